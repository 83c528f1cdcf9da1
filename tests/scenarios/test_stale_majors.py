"""A container's config passes four cards with the majors of another boot; two are wanted. Played in both worlds."""

from __future__ import annotations

import re

import pytest

from tests.scenarios.stage import THIRD, Stage
from tests.scenarios.stale import COMMENTS, CONF, SNAPSHOT, STALE, specification


def section(conf: str, name: str) -> str:
    return conf[conf.index(f"\n[{name}]") :]


def test_the_config_is_put_right_and_the_container_restarted_once(stage: Stage) -> None:
    before = stage.started(129)
    predicted = stage.reconcile("plan", "-o", "json")
    assert predicted.rc == 0, predicted.err
    assert [(s["layer"], s["action"]) for s in predicted.json["steps"]] == [
        ("container.devices", "edit-config"),
        ("container.power", "restart"),
    ]
    assert predicted.json["blocked"] == predicted.json["unknown"] == []
    assert stage.reconcile("plan", "--detailed-exitcode").rc == 2
    assert stage.conf(129).decode() == CONF
    assert stage.started(129) == before

    done = stage.reconcile("--once")
    assert done.rc == 0, done.out + done.err

    conf = stage.conf(129).decode()
    assert [line for line in conf.splitlines() if line.startswith("#")] == COMMENTS
    assert section(conf, "before-upgrade") == SNAPSHOT
    main = conf[: conf.index("\n[before-upgrade]")]
    assert f"c {STALE}:" not in main
    assert "lxc.cgroup2.devices.allow: c 10:200 rwm" in main
    assert sorted(re.findall(r"lxc.mount.entry: /dev/(nvidia\d)", main)) == ["nvidia2", "nvidia3"]
    assert stage.started(129) not in ("", before)

    assert [stage.opens(129, f"/dev/nvidia{n}") for n in (2, 3)] == ["allowed", "allowed"]
    assert stage.opens(129, "/dev/nvidiactl") == "allowed"
    assert stage.opens(129, "/dev/nvidia-uvm") == "allowed"
    assert [stage.opens(129, f"/dev/nvidia{n}") for n in (0, 1)] == ["absent", "absent"]
    stage.lend_third(129, "kpro5", 0)
    assert stage.opens(129, THIRD) == "refused"

    started = stage.started(129)
    again = stage.reconcile("--once")
    assert again.rc == 0
    assert "Nothing was done" in again.out
    assert stage.reconcile("plan", "--detailed-exitcode").rc == 0
    assert stage.conf(129).decode() == conf
    assert stage.started(129) == started


def test_without_permission_it_waits_and_says_for_what(stage: Stage) -> None:
    specification(stage, allow="[restart-container]")
    before = stage.started(129)
    done = stage.reconcile("--once")
    assert done.rc == 2
    assert "--allow edit-container-config:Container/ct129" in done.out
    assert stage.conf(129).decode() == CONF
    assert stage.started(129) == before

    given = stage.reconcile("--once", "--allow", "edit-container-config:Container/ct129")
    assert given.rc == 0, given.out


def test_yes_gives_what_the_plan_asks_for(stage: Stage) -> None:
    specification(stage, allow="[]")
    done = stage.reconcile("--once", "--yes")
    assert done.rc == 0, done.out + done.err


def test_report_mode_looks_and_touches_nothing(stage: Stage) -> None:
    stage.spec((stage.specs / "spec.yaml").read_text().replace("mode: enforce", "mode: report"))
    done = stage.reconcile("--once")
    assert done.rc == 2
    assert stage.conf(129).decode() == CONF


def test_an_edit_by_a_person_is_gone_on_from(stage: Stage) -> None:
    changed = CONF.replace("memory: 4096", "memory: 6144").replace("# --- GPU", "# eh: --- GPU")
    stage.write_conf(129, changed.encode())
    assert stage.reconcile("--once").rc == 0
    conf = stage.conf(129).decode()
    assert "memory: 6144" in conf
    assert "# eh: --- GPU" in conf


@pytest.mark.parametrize("command", ["status", "why"])
def test_status_and_why_say_what_is_wrong(stage: Stage, command: str) -> None:
    said = stage.reconcile(command, "ct129")
    assert "Container/ct129" in said.out
    assert re.search(r"wrong-cards|too-many-cards|stale-major", said.out), said.out
