"""A whole controller on the simulated fleet, and everything that can go wrong on the way, by name."""

from __future__ import annotations

import json

import pytest

from controller.core.words import Drift
from controller.facts.words import Known, Unknown
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.shared import pve_physics as pve
from controller.layers.shared.truth import Fleet, Host, Impossible, Said
from controller.run.ended import Result
from controller.spec.ref import Ref
from controller.world.port import Done, Look, Lost, Order, Refused
from controller.world.sim import SimWorld, file
from controller.world.sim.faults import ANSWERS, Fault, Killed, Moment, Name
from tests.sim.controllers import Controller
from tests.sim.fleets import DEMO, demo

CONF = "/etc/pve/lxc/129.conf"
CT = Ref("Container", "ct129")


@pytest.fixture
def made() -> Fleet:
    return demo()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, made: Fleet) -> list[int]:
    """The containers of the fleet that were started, in order, from the test's beginning on."""
    started: list[int] = []
    real = pve.pct_start

    def counted(fleet: Fleet, host: Host, vmid: int) -> Said:
        said = real(fleet, host, vmid)
        if said.rc == 0 and fleet is made:
            started.append(vmid)
        return said

    monkeypatch.setattr(pve, "pct_start", counted)
    return started


def is_right(made: Fleet) -> None:
    """CT 129 opens exactly its two cards, and all of its config that is nobody's business is as it was."""
    host = made.hosts["kpro5"]
    reached = {path for path in host.containers[129].dev if pve.opens(host, 129, path) == ""}
    assert reached == {"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
    text = pve.read(made, host, CONF).text
    first = pve.read(demo(), host, CONF).text
    assert text.partition("[before-upgrade]")[2] == first.partition("[before-upgrade]")[2]
    assert [line for line in text.split("\n") if line.startswith("#")] == [
        line for line in first.split("\n") if line.startswith("#")
    ]
    assert made.hosts["kpro4"].machines.keys() == {210}
    assert host.machines.keys() == {205}


def test_the_main_job(made: Fleet, starts: list[int]) -> None:
    controller = Controller(made)
    report = controller.once()
    assert [(e.step.action, e.result) for e in report.ended] == [
        ("edit-config", Result.WORKED),
        ("restart", Result.WORKED),
    ]
    is_right(made)
    assert starts == [129]
    again = Controller(made).once()
    assert again.ended == []
    assert again.upcoming.in_sync


def test_looking_changes_nothing(made: Fleet) -> None:
    before = json.dumps(file.to_plain(made)["hosts"]), json.dumps(file.to_plain(made)["clusters"])
    Controller(made).look()
    assert (json.dumps(file.to_plain(made)["hosts"]), json.dumps(file.to_plain(made)["clusters"])) == before


MOMENTS = (Moment.BEFORE, Moment.DURING, Moment.AFTER)
ACTIONS = ("edit-config", "restart")


@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_lost_connection_ends_in_the_same_state(made: Fleet, starts: list[int], action: str, when: Moment) -> None:
    controller = Controller(made)
    controller.world.inject(Fault(Name.CONNECTION_LOST, "kpro5", when, action))
    first = controller.once()
    assert controller.world.armed == ()
    assert not first.failed
    Controller(made).once()
    is_right(made)
    assert starts == [129]


@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_killed_controller_is_gone_on_from(made: Fleet, starts: list[int], action: str, when: Moment) -> None:
    controller = Controller(made)
    controller.world.inject(Fault(Name.KILLED, "kpro5", when, action))
    with pytest.raises(Killed):
        controller.once()
    report = Controller(made).once()  # the same controller, started again
    assert report.upcoming.in_sync
    is_right(made)
    assert starts == [129]


def test_a_controller_can_be_killed_while_it_looks(made: Fleet) -> None:
    controller = Controller(made)
    controller.world.inject(Fault(Name.KILLED, "kpro5", Moment.LOOK))
    with pytest.raises(Killed):
        controller.look()


def test_a_reply_that_is_lost_though_all_is_done(made: Fleet, starts: list[int]) -> None:
    controller = Controller(made)
    controller.world.inject(Fault(Name.REPLY_LOST, "kpro5", action="restart"))
    controller.once()
    is_right(made)
    assert starts == [129]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (Name.HANG, "timed-out"),
        (Name.GARBAGE, "garbage"),
        (Name.HUGE, "too-long"),
        (Name.HALF, "cut-off"),
        (Name.FOREIGN, "garbage"),
    ],
)
def test_an_answer_that_is_none_is_unknown_and_the_other_host_goes_on(made: Fleet, name: Name, reason: str) -> None:
    controller = Controller(made)
    controller.world.inject(Fault(name, "kpro5", times=0))
    report = controller.once()
    assert report.ended == []
    assert report.facts["kpro5"].failure is not None
    assert report.facts["kpro5"].failure.reason == reason
    assert isinstance(report.facts["kpro4"].section("host.access"), Known)


