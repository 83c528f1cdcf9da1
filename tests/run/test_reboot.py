"""A reboot as a step: behind everybody's permission, refused where it would hurt, and waited for."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from controller.core import observe
from controller.core.next_steps import next_steps
from controller.core.permissions import Grants, asked_for
from controller.core.view import View
from controller.core.words import Block, Drift, Gate, InSync, Layer, Step, Verdict, Wait
from controller.facts.units import UnitFacts
from controller.layers.order import ORDER
from controller.layers.shared.reboot import NoReboot, reboot
from controller.layers.shared.truth import Fleet
from controller.run.ended import Result
from controller.run.eyes import Eyes
from controller.run.once import Pass, Report
from controller.spec.load import load
from controller.spec.model import Connection, Host, Specs
from controller.spec.ref import Ref
from controller.world.port import World
from controller.world.sim import SimWorld
from controller.world.sim.faults import Fault, Name
from tests.sim.controllers import Told
from tests.sim.fleets import fleet

THREE = """\
hosts:
  kpro4: {cluster: lab, address: 192.0.2.4}
  kpro5:
    cluster: lab
    address: 192.0.2.5
    lxc:
      129: {running: true, config: "arch: amd64\\nonboot: 1\\n"}
      130: {running: true, config: "arch: amd64\\n"}
      131: {running: false, config: "arch: amd64\\n"}
    qemu: {210: {running: true, config: "memory: 512\\n"}}
  kpro6: {cluster: lab, address: 192.0.2.6}
