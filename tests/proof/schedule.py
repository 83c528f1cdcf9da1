"""Schedules: what happens to a fleet, event by event, and whether each promise holds all along and in the end.

A schedule is text, ``story-done/once odd.17 fault.233 drive.3``: where it starts and what drives it last, then events,
each with a seed of its own, so that any of them can be left out without changing what the others do.
"""

from __future__ import annotations

import copy
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.core.permissions import Grants
from controller.core.words import Block, Drift, InSync, Skipped, Step, Unseen
from controller.layers.order import ORDER
from controller.layers.shared import pve_physics as pve
from controller.layers.shared.truth import Fleet, Impossible
from controller.run.eyes import Eyes
from controller.run.once import Pass, Report
from controller.run.picture import WaitingFor
from controller.spec.load import SpecErrors, load
from controller.world.sim import SimWorld
from controller.world.sim.faults import ANSWERS, Fault, Killed, Moment, Name
from tests.proof.fleets import ALL, CT130, OLD_DIGEST, OLD_RUNFILE, SECRET, STARTS, Document, files_of, specs_of, start
from tests.proof.odd import make_odd
from tests.proof.witness import NIGHT, Book, WitnessWorld, claimed, opened
from tests.scenarios import story
from tests.sim.controllers import Told
from tests.sim.loops import Player

HOUR = 3600.0
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
STEPS = (Moment.BEFORE, Moment.DURING, Moment.AFTER)
ACTIONS = (
    *("", "install-headers", "keep-nouveau-off", "bind-gpu", "fetch-driver", "install-driver", "load-driver"),
    *("set-up-boot", "take-over-container", "move-container", "edit-config", "start", "stop", "restart"),
    *("install-userland", "make-nodes", "reboot-host"),
)
SECTIONS = (
    *("world", "host.access", "host.gpu-health", "host.kernel", "host.driver", "host.gpu-binding", "host.boot"),
    *("container.placement", "container.mounts", "container.devices", "container.power", "container.userland"),
)


@dataclass(frozen=True)
class Event:
    """One thing that happens; ``seed`` decides what exactly."""

    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}.{self.seed}"