def test_every_spoilt_answer_is_tried() -> None:
    assert set(ANSWERS) == {Name.HANG, Name.GARBAGE, Name.HUGE, Name.HALF, Name.FOREIGN}


def test_a_host_that_is_out_of_reach_and_back(made: Fleet) -> None:
    controller = Controller(made)
    controller.world.inject(Fault(Name.UNREACHABLE, "kpro5"))
    assert controller.once().facts["kpro5"].failure is not None
    controller.world.inject(Fault(Name.REACHABLE, "kpro5"))
    controller.once()
    is_right(made)


def test_a_changed_host_key_is_no_host(made: Fleet) -> None:
    controller = Controller(made)
    controller.world.inject(Fault(Name.HOST_KEY_CHANGED, "kpro5"))
    report = controller.once()
    assert report.facts["kpro5"].failure == Unknown("host-key-changed", report.facts["kpro5"].failure.message)
    assert report.ended == []


def test_nvidia_smi_that_hangs_is_unknown_and_no_step_follows(made: Fleet) -> None:
    controller = Controller(made)
    controller.world.inject(Fault(Name.SMI_HANG, "kpro5"))
    report = controller.once()
    facts = report.facts["kpro5"].section("host.gpu-health")
    assert isinstance(facts, Known)
    assert isinstance(facts.value, GpuFacts)
    assert facts.value.smi_failure is not None
    assert facts.value.smi_failure.reason == "nvidia-smi-hangs"
    assert report.ended == []
    controller.world.inject(Fault(Name.SMI_BACK, "kpro5"))
    controller.once()
    is_right(made)


def test_a_card_that_falls_off_the_bus_is_told_by_nvidia_smi(made: Fleet) -> None:
    controller = Controller(made)
    controller.world.inject(Fault(Name.CARD_LOST, "kpro5", card="0000:ce:00.0"))
    verdict = controller.look().verdict(Ref("Host", "kpro5"), "host.gpu-health")
    assert isinstance(verdict, Drift)
    assert verdict.reason == "off-the-bus"
    assert "Xid (PCI:0000:ce:00): 79" in verdict.message
    assert "0000:CE:00.0: Unknown Error" in verdict.evidence["nvidia-smi-failed"]


def test_a_persons_edit_between_look_and_step_survives(made: Fleet, starts: list[int]) -> None:
    controller = Controller(made)
    text = pve.read(made, made.hosts["kpro5"], CONF).text
    by_hand = text.replace("memory: 131072", "memory: 200000", 1)
    controller.world.inject(Fault(Name.EDIT, "kpro5", Moment.BEFORE, "edit-config", path=CONF, text=by_hand))
    report = controller.once()
    assert [e.result for e in report.ended] == [Result.STALE, Result.WORKED, Result.WORKED]
    assert "memory: 200000\n" in pve.read(made, made.hosts["kpro5"], CONF).text
    is_right(made)
    assert starts == [129]


