"""From specs and facts to verdicts, a row for each reason; and what a plan expects of the edit."""

from __future__ import annotations

import dataclasses

import pytest

from controller.core.view import View
from controller.core.words import Block, Drift, InSync, NotKnown, Skipped, Step, Verdict
from controller.facts.words import HostFacts, Known, Later
from controller.layers import devices
from controller.layers.devices.facts import Guest, GuestFacts
from controller.layers.devices.reasons import Reason
from controller.layers.power.facts import PowerFacts
from controller.spec.model import Container
from controller.spec.policy import Permission
from controller.spec.ref import Ref
from tests.layers import fleet
from tests.layers.fleet import (
    A6000,
    FIRST,
    SECOND,
    VMS,
    access_facts,
    container,
    gpu_facts,
    guest_facts,
    node,
    specs,
    view,
)

RIGHT = "arch: amd64\ndev0: /dev/nvidia0\ndev1: /dev/nvidia1\ndev2: /dev/nvidiactl\ndev3: /dev/nvidia-uvm\n"
STALE = (
    "# about\narch: amd64\nmemory: 512\n"
    "lxc.cgroup2.devices.allow: c 195:* rwm\nlxc.cgroup2.devices.allow: c 510:* rwm\n"
    + "".join(
        f"lxc.mount.entry: /dev/{n} dev/{n} none bind,optional,create=file\n"
        for n in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm")
    )
    + "\n[snap]\nlxc.cgroup2.devices.allow: c 509:* rwm\n"
)


def judge(world: View, who: Container | None = None) -> Verdict:
    return devices.check(world, who or next(iter(world.specs.containers.values())))


def block(verdict: Verdict) -> Block:
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Block)
    return verdict.remedy


def step(verdict: Verdict) -> Step:
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Step)
    return verdict.remedy


def test_in_sync() -> None:
    assert judge(view(specs(), guest_facts((129, RIGHT)))) == InSync()


def test_the_edit() -> None:
    verdict = judge(view(specs(), guest_facts((129, STALE))))
    assert isinstance(verdict, Drift)
    assert verdict.reason == Reason.TOO_MANY_CARDS
    assert "nvidia2, /dev/nvidia3" in verdict.message
    assert verdict.evidence["assigned"] == f"{FIRST}, {SECOND}"
    assert "stale-major" in verdict.evidence
    edit = step(verdict)
    guest = Guest("lxc", 129, "kpro5", STALE)
    assert (edit.action, edit.hosts, edit.args[:2]) == ("edit-config", ("kpro5",), ("129", guest.sha256))
    assert edit.args[2].split("\n") == [line for line in STALE.split("\n\n")[0].split("\n") if line.startswith("lxc.")]
    assert [(str(d.object), d.permission) for d in edit.disrupts] == [
        ("Container/ct129", Permission.EDIT_CONTAINER_CONFIG)
    ]
    assert edit.stdin.decode().endswith("\n[snap]\nlxc.cgroup2.devices.allow: c 509:* rwm\n")
    assert "+lxc.cgroup2.devices.allow: c 508:* rwm" in edit.diff
    assert "memory" not in edit.diff


def test_after_the_edit_it_is_in_sync_and_the_record_says_what_it_was_started_with() -> None:
    world = view(specs(), guest_facts((129, STALE)), power=fleet.running())
    facts = step(judge(world)).effect(world.facts)
    assert isinstance(judge(View(world.specs, facts)), InSync)
    power = facts["kpro5"].sections["container.power"]
    assert isinstance(power, Known)
    assert isinstance(power.value, PowerFacts)
    running = power.value.of(129)
    assert running is not None
    assert running.edited is not None
    assert "lxc.cgroup2.devices.allow: c 510:* rwm" in running.edited


def test_of_a_container_that_ha_manages_the_config_is_edited_and_that_is_said() -> None:
    verdict = judge(view(specs(), guest_facts((129, STALE)), access=access_facts(ha=(129,))))
    assert isinstance(verdict, Drift)
    assert step(verdict).action == "edit-config"
    assert "HA" in verdict.evidence["ha-managed"]