@dataclass(frozen=True)
class Schedule:
    """A fleet to begin on, what brings it to rest in the end (``once`` or ``loop``), and events."""

    start: str
    last: str
    events: tuple[Event, ...]

    def __str__(self) -> str:
        return " ".join((f"{self.start}/{self.last}", *map(str, self.events)))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read what ``str`` gives."""
        first, *events = text.split()
        begin, last = first.split("/")
        return cls(begin, last, tuple(Event(kind, int(seed)) for kind, seed in (e.split(".") for e in events)))

    @classmethod
    def of(cls, seed: int) -> Schedule:
        """The schedule of a seed."""
        chance = random.Random(seed)
        kinds = chance.choices(tuple(KINDS), weights=[weight for _, weight in KINDS.values()], k=chance.randint(2, 9))
        events = [Event(kind, chance.randrange(100_000)) for kind in kinds]
        if not any(event.kind in ("drive", "loop") for event in events):
            events.append(Event("drive", chance.randrange(100_000)))
        return cls(chance.choice(STARTS), chance.choice(("once", "once", "loop")), tuple(events))


class LoopPlayer(Player):
    """The loop under watch."""

    def __init__(self, play: Play, state: Path, texts: dict[str, bytes], seed: int) -> None:
        self._play = play
        super().__init__(play.fleet, state, texts, "looper", seed)

    def enter(self) -> SimWorld:
        """Begin a life under watch, with the faults that are armed."""
        return self._play.enter("looper")


class Play:
    """A schedule as it is played."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.fleet, documents = start(schedule.start)
        self.documents = documents
        self.book = Book(copy.deepcopy(documents))
        self.aside = WitnessWorld(self.book, self.fleet, "nobody")  # to let time go by when no controller works
        self.off = {host.name for host in self.fleet.hosts.values() if not host.powered}
        self.broken: dict[str, bytes | None] = {}  # files that are not what the documents say: other text, or gone
        self.faults: tuple[Fault, ...] = ()
        self.meddling: list[tuple[bool, int]] = []
        self.blurred: list[tuple[str, str, int]] = []  # host, section, stale looks; for the world that comes next
        self._next_look = self._quiet_since = 0.0
        self._performed = -1
        self.loop: LoopPlayer | None = None
        self.folder: Path | None = None

    def run(self) -> Book:
        """Play it all, to the rest in the end. Violations are in the book."""
        try:
            for event in self.schedule.events:
                self.happen(event)
                if self.book.violations:
                    return self.book
            self.come_to_rest()
        except Impossible as impossible:
            self.book.wrong("the simulated fleet is one that can be", str(impossible))
        except Exception as error:
            self.book.wrong("nothing stumbles", f"{type(error).__name__}: {error}")
            self.book.log.append("".join(traceback.format_exception(error)[-6:]))
        finally:
            self.close()
        return self.book

    def happen(self, event: Event) -> None:
        """One event."""
        self.book.log.append(str(event))
        function, _ = KINDS[event.kind]
        function(self, random.Random(event.seed))
        self.aside.clock.wait(0.1)
        self.aside.check_places()

    def close(self) -> None:
        """Leave nothing behind."""
        if self.loop is not None:
            self.loop.kill()
            self.loop = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    # --- what drives ---

    def enter(self, name: str) -> WitnessWorld:
        """A controller's world, with what is armed."""
        world = WitnessWorld(self.book, self.fleet, name)
        world.inject(*self.faults)
        self.faults = ()
        for host, section, stale in self.blurred:
            world.blurred.setdefault(host, []).append(section)
            world.stale[host] += stale
        self.blurred = []
        world.meddling, self.meddling = self.meddling, []
        return world

    def texts(self) -> dict[str, bytes]:
        """The spec files as they lie there."""
        texts: dict[str, bytes] = dict(files_of(self.documents))
        for name, text in self.broken.items():
            if text is None:
                texts.pop(name, None)
            elif name in texts:
                texts[name] = text
        return texts

    def once(self, timeout: float, name: str = "one") -> Report | None:
        """A pass; None when the specs are broken, and nothing is begun, or when it was killed."""
        if self.broken:
            try:
                specs_of_texts(self.texts())
            except SpecErrors:
                self.book.checks["a pass on broken specs does nothing"] += 1
                return None
        specs = specs_of_texts(self.texts())
        world = self.enter(name)
        eyes = Eyes(world, ORDER, specs)
        try:
            eyes.look(specs.hosts)
            report = Pass(world, ORDER, specs, Grants(specs), world.clock, Told(), timeout).run(eyes)
        except Killed:
            self.book.log.append("  killed")
            return None
        finally:
            self.faults = world.armed
        for judged in report.upcoming.judged:
            verdict = judged.verdict
            defect = isinstance(verdict, Unseen) and verdict.reason == "defect"
            self.book.check("no check stumbles", not defect, verdict)
            self.book.check("no secret is shown", SECRET not in repr(verdict), f"{judged.layer} of {judged.object}")
        return report

    def looper(self, seed: int) -> LoopPlayer:
        """The loop, begun when there is none."""
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="proof-", dir=IN_MEMORY))
        if self.loop is None:
            self.loop = LoopPlayer(self, self.folder, self.texts(), seed)
        return self.loop

    def saved(self) -> None:
        """Spec files were saved: the book knows what people want, and the loop reads them."""
        self.book.documents = copy.deepcopy(self.documents)
        if self.loop is not None:
            self.loop.save(self.texts())

    # --- the end ---

    def heal(self) -> None:
        """All faults end; people are done."""
        self.faults, self.blurred, self.meddling, self.broken = (), [], [], {}
        self.book.unsure, self.book.suspended, self.book.jump = set(), set(), 0.0
        for document in self.documents:
            document.get("policy", {}).pop("windows", None)
        self.fleet.unreachable.clear()
        self.fleet.changed_keys.clear()
        for host in self.fleet.hosts.values():
            host.disk_full = host.smi_hangs = False
            host.smi_hung_since, host.start_failure = None, ""
            for function in host.functions.values():
                if function.gpu is not None:
                    function.gpu.lost = False
        for cluster in self.fleet.clusters.values():
            pve.part(self.fleet, cluster, [])
        for host in self.fleet.hosts.values():
            if not host.powered and host.name not in self.off and host.powers_on is None:
                pve.power_on(self.fleet, host)
            self.fleet.touch(host)
        self.aside.clock.wait(900)
        if self.loop is not None:
            for ref in list(self.loop.memory.suspensions(self.fleet.now)):
                self.loop.memory.resume(ref)
            self.loop.world._faults.clear()
            self.loop.world.blurred.clear()
            self.loop.world.meddling.clear()
            self.loop.world.stale.clear()
        self.saved()

    def come_to_rest(self) -> None:
        """Faults have ended: the fleet comes to what is wanted, or says why not, and then nothing more is done."""
        self.heal()
        self.book.log.append(f"healed; {self.schedule.last}")
        if self.schedule.last == "loop":
            looper = self.looper(1)
            looper.play(120)  # what its picture shows is from before the faults ended
            looper.play(3 * HOUR, until=lambda: self.is_resting(looper))
            self.close()
        reports: list[Report] = []
        for _ in range(8):
            report = self.once(2 * HOUR)
            if report is None or self.book.violations:
                break
            reports.append(report)
            # A look may itself put something right (nvidia-smi makes nodes), so that it takes two to tell
            if len(reports) > 1 and not _worked(reports[-1]) and not _worked(reports[-2]):
                break
        done = _worked(reports[-1]) if reports else ["the specs are not whole"]
        self.book.check("it comes to rest, and then nothing more is done", not done, done)
        if self.schedule.last == "loop" and reports:
            earlier = [each for report in reports for each in _worked(report)]
            self.book.check("what the loop calls rest is rest to a pass", not earlier, earlier)
        if reports:
            self._check_rest(reports[-1])

    def is_resting(self, looper: LoopPlayer) -> bool:
        """Whether the loop is done, as its picture tells; looked at every twenty seconds."""
        now = self.fleet.now
        if now < self._next_look:
            return False
        self._next_look = now + 20
        if len(looper.performed) != self._performed:
            self._performed, self._quiet_since = len(looper.performed), now
        picture = looper.loop.picture()
        if not picture.observed or not looper.loop.idle or not picture.conditions:
            return False
        if all(c.status == "True" for each in picture.conditions.values() for c in each if c.type == "Ready"):
            return True
        # What waits for a person for good is rest; what is tried again later is not
        waits = [p for p in picture.pending if p.waiting_for not in (WaitingFor.BLOCKED, WaitingFor.PERMISSION)]
        later = waits or any("tried" in p.message for p in picture.pending) or not picture.pending
        return not later and now > self._quiet_since + 300

    def _check_rest(self, report: Report) -> None:
        grants = Grants(specs_of_texts(self.texts()))
        for judged in report.upcoming.judged:
            verdict, what = judged.verdict, f"{judged.layer} of {judged.object}: {judged.verdict}"
            if isinstance(verdict, InSync | Skipped):
                continue
            if isinstance(verdict, Drift) and isinstance(verdict.remedy, Step):
                undone = judged.held == "" and grants.may(verdict.remedy) and verdict.remedy.id not in report.failed
                self.book.check("nothing that may be done is left undone", not undone, what)
            says = verdict.reason and verdict.message
            if isinstance(verdict, Drift) and isinstance(verdict.remedy, Block):
                says = says and verdict.remedy.needs
            self.book.check("what is not right says why", bool(says), what)
        if report.upcoming.in_sync:
            self.book.steps["(in sync in the end)"] += 1
            self._check_right()
        else:
            self.book.steps["(rests otherwise)"] += 1

    def _check_right(self) -> None:
        """What is called in sync is so in truth."""
        hosts = {d["name"]: d for d in self.documents if d["kind"] == "Host"}
        for document in (d for d in hosts.values() if d.get("lifecycle", "active") == "active" and d.get("nvidia")):
            host = self.fleet.hosts[document["name"]]
            driver = document["nvidia"].get("driver")
            if driver is not None:
                loaded = host.loaded.get("nvidia")
                right = loaded is not None and loaded.version == driver["version"]
                self.book.check("in sync is right: driver", right, f"{host.name}: {loaded}")
            for gpu in document["nvidia"]["gpus"]:
                function = host.functions[f"0000:{gpu['pci']}"]
                wanted = "vfio-pci" if gpu["owner"] == "vms" else "nvidia"
                idle = gpu["owner"] == "vms" and function.driver is None and function.override == "vfio-pci"
                right = function.driver == wanted or idle
                self.book.check("in sync is right: cards", right, f"{host.name} {gpu['pci']}: {function.driver}")
        taken: set[tuple[str, str]] = set()
        for document in (d for d in self.documents if d["kind"] == "Container"):
            if hosts[document["host"]].get("lifecycle", "active") != "active":
                continue
            host, vmid = self.fleet.hosts[document["host"]], document["id"]
            running = document.get("state", "running") == "running"
            self.book.check("in sync is right: power", (vmid in host.containers) == running, f"CT {vmid}")
            if not running or vmid not in host.containers or document.get("gpus") is None:
                continue
            gpus, got = document["gpus"], opened(host, vmid)
            count = len(gpus) if isinstance(gpus, list) else gpus["count"]
            self.book.check("in sync is right: a container opens its cards", len(got) == count, f"CT {vmid}: {got}")
            if isinstance(gpus, list):
                exact = got == {f"0000:{pci}" for pci in gpus}
                self.book.check("in sync is right: a container opens its cards", exact, f"CT {vmid}: {got}")
            twice = taken & {(host.name, address) for address in got}
            self.book.check("in sync is right: no card twice", not twice, twice)
            self.book.check("in sync is right: no card of a VM", not got & claimed(self.fleet, host), got)
            taken |= {(host.name, address) for address in got}


