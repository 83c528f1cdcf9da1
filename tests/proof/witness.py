"""A simulated fleet under watch: each promise is checked at every order and at every change that a step makes.

The checks read the hidden truth and the documents as people wrote them, never the controller's own judgement.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from typing import Any

from controller.core.words import Step
from controller.facts.words import Observation, Section
from controller.layers.shared import pve_physics as pve
from controller.layers.shared.truth import File, Fleet, Host, Impossible, Said, Unit
from controller.spec.policy import Permission
from controller.world.port import Look, Order, Outcome
from controller.world.sim import SimWorld
from controller.world.sim.faults import Fault
from controller.world.sim.world import SimClock
from tests.proof.fleets import SECRET, Document
from tests.proof.odd import make_odd

OURS = (
    *("/etc/reconcile/", "/etc/systemd/system/reconcile-", "/etc/systemd/system/sysinit.target.wants/reconcile-"),
    *("/etc/modprobe.d/", "/var/lib/reconcile/", "/run/reconcile/", "/var/lib/lxc/"),
)
"""What a step may write outside of a container's config; in ``modprobe.d`` only the one file of its own."""
PASSED = re.compile(r"(dev\d+|mp\d+|lxc\.cgroup2?\.devices\.\w+|lxc\.mount\.entry)\s*[:=]")
"""The lines of a container's config that the controller may change."""
STOPS = {
    *(Permission.RESTART_CONTAINER, Permission.MOVE_CONTAINER, Permission.TAKE_OVER_CONTAINER),
    *(Permission.CHANGE_DRIVER, Permission.REBOOT_HOST, Permission.REBIND_GPU),
}
NIGHT = {"cron": "0 2 * * *", "duration": "1h", "timezone": "UTC"}
"""The one maintenance window that schedules give to objects: from two to three, UTC."""


@dataclass
class Book:
    """What is known of a schedule from outside: what people want, and what has been seen so far."""

    documents: list[Document]
    unsure: set[str] = field(default_factory=set)  # names of objects whose file is broken; "*": of all
    suspended: set[str] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    ordered: dict[str, tuple[Step, list[Document]]] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)  # a guest's id, and a line that a person wrote
    jump: float = 0.0  # seconds that the controller's calendar is off

    def wrong(self, invariant: str, what: str) -> None:
        """Note a violation."""
        self.violations.append(f"{invariant}: {what}")
        self.log.append(f"  VIOLATED {invariant}: {what}")

    def check(self, invariant: str, holds: bool, what: object = "") -> None:
        """Check one invariant once."""
        self.checks[invariant] += 1
        if not holds:
            self.wrong(invariant, str(what))


class JumpingClock(SimClock):
    """A controller's clock whose calendar may be set while it runs."""

    def __init__(self, world: WitnessWorld) -> None:
        super().__init__(world.fleet, world.settle)
        self._book = world.book

    def date(self) -> datetime:
        return super().date() + timedelta(seconds=self._book.jump)


