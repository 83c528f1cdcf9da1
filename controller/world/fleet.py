"""Real hosts: one kept connection each, all asked at once, their answers read by one thread."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from controller.core.observe import WORLD
from controller.core.words import Layer
from controller.facts.hub import Description, NotDescribed
from controller.facts.words import Observation, Section, Unknown
from controller.spec.model import Connection, Host, Specs
from controller.world import units
from controller.world.endpoint import Endpoint, UserConfig, endpoint
from controller.world.hub import Hub
from controller.world.keys import KnownHosts, Shown
from controller.world.local import LocalTransport
from controller.world.port import Look, ModelAsked, Order, Outcome, Refused
from controller.world.shell import Counts, ProbeShell
from controller.world.ssh import CONNECT_TIMEOUT, Connector
from controller.world.transport import HostError, Reason, Transport

LOOK_TIMEOUT = 45.0  # seconds from asking to the whole answer; several tools may hang in it, each up to its own limit
LEASE = 60  # seconds that the right to start steps on a host is kept after a step
_OPEN_TIMEOUT = 10.0  # seconds for starting a shell on a connection
_LOGINS_AT_ONCE = 128  # 50 are as quick, but hosts that do not answer must not keep the others waiting
_PATIENCE = (1.0, 30.0)  # seconds without another try after a failed login: at first, and doubled up to


class Identity(Protocol):
    """Who takes leases: ``id`` stays the same over restarts, ``name`` is for people."""

    @property
    def id(self) -> str:
        """The controller's id."""
        ...

    @property
    def name(self) -> str:
        """The controller's machine and process."""
        ...