def _worked(report: Report) -> list[str]:
    """The steps of a pass that did something; one that fails each time, and says why, is no unrest."""
    done = [ended for ended in report.ended if ended.step.id not in report.failed]
    return [f"{e.step.action} {e.step.object} {e.result}: {e.message[:200]}" for e in done]


def specs_of_texts(texts: dict[str, bytes]) -> Any:
    """The specs in files; those of whole documents are kept. Raises SpecErrors."""
    key = tuple(sorted(texts.items()))
    if key not in _READ:
        if len(_READ) > 2000:
            _READ.clear()
        _READ[key] = load(texts)
    return _READ[key]


_READ: dict[tuple[tuple[str, bytes], ...], Any] = {}


# --- events ---


def odd(play: Play, chance: random.Random) -> None:
    """What half-done steps, people and other tools leave."""
    name, said = make_odd(chance, play.fleet)
    if name:
        play.book.faults[f"odd: {name}"] += 1
        play.book.log.append(f"  {said}")


def spec(play: Play, chance: random.Random) -> None:
    """Somebody edits a spec; what is refused as a whole is not saved."""
    documents = copy.deepcopy(play.documents)
    said = edit_documents(chance, documents)
    try:
        specs_of(documents)
    except SpecErrors as errors:
        play.book.log.append(f"  refused: {said}: {str(errors)[:80]}")
        return
    play.documents = documents
    play.book.faults["spec edited"] += 1
    play.book.log.append(f"  {said}")
    play.saved()


