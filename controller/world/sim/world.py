"""The simulated fleet as a world: it answers looks in the probe's text and plays steps on the hidden truth."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Protocol, Self

from controller import layers
from controller.core import probe
from controller.core.words import Step
from controller.facts.hub import Description, NotDescribed
from controller.facts.words import Observation, Section, Unknown
from controller.layers.order import ORDER
from controller.layers.shared import kernel_physics, pve_physics, server_physics
from controller.layers.shared.hub_truth import described
from controller.layers.shared.truth import Fleet, Host, Impossible, Said, Unit, refuse_impossible
from controller.spec.model import Specs
from controller.world.port import Done, Look, Lost, ModelAsked, Order, Outcome, Refused
from controller.world.sim import events, store, units
from controller.world.sim.faults import ANSWERS, Fault, Killed, Moment, Name

ROUND_TRIP = 0.02  # seconds that a look takes
REBOOT = 45.0  # seconds from going down to having booted
PATIENCE = 20.0  # seconds after which a look that is not answered is given up
OUTPUT_LIMIT = 64 * 1024


class Identity(Protocol):
    """The controller that works on the fleet."""

    @property
    def id(self) -> str:
        """What its leases say."""
        ...

    @property
    def name(self) -> str:
        """What people read of it."""
        ...


class SimClock:
    """The fleet's time, which goes by only when it is let go by."""

    def __init__(self, fleet: Fleet, settle: Callable[[], None]) -> None:
        self._fleet = fleet
        self._settle = settle

    def now(self) -> float:
        """Unix seconds of the fleet."""
        return self._fleet.now

    def date(self) -> datetime:
        """The fleet's date and time of day, in UTC."""
        return datetime.fromtimestamp(self._fleet.now, UTC)

    def wait(self, seconds: float) -> None:
        """Let time go by, and happen what is due in it."""
        self.wait_until(self._fleet.now + seconds)

    def wait_until(self, when: float) -> None:
        """Let time go by until then, and happen what is due in it."""
        self._fleet.now = max(self._fleet.now, when)
        self._settle()