class WitnessWorld(SimWorld):
    """One controller's world under watch."""

    def __init__(self, book: Book, fleet: Fleet, controller: str) -> None:
        super().__init__(fleet, controller, f"{controller}:1")
        self.book = book
        self.clock = JumpingClock(self)
        self.last: dict[str, Observation] = {}
        self.stale: Counter[str] = Counter()  # looks at a host that are answered with what was true before
        self.meddling: list[tuple[bool, int]] = []  # before a step or after it, and a seed: somebody changes something
        self.blurred: dict[str, list[str]] = {}  # sections that a host cannot give the next time

    def _seconds(self, step: Step) -> float:
        """Most jobs are quick here: a pass looks at them every second, and sees the same all the while."""
        real = super()._seconds(step)
        return real if zlib.crc32(step.id.encode()) % 4 == 0 else min(real, 4.0)

    def settle(self) -> None:
        """What is due on the fleet happens."""
        self._settle_all()

    # --- looks ---

    def observe(self, looks: Sequence[Look]) -> Mapping[str, Observation]:
        seen = dict(super().observe(looks))
        for look in looks:
            before = self.last.get(look.host)
            if self.stale[look.host] > 0 and before is not None and before.failure is None:
                self.stale[look.host] -= 1
                self.book.faults["stale observation"] += 1
                seen[look.host] = Observation(look.host, seen[look.host].at, before.sections)
            elif self.blurred.get(look.host) and seen[look.host].failure is None:
                name = self.blurred[look.host].pop()
                sections = dict(seen[look.host].sections)
                if name in sections:
                    self.book.faults["section not readable"] += 1
                    sections[name] = Section(124, "", "timed out\n")
                    seen[look.host] = Observation(look.host, seen[look.host].at, sections)
        self.last.update(seen)
        return seen

    def _happen(self, fault: Fault) -> None:
        try:
            super()._happen(fault)
        except Impossible:
            raise
        except ValueError as error:  # nobody can edit without quorum, or start what is not there
            self.book.log.append(f"  {error}")
            return
        self.book.log.append(f"  struck: {fault.name} on {fault.host}")
        for guest, file in _configs(self.fleet).items():
            for line in file.text.split("\n"):
                if line.startswith("#note") and (guest, line) not in self.book.notes:
                    self.book.notes.append((guest, line))

    def _strike(self, moment: Any, host: Host, action: str = "") -> frozenset[Any]:
        before = {id(armed.fault): armed.struck for armed in self._faults}
        armed = list(self._faults)
        try:
            return super()._strike(moment, host, action)
        finally:
            for each in armed:
                if each.struck > before[id(each.fault)]:
                    self.book.faults[f"{each.fault.name} at {each.fault.moment}"] += 1

    # --- orders ---

    def _perform(self, order: Order) -> Outcome:
        step, book = order.step, self.book
        book.ordered[step.id] = (step, book.documents)
        book.steps[step.action] += 1
        book.log.append(f"  {self._controller}: {step.action} {step.object} on {', '.join(step.hosts)}")
        self._check_permitted(step)
        self._check_known(step)
        shown = (step.action, step.summary, step.args, step.diff, step.reason, repr(step))
        book.check("no secret is shown", SECRET not in repr(shown), step.id)
        meddles, seed = self.meddling.pop() if self.meddling else (None, 0)
        if meddles is True:
            self._meddle(seed)
        said = super()._perform(order)
        if meddles is False:
            self._meddle(seed)
        book.log.append(f"    {type(said).__name__} {str(said)[:160]}")
        return said

    def _meddle(self, seed: int) -> None:
        name, said = make_odd(Random(seed), self.fleet)
        if name:
            self.book.faults[f"meanwhile: {name}"] += 1
            self.book.log.append(f"  meanwhile {said}")
            self.settle()

    def _check_permitted(self, step: Step) -> None:
        book = self.book
        of = {(d["kind"], d.get("name", "")): d for d in book.documents}
        own = of.get((step.object.kind, step.object.name))
        book.check("only what a spec wants is acted on", own is not None, step.object)
        mode = (own or {}).get("policy", {}).get("mode", "report")
        book.check("nothing is done in report mode", mode == "enforce", step.object)
        for disruption in step.disrupts:
            policy = of.get((disruption.object.kind, disruption.object.name), {}).get("policy", {})
            given = policy.get("mode") == "enforce" and str(disruption.permission) in policy.get("allow", [])
            book.check("each disruption is permitted by whom it disrupts", given, f"{step.id}: {disruption}")
            hour = self.clock.date().hour
            book.check("windows are kept", "windows" not in policy or hour == 2, f"{step.id} at {self.clock.date()}")
        names = {step.object.name, *(d.object.name for d in step.disrupts), *step.hosts}
        book.check("nothing is done for a broken spec file", not names & book.unsure and "*" not in book.unsure, names)
        book.check("what is suspended is left alone", not names & book.suspended, names & book.suspended)
        for host in step.hosts:
            lifecycle = of.get(("Host", host), {}).get("lifecycle", "active")
            book.check("a host in maintenance is not touched", lifecycle != "maintenance", f"{step.id} on {host}")

    def _check_known(self, step: Step) -> None:
        for host in step.hosts:
            document = next((d for d in self.book.documents if d.get("name") == host), {})
            seen = self.last.get(host)
            gone = document.get("lifecycle") == "decommissioned"
            known = seen is not None and seen.failure is None
            self.book.check("nothing is done on a host that cannot be seen", known or gone, f"{step.id} on {host}")
            if seen is None or not known:
                continue
            quorate = '"quorate": 0' not in seen.sections["host.access"].out
            self.book.check("nothing is done without quorum", quorate or gone, f"{step.id} on {host}")
            own = seen.sections.get(step.layer)
            self.book.check(
                "no step rests on a section that could not be read",
                own is None or own.rc == 0 or host != step.hosts[0],
                f"{step.id} on {host}",
            )

    # --- what steps do ---

    def _act(self, host: Host, unit: Unit) -> Said:
        before = _Truth(self.fleet)
        said = super()._act(host, unit)
        step, documents = self.book.ordered.get(unit.work.step, (None, self.book.documents))
        if step is not None and step.action != "reboot-host":
            self._check_cards(before, step, documents)
            self._check_guests(before, step, documents)
            self._check_files(before, step)
        self.check_places()
        return said

    def _check_cards(self, before: _Truth, step: Step, documents: list[Document]) -> None:
        for host in self.fleet.hosts.values():
            document = next((d for d in documents if d["kind"] == "Host" and d["name"] == host.name), {})
            listed = {_pci(g["pci"]): g["owner"] for g in (document.get("nvidia") or {}).get("gpus", [])}
            for address, function in host.functions.items():
                was, override = before.drivers[host.name, address]
                if (was, override) == (function.driver, function.override):
                    continue
                card = f"{address.rpartition('.')[0]}.0"
                what = f"{step.id}: {address} of {host.name}, {was} -> {function.driver}"
                self.book.check("no card is touched that no spec gives away", card in listed, what)
                if was != function.driver:
                    # Where it was going already, a card without a driver may be put for its virtual machine
                    helps = was is None and function.driver == "vfio-pci" and listed.get(card) == "vms"
                    safe = card not in before.claimed[host.name] or helps
                    self.book.check("the driver of a virtual machine's card is never changed", safe, what)
        self.book.checks["the driver of a virtual machine's card is never changed"] += 1

    def _check_guests(self, before: _Truth, step: Step, documents: list[Document]) -> None:
        disrupted = {d.object.name for d in step.disrupts if d.permission in STOPS}
        wanted = {d["id"]: d["name"] for d in documents if d["kind"] == "Container"}
        for host in self.fleet.hosts.values():
            self.book.check(
                "no virtual machine is started, stopped or restarted",
                before.machines[host.name] == {v: m.pid for v, m in host.machines.items()},
                step.id,
            )
            now = {vmid: container.pid for vmid, container in host.containers.items()}
            for vmid, pid in before.containers[host.name].items():
                same = now.get(vmid) == pid or wanted.get(vmid, "?") in disrupted
                self.book.check("a container is stopped only by a step that says so", same, f"{step.id}: CT {vmid}")
            for vmid in now.keys() - before.containers[host.name].keys():
                known = vmid in wanted
                self.book.check("only containers of the specs are started", known, f"{step.id}: CT {vmid}")
            for vmid in (v for v in now if now[v] != before.containers[host.name].get(v)):
                self._check_opened(host, vmid, documents, step)

    def _check_opened(self, host: Host, vmid: int, documents: list[Document], step: Step) -> None:
        document = next((d for d in documents if d["kind"] == "Container" and d["id"] == vmid), {})
        if document.get("gpus") is None:
            return
        owners = {
            _pci(gpu["pci"]): gpu["owner"]
            for d in documents
            if d["kind"] == "Host" and d["name"] == host.name
            for gpu in (d.get("nvidia") or {}).get("gpus", [])
        }
        for address in opened(host, vmid):
            what = f"{step.id}: CT {vmid} opens {address}"
            self.book.check("a container gets only cards for containers", owners.get(address) == "containers", what)

    def _check_files(self, before: _Truth, step: Step) -> None:
        for host in self.fleet.hosts.values():
            was = before.files[host.name]
            for path in was.keys() | host.files.keys():
                if was.get(path) is host.files.get(path):
                    continue
                ours = path.startswith(OURS) and (not path.startswith("/etc/modprobe.d/") or "reconcile" in path)
                known = ours or path not in was  # what an installer brings is its own affair
                self.book.check("no file of others is changed or removed", known, f"{step.id}: {path} of {host.name}")
        for cluster in self.fleet.clusters.values():
            for node in cluster.nodes:
                now, was = pve.tree(cluster, node).files, before.trees[cluster.name or id(cluster), node]
                for path in was.keys() - now.keys() | now.keys() - was.keys():
                    moved = step.action in ("move-container", "take-over-container")
                    self.book.check("configs are moved only by a move", moved, f"{step.id}: {path}")
                for path in (p for p in was.keys() & now.keys() if was[p] is not now[p]):
                    self._check_edit(path, was[path].text, now[path].text, step)

    def _check_edit(self, path: str, was: str, now: str, step: Step) -> None:
        own = re.fullmatch(r"nodes/[^/]+/lxc/(\d+)\.conf", path)
        self.book.check("no config but a container's is edited", own is not None, f"{step.id}: {path}")
        kept = [line for line in was.split("\n") if not PASSED.match(line)]
        still = [line for line in now.split("\n") if not PASSED.match(line)]
        self.book.check("an edit keeps every line that is not its business", kept == still, f"{step.id}: {path}")
        sections = was[was.index("\n[") :] if "\n[" in was else ""
        self.book.check("an edit keeps snapshots as they are", now.endswith(sections), f"{step.id}: {path}")

    def check_places(self) -> None:
        """No container runs twice, no guest has two configs, nothing that a person wrote is lost."""
        places: Counter[int] = Counter(vmid for host in self.fleet.hosts.values() for vmid in host.containers)
        twice = [vmid for vmid, times in places.items() if times > 1]
        self.book.check("no container runs on two nodes", not twice, twice)
        for cluster in self.fleet.clusters.values():
            for tree in cluster.trees:
                ids = Counter(path.rsplit("/", 1)[1] for path in tree.files if re.search(r"/(lxc|qemu-server)/", path))
                self.book.check("no guest has two configs", all(times == 1 for times in ids.values()), ids)
        configs = _configs(self.fleet)
        for guest, line in self.book.notes:
            kept = guest not in configs or configs[guest].text.split("\n").count(line) == 1
            self.book.check("what a person wrote is never overwritten", kept, f"{guest}: {line}")