class SshWorld:
    """The hosts of the specs, over SSH or (``connection: local``) as the controller's own machine. See ``port.World``.

    ``state`` is the directory with the pinned host keys. ``clock`` tells the time of observations, in seconds.
    A look takes at most ``connect_timeout + look_timeout`` seconds. ``observe`` waits for the slowest host; a slow one
    holds up nobody who uses ``ask`` and ``hear``.
    """

    def __init__(
        self,
        specs: Specs,
        state: str | os.PathLike[str],
        identity: Identity,
        layers: Sequence[Layer],
        clock: Callable[[], float] = time.time,
        connect_timeout: float = CONNECT_TIMEOUT,
        look_timeout: float = LOOK_TIMEOUT,
        user_config: str | None = "~/.ssh/config",
    ) -> None:
        self._controller = units.Controller(identity.id, identity.name)
        self._layers = tuple(layers)
        self._clock = clock
        self._connect_timeout = connect_timeout
        self._look_timeout = look_timeout
        self._user_config = UserConfig(user_config)
        self._connector = Connector(KnownHosts(state), connect_timeout)
        self._hub = Hub(state)
        self._pool: ThreadPoolExecutor | None = None  # while somebody is being logged in to
        self._news: queue.SimpleQueue[Look | _Link] = queue.SimpleQueue()
        self._observing = threading.Lock()
        self._links: dict[str, _Link] = {}
        self._waiting: dict[_Link, _Asked] = {}
        self.use(specs)

    @property
    def counts(self) -> Counts:
        """Return what looking at the hosts has cost so far, all of them together."""
        each = [link.shell.counts for link in self._links.values()]
        return Counts(sum(c.rounds for c in each), sum(c.reads for c in each), sum(c.logins for c in each))

    def describe(self, asked: Sequence[ModelAsked]) -> Mapping[tuple[str, str], Description | NotDescribed]:
        """What the Hub says of models, all at once; what was learned lies in the state directory."""
        return self._hub.describe(asked)

    def use(self, specs: Specs) -> None:
        """Go on with other specs; hosts that are reached as before keep their connection."""
        with self._observing:
            before, self._links = self._links, {}
            for name, host in specs.hosts.items():
                where, fragments = _where(host, self._user_config, specs.hosts), _fragments(self._layers, host)
                known = before.get(name)
                if known is not None and (known.where, known.fragments) == (where, fragments):
                    self._links[name] = before.pop(name)
                else:
                    self._links[name] = _Link(name, where, fragments, self._connector, self._news)
        for link in before.values():
            if (asked := self._waiting.pop(link, None)) is not None:
                self._news.put(asked.look)  # of the host as it is reached now
            link.close()

    def ask(self, looks: Sequence[Look]) -> None:
        """Begin to look at hosts; whoever hears gets their answers. Of a host asked already, the first look counts."""
        for look in looks:
            self._news.put(look)

    def hear(self, seconds: float) -> Sequence[Observation]:
        """Wait so long for answers, and return those that have come as soon as there are some."""
        with self._observing:
            return self._hear(time.monotonic() + seconds)

    def observe(self, looks: Sequence[Look]) -> Mapping[str, Observation]:
        """Look at hosts, all at once, and wait for all."""
        with self._observing:
            self.ask(looks)
            hosts = {look.host for look in looks}
            seen: dict[str, Observation] = {}
            while not hosts <= seen.keys():
                seen.update((one.host, one) for one in self._hear(math.inf))
            return {look.host: seen[look.host] for look in looks}

    def _hear(self, until: float) -> list[Observation]:
        seen: list[Observation] = []
        while not seen and (now := time.monotonic()) <= until:
            soonest = min((asked.until for asked in self._waiting.values()), default=math.inf)
            told = self._next_news(min(until, soonest) - now)
            while told is not None:
                seen += self._take(told)
                told = self._next_news(0.0)
            seen += self._late()
            if not self._waiting:
                self._end_idle_logins()
            if until <= now:
                break
        return seen

    def _take(self, told: Look | _Link) -> list[Observation]:
        """Begin a look, or take a host that has news a step further."""
        if isinstance(told, _Link):
            told.told = False  # before looking, so that nothing said after it is missed
            return self._forward(told) if told in self._waiting else []
        link = self._links.get(told.host)
        if link is None:
            return [self._observation(told.host, HostError(Reason.CONFIG, f"no spec has a host {told.host} any more"))]
        if link in self._waiting:
            return []
        self._waiting[link] = _Asked(told, time.monotonic() + self._connect_timeout + self._look_timeout)
        return self._forward(link)

    def _logins(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_LOGINS_AT_ONCE, thread_name_prefix="login")
        return self._pool

    def _end_idle_logins(self) -> None:
        """Keep no threads for logins when there are none: between looks a connection costs its own thread only."""
        if self._pool is not None and not any(link.opening() for link in self._links.values()):
            self._pool.shutdown(wait=False)
            self._pool = None

    def _forward(self, link: _Link) -> list[Observation]:
        """Take one host a step further: log in, ask, or take in what it answers."""
        asked = self._waiting[link]
        found: Mapping[str, Section] | HostError | None
        try:
            if asked.since is None:
                if not link.ready(self._logins):
                    return []
                asked.since = time.monotonic()
                asked.until = asked.since + self._look_timeout
                link.shell.ask(asked.look.max_age, asked.look.guests)
            found = link.hear()
        except HostError as error:
            if asked.since is not None and not asked.again and link.was_kept_and_died():
                # The connection had died unnoticed; what a look asks may be asked twice.
                until = time.monotonic() + self._connect_timeout + self._look_timeout
                self._waiting[link] = _Asked(asked.look, until, again=True)
                return self._forward(link)
            found = error
        if found is None:
            return []
        del self._waiting[link]
        return [self._observation(link.host, found)]

    def _next_news(self, seconds: float) -> Look | _Link | None:
        """Return the next look to begin or host that has something to say; None when there is none within the time."""
        try:
            if seconds <= 0.0:
                return self._news.get_nowait()
            return self._news.get(timeout=seconds if seconds < math.inf else None)
        except queue.Empty:
            return None

    def _late(self) -> list[Observation]:
        """Give up the hosts whose time is over."""
        now = time.monotonic()
        late = [link for link, asked in self._waiting.items() if now >= asked.until]
        return [self._give_up(link) for link in late]

    def _give_up(self, link: _Link) -> Observation:
        asked = self._waiting.pop(link)
        late = link.login_late() if asked.since is None else link.shell.give_up(self._look_timeout)
        return self._observation(link.host, late)

    def _observation(self, host: str, found: Mapping[str, Section] | HostError) -> Observation:
        if isinstance(found, HostError):
            return Observation(host, self._clock(), failure=Unknown(found.reason.value, found.message))
        return Observation(host, self._clock(), found)

    def perform(self, order: Order) -> Outcome:
        """Start the step's script as a unit on its host and wait until it ends (a job: until it is started)."""
        link = self._links[order.step.hosts[0]]
        if order.step.action == "reboot-host" and order.boot_id == _own_boot_id():
            return Refused("unable", f"the controller runs on {link.host}, or in a container of it: reboot it yourself")
        try:
            transport = link.connected()
        except HostError as error:
            return Refused("rights" if error.reason is Reason.SUDO_REFUSED else "unreachable", error.message)
        link.leased = True
        return units.perform(transport, order, self._controller, LEASE)

    def host_keys(self, host: str) -> Iterator[Shown]:
        """Yield the key of each server on the way to a host, the host's last; ``pin`` one before taking the next.

        For ``reconcile trust``. Nothing is logged in to but jump hosts. Raises Unreachable.
        """
        where = self._links[host].where
        if isinstance(where, HostError):
            raise where
        if isinstance(where, Endpoint):
            yield from self._connector.shown(where)

    def pin(self, shown: Shown, *, replace: bool = False) -> None:
        """Pin a key that was shown. Raises NotPinned."""
        self._connector.known.pin(shown, replace=replace)

    def close(self) -> None:
        """Give back leases and close connections."""
        leased = [link for link in self._links.values() if link.leased]
        with ThreadPoolExecutor(max(1, len(leased))) as pool:
            for link in leased:
                pool.submit(link.release, self._controller)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        for link in self._links.values():
            link.close()
        self._connector.close()