def test_odd_bytes_come_back_as_they_were() -> None:
    text = "# \udcff\udc80\r\n" + STALE
    edit = step(judge(view(specs(), guest_facts((129, text)))))
    assert edit.stdin.startswith(b"# \xff\x80\r\n# about\n")
    edit.diff.encode("utf-8")


def facts_of(text: str = STALE, **more: object) -> GuestFacts:
    return guest_facts((129, text), **more)


def without(*paths: str, plus: tuple[fleet.Node, ...] = ()) -> object:
    gpus = gpu_facts()
    return dataclasses.replace(gpus, nodes=(*(n for n in gpus.nodes if n.path not in paths), *plus))


BLOCKED = {
    Reason.NO_QUORUM: {"access": access_facts(quorate=False)},
    Reason.LOCKED: {"guests": facts_of("lock: migrate\n" + STALE)},
    Reason.TEMPLATE: {"guests": facts_of("template: 1\n" + STALE)},
    Reason.PENDING: {"guests": facts_of(STALE.replace("[snap]", "[pve:pending]\ndev7: /dev/nvidia2\n\n[snap]"))},
    Reason.CGROUP_V1: {"guests": dataclasses.replace(facts_of(), cgroup2=False)},
    Reason.NO_UVM: {"gpus": dataclasses.replace(gpu_facts(), majors=(("nvidia", 195),))},
    Reason.MISSING_NODE: {"gpus": without("/dev/nvidia1")},
    Reason.NODE_NOT_A_DEVICE: {
        "gpus": without("/dev/nvidiactl", plus=(node("/dev/nvidiactl", 0, 0, "regular empty file", "0"),))
    },
    Reason.NODE_OF_ANOTHER_DEVICE: {"gpus": without("/dev/nvidia-uvm", plus=(node("/dev/nvidia-uvm", 510, 0),))},
    Reason.GPU_NOT_AVAILABLE: {"gpus": gpu_facts(minors={FIRST: 0})},
    Reason.GPU_MISSING: {"gpus": gpu_facts(cards={FIRST: A6000}, minors={FIRST: 0})},
    Reason.GPU_CLAIMED_BY_VM: {
        "guests": dataclasses.replace(
            facts_of(), guests=(*facts_of().guests, Guest("qemu", 210, "kpro5", "hostpci0: 4f:00\n"))
        ),
        "gpus_of_spec": [FIRST],
    },
    Reason.GPU_OWNED_BY_VM: {"gpus_of_spec": [VMS[0]]},
    Reason.GPU_NOT_LISTED: {"gpus_of_spec": ["0000:99:00.0"]},
    Reason.NOT_ENOUGH_GPUS: {"gpus_of_spec": {"count": "3"}},
    Reason.GPU_OTHER_MODEL: {
        "gpus_of_spec": [FIRST],
        "gpus": gpu_facts(cards={FIRST: fleet.RTX3090}, minors={FIRST: 0}),
    },
    Reason.ALLOWS_EVERYTHING: {"guests": facts_of(RIGHT + "lxc.cgroup2.devices.allow: a\n")},
    Reason.DENIED: {"guests": facts_of("lxc.cgroup2.devices.deny: c *:* rwm\n" + STALE)},
}


@pytest.mark.parametrize("reason", BLOCKED)
def test_blocked(reason: Reason) -> None:
    given = dict(BLOCKED[reason])
    gpus_of_spec = given.pop("gpus_of_spec", None)
    who = container(gpus=gpus_of_spec) if gpus_of_spec is not None else container()
    guests = given.pop("guests", facts_of())
    found = block(judge(view(specs(fleet.host(), who), guests, **given)))  # type: ignore[arg-type]
    assert found.reason == reason
    assert found.message
    assert found.needs