def test_a_container_stopped_by_somebody_else_meanwhile(made: Fleet, starts: list[int]) -> None:
    controller = Controller(made)
    controller.world.inject(Fault(Name.CT_STOP, "kpro5", Moment.BEFORE, "restart", guest=129))
    report = controller.once()
    assert [(e.step.action, e.result) for e in report.ended] == [
        ("edit-config", Result.WORKED),
        ("restart", Result.STALE),
        ("start", Result.WORKED),
    ]
    is_right(made)
    assert starts == [129]


def test_a_vm_that_takes_a_card_meanwhile(made: Fleet) -> None:
    controller = Controller(made)
    config = "hostpci0: 0000:ce:00,pcie=1\nname: thief\n"
    controller.world.inject(
        Fault(Name.EDIT, "kpro5", Moment.BEFORE, "edit-config", path="/etc/pve/qemu-server/300.conf", text=config),
        Fault(Name.VM_START, "kpro5", Moment.BEFORE, "edit-config", guest=300),
    )
    report = controller.once()
    verdict = report.upcoming.verdict(CT, "container.devices")
    assert isinstance(verdict, Drift)
    assert made.hosts["kpro5"].functions["0000:ce:00.0"].driver == "vfio-pci"
    assert 300 in made.hosts["kpro5"].machines


def test_a_start_that_fails_is_told_with_its_text(made: Fleet) -> None:
    controller = Controller(made)
    controller.world.inject(Fault(Name.START_FAILS, "kpro5", text="startup for container '129' failed"))
    report = controller.once()
    assert [(e.step.action, e.result) for e in report.ended] == [
        ("edit-config", Result.WORKED),
        ("restart", Result.FAILED),
        ("start", Result.WORKED),
    ]
    assert "CT 129 does not run after pct start" in report.ended[1].message


def test_a_full_disk_fails_the_edit_and_leaves_the_config(made: Fleet) -> None:
    controller = Controller(made)
    before = pve.read(made, made.hosts["kpro5"], CONF).text
    controller.world.inject(Fault(Name.DISK_FULL, "kpro5", Moment.DURING, "edit-config"))
    report = controller.once()
    assert report.ended[0].result is Result.FAILED
    assert "cannot keep a copy" in report.ended[0].message
    assert pve.read(made, made.hosts["kpro5"], CONF).text == before
    controller.world.inject(Fault(Name.DISK_FREED, "kpro5"))
    Controller(made).once()
    is_right(made)


def test_quorum_lost_between_look_and_step(made: Fleet) -> None:
    controller = Controller(made)
    before = pve.read(made, made.hosts["kpro5"], CONF).text
    controller.world.inject(
        Fault(Name.PARTITION, "kpro5", Moment.BEFORE, "edit-config", sides=(("kpro4",), ("kpro5",)))
    )
    report = controller.once()
    assert report.ended[0].result is Result.FAILED
    assert pve.read(made, made.hosts["kpro5"], CONF).text == before
    controller.world.inject(Fault(Name.HEAL, "kpro5"))
    Controller(made).once()
    is_right(made)


@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_host_that_reboots_under_a_step(made: Fleet, action: str, when: Moment) -> None:
    controller = Controller(made)
    controller.world.inject(Fault(Name.REBOOT, "kpro5", when, action, seconds=90))
    boot_id = made.hosts["kpro5"].boot_id
    controller.once()
    assert not made.hosts["kpro5"].powered
    controller.world.clock.wait(120)
    assert made.hosts["kpro5"].powered
    assert made.hosts["kpro5"].boot_id != boot_id
    again = Controller(made)
    report = again.once()
    assert report.upcoming.in_sync
    is_right(made)
    assert Controller(made).once().ended == []


def test_power_cut_and_given_back(made: Fleet) -> None:
    controller = Controller(made)
    controller.world.inject(Fault(Name.POWER_OFF, "kpro5"))
    assert controller.look().verdict(CT, "container.power").__class__.__name__ == "Unseen"
    controller.world.inject(Fault(Name.POWER_ON, "kpro5"))
    assert 129 in made.hosts["kpro5"].containers  # onboot: 1
    Controller(made).once()
    is_right(made)


# --- two controllers ---


