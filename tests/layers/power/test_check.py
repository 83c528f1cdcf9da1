"""From specs and facts to verdicts: when a container has to be started, stopped or restarted, and when not."""

from __future__ import annotations

import dataclasses

import pytest

from controller.core.next_steps import next_steps
from controller.core.plan import plan
from controller.core.view import View
from controller.core.words import Block, Drift, InSync, NotKnown, Skipped, Step, Verdict
from controller.facts.words import HostFacts, Known, Later
from controller.layers import devices, power
from controller.layers.power.facts import PowerFacts
from controller.layers.power.reasons import Reason
from controller.spec.model import Container
from tests.layers import fleet
from tests.layers.devices.test_check import STALE
from tests.layers.fleet import CHAR, access_facts, container, guest_facts, running, server, specs, view

CONF = "onboot: 1\ndev0: /dev/nvidia0\ndev1: /dev/nvidia1\ndev2: /dev/nvidiactl\ndev3: /dev/nvidia-uvm\n"
GENERATED = "".join(f"lxc.cgroup2.devices.allow = c {device} rw\n" for device in ("195:0", "195:1", "195:255", "508:0"))
NODES = (
    ("nvidia0", CHAR, 195, 0),
    ("nvidia1", CHAR, 195, 1),
    ("nvidiactl", CHAR, 195, 255),
    ("nvidia-uvm", CHAR, 508, 0),
)


def world(conf: str = CONF, now: PowerFacts | None = None, who: Container | None = None, **more: object) -> View:
    now = running(generated=GENERATED, nodes=NODES) if now is None else now
    bystander = container(name="other", id="130", gpus=None, state="stopped")
    wanted = specs(fleet.host(), who or container(), bystander, server("one"), server("two", "other"))
    return view(wanted, guest_facts((129, conf), (130, "arch: amd64\n")), power=now, **more)  # type: ignore[arg-type]


def judge(seen: View) -> Verdict:
    return power.check(seen, seen.specs.containers["ct129"])


def step(verdict: Verdict) -> Step:
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Step)
    return verdict.remedy


def test_it_runs_with_what_its_config_says() -> None:
    assert judge(world()) == InSync()


def test_a_start() -> None:
    seen = world(now=PowerFacts(()))
    verdict = judge(seen)
    start = step(verdict)
    assert verdict.reason == Reason.NOT_RUNNING  # type: ignore[union-attr]
    digest = guest_facts((129, CONF)).guests[0].sha256
    assert (start.action, start.args) == ("start", ("start", "129", digest, "0", ""))
    assert [str(d) for d in start.disrupts] == ["restart-container:Container/ct129", "restart-server:ModelServer/one"]
    assert not start.independent
    after = start.effect(seen.facts)
    assert judge(View(seen.specs, after)) == InSync()
    expected = View(seen.specs, after).fact("kpro5", "container.power", PowerFacts).of(129)
    assert expected is not None
    assert expected.started == Later(start.id)


def test_a_stop_waits_for_nothing_below_it() -> None:
    seen = world(who=container(state="stopped"))
    stop = step(judge(seen))
    assert (stop.action, stop.args[3], stop.independent) == ("stop", "123456", True)
    assert isinstance(judge(View(seen.specs, stop.effect(seen.facts))), InSync)
    broken = world(conf="arch: amd64\n", who=container(state="stopped", gpus={"count": "7"}))
    assert [s.action for s in next_steps((devices.LAYER, power.LAYER), broken).ready] == ["stop"]


def test_stopped_as_wanted() -> None:
    verdict = judge(world(now=PowerFacts(()), who=container(state="stopped")))
    assert isinstance(verdict, InSync)
    assert "onboot" in verdict.note


RAW = (
    "onboot: 1\n"
    + "".join(
        f"lxc.cgroup2.devices.allow: {rule}\n"
        for rule in ("c 195:0 rwm", "c 195:1 rwm", "c 195:255 rwm", "c 508:* rwm")
    )
    + "".join(f"lxc.mount.entry: /dev/{name} dev/{name} none bind,optional,create=file\n" for name, *_ in NODES)
)
OLD_RULES = "lxc.cgroup2.devices.allow = c 195:* rwm\nlxc.cgroup2.devices.allow = c 510:* rwm\n"
RAW_RULES = (
    "lxc.cgroup2.devices.allow = c 195:0 rwm\nlxc.cgroup2.devices.allow = c 195:1 rwm\n"
    "lxc.cgroup2.devices.allow = c 195:255 rwm\nlxc.cgroup2.devices.allow = c 508:* rwm\n"
)