def edit_documents(chance: random.Random, documents: list[Document]) -> str:
    containers = [d for d in documents if d["kind"] == "Container"]
    hosts = [d for d in documents if d["kind"] == "Host"]
    cards = [d for d in hosts if d.get("nvidia", {}).get("gpus")]
    servers = [d for d in documents if d["kind"] == "ModelServer"]
    if servers and chance.random() < 0.3:
        server = chance.choice(servers)
        server["state"] = chance.choice(["running", "running", "stopped", "absent"])
        server["serve"]["port"] = chance.choice([30000, 30001])
        return f"{server['name']} {server['state']} at {server['serve']['port']}"
    what = chance.randrange(12)
    if what <= 5 and containers:
        document = chance.choice(containers)
        if what == 0:
            document["host"] = chance.choice(hosts)["name"]
        elif what == 1:
            cards_ = [["4f:00.0"], ["ce:00.0"], ["ce:00.0", "4f:00.0"], None, {"count": 1}, {"count": 2}, {"count": 3}]
            document["gpus"] = chance.choice(cards_)
            if document["gpus"] is None:
                del document["gpus"]
        elif what == 2:
            document["passthrough"] = chance.choice(["keep", "dev", "lxc"])
        elif what == 3:
            document["state"] = chance.choice(["running", "stopped"])
        elif what == 4:
            document["mounts"] = [{"target": "/shared", "when_missing": chance.choice(["drop", "block"])}]
        else:
            document["policy"] = {"mode": "enforce", "allow": sorted(chance.sample(ALL, chance.randrange(len(ALL))))}
            if chance.random() < 0.5:
                document["policy"]["windows"] = [NIGHT]
        return f"{document['name']}: {document}"
    if what == 6:
        document = chance.choice(hosts)
        document["lifecycle"] = chance.choice(["active", "active", "maintenance", "decommissioned"])
        return f"{document['name']} {document['lifecycle']}"
    if what == 7 and cards:
        document = chance.choice(cards)
        driver = document["nvidia"].get("driver")
        if driver is not None:
            old = chance.random() < 0.5
            driver["version"] = story.OLD if old else story.VERSION
            url, digest = _NEW[document["platform"]]
            driver["url"], driver["sha256"] = (OLD_RUNFILE, OLD_DIGEST) if old else (url, digest)
            driver["kernel_modules"] = chance.choice(["proprietary", "open", "auto"])
        return f"{document['name']} driver {driver}"
    if what == 8 and cards:
        gpu = chance.choice(chance.choice(cards)["nvidia"]["gpus"])
        gpu["owner"] = chance.choice(["containers", "vms"])
        return f"owner of {gpu}"
    if what == 9 and cards:
        gpus = chance.choice(cards)["nvidia"]["gpus"]
        return f"unlisted {gpus.pop(chance.randrange(len(gpus)))}" if len(gpus) > 1 else "nothing"
    if what == 10:
        if any(d.get("name") == "ct130" for d in documents):
            documents[:] = [d for d in documents if d.get("name") != "ct130"]
            return "ct130 forgotten"
        if any(d.get("name") == "kpro5" for d in documents):
            documents.append(copy.deepcopy(CT130))
        return "ct130 wanted"
    document = chance.choice(hosts)
    document["policy"] = {"mode": chance.choice(["report", "enforce"]), "allow": chance.choice([[], ["rebind-gpu"]])}
    if chance.random() < 0.3:
        document["policy"]["windows"] = [NIGHT]
    return f"{document['name']} {document['policy']}"