def test_another_controller_holds_the_host(made: Fleet) -> None:
    controller = Controller(made)
    controller.world.inject(Fault(Name.OTHER_CONTROLLER, "kpro5", text="ops@desk:77", seconds=45))
    report = controller.once()
    assert [e.result for e in report.ended] == [Result.REFUSED]
    assert "ops@desk:77" in report.ended[0].message
    controller.world.clock.wait(60)
    assert Controller(made).once().upcoming.in_sync


def test_two_controllers_never_double_a_step(made: Fleet, starts: list[int]) -> None:
    one, other = Controller(made, "one"), Controller(made, "other")
    one.look()
    other.look()
    one.world.inject(Fault(Name.CONNECTION_LOST, "kpro5", Moment.DURING, "edit-config"))
    one.once()
    report = other.once()
    assert all(e.result is Result.REFUSED for e in report.ended)
    assert "one" in "".join(e.message for e in report.ended) or report.ended == []
    is_right(made)
    assert starts == [129]


# --- the port's rules ---


def order(controller: Controller) -> Order:
    step = controller.look().ready[0]
    host = controller.world.fleet.hosts["kpro5"]
    return Order(step, host.generation, host.boot_id)


def test_an_order_of_an_older_generation_or_boot_is_stale(made: Fleet) -> None:
    controller = Controller(made)
    given = order(controller)
    assert isinstance(controller.world.perform(given), Done)
    refused = controller.world.perform(given)
    assert isinstance(refused, Refused)
    assert refused.reason == "stale"
    made.hosts["kpro5"].boot_id = "another"
    refused = controller.world.perform(Order(given.step, 1, "before"))
    assert isinstance(refused, Refused)
    assert "booted" in refused.message


def test_a_running_step_keeps_others_out_even_of_the_same_controller(made: Fleet) -> None:
    controller = Controller(made)
    given = order(controller)
    controller.world.inject(Fault(Name.CONNECTION_LOST, "kpro5"))
    assert isinstance(controller.world.perform(given), Lost)
    refused = controller.world.perform(Order(given.step, 1, given.boot_id))
    assert refused == Refused("busy", f"{given.step.id} of Container/ct129 is running")


def test_leases_are_given_back_at_the_end(made: Fleet) -> None:
    controller = Controller(made)
    controller.once()
    assert made.hosts["kpro5"].lease is not None
    controller.world.close()
    assert made.hosts["kpro5"].lease is None


def test_a_host_that_is_not_there(made: Fleet) -> None:
    seen = SimWorld(made).observe([Look("nobody")])
    assert seen["nobody"].failure is not None


def test_faults_strike_when_their_turn_comes(made: Fleet) -> None:
    world = SimWorld(made)
    world.inject(Fault(Name.HANG, "kpro5", skip=1, times=2))
    told = [world.observe([Look("kpro5")])["kpro5"].failure is not None for _ in range(4)]
    assert told == [False, True, True, False]


def test_a_change_by_hand_that_cannot_be_is_refused(made: Fleet) -> None:
    world = SimWorld(made)
    with pytest.raises(Impossible, match="both have minor 0"), world.change("kpro5") as host:
        host.functions["0000:ce:00.0"].gpu.minor = 0


def test_an_unnoted_change_is_found_when_answers_are_checked(made: Fleet) -> None:
    world = SimWorld(made, checked=True)
    world.observe([Look("kpro5")])
    made.hosts["kpro5"].kernel = "6.8.12-11-pve"
    with pytest.raises(Impossible, match="nobody noted"):
        world.observe([Look("kpro5")])


def test_what_did_not_change_is_the_same_object(made: Fleet) -> None:
    world = SimWorld(made)
    world.observe([Look("kpro5"), Look("kpro4")])
    first = world.observe([Look("kpro5"), Look("kpro4")])
    with world.change("kpro5") as host:
        host.kernel = "6.8.12-11-pve"
    second = world.observe([Look("kpro5"), Look("kpro4")])
    assert first["kpro5"].sections is not second["kpro5"].sections
    assert DEMO.exists()
