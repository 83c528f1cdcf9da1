"""The story cut off at each of its steps, before, during and after it: the next run comes to the same end."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from controller.layers.shared import pve_physics
from controller.layers.shared.truth import Fleet, Function, Host, Said
from controller.run.ended import Result
from controller.spec.load import load
from controller.spec.model import Specs
from controller.world.sim import file as simfile
from controller.world.sim.faults import Fault, Killed, Moment, Name
from tests.scenarios import story
from tests.scenarios.story import A6000, LINE, MOVED, RTX3090, STORY, TAKEN_OVER, VERSION
from tests.sim.controllers import Controller


@functools.cache
def specs(*, served: bool = False) -> Specs:
    """What lies in specs/story, with what the container serves or without."""
    files = {path.name: path.read_bytes() for path in STORY.glob("*.yaml") if not path.name.endswith(".sim.yaml")}
    loaded = load(files)
    return loaded if served else dataclasses.replace(loaded, servers={})


@functools.cache
def _arrived() -> Fleet:
    """The fleet when the container is where it is wanted, and serves nothing yet."""
    made = copy.deepcopy(_first(alive=False))
    assert Controller(made, wanted=specs()).once().upcoming.in_sync
    return made


@functools.cache
def _first(*, alive: bool) -> Fleet:
    return simfile.load(story.sim_file(alive=alive), "story.sim.yaml")


@dataclass
class Played:
    """A fleet in the story's first world, and what is to be counted in it."""

    fleet: Fleet
    driver_changes: list[str]
    started: list[str] = field(default_factory=list)

    def once(self) -> list[tuple[str, Result]]:
        """One run of one controller, always the same, as after it was started anew."""
        return [(ended.step.action, ended.result) for ended in Controller(self.fleet, wanted=specs()).once().ended]


class WatchedFunction(Function):
    """A PCI function that tells of each change of its ``driver``."""

    __slots__ = ()
    told: ClassVar[list[str]] = []

    def __setattr__(self, name: str, value: object) -> None:
        if name == "driver" and getattr(self, "driver", value) != value:
            WatchedFunction.told.append(f"{self.driver} -> {value}")
        super().__setattr__(name, value)


def play(monkeypatch: pytest.MonkeyPatch, *, alive: bool) -> Played:
    made = copy.deepcopy(_first(alive=alive))
    played = Played(made, [])
    monkeypatch.setattr(WatchedFunction, "told", played.driver_changes)
    functions = made.hosts["kpro5"].functions
    for pci in RTX3090:
        function = functions[pci]
        functions[pci] = WatchedFunction(**{name: getattr(function, name) for name in Function.__slots__})
    real = pve_physics.pct_start

    def counted(fleet: Fleet, host: Host, vmid: int) -> Said:
        said = real(fleet, host, vmid)
        if said.rc == 0 and fleet is made:
            played.started.append(host.name)
        return said

    monkeypatch.setattr(pve_physics, "pct_start", counted)
    return played


def as_told(played: Played) -> None:
    """The story's end."""
    kpro5 = played.fleet.hosts["kpro5"]
    assert kpro5.containers.keys() == {129}
    assert story.sim_smi(played.fleet, "kpro5") == (set(A6000), (VERSION,))
    assert kpro5.loaded["nvidia"].version == VERSION
    config = pve_physics.read(played.fleet, kpro5, "/etc/pve/nodes/kpro5/lxc/129.conf")
    assert config is not None
    assert LINE not in config.text
    assert story.snapshot(config.text) == story.snapshot(story.CONF)
    assert pve_physics.read(played.fleet, kpro5, "/etc/pve/nodes/kpro6/lxc/129.conf") is None
    assert [kpro5.functions[pci].driver for pci in RTX3090] == ["vfio-pci"] * 3
    assert kpro5.machines.keys() == {201, 202}


def goes_on(played: Played) -> None:
    """What was cut off is gone on from, and nothing is left to do then."""
    for _ in range(2):  # what a lost connection left at work may have to end first
        if not Controller(played.fleet, wanted=specs()).look().in_sync:
            played.once()
    as_told(played)
    last = Controller(played.fleet, wanted=specs()).once()
    assert last.upcoming.in_sync
    assert last.ended == []