def node(name: str, *what: object) -> tuple:
    return tuple((name, *what) if each[0] == name else each for each in NODES if what or each[0] != name)


# name: (config, the running container, why it has to be restarted)
RESTARTS = {
    "it could open any card that the driver is given yet": (
        RAW,
        running(generated=RAW_RULES.replace("c 195:0 rwm", "c 195:* rwm"), nodes=NODES),
        Reason.DEVICES_CHANGED,
    ),
    "its rules were narrower": (
        CONF,
        running(generated=GENERATED.replace("195:1", "195:7"), nodes=NODES),
        Reason.DEVICES_CHANGED,
    ),
    "nvidia-uvm has another major now": (
        RAW,
        running(generated=RAW_RULES.replace("508", "510"), nodes=NODES),
        Reason.DEVICES_CHANGED,
    ),
    "its rules were wider, and another card is there": (
        CONF.replace("dev1: /dev/nvidia1\n", ""),
        running(generated=GENERATED, nodes=NODES),
        Reason.DEVICES_CHANGED,
    ),
    "our own edit since, generated config written again": (
        CONF,
        running(edited=("dev0: /dev/nvidia0", "dev2: /dev/nvidiactl"), nodes=NODES),
        Reason.DEVICES_CHANGED,
    ),
    "a node is not inside": (CONF, running(generated=GENERATED, nodes=node("nvidia1")), Reason.INNER_NODE_MISSING),
    "a plain file is inside": (
        CONF,
        running(generated=GENERATED, nodes=node("nvidia-uvm", "regular empty file", 0, 0)),
        Reason.INNER_NODE_NOT_A_DEVICE,
    ),
    "a node of before a reload is inside": (
        RAW,
        running(generated=RAW_RULES, nodes=node("nvidia-uvm", CHAR, 510, 0)),
        Reason.INNER_NODE_OF_ANOTHER_DEVICE,
    ),
    "nothing tells of its rules, and a node is missing": (
        CONF,
        running(nodes=node("nvidia0")),
        Reason.INNER_NODE_MISSING,
    ),
}


@pytest.mark.parametrize("name", RESTARTS)
def test_a_restart(name: str) -> None:
    conf, now, reason = RESTARTS[name]
    seen = world(conf, now)
    verdict = judge(seen)
    assert isinstance(verdict, Drift)
    assert verdict.reason == reason
    restart = step(verdict)
    assert restart.action == "restart"
    assert restart.args[4]
    assert judge(View(seen.specs, restart.effect(seen.facts))) == InSync()


NO_RESTARTS = {
    "raw lines instead of dev, to the same effect": (RAW, running(generated=GENERATED, nodes=NODES)),
    "a rule for what no driver has is gone": (
        RAW,
        running(generated=RAW_RULES + "lxc.cgroup2.devices.allow = c 237:* rwm\n", nodes=NODES),
    ),
    "a wildcard is gone that let nothing more in, as all cards are its own": (
        RAW,
        running(generated=RAW_RULES.replace("c 195:0 rwm", "c 195:* rwm"), nodes=NODES),
    ),
    "our edit came back to what it was started with": (
        CONF,
        running(edited=tuple(CONF.split("\n")[1:-1]), nodes=NODES),
    ),
    "NVIDIA's userland made a node of a card that may not be opened": (
        CONF.replace("dev1: /dev/nvidia1\n", ""),
        running(generated=GENERATED.replace("c 195:1", "c 1:7"), nodes=NODES),
    ),
    "nothing tells of its rules, and all nodes are right": (CONF, running(nodes=NODES)),
    "its GPUs are not looked after": (CONF, running(generated="", nodes=())),
}