def spoil(play: Play, chance: random.Random) -> None:
    """A spec file is saved half-way, emptied, or gone; the next time it is whole again."""
    if play.broken:
        play.broken = {}
        play.book.unsure = set()
    else:
        texts = files_of(play.documents)
        names = list(texts) if chance.random() < 0.8 else ["*"]
        name = chance.choice(names)
        if name == "*":
            play.broken = dict.fromkeys(texts)
            play.book.unsure = {"*"}
            play.book.faults["all spec files gone"] += 1
        else:
            text = texts[name]
            broken = chance.choice(
                [text[: len(text) // 2], b"kind: Container\nname: [", b"\xff\xfe\x00", b"kind: Hots\n"]
            )
            play.broken = {name: broken}
            inside = {d.get("name", "") for d in play.documents if _file_of(d) == name}
            play.book.unsure = {"*"} if name == "hosts.yaml" else inside
            play.book.faults["spec file broken"] += 1
    play.book.log.append(f"  broken: {sorted(play.broken)}")
    play.saved()


def _file_of(document: Document) -> str:
    return "hosts.yaml" if document["kind"] in ("Fleet", "Host") else f"{document['name']}.yaml"


def fault(play: Play, chance: random.Random) -> None:
    """Something goes wrong at some moment of what comes."""
    made = _fault(play, chance)
    if made.name is not Name.APPEND or made.path:
        play.faults = (*play.faults, made)
        play.book.log.append(f"  armed: {made.name} {made.host} {made.moment} {made.action} skip {made.skip}")
        if play.loop is not None:
            play.loop.world.inject(made)
            play.faults = ()


def _fault(play: Play, chance: random.Random) -> Fault:
    name = chance.choice(
        [
            *(Name.CONNECTION_LOST, Name.REPLY_LOST, Name.KILLED, Name.KILLED, Name.REBOOT, Name.PARTITION),
            *(Name.APPEND, Name.APPEND, Name.DISK_FULL, Name.SMI_HANG, Name.OTHER_CONTROLLER, Name.START_FAILS),
            *(Name.UNREACHABLE, Name.POWER_OFF, Name.VM_START, Name.VM_STOP, Name.CT_START, Name.CT_STOP),
            *(Name.CARD_LOST, *ANSWERS),
        ]
    )
    hosts = list(play.fleet.hosts)
    host = chance.choice([*hosts, *(h for h in hosts if play.fleet.hosts[h].functions)])
    if name in ANSWERS:
        return Fault(name, host, skip=chance.randrange(6), times=chance.choice((1, 2)))
    if name is Name.PARTITION and play.fleet.hosts[host].cluster is None:
        name = Name.REBOOT
    sides = chance.choice([[[host]], [[h] for h in hosts], [hosts[: len(hosts) // 2], hosts[len(hosts) // 2 :]]])
    cards = [a for a, f in play.fleet.hosts[host].functions.items() if f.gpu is not None]
    if name is Name.CARD_LOST and not cards:
        name = Name.KILLED
    return Fault(
        name,
        host,
        chance.choice(STEPS),
        chance.choice(ACTIONS),
        chance.randrange(3),
        1,
        path=f"/etc/pve/nodes/{host}/lxc/129.conf" if name is Name.APPEND else "",
        text=f"#note {chance.randrange(100_000)}\n" if name is Name.APPEND else "",
        guest=chance.choice([201, 203, 210]) if name in (Name.VM_START, Name.VM_STOP) else 129,
        card=chance.choice(cards) if cards else "",
        sides=tuple(tuple(side) for side in sides),
        seconds=chance.choice((5, 50, 500)),
    )


def now(play: Play, chance: random.Random) -> None:
    """Something happens to the fleet at once: power, networks, people."""
    host = play.fleet.hosts[chance.choice(list(play.fleet.hosts))]
    happens = chance.choice(["reboot", "off", "on", "cut", "joined", "part", "whole", "note", "stop", "start", "vm"])
    play.book.faults[f"at once: {happens}"] += 1
    play.book.log.append(f"  {happens} {host.name}")
    fleet, cluster = play.fleet, play.fleet.cluster_of(host)
    if happens in ("reboot", "off") and host.powered:
        pve.power_off(fleet, host)
        if happens == "reboot":
            host.powers_on = fleet.now + 60
    elif happens == "on" and not host.powered and host.name not in play.off:
        pve.power_on(fleet, host)
    elif happens == "cut" and host.name not in fleet.unreachable:
        fleet.unreachable.append(host.name)
    elif happens == "joined":
        fleet.unreachable.clear()
    elif cluster is not None and happens in ("part", "whole"):
        pve.part(fleet, cluster, [[host.name]] if happens == "part" else [])
    elif host.powered and happens == "note":
        for vmid in pve.own_guests(fleet, host, "lxc"):
            path, line = f"/etc/pve/nodes/{host.name}/lxc/{vmid}.conf", f"#note {chance.randrange(100_000)}"
            file = pve.read(fleet, host, path)
            if file is not None and not pve.write(fleet, host, path, f"{line}\n{file.text}"):
                play.book.notes.append((str(vmid), line))
    elif host.powered and happens in ("stop", "start"):
        for vmid in pve.own_guests(fleet, host, "lxc"):
            (pve.pct_stop if happens == "stop" else pve.pct_start)(fleet, host, vmid)
    elif host.powered and happens == "vm":
        for vmid in pve.own_guests(fleet, host, "qemu-server"):
            if vmid in host.machines:
                pve.qm_stop(fleet, host, vmid)
            elif not any(f.gpu is not None and f.gpu.used_by for f in host.functions.values()):
                pve.qm_start(fleet, host, vmid)
    fleet.touch(host)


def blur(play: Play, chance: random.Random) -> None:
    """A section that cannot be read, and looks that are answered with what was true before."""
    host, section = chance.choice(list(play.fleet.hosts)), chance.choice(SECTIONS)
    play.blurred.append((host, section, chance.randrange(3)))
    if play.loop is not None:
        play.loop.world.blurred.setdefault(host, []).append(section)
        play.loop.world.stale[host] += chance.randrange(3)


def meddle(play: Play, chance: random.Random) -> None:
    """Somebody changes something just before a step, or just after it."""
    made = [(chance.random() < 0.5, chance.randrange(100_000)) for _ in range(chance.randint(1, 4))]
    (play.loop.world if play.loop is not None else play).meddling.extend(made)


def job(play: Play, chance: random.Random) -> None:
    """Jobs at work are killed, fail, or hang."""
    for host in play.fleet.hosts.values():
        for unit in host.jobs.values():
            if unit.runs:
                how = chance.choice(["killed", "failed", "hangs"])
                play.book.faults[f"job {how}"] += 1
                play.book.log.append(f"  {unit.work.step} of {host.name} {how}")
                if how == "hangs":
                    unit.ends = play.fleet.now + chance.choice([200.0, 3000.0])
                else:
                    unit.how, unit.rc = ("killed", None) if how == "killed" else ("exit", 1)
                    unit.ended = play.fleet.uptime(host)
                play.fleet.touch(host)


def wait(play: Play, chance: random.Random) -> None:
    """Time goes by."""
    play.aside.clock.wait(chance.choice([1, 30, 100, 1000, HOUR * 7, 86400 * 40]))


def clock(play: Play, chance: random.Random) -> None:
    """The controller's calendar jumps."""
    play.book.faults["clock jumped"] += 1
    play.book.jump += chance.choice([-HOUR * 30, -HOUR, -5, 5, HOUR, HOUR * 24 * 365])


def drive(play: Play, chance: random.Random) -> None:
    """A pass, by one of two controllers, that may not wait for long."""
    play.once(chance.choice([5, 60, 600]), chance.choice(["one", "other"]))


def loop(play: Play, chance: random.Random) -> None:
    """The loop, for a while; it may be ended by SIGKILL, and even lose its memory, before it begins."""
    if play.loop is not None and chance.random() < 0.3:
        play.book.faults["loop killed"] += 1
        play.loop.kill()
        play.faults, play.loop = play.loop.world.armed, None
        if chance.random() < 0.3 and play.folder is not None:
            play.book.faults["memory lost"] += 1
            shutil.rmtree(play.folder)
            play.folder = None
    play.looper(chance.randrange(1000)).play(chance.choice([30, 120, 400]))


_NEW = {
    document["platform"]: (document["nvidia"]["driver"]["url"], document["nvidia"]["driver"]["sha256"])
    for document in (d for name in ("story", "boxes") for d in start(name)[1])
    if document["kind"] == "Host" and document.get("nvidia")
}
KINDS: dict[str, tuple[Callable[[Play, random.Random], None], int]] = {
    "odd": (odd, 6),
    "spec": (spec, 4),
    "spoil": (spoil, 2),
    "fault": (fault, 7),
    "now": (now, 4),
    "blur": (blur, 2),
    "meddle": (meddle, 3),
    "job": (job, 1),
    "wait": (wait, 1),
    "clock": (clock, 1),
    "drive": (drive, 7),
    "loop": (loop, 4),
}
"""Every kind of event, and how often it comes."""


def smallest(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """The schedule with every event left out that its failure does not need."""
    changed = True
    while changed:
        changed = False
        for shorter in _shorter(schedule):
            if fails(shorter):
                schedule, changed = shorter, True
                break
    return schedule


def _shorter(schedule: Schedule) -> Iterator[Schedule]:
    for index in range(len(schedule.events)):
        yield Schedule(schedule.start, schedule.last, schedule.events[:index] + schedule.events[index + 1 :])


__all__ = ["KINDS", "Event", "Fleet", "Play", "Schedule", "smallest"]