class SimWorld:
    """One controller's world on a simulated fleet. Several may share a fleet, as several controllers share hosts.

    ``notes`` are for people: what was done with the kept state. Every answer goes through the real frame and the real
    parsers; ``checked`` builds each kept answer anew all the same and raises when it would be another (for tests).
    """

    def __init__(
        self,
        fleet: Fleet,
        controller: str = "controller",
        name: str = "here:1",
        kept: store.Kept | None = None,
        *,
        checked: bool = False,
    ) -> None:
        self.fleet = fleet
        self.clock = SimClock(fleet, self._settle_all)
        self.notes: tuple[str, ...] = kept.notes if kept is not None else ()
        self._controller = controller
        self._name = name
        self._kept = kept
        self._checked = checked
        self._lock = threading.RLock()
        self._asked: queue.SimpleQueue[Look] = queue.SimpleQueue()
        self._faults: list[_Armed] = []
        self._physics = _layer_physics()
        self._answers: dict[str, tuple[object, Mapping[str, Section]]] = {}

    @classmethod
    def load(cls, file: Path, state_dir: Path | None, identity: Identity) -> Self:
        """The fleet of a file in its present state, kept under ``state_dir``. Raises SimFileError, OSError."""
        kept = store.Kept(file, state_dir)
        return cls(kept.fleet, identity.id, identity.name, kept)

    # --- the port ---

    def observe(self, looks: Sequence[Look]) -> Mapping[str, Observation]:
        """Look at hosts, all at once."""
        with self._lock:
            self.clock.wait(ROUND_TRIP)
            return {look.host: self._look(look) for look in looks}

    def ask(self, looks: Sequence[Look]) -> None:
        """Begin to look at hosts."""
        for look in looks:
            self._asked.put(look)

    def hear(self, seconds: float) -> Sequence[Observation]:
        """Look at the hosts that were asked."""
        looks: list[Look] = []
        try:
            looks.append(self._asked.get(timeout=seconds) if seconds > 0 else self._asked.get_nowait())
            while True:
                looks.append(self._asked.get_nowait())
        except queue.Empty:
            return list(self.observe(looks).values()) if looks else []

    def use(self, specs: Specs) -> None:
        """Do nothing: the fleet is what its file says."""

    def go_by(self, seconds: float) -> None:
        """Let time go by on the fleet beside whatever else is done with it."""
        with self._lock:
            self.clock.wait(seconds)

    def perform(self, order: Order) -> Outcome:
        """Play a step. Raises Killed where a fault kills the controller."""
        with self._lock:
            try:
                return self._perform(order)
            finally:
                self._save()

    def describe(self, asked: Sequence[ModelAsked]) -> Mapping[tuple[str, str], Description | NotDescribed]:
        """What the fleet's own Hub says of models."""
        with self._lock:
            return {(one.repo, one.revision): described(self.fleet, one.repo, one.revision) for one in asked}

    def close(self) -> None:
        """Give back leases and keep the fleet's state."""
        with self._lock:
            for host in self.fleet.hosts.values():
                if host.lease is not None and host.lease.holder == self._controller and _reaches(self.fleet, host):
                    host.lease = None
                    self.fleet.touch(host)
            self._save()

    # --- for tests and demonstrations ---

    def inject(self, *faults: Fault) -> None:
        """Arm faults; those whose moment is now happen at once."""
        with self._lock:
            for fault in faults:
                if fault.moment is Moment.NOW:
                    self._happen(fault)
                else:
                    self._faults.append(_Armed(fault))

    @property
    def armed(self) -> tuple[Fault, ...]:
        """The faults that have not struck for the last time."""
        return tuple(armed.fault for armed in self._faults)

    @contextmanager
    def change(self, host: str) -> Iterator[Host]:
        """A host whose truth may be changed by hand; what cannot be is refused afterwards. Raises Impossible."""
        with self._lock:
            yield self.fleet.hosts[host]
            self.fleet.touch(self.fleet.hosts[host])
            refuse_impossible(self.fleet)

    # --- looks ---

    def _look(self, look: Look) -> Observation:
        host = self.fleet.hosts.get(look.host)
        now = self.fleet.now
        if host is None:
            missing = Unknown("unreachable", f"the simulated fleet has no host {look.host}")
            return Observation(look.host, now, failure=missing)
        spoilt = self._strike(Moment.LOOK, host)
        if host.name in self.fleet.changed_keys:
            return Observation(host.name, now, failure=Unknown("host-key-changed", _KEY_CHANGED.format(host.name)))
        if not _reaches(self.fleet, host):
            return Observation(host.name, now, failure=Unknown("unreachable", f"{host.name} does not answer"))
        if Name.HANG in spoilt:
            self.clock.wait(PATIENCE)
            message = f"{host.name} did not answer within {PATIENCE:.0f} s"
            return Observation(host.name, self.fleet.now, failure=Unknown("timed-out", message))
        sections = self._sections(host, look.guests)
        if spoilt:
            return self._spoilt(host, sections, spoilt)
        return Observation(host.name, now, sections)

    def _sections(self, host: Host, guests: tuple[int, ...]) -> Mapping[str, Section]:
        """The host's answer; the same object again while nothing has changed, so that nothing is parsed again."""
        sign = (id(host), host.version, guests, units.sign(self.fleet, host))
        kept = self._answers.get(host.name)
        if kept is not None and kept[0] == sign:
            if self._checked and dict(kept[1]) != self._through_frame(host, guests):
                raise Impossible(f"{host.name} has changed and nobody noted it")
            return kept[1]
        sections = self._through_frame(host, guests)
        self._answers[host.name] = (sign, sections)
        return sections

    def _through_frame(self, host: Host, guests: tuple[int, ...]) -> dict[str, Section]:
        return probe.read(_frame(self._built(host, guests)), _NONCE)

    def _built(self, host: Host, guests: tuple[int, ...]) -> dict[str, Section]:
        built = {"world": units.answer(self.fleet, host)}
        for layer in ORDER:
            if layer.probe and host.platform in layer.platforms:
                built[layer.name] = self._physics[layer.name].answer(self.fleet, host, guests)
        return built

    def _spoilt(self, host: Host, sections: Mapping[str, Section], spoilt: frozenset[Name]) -> Observation:
        """An answer that is none, read as a real one would be."""
        data = _frame(dict(sections))
        if Name.HUGE in spoilt:
            data = data[:-1] + b"x" * 10_000_000
        if Name.HALF in spoilt:
            data = data[: len(data) // 2]
        if Name.GARBAGE in spoilt:
            data = bytes(byte ^ 0x5A for byte in data)
        if Name.FOREIGN in spoilt:
            data = f"bash: Zeile 1: look: Kommando nicht gefunden.\n{_NONCE} Ende\n".encode()
        now = self.fleet.now
        if len(data) > probe.LIMIT:
            message = f"{host.name} answered more than {probe.LIMIT} bytes"
            return Observation(host.name, now, failure=Unknown("too-long", message))
        if not probe.complete(data, _NONCE):
            reason = "cut-off" if data.startswith(f"{_NONCE} begin\n".encode()) else "garbage"
            return Observation(host.name, now, failure=Unknown(reason, f"{host.name} answered {data[:60]!r}"))
        try:
            return Observation(host.name, now, probe.read(data, _NONCE))
        except probe.FrameError as error:
            return Observation(host.name, now, failure=Unknown("garbage", f"{host.name}: {error}"))

    # --- steps ---

    def _perform(self, order: Order) -> Outcome:
        step = order.step
        host = self.fleet.hosts.get(step.hosts[0])
        if host is None:
            return Refused("unreachable", f"the simulated fleet has no host {step.hosts[0]}")
        if self._cut_at(Moment.BEFORE, host, step):
            return Lost(f"the connection to {host.name} was lost before anything was laid down there")
        if not _reaches(self.fleet, host) or host.name in self.fleet.changed_keys:
            return Refused("unreachable", f"{host.name} does not answer")
        refused = units.refuse(self.fleet, host, order, self._controller)
        if refused is not None:
            return refused
        seconds = self._seconds(step)
        unit = units.begin(self.fleet, host, order, self._controller, self._name, seconds)
        if step.job is not None:
            cut = self._cut_at(Moment.DURING, host, step)
            return Lost(f"the connection to {host.name} was lost as a job began") if cut else Done(0, "", "")
        self.clock.wait(seconds / 2)
        if self._cut_at(Moment.DURING, host, step):
            return Lost(f"the connection to {host.name} was lost while {unit.work.step} ran")
        if unit.runs and unit.ends is not None:
            self.clock.wait_until(unit.ends)
        if unit.runs:
            self.clock.wait(step.timeout)
            return Lost(f"{unit.work.step} on {host.name} has not ended after {step.timeout:.0f} s")
        if self._cut_at(Moment.AFTER, host, step) or unit.how != "exit":
            return Lost(f"the connection to {host.name} was lost before its answer came")
        return Done(unit.rc or 0, unit.output[-OUTPUT_LIMIT:], unit.errors[-OUTPUT_LIMIT:])

    def _seconds(self, step: Step) -> float:
        if step.action == "reboot-host":
            return 0.5
        takes: Callable[[Step], float] | None = getattr(self._physics.get(step.layer), "takes", None)
        return takes(step) if takes is not None else 0.2

    def _settle_all(self) -> None:
        for host in self.fleet.hosts.values():
            self._settle(host)

    def _settle(self, host: Host) -> None:
        """Let happen what is due on a host: a reboot's end, a unit's end."""
        now = self.fleet.now
        if host.goes_down is not None and host.goes_down <= now:
            host.powers_on = host.goes_down + REBOOT
            pve_physics.power_off(self.fleet, host)
        if host.powers_on is not None and host.powers_on <= now:
            host.powers_on = None
            pve_physics.power_on(self.fleet, host)
        server_physics.settle(self.fleet, host)
        for unit in filter(None, (host.step, *host.jobs.values())):
            if unit.runs and unit.ends is not None and unit.ends <= now:
                self._end(host, unit)

    def _end(self, host: Host, unit: Unit) -> None:
        """Do to the truth what the unit's script does."""
        try:
            said = self._act(host, unit)
        except kernel_physics.Hang as hang:
            unit.ends, unit.errors = None, str(hang)
            self.fleet.touch(host)
            return
        units.end(self.fleet, host, unit, said.rc, said.out, said.err)
        refuse_impossible(self.fleet)

    def _act(self, host: Host, unit: Unit) -> Said:
        if unit.work.action == "reboot-host":  # whatever layer asked for it
            return pve_physics.ask_reboot(self.fleet, host)
        if not unit.work.layer:
            return Said(0)  # a unit of a snapshot, of which nothing but its name was seen, ends and does nothing
        said: Said = self._physics[unit.work.layer].act(self.fleet, host, unit.work)
        return said

    # --- faults ---

    def _cut_at(self, moment: Moment, host: Host, step: Step) -> bool:
        """Let the faults of this moment strike; True: the controller's connection is gone. Raises Killed."""
        struck = self._strike(moment, host, step.action)
        if Name.KILLED in struck:
            raise Killed(f"{moment} {step.id}")
        lost = bool({Name.CONNECTION_LOST, Name.REPLY_LOST} & struck)
        return lost or (moment is not Moment.BEFORE and not _reaches(self.fleet, host))

    def _strike(self, moment: Moment, host: Host, action: str = "") -> frozenset[Name]:
        struck: set[Name] = set()
        for armed in list(self._faults):
            fault = armed.fault
            if fault.moment is not moment or fault.host != host.name or fault.action not in ("", action):
                continue
            if armed.passed < fault.skip:
                armed.passed += 1
                continue
            armed.struck += 1
            if fault.times and armed.struck >= fault.times:
                self._faults.remove(armed)
            if fault.name in _NOT_EVENTS:
                struck.add(fault.name)
            else:
                self._happen(fault)
        if moment is Moment.LOOK and Name.KILLED in struck:
            raise Killed(f"looking at {host.name}")
        return frozenset(struck)

    def _happen(self, fault: Fault) -> None:
        if fault.name in _NOT_EVENTS:
            raise ValueError(f"{fault.name} has to have a moment in a look or a step")
        events.happen(self.fleet, fault)
        self._settle_all()
        refuse_impossible(self.fleet)

    def _save(self) -> None:
        if self._kept is not None:
            self._kept.save(self._settle_step)

    def _settle_step(self, fleet: Fleet) -> None:
        """Let end, in a copy that is kept for the next command, the short steps that are at work."""
        twin = SimWorld(fleet, self._controller)
        for host in fleet.hosts.values():
            if host.step is not None and host.step.runs and host.step.ends is not None:
                twin._end(host, host.step)


class _Armed:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.passed = 0
        self.struck = 0


_NOT_EVENTS = ANSWERS | {Name.CONNECTION_LOST, Name.REPLY_LOST, Name.KILLED}
_NONCE = "simulated"
_KEY_CHANGED = "{0} answers with another host key than the pinned one; if that is meant: reconcile trust {0}"


def _reaches(fleet: Fleet, host: Host) -> bool:
    return host.powered and host.name not in fleet.unreachable


def _frame(sections: Mapping[str, Section]) -> bytes:
    """The bytes that the host's shell would send, as core/probe.sh frames them."""
    parts = [f"{_NONCE} begin\n".encode()]
    for name, section in sections.items():
        out = section.out.encode("utf-8", "surrogateescape")
        err = section.err.encode("utf-8", "surrogateescape")[:4096]
        parts.append(f"{_NONCE} section {name} {section.rc} {len(out)} {len(err)}\n".encode() + out + err + b"\n")
    parts.append(f"{_NONCE} end\n".encode())
    return b"".join(parts)


@functools.cache
def _layer_physics() -> Mapping[str, ModuleType]:
    """Each layer's ``sim`` module, by the layer's name."""
    found: dict[str, ModuleType] = {}
    for module in pkgutil.iter_modules(layers.__path__):
        if module.ispkg:
            package = importlib.import_module(f"{layers.__name__}.{module.name}")
            layer = getattr(package, "LAYER", None)
            if layer in ORDER:
                found[layer.name] = importlib.import_module(f"{package.__name__}.sim")
    return found
