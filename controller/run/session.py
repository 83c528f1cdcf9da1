"""What a command works with: the specs, a world, and eyes on it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from controller.core.batch import kept_apart
from controller.core.next_steps import Next, next_steps
from controller.core.permissions import Grants
from controller.core.view import View
from controller.core.words import Disruption
from controller.layers.order import ORDER
from controller.run import state
from controller.run.eyes import Eyes
from controller.run.memory import Memory
from controller.run.once import Clock
from controller.spec.model import Lifecycle, Specs
from controller.spec.ref import Ref
from controller.spec.values import nearest
from controller.world.fleet import SshWorld
from controller.world.port import World
from controller.world.sim import SimFileError, SimWorld
from controller.world.sim.store import place_of

SHOWN = 12  # names that an error lists


class Mistake(Exception):  # noqa: N818 - what the person asked for cannot be
    """The command cannot be carried out as it was given; the message says why and what to do."""


@dataclass(frozen=True)
class Narrow:
    """``--host``, ``--object`` and ``--layer``, each of which narrows what the others have left.

    An object brings the layers below it. Without ``objects`` all are meant.
    """

    hosts: frozenset[str] = frozenset()
    objects: frozenset[Ref] = frozenset()
    layers: frozenset[str] = frozenset()

    def takes(self, ref: Ref, layer: str) -> bool:
        """Whether a layer of an object is meant; with no layer given, whether the object is."""
        if self.objects and ref not in self.objects:
            return False
        return not (self.layers and layer and layer not in self.layers)


def narrow(specs: Specs, hosts: Collection[str], objects: Iterable[str], layers: Iterable[str]) -> Narrow:
    """Check what a command was narrowed to. Raises Mistake."""
    for host in hosts:
        if host not in specs.hosts:
            raise Mistake(f"cannot find a host called {host} in the specs; {there_are(host, specs.hosts)}")
    known = [layer.name for layer in ORDER]
    for layer in layers:
        if layer not in known:
            raise Mistake(f"cannot find a layer called {layer}; {there_are(layer, known)}")
    refs: set[Ref] = set()
    for name in objects:
        ref = find(specs, name)
        if hosts and not _lives_on_one_of(specs, ref, hosts):
            raise Mistake(f"cannot narrow to nothing: {ref} does not live on {' or '.join(hosts)}")
        refs |= set(specs.below(ref))
    if hosts:
        refs = {ref for ref in refs or {obj.ref for obj in specs} if _lives_on_one_of(specs, ref, hosts)}
    return Narrow(frozenset(hosts), frozenset(refs), frozenset(layers))


def find(specs: Specs, name: str) -> Ref:
    """An object by ``Kind/name``, or by its name alone when one object only has it. Raises Mistake."""
    found = [obj.ref for obj in specs if name in (obj.name, str(obj.ref))]
    if len(found) == 1:
        return found[0]
    if found:
        raise Mistake(f"cannot tell which {name} is meant: {', '.join(map(str, found))}")
    there = [str(obj.ref) if "/" in name else obj.name for obj in specs]
    raise Mistake(f"cannot find {name} in the specs; {there_are(name, there)}")


def there_are(wrong: str, names: Iterable[str]) -> str:
    """What there is in place of a name that there is not: the nearest one, or all if they are few."""
    names = list(dict.fromkeys(names))
    close = nearest(wrong, names)
    if close:
        return f"did you mean {close}?"
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return f"there are {shown}" if names else "there are none"


def memory_dir(fleet: str, state_dir: Path) -> Path:
    """Where a fleet's memory and audit log lie: a rehearsal on a simulated fleet is no history of the real one."""
    if not fleet.startswith("sim:"):
        return state_dir
    return state_dir / f"sim-{place_of(Path(fleet.removeprefix('sim:')))}"


def _lives_on_one_of(specs: Specs, ref: Ref, hosts: Collection[str]) -> bool:
    return any(each.kind == "Host" and each.name in hosts for each in specs.below(ref))