class _Truth:
    """What is compared before and after a step. Files are never changed in place, so that it is enough to hold them."""

    def __init__(self, fleet: Fleet) -> None:
        hosts = fleet.hosts.values()
        self.drivers = {(h.name, a): (f.driver, f.override) for h in hosts for a, f in h.functions.items()}
        self.containers = {h.name: {vmid: c.pid for vmid, c in h.containers.items()} for h in hosts}
        self.machines = {h.name: {vmid: m.pid for vmid, m in h.machines.items()} for h in hosts}
        self.files = {h.name: dict(h.files) for h in hosts}
        self.claimed = {h.name: claimed(fleet, h) for h in hosts}
        self.trees = {
            (cluster.name or id(cluster), node): dict(pve.tree(cluster, node).files)
            for cluster in fleet.clusters.values()
            for node in cluster.nodes
        }


def _configs(fleet: Fleet) -> dict[str, File]:
    """Each container's config by its id, in the newest copy of its cluster's files."""
    found: dict[str, File] = {}
    for cluster in fleet.clusters.values():
        newest = max(cluster.trees, key=lambda tree: tree.version)
        for path, file in newest.files.items():
            if match := re.fullmatch(r"nodes/[^/]+/lxc/(\d+)\.conf", path):
                found[match[1]] = file
    return found


def claimed(fleet: Fleet, host: Host) -> set[str]:
    """The cards (function 0) that configs of this node's virtual machines name."""
    cluster = fleet.cluster_of(host)
    if cluster is None:
        return set()
    found: set[str] = set()
    for path, file in pve.tree(cluster, host.name).files.items():
        if path.startswith(f"nodes/{host.name}/qemu-server/"):
            for value in pve.read_config(file.text).numbered("hostpci"):
                named = value.split(",")[0].removeprefix("host=")
                found |= {f"{address.rpartition('.')[0]}.0" for address in pve.claimed(host, named)}
    return found


def opened(host: Host, vmid: int) -> set[str]:
    """The cards that a process in a running container can open."""
    return {
        address
        for address, function in host.functions.items()
        if function.gpu is not None
        and function.gpu.minor is not None
        and pve.opens(host, vmid, f"/dev/nvidia{function.gpu.minor}") == ""
    }


def _pci(short: str) -> str:
    return short if short.count(":") == 2 else f"0000:{short}"