@dataclass
class _Asked:
    """A look under way: ``since`` when the host was asked, None while it is being logged in to."""

    look: Look
    until: float
    since: float | None = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class _Here:
    """The controller's own machine."""

    sudo: bool


class _Link:
    """One host: its connection, its shell, and what went wrong with them."""

    def __init__(
        self,
        host: str,
        where: Endpoint | _Here | HostError,
        fragments: Mapping[str, str],
        connector: Connector,
        news: queue.SimpleQueue[Look | _Link],
    ) -> None:
        self.host = host
        self.where = where
        self.fragments = fragments
        self.shell = ProbeShell(host, fragments)
        self.leased = False
        self.told = False  # that there are news, and nobody has looked yet
        self._connector = connector
        self._news = news
        self._transport: Transport | None = None
        self._login = threading.Lock()
        self._opening: Future[None] | None = None
        self._served = False  # the connection has carried an answer
        self._failure: HostError | None = None
        self._patience = 0.0
        self._not_before = 0.0

    def opening(self) -> bool:
        """Tell whether the host is being logged in to."""
        return self._opening is not None and not self._opening.done()

    def ready(self, pool: Callable[[], ThreadPoolExecutor]) -> bool:
        """Tell whether the shell can be asked now; when not, see to it, and there will be news.

        Raises HostError for a login that has failed, at once while it is not yet time for another try.
        """
        if self._opening is None:
            if self._alive() and self.shell.is_open() and self._transport and self._transport.at_hand(0.0):
                return True
            if self._failure and time.monotonic() < self._not_before:
                raise self._failure
            self._opening = pool().submit(self._open)
            self._opening.add_done_callback(lambda _: self.wake())
            return False
        if not self._opening.done():
            return False
        opening, self._opening = self._opening, None
        try:
            opening.result()
        except HostError as error:
            self._failure = error
            self._patience = min(max(self._patience * 2, _PATIENCE[0]), _PATIENCE[1])
            self._not_before = time.monotonic() + self._patience
            raise
        self._failure, self._patience = None, 0.0
        return True

    def hear(self) -> Mapping[str, Section] | None:
        """Take in what the host says. Raises HostError."""
        sections = self.shell.hear()
        self._served = self._served or sections is not None
        return sections

    def login_late(self) -> HostError:
        """Return why there is no answer from a host that is not logged in to yet; the login goes on."""
        return HostError(Reason.TIMED_OUT, f"{self.host} is still being logged in to")

    def was_kept_and_died(self) -> bool:
        """Tell whether the connection had served before and is gone now."""
        return self._served and not self._alive()

    def connected(self) -> Transport:
        """Return the connection, made anew when there is none. Raises Unreachable."""
        with self._login:
            if self._transport is None or not self._transport.alive():
                self._served = False
                self._transport = self._connect()
                self.shell.counts.logins += 1
            return self._transport

    def wake(self) -> None:
        """Put the host on the list of those with news, once."""
        if not self.told:
            self.told = True
            self._news.put(self)

    def release(self, controller: units.Controller) -> None:
        """Give the lease back, if the host can be reached; else it runs out."""
        self.leased = False
        if self._transport is not None and self._transport.alive():
            with contextlib.suppress(HostError):
                units.release(self._transport, controller)

    def close(self) -> None:
        """End the connection."""
        self.shell.drop()
        if self._transport is not None:
            self._transport.close()

    def _alive(self) -> bool:
        return self._transport is not None and self._transport.alive()

    def _open(self) -> None:
        """Log in and start the shell, or wait until a busy connection takes the question. In a thread of the pool."""
        kept = self._alive()
        transport = self.connected()
        if kept and self.shell.is_open() and transport.at_hand(_OPEN_TIMEOUT):
            return
        self.shell.drop()
        try:
            self.shell.open(transport, self.wake, _OPEN_TIMEOUT)
        except HostError:
            if not kept or transport.alive():
                raise
            self.shell.open(self.connected(), self.wake, _OPEN_TIMEOUT)  # the kept connection had died

    def _connect(self) -> Transport:
        if isinstance(self.where, HostError):
            raise self.where
        if isinstance(self.where, _Here):
            return LocalTransport(self.host, sudo=self.where.sudo)
        return self._connector.connect(self.where)


def _where(host: Host, config: UserConfig, hosts: Mapping[str, Host]) -> Endpoint | _Here | HostError:
    if host.ssh.connection is Connection.LOCAL:
        return _Here(host.ssh.sudo)
    try:
        return endpoint(host, config, hosts)
    except HostError as error:
        return error


def _fragments(layers: Sequence[Layer], host: Host) -> dict[str, str]:
    """Return what a host is asked, by section: the world's own question, then each layer's."""
    return {
        WORLD: units.PROBE,
        **{layer.name: layer.probe for layer in layers if layer.probe and host.platform in layer.platforms},
    }


def _own_boot_id() -> str:
    """The boot id of the kernel that the controller runs on: a container has that of its host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