@pytest.mark.parametrize("name", NO_RESTARTS)
def test_no_restart(name: str) -> None:
    conf, now = NO_RESTARTS[name]
    who = container(gpus=None) if name == "its GPUs are not looked after" else container()
    own = {fleet.FIRST: fleet.A6000, fleet.SECOND: fleet.A6000}
    more = {"gpus": fleet.gpu_facts(cards=own)} if "all cards are its own" in name else {}
    assert isinstance(judge(world(conf, now, who, **more)), InSync)


def test_what_cannot_be_told_is_said() -> None:
    verdict = judge(world(now=running(nodes=NODES)))
    assert isinstance(verdict, InSync)
    assert "cannot be told" in verdict.note


def test_a_node_that_is_wrong_on_the_host_is_no_reason_to_restart() -> None:
    gpus = fleet.gpu_facts()
    broken = dataclasses.replace(gpus, nodes=tuple(n for n in gpus.nodes if n.path != "/dev/nvidia1"))
    assert judge(world(now=running(generated=GENERATED, nodes=node("nvidia1")), gpus=broken)) == InSync()


def test_a_restart_that_did_not_help_is_not_repeated() -> None:
    now = running(generated=GENERATED, nodes=node("nvidia1"))
    why = step(judge(world(now=now))).args[4]
    again = dataclasses.replace(now, running=(dataclasses.replace(now.running[0], started=777, restarted_for=why),))
    verdict = judge(world(now=again))
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Block)
    assert verdict.remedy.reason == Reason.RESTART_DID_NOT_HELP
    other = dataclasses.replace(again, running=(dataclasses.replace(again.running[0], nodes=()),))
    assert step(judge(world(now=other))).action == "restart"


def test_pending_changes_of_others_are_said_before_they_are_applied() -> None:
    start = step(judge(world(CONF + "[pve:pending]\nmemory: 1024\n", PowerFacts(()))))
    assert "pending changes of memory" in start.summary


def test_the_plan_of_a_stale_config_edits_and_restarts_once() -> None:
    old = running(generated=OLD_RULES, nodes=NODES[:3])
    seen = world(STALE, old)
    planned = plan((devices.LAYER, power.LAYER), seen.specs, seen.facts)
    assert [p.step.action for p in planned.steps] == ["edit-config", "restart"]
    assert planned.then.in_sync


def test_the_plan_of_a_stopped_one_edits_and_starts() -> None:
    seen = world(STALE, PowerFacts(()))
    planned = plan((devices.LAYER, power.LAYER), seen.specs, seen.facts)
    assert [p.step.action for p in planned.steps] == ["edit-config", "start"]
    assert planned.then.in_sync


def test_a_plan_whose_numbers_are_not_known_yet_restarts_too() -> None:
    gpus = fleet.gpu_facts()
    later = dataclasses.replace(gpus, gpus=tuple(dataclasses.replace(g, minor=Later("load")) for g in gpus.gpus))
    seen = world(STALE, running(generated=OLD_RULES, nodes=NODES[:3]), gpus=later)
    planned = plan((devices.LAYER, power.LAYER), seen.specs, seen.facts)
    assert [(p.step.action, p.step.provisional) for p in planned.steps] == [("edit-config", True), ("restart", True)]
    assert planned.then.in_sync


def with_taker(minor: int, *, taker_runs: bool = False, ring: bool = False) -> View:
    """ct129 had both cards and keeps the first; ct100 is to have the second, or each is to have the other's."""
    first, second = fleet.FIRST, fleet.SECOND
    small = container(gpus=[first] if not ring else [second])
    taker = container(name="ct100", id="100", gpus=[second] if not ring else [first])
    before = running(generated=GENERATED if not ring else GENERATED.replace("195:1", "1:9"), nodes=NODES)
    if taker_runs:
        rules = "lxc.cgroup2.devices.allow = c 195:1 rw\n" if ring else ""
        before = PowerFacts((*running(100, generated=rules).running, *before.running))
    configs = [
        (129, CONF.replace(f"dev{minor}: /dev/nvidia{minor}\n", "")),
        (100, CONF.replace("/dev/nvidia0", "/dev/zero")),
    ]
    if ring:
        configs = [(129, CONF.replace("dev0: /dev/nvidia0\n", "")), (100, CONF.replace("dev1: /dev/nvidia1\n", ""))]
    return view(specs(fleet.host(), small, taker), guest_facts(*configs), power=before)