FAULTS = {
    "killed-before": (Name.KILLED, Moment.BEFORE),
    "killed-during": (Name.KILLED, Moment.DURING),
    "killed-after": (Name.KILLED, Moment.AFTER),
    "cut-before": (Name.CONNECTION_LOST, Moment.BEFORE),
    "cut-during": (Name.CONNECTION_LOST, Moment.DURING),
    "reply-lost": (Name.REPLY_LOST, Moment.AFTER),
    "network-gone": (Name.UNREACHABLE, Moment.DURING),
    "power-cut": (Name.REBOOT, Moment.DURING),
}
JOBS = {"install-headers", "fetch-driver", "install-driver", "install-userland"}


def _cases() -> Iterator[tuple[bool, int, str]]:
    for number, (_, action) in enumerate(TAKEN_OVER):
        # A job's end is seen in a look: no answer of its own can be lost
        yield from (
            (False, number, fault) for fault, (_, at) in FAULTS.items() if not (at is Moment.AFTER and action in JOBS)
        )
    moving = MOVED.index(("container.placement", "move-container"))
    yield from ((True, moving, fault) for fault in FAULTS)


def _id(case: tuple[bool, int, str]) -> str:
    alive, number, fault = case
    return f"{number + 1}-{(MOVED if alive else TAKEN_OVER)[number][1]}-{fault}"


SERVED_JOBS = {"build-environment", "fetch-weights", "check-output"}
SERVED = [action for _, action in story.SERVED]
LONG = 9000.0  # seconds: a build and a download


@pytest.mark.parametrize(
    ("action", "fault"),
    [
        (action, fault)
        for action in SERVED
        for fault, (_, when) in FAULTS.items()
        if not (when is Moment.AFTER and action in SERVED_JOBS)
    ],
)
def test_what_it_serves_is_cut_off(action: str, fault: str) -> None:
    name, when = FAULTS[fault]
    made = copy.deepcopy(_arrived())
    wanted = specs(served=True)
    controller = Controller(made, wanted=wanted)
    controller.world.inject(Fault(name, "kpro5", when, action, seconds=60))
    with contextlib.suppress(Killed):
        controller.once(timeout=LONG)
    assert not controller.world.armed, "the story did not come to this step"
    if name is Name.UNREACHABLE:
        controller.world.inject(Fault(Name.REACHABLE, "kpro5"))
    controller.world.clock.wait(120)
    for _ in range(3):  # what a lost connection left at work may have to end first
        if not Controller(made, wanted=wanted).look().in_sync:
            Controller(made, wanted=wanted).once(timeout=LONG)
    last = Controller(made, wanted=wanted).once(timeout=LONG)
    assert last.upcoming.in_sync
    assert last.ended == []
    (process,) = made.hosts["kpro5"].containers[129].session.processes
    assert process.listens
    (environment,) = made.images["ceph-rbd:vm-129-disk-0"].environments
    assert process.environment == environment


@pytest.mark.parametrize("case", list(_cases()), ids=_id)
def test_cut_off(case: tuple[bool, int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    alive, number, fault = case
    played = play(monkeypatch, alive=alive)
    steps = [action for _, action in (MOVED if alive else TAKEN_OVER)]
    action, (name, when) = steps[number], FAULTS[fault]
    host = "kpro6" if action == "move-container" else "kpro5"
    cut = Fault(name, host, when, action, skip=steps[:number].count(action), seconds=60)
    controller = Controller(played.fleet, wanted=specs())
    controller.world.inject(cut)
    with contextlib.suppress(Killed):
        controller.once()
    assert not controller.world.armed, "the story did not come to this step"
    if name is Name.UNREACHABLE:
        controller.world.inject(Fault(Name.REACHABLE, host))
    controller.world.clock.wait(120)
    goes_on(played)
    if name is Name.REBOOT and host == "kpro5":
        assert set(played.driver_changes) == {"vfio-pci -> None", "None -> vfio-pci"}  # the power's end, and the boot
    else:
        assert played.driver_changes == []
    if name is not Name.REBOOT:
        assert played.started == ["kpro5"]