"""


class Reason(StrEnum):
    """Reasons of the layer that wants reboots."""

    OLD = "old-boot"


def layers(first_boot: str, helps: bool = True, name: str = "kpro5") -> tuple[Layer, ...]:
    """The layers, and one that wants a host in another boot than its first; or in a boot that never comes."""

    def check(view: View, host: Host) -> Verdict:
        units = view.fact(host.name, "world", UnitFacts)
        if host.name != name or (helps and units.boot_id != first_boot):
            return InSync()
        remedy = reboot(view, host, "host.test", Reason.OLD, "to see it come back", lambda facts: facts)
        return Drift(Reason.OLD, "this boot is too old", remedy)

    return (*ORDER, Layer("host.test", "Host", Reason, check, gates=Gate.ALL))


def specs(addresses: dict[str, str] | None = None, extra: str = "") -> Specs:
    addresses = addresses or {f"kpro{n}": f"192.0.2.{n}" for n in (4, 5, 6)}
    text = "".join(
        f"kind: Host\nname: {name}\naddress: {address}\nplatform: proxmox\npolicy: {{mode: enforce}}\n{extra}---\n"
        for name, address in addresses.items()
    )
    return load({"s.yaml": f"{text}kind: Container\nname: ct129\nid: 129\nhost: kpro5\n".encode()})


@dataclasses.dataclass
class Sim:
    """The simulated cluster with a controller."""

    fleet: Fleet = dataclasses.field(default_factory=lambda: fleet(THREE))

    def __post_init__(self) -> None:
        self.specs = specs()
        self.world = SimWorld(self.fleet, checked=True)
        self.boot = self.fleet.hosts["kpro5"].boot_id

    def verdict(self, helps: bool = True, changed: Specs | None = None) -> Verdict:
        wanted, made = changed or self.specs, layers(self.boot, helps)
        eyes = Eyes(self.world, made, wanted)
        eyes.look(wanted.hosts)
        found = next_steps(made, View(wanted, eyes.facts)).verdict(Ref("Host", "kpro5"), "host.test")
        assert found is not None
        return found

    def once(self, helps: bool = True, permitted: bool = True) -> tuple[Report, Told]:
        return once(self.world, self.world.clock, layers(self.boot, helps), self.specs, permitted)


def once(world: World, clock: object, made: tuple[Layer, ...], wanted: Specs, permitted: bool) -> tuple[Report, Told]:
    eyes, told = Eyes(world, made, wanted), Told()
    eyes.look(wanted.hosts)
    given = asked_for(next_steps(made, View(wanted, eyes.facts)).ready) if permitted else frozenset()
    grants = Grants(wanted, given)
    return Pass(world, made, wanted, grants, clock, told, 300.0).run(eyes), told  # type: ignore[arg-type]


def remedy(verdict: Verdict) -> Step | Block | Wait:
    assert isinstance(verdict, Drift)
    return verdict.remedy


def test_everybody_on_the_host_has_to_agree() -> None:
    step = remedy(Sim().verdict())
    assert isinstance(step, Step)
    refs = {"Host/kpro5", "Container/ct129", "Guest/130@kpro5", "Guest/210@kpro5"}
    assert {str(d) for d in step.disrupts} == {f"reboot-host:{ref}" for ref in refs}


def test_without_permission_nothing_happens() -> None:
    sim = Sim()
    report, _ = sim.once(permitted=False)
    assert report.ended == []
    assert sim.fleet.hosts["kpro5"].boot_id == sim.boot


def test_the_pass_waits_for_the_reboot_and_looks_afresh() -> None:
    sim = Sim()
    report, told = sim.once()
    assert [(e.step.action, e.result) for e in told.ended_][:1] == [("reboot-host", Result.WORKED)]
    assert sim.fleet.hosts["kpro5"].boot_id != sim.boot
    assert report.upcoming.verdict(Ref("Host", "kpro5"), "host.test") == InSync()
    assert not report.timed_out
    units = observe.units(report.facts["kpro5"])
    assert units is not None
    assert units.boot_id == sim.fleet.hosts["kpro5"].boot_id
    assert 129 in sim.fleet.hosts["kpro5"].containers


def test_a_new_controller_waits_for_a_reboot_that_was_asked_for() -> None:
    sim = Sim()
    sim.world.inject(Fault(Name.REPLY_LOST, "kpro5", action="reboot-host"))
    report, told = sim.once()
    assert [e.result for e in told.ended_][:1] == [Result.LOST]
    assert report.upcoming.verdict(Ref("Host", "kpro5"), "host.test") == InSync()
    assert [e.step.action for e in told.ended_].count("reboot-host") == 1


def test_it_is_not_rebooted_again_for_what_a_reboot_did_not_help() -> None:
    sim = Sim()
    report, told = sim.once(helps=False)
    assert [e.result for e in told.ended_ if e.step.action == "reboot-host"] == [Result.WORKED]
    last = remedy(report.upcoming.verdict(Ref("Host", "kpro5"), "host.test"))  # type: ignore[arg-type]
    assert isinstance(last, Block)
    assert last.reason == NoReboot.DID_NOT_HELP


def test_not_without_quorum_afterwards() -> None:
    sim = Sim()
    sim.world.inject(Fault(Name.POWER_OFF, "kpro6"))
    block = remedy(sim.verdict())
    assert isinstance(block, Block)
    assert block.reason == NoReboot.QUORUM


def test_who_starts_in_between_has_to_agree_too() -> None:
    sim = Sim()
    assert isinstance(remedy(sim.verdict()), Step)
    sim.world.inject(Fault(Name.CT_START, "kpro5", guest=131))
    again = remedy(sim.verdict())
    assert isinstance(again, Step)
    assert "reboot-host:Guest/131@kpro5" in {str(d) for d in again.disrupts}
    assert "lxc/131" in again.script.text


def test_not_where_the_controller_runs() -> None:
    sim = Sim()
    wanted = sim.specs
    here = wanted.hosts["kpro5"]
    local = here.model_copy(update={"ssh": here.ssh.model_copy(update={"connection": Connection.LOCAL})})
    block = remedy(sim.verdict(changed=dataclasses.replace(wanted, hosts={**wanted.hosts, "kpro5": local})))
    assert isinstance(block, Block)
    assert block.reason == NoReboot.CONTROLLER