def test_two_containers_that_want_the_same_card() -> None:
    wanted = specs(fleet.host(), container(gpus=[FIRST]), container(name="a", id="100", gpus=[FIRST]))
    assert block(judge(view(wanted, facts_of()), wanted.containers["ct129"])).reason == Reason.GPU_IN_USE


def test_a_container_that_is_elsewhere_is_left_to_placement() -> None:
    seen = view(specs(), guest_facts(), access=access_facts(guests=((129, "kpro6", "lxc"),)))
    assert isinstance(judge(seen), Skipped)


def test_every_reason_is_shown_by_a_test() -> None:
    by_repair = {"wrong-cards", "too-many-cards", "too-few-cards", "node-not-passed", "stale-major", "no-rule"}
    by_repair |= {"bad-rule", "wrong-target", "wrong-style"}
    assert by_repair | {str(reason) for reason in (*BLOCKED, Reason.GPU_IN_USE)} == {str(reason) for reason in Reason}


def test_a_config_that_is_right_is_not_blocked_by_a_lock() -> None:
    assert isinstance(judge(view(specs(), facts_of("lock: backup\n" + RIGHT))), InSync)


def test_other_pending_changes_are_nobodys_business() -> None:
    text = STALE.replace("[snap]", "[pve:pending]\nmemory: 1024\ndev7: /dev/zero\n\n[snap]")
    assert step(judge(view(specs(), facts_of(text)))).action == "edit-config"


def test_companions_have_to_be_there_when_the_container_could_not_start_without_them() -> None:
    gone = without("/dev/nvidia-modeset")
    for line, blocked in {
        "dev9: /dev/nvidia-modeset\n": True,
        "lxc.mount.entry: /dev/nvidia-modeset dev/nvidia-modeset none bind,create=file\n": True,
        "lxc.cgroup2.devices.allow: /dev/nvidia-modeset rwm\n": True,
        "lxc.mount.entry: /dev/nvidia-modeset dev/nvidia-modeset none bind,optional,create=file\n": False,
    }.items():
        verdict = judge(view(specs(), facts_of(RIGHT + line), gone))  # type: ignore[arg-type]
        assert isinstance(verdict, Drift if blocked else InSync), line


def test_what_it_says_nothing_of_it_does_not_touch() -> None:
    assert isinstance(judge(view(specs(fleet.host(), container(gpus=None)), facts_of())), Skipped)


@pytest.mark.parametrize("lifecycle", ["maintenance", "decommissioned"])
def test_hosts_that_are_not_worked_on(lifecycle: str) -> None:
    wanted = specs(fleet.host(lifecycle=lifecycle), container())
    assert isinstance(judge(View(wanted, {})), Skipped)


def test_unknown_facts_are_not_judged() -> None:
    with pytest.raises(NotKnown):
        judge(View(specs(), {"kpro5": HostFacts("kpro5", {"container.devices": Known(facts_of())})}))


def test_an_empty_list_takes_every_card_away() -> None:
    edit = step(judge(view(specs(fleet.host(), container(gpus=[])), facts_of())))
    assert b"nvidia0" not in edit.stdin
    assert b"195:255" in edit.stdin


def test_numbers_that_a_plan_does_not_know_yet() -> None:
    gpus = gpu_facts()
    later = dataclasses.replace(gpus, gpus=tuple(dataclasses.replace(g, minor=Later("load-driver")) for g in gpus.gpus))
    world = view(specs(), facts_of(), later, power=fleet.running())
    edit = step(judge(world))
    assert edit.provisional
    assert "load-driver" in edit.summary
    facts = edit.effect(world.facts)
    assert isinstance(judge(View(world.specs, facts)), InSync)
    assert facts != world.facts


def test_the_id_of_the_step_changes_with_what_it_was_decided_on() -> None:
    one, other = (step(judge(view(specs(), facts_of(text)))) for text in (STALE, "# more\n" + STALE))
    assert one.id != other.id
    assert one.object == Ref("Container", "ct129")