@dataclass
class Session:
    """One command at work."""

    specs: Specs
    world: World
    clock: Clock
    eyes: Eyes
    narrowed: Narrow
    memory: Memory
    hosts: tuple[str, ...] = field(default=())

    @property
    def notes(self) -> tuple[str, ...]:
        """What people have to know of the world and of the memory before they read what they say."""
        return (*(self.world.notes if isinstance(self.world, SimWorld) else ()), *self.memory.notes)

    @property
    def at(self) -> float:
        """The time now, in UNIX seconds of the fleet's clock."""
        return self.clock.date().timestamp()

    def grants(self, given: frozenset[Disruption] = frozenset()) -> Grants:
        """What the specs allow, what is given on the command line, and the approvals in force. Raises NoState."""
        return Grants(self.specs, given, tuple(self.memory.approvals(self.at)))

    def close(self) -> None:
        """Give the world and the memory back. Raises OSError."""
        try:
            self.world.close()
        finally:
            self.memory.close()

    def look(self) -> Next:
        """Look at every host that matters, and work out what follows."""
        self.eyes.look(self.hosts)
        return self.upcoming

    @property
    def upcoming(self) -> Next:
        """What follows from what was seen last."""
        return next_steps(ORDER, View(self.specs, self.eyes.facts))

    def excused(self, ref: Ref) -> bool:
        """Whether it is no fault that this cannot be observed: its host is in maintenance, or gone as wanted."""
        hosts = [r.name for r in self.specs.below(ref) if r.kind == "Host"]
        return any(self.specs.hosts[h].lifecycle is not Lifecycle.ACTIVE for h in hosts)


def open_session(specs: Specs, fleet: str, state_dir: Path, narrowed: Narrow) -> Session:
    """Open the world that ``--fleet`` names: ``ssh``, or ``sim:FILE``. Raises Mistake, NoState."""
    world, clock = open_world(specs, fleet, state_dir)
    try:
        memory = Memory.open(memory_dir(fleet, state_dir))
    except state.NoState:
        world.close()
        raise
    concerned = kept_apart(narrowed.hosts or specs.hosts, specs.fleet.limits.never_together)
    hosts = tuple(host for host in specs.hosts if host in concerned)
    return Session(specs, world, clock, Eyes(world, ORDER, specs), narrowed, memory, hosts)


def open_world(specs: Specs, fleet: str, state_dir: Path) -> tuple[World, Clock]:
    """The world that ``--fleet`` names, and its clock. Raises Mistake, NoState."""
    if fleet == "ssh":
        return SshWorld(specs, state_dir, state.identity(state_dir), ORDER), WallClock()
    simulated = _simulated(fleet, state_dir)
    return simulated, simulated.clock


def clock_of(fleet: str, state_dir: Path) -> Clock:
    """The clock that ``--fleet`` goes by, without a look at specs or hosts. Raises Mistake, NoState."""
    return WallClock() if fleet == "ssh" else _simulated(fleet, state_dir).clock


def _simulated(fleet: str, state_dir: Path) -> SimWorld:
    if not fleet.startswith("sim:"):
        raise Mistake(f"cannot use --fleet {fleet}: it is `ssh`, or `sim:FILE`")
    file = Path(fleet.removeprefix("sim:"))
    identity = state.identity(state_dir)
    try:
        return SimWorld.load(file, state_dir, identity)
    except SimFileError as error:
        raise Mistake(f"cannot load the simulated fleet: {error}") from None
    except OSError as error:
        raise Mistake(f"cannot load the simulated fleet: {error.filename or file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Mistake(f"cannot load the simulated fleet: {file} is not text in UTF-8") from None


class WallClock:
    """Real time."""

    def now(self) -> float:
        """Seconds since some moment; never goes back."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Let that much time go by."""
        time.sleep(seconds)

    def date(self) -> datetime:
        """The date and time of day, in UTC."""
        return datetime.now(UTC)