def check_of(seen: View, name: str) -> Verdict:
    return power.check(seen, seen.specs.containers[name])


@pytest.mark.parametrize("taker_runs", [False, True])
def test_a_card_is_given_on_when_the_other_has_let_go_of_it(taker_runs: bool) -> None:
    seen = with_taker(1, taker_runs=taker_runs)
    verdict = check_of(seen, "ct100")
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Block)
    assert verdict.remedy.reason == Reason.GPU_STILL_IN_USE
    assert "ct129" in verdict.remedy.message
    let_go = step(check_of(seen, "ct129"))
    assert let_go.action == "restart"
    after = View(seen.specs, let_go.effect(seen.facts))
    assert step(check_of(after, "ct100")).action == ("restart" if taker_runs else "start")


def test_of_two_who_wait_for_each_other_the_first_goes() -> None:
    seen = with_taker(1, taker_runs=True, ring=True)
    assert step(check_of(seen, "ct100")).action == "restart"
    other = check_of(seen, "ct129")
    assert isinstance(other, Drift)
    assert isinstance(other.remedy, Block)
    after = View(seen.specs, step(check_of(seen, "ct100")).effect(seen.facts))
    assert step(check_of(after, "ct129")).action == "restart"


HA = access_facts(ha=(129,))
BLOCKED = {
    Reason.HA_MANAGED: {"access": HA},
    Reason.LOCKED: {"conf": "lock: backup\n" + CONF},
    Reason.TEMPLATE: {"conf": "template: 1\n" + CONF},
}


@pytest.mark.parametrize("reason", BLOCKED)
@pytest.mark.parametrize("state", ["running", "stopped"])
def test_blocked(reason: Reason, state: str) -> None:
    now = PowerFacts(()) if state == "running" else running(generated=GENERATED, nodes=NODES)
    given = dict(BLOCKED[reason])
    verdict = judge(world(given.pop("conf", CONF), now, container(state=state), **given))
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Block)
    assert verdict.remedy.reason == reason
    assert verdict.remedy.needs


@pytest.mark.parametrize("reason", BLOCKED)
def test_what_is_as_wanted_is_not_blocked(reason: Reason) -> None:
    given = dict(BLOCKED[reason])
    assert isinstance(judge(world(given.pop("conf", CONF), **given)), InSync)


def test_a_container_that_is_elsewhere_is_left_to_placement() -> None:
    assert isinstance(judge(view(specs(), guest_facts(), access=access_facts(((129, "kpro6", "lxc"),)))), Skipped)


def test_just_starting_or_stopping_is_unknown() -> None:
    with pytest.raises(NotKnown, match="just being started or stopped"):
        judge(world(now=PowerFacts((), frozenset({129}))))


def test_a_stop_needs_to_know_nothing_of_gpus() -> None:
    seen = world(who=container(state="stopped"))
    sections = {k: v for k, v in seen.facts["kpro5"].sections.items() if k != "host.gpu-health"}
    assert step(judge(View(seen.specs, {"kpro5": HostFacts("kpro5", sections)}))).action == "stop"


@pytest.mark.parametrize("lifecycle", ["maintenance", "decommissioned"])
def test_hosts_that_are_not_worked_on(lifecycle: str) -> None:
    assert isinstance(judge(View(specs(fleet.host(lifecycle=lifecycle), container()), {})), Skipped)


def test_unknown_facts_are_not_judged() -> None:
    with pytest.raises(NotKnown):
        judge(View(specs(), {"kpro5": HostFacts("kpro5", {"container.devices": Known(guest_facts((129, CONF)))})}))


def test_every_reason_is_shown_by_a_test() -> None:
    shown = {
        Reason.GPU_STILL_IN_USE,
        Reason.NOT_RUNNING,
        Reason.STILL_RUNNING,
        Reason.RESTART_DID_NOT_HELP,
    }
    assert shown | set(BLOCKED) | {reason for *_, reason in RESTARTS.values()} == set(Reason)
