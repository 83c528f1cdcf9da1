"""The script that writes a unit, for real, with a stand-in for systemctl; cut off before any of its commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from controller.core.words import Step
from controller.layers.server_unit.facts import ServerUnit, parse
from controller.layers.shared import inside
from tests.layers.inside import Ground
from tests.layers.servers import Rig, document

COUNTED = ("head", "stat", "chmod", "sync", "mv", "rm", "mkdir", "sha256sum", "cp", "cut", "systemctl")
SECRET = document(serve="{port: 30000, api_key: {secret: key}}", gpus="[]", place="host: box1")
PROBE = inside.probe("controller.layers.server_unit", "probe.sh")


class Machine(Ground):
    """This machine with counted stand-ins for its commands: before the ``at``-th all of the script is killed."""

    def cut(self, step: Step, at: int = 0) -> subprocess.CompletedProcess[bytes]:
        bin_ = self.root / "bin"
        bin_.mkdir(exist_ok=True)
        (self.root / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
        (self.root / "opt").mkdir(exist_ok=True)
        (self.root / "count").write_text("0")
        for name in COUNTED:
            does = f'exec {shutil.which(name)} "$@"' if name != "systemctl" else "echo loaded"
            (bin_ / name).write_text(
                # those of a pipe run at once: each has a number of its own
                f'#!/bin/sh\nexec 9>"{self.root}/lock"; flock 9\n'
                f'read -r n <"{self.root}/count"; n=$((n + 1)); echo "$n" >"{self.root}/count"; exec 9>&-\n'
                f'if [ "$n" = {at} ]; then kill -9 0; fi\n{does}\n'
            )
            (bin_ / name).chmod(0o755)
        text = self.text(step.script).replace("PATH=/usr/local/sbin", f"PATH={bin_}:/usr/local/sbin")
        # `timeout` makes a process group of its own, and what is killed is all of it
        text = re.sub(r"timeout \"\$1\"", 'timeout --foreground "$1"', text)
        script = self.root / "script"
        script.write_text(f"set -eu\n{text}")
        args = [arg.replace("/opt/reconcile", f"{self.root}/opt/reconcile") for arg in step.args]
        args = [arg.replace("/etc/systemd", f"{self.root}/etc/systemd") for arg in args]
        env = {"PATH": os.environ["PATH"], "RECONCILE_STEP_DIR": str(self.root)}
        return subprocess.run(
            ["dash", str(script), *args],
            input=step.stdin,
            capture_output=True,
            start_new_session=True,
            timeout=120,
            check=False,
            env=env,
        )

    @property
    def count(self) -> int:
        return int((self.root / "count").read_text())

    def seen(self) -> ServerUnit | None:
        """The unit as a look tells it, with the tree's own path taken out."""
        section = self.ask(PROBE)
        here = parse(type(section)(section.rc, section.out.replace(str(self.root), ""), section.err)).of(None)
        assert here is not None
        return here.of("qwen")


@pytest.fixture(scope="module")
def step() -> Step:
    """The first writing of a server's unit, with secrets."""
    return Rig(SECRET, secrets={"key": "s3cret"}).step("server.unit")


def is_right(found: ServerUnit | None) -> bool:
    """Whether a look takes it for wholly written."""
    return (
        found is not None
        and found.marker is not None
        and found.text is not None
        and found.text.sha256 == found.marker.unit
        and found.arguments is not None
        and found.note
        and found.secret_digest != ""
        and found.salt != ""
    )


def test_it_writes_everything_with_its_modes(tmp_path: Path, step: Step) -> None:
    machine = Machine(tmp_path)
    done = machine.cut(step)
    assert done.returncode == 0, done.stderr
    assert is_right(machine.seen())
    here = tmp_path / "opt/reconcile/server/qwen"
    modes = {path.name: f"{path.stat().st_mode & 0o777:o}" for path in here.iterdir()}
    assert modes == {
        "args.json": "644",
        "config.yaml": "600",
        "marker.json": "644",
        "note.sh": "755",
        "salt": "600",
    }
    again = machine.cut(step)
    assert again.returncode == 75  # somebody has written it since it was seen


def test_cut_off_anywhere_it_is_seen_and_gone_on_from(tmp_path: Path, step: Step) -> None:
    whole = Machine(tmp_path / "whole")
    (tmp_path / "whole").mkdir()
    assert whole.cut(step).returncode == 0
    for at in range(1, whole.count + 1):
        machine = Machine(tmp_path / str(at))
        machine.root.mkdir()
        assert machine.cut(step, at).returncode != 0, at
        found = machine.seen()
        args = list(step.args)
        args[2] = found.text.sha256 if found is not None and found.text is not None else "absent"
        anew = Step(**{name: getattr(step, name) for name in step.__slots__} | {"args": tuple(args)})
        done = machine.cut(anew)
        assert done.returncode == 0, (at, done.stderr)
        assert is_right(machine.seen()), at
        left = [path.name for path in (machine.root / "opt/reconcile/server/qwen").iterdir() if "new" in path.name]
        assert left == [], at
