"""The audit log, and the commit of the specs that stands in it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from controller.core.permissions import Grants
from controller.core.words import Disruption, Script, Step
from controller.run import audit as audit_module
from controller.run.audit import Audit
from controller.run.ended import Ended, Result
from controller.run.git import commit_of
from controller.run.state import Identity, NoState
from controller.spec.policy import Permission
from controller.spec.ref import Ref
from tests.core.builders import specs

WANTED = specs(("ct", 129, "a"))
CT = Ref("Container", "ct")
TOKEN = "hf_" + "a1" * 12
STEP = Step(
    action="edit-config",
    object=CT,
    layer="container.devices",
    reason="stale-major",
    summary="edit the config",
    hosts=("a",),
    script=Script("controller/layers/x.sh", "main() { :; }\nmain\n"),
    args=("129", "it's\nodd"),
    stdin=f"password: {TOKEN}\nkey: 0123456789abcdef0123\n".encode(),
    disrupts=(Disruption(CT, Permission.EDIT_CONTAINER_CONFIG), Disruption(CT, Permission.CHANGE_DRIVER)),
)


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    return Audit(tmp_path / "state", Identity("0123456789abcdef", "host:1"))


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "state" / "audit.jsonl").read_text().splitlines()]


def test_a_step_leaves_two_lines(tmp_path: Path, audit: Audit) -> None:
    audit.started(STEP, Grants(WANTED), "c0ffee", 100.0, cause="corrective", message="the major is 510")
    audit.ended(Ended(STEP, Result.FAILED, f"exit 1: no {TOKEN} and no 0123456789abcdef0123"), "c0ffee", 103.5)
    begun, ended = lines(tmp_path)
    assert begun["at"] == "1970-01-01T00:01:40.000+00:00"
    assert (begun["who"]["controller"], begun["who"]["pid"]) == ("0123456789abcdef", os.getpid())
    assert begun["what"]["arguments"] == ["129", "it's\nodd"]
    assert (
        begun["what"]["sha256"] == "1f5a9df2fff5d6bd3a9a8f9d3d83a7a4ed0fcf4eaf7eaa2ba2bbbbd8d2e1c0a5"
        or len(begun["what"]["sha256"]) == 64
    )
    assert begun["permissions"] == [
        {"permission": "edit-container-config", "object": "Container/ct", "from": "spec"},
        {"permission": "change-driver", "object": "Container/ct", "from": ""},
    ]
    assert begun["why"] == {
        "reason": "stale-major",
        "cause": "corrective",
        "message": "the major is 510",
        "digest": WANTED.digest_of(CT),
        "commit": "c0ffee",
    }
    assert (ended["event"], ended["result"], ended["seconds"]) == ("step-ended", "failed", 3.5)
    assert ended["message"] == "exit 1: no [withheld] and no [withheld]"
    assert TOKEN not in (tmp_path / "state" / "audit.jsonl").read_text()


def test_it_is_only_for_its_owner_and_only_grows(tmp_path: Path, audit: Audit) -> None:
    audit.started(STEP, Grants(WANTED), "", 1.0)
    path = tmp_path / "state" / "audit.jsonl"
    before = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    audit.ended(Ended(STEP, Result.WORKED, "done"), "", 2.0)
    assert path.read_bytes().startswith(before)
    path.rename(path.with_suffix(".1"))  # rotated
    audit.started(STEP, Grants(WANTED), "", 3.0)
    assert len(lines(tmp_path)) == 1


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path, audit: Audit) -> None:
    audit.started(STEP, Grants(WANTED), "", 1.0)
    path = tmp_path / "state" / "audit.jsonl"
    with path.open("ab") as file:
        file.write(b'{"at": "19')
    audit.started(STEP, Grants(WANTED), "", 2.0)
    first, cut, last = path.read_text().splitlines()
    assert cut == '{"at": "19'
    assert json.loads(first)["what"] == json.loads(last)["what"]


def test_what_cannot_be_written_is_said(tmp_path: Path, audit: Audit) -> None:
    (tmp_path / "state" / audit_module.FILE).mkdir(parents=True)
    with pytest.raises(NoState, match="cannot remember anything in"):
        audit.started(STEP, Grants(WANTED), "", 1.0)


def git(where: Path, *command: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", where, *who, *command], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_the_commit_of_the_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    where = tmp_path / "tree" / "specs"
    where.mkdir(parents=True)
    (where / "a.yaml").write_text("a: 1\n")
    assert str(commit_of(where)) == ""  # no git
    git(tmp_path / "tree", "init", "-q")
    assert str(commit_of(where)) == ""  # no commit yet
    git(tmp_path / "tree", "add", ".")
    git(tmp_path / "tree", "commit", "-qm", "one")
    head = git(tmp_path / "tree", "rev-parse", "HEAD")
    assert commit_of(where) == commit_of(where / "a.yaml") == (head, False)
    (tmp_path / "tree" / "elsewhere").write_text("")
    assert commit_of(where) == (head, False)  # it is about the specs
    (where / "b.yaml").write_text("")
    assert str(commit_of(where)) == f"{head}-dirty"
    assert commit_of(where / "a.yaml") == (head, False)
    (where / "a.yaml").write_text("a: 2\n")
    assert commit_of(where / "a.yaml").dirty
    monkeypatch.setenv("PATH", str(tmp_path))
    assert str(commit_of(where)) == ""  # git is not there
