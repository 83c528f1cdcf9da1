"""How servers behave in the simulated fleet: systemd's units in places, and engines that start, serve and fail.

From systemd.service(5) and systemd.syntax(7), and from what SGLang 0.5.x was seen to do: an option that it does not
know ends it with 2, what it cannot be with 1, a failure in a child makes it kill itself; it listens when all is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from controller.layers.shared.inside_physics import image_of, places, session_of
from controller.layers.shared.truth import End, Fleet, Host, Image, Model, Process, Said, Session, Start, Work

UNITS = "/etc/systemd/system"
_FOLDER = "/opt/reconcile/server"
SETTLED = 30  # seconds after an end, when systemd would have started the unit again
LOADING = 40.0  # seconds from an engine's start until it listens
_FAILS_AFTER = 5  # seconds from a start until an engine that cannot run has ended


# --- systemd ---------------------------------------------------------------------------------------------------------


def daemon_reload(fleet: Fleet, host: Host, vmid: int | None) -> None:
    """Read all units anew; what runs goes on as it was started."""
    image, session = image_of(fleet, host, vmid), session_of(host, vmid)
    session.loaded = {
        path.removeprefix(f"{UNITS}/"): file.text
        for path, file in image.files.items()
        if path.startswith(f"{UNITS}/") and path.endswith(".service") and path.count("/") == 4
    }
    fleet.touch(host)


def start(fleet: Fleet, host: Host, vmid: int | None, unit: str) -> str:
    """``systemctl start``: what systemd says when it cannot."""
    session = session_of(host, vmid)
    text = session.loaded.get(unit)
    if text is None:
        return f"Failed to start {unit}: Unit {unit} not found."
    if any(process.unit == unit for process in session.processes):
        return ""
    name = unit.removeprefix("reconcile-").removesuffix(".service")
    argv, digest = words(_setting(text, "ExecStart")), _setting(text, "ExecStartPre").rpartition(" ")[2]
    if digest:
        secrets = secret_digest(image_of(fleet, host, vmid), name) or "-"
        session.starts[name] = Start(digest, int(fleet.now), secrets)
    if unit in session.down:
        session.down.remove(unit)
    process = Process(
        fleet.draw(host, range(2000, 4_000_000)),
        fleet.now,
        list(argv),
        unit,
        port=int(_after(argv, "--port") or 0),
        ready=fleet.now + LOADING,
        gpus=_gpus(text),
        environment=argv[0].partition("/bin/")[0],
        model=next((part for part in argv if part in image_of(fleet, host, vmid).models), ""),
    )
    failure = _failure(fleet, host, vmid, process)
    if failure is not None:
        _ended_badly(fleet, host, vmid, unit, text, failure)
        return ""
    session.processes.append(process)
    _hold(host, vmid, process.gpus)
    fleet.touch(host)
    return ""


def stop(fleet: Fleet, host: Host, vmid: int | None, unit: str) -> None:
    """``systemctl stop``: all of the unit is gone afterwards."""
    session = session_of(host, vmid)
    gone = [process for process in session.processes if process.unit == unit]
    session.processes = [process for process in session.processes if process.unit != unit]
    if gone:
        _note_end(session, unit, End(int(fleet.now), "success", "exited", "0"))
        _let_go(host, vmid)
    fleet.touch(host)


def kill(fleet: Fleet, host: Host, vmid: int | None, unit: str) -> None:
    """A unit's process is killed by somebody: systemd starts it again."""
    session = session_of(host, vmid)
    session.processes = [process for process in session.processes if process.unit != unit]
    _note_end(session, unit, End(int(fleet.now), "signal", "killed", "KILL"))
    _let_go(host, vmid)
    start(fleet, host, vmid, unit)


def boot(fleet: Fleet, host: Host, vmid: int | None) -> None:
    """What is enabled starts with its place."""
    daemon_reload(fleet, host, vmid)
    for unit in image_of(fleet, host, vmid).enabled:
        start(fleet, host, vmid, unit)


def settle(fleet: Fleet, host: Host) -> None:
    """Let happen what time brings: engines that have loaded listen, units that ended stay down."""
    for vmid in places(host, host.containers):
        session = session_of(host, vmid)
        for process in session.processes:
            if process.ready is not None and process.ready <= fleet.now and not process.listens and process.port:
                process.listens = True
                fleet.touch(host)
        at_work = {process.unit for process in session.processes}
        for name in dict.fromkeys((*session.starts, *session.ends)):
            unit, ends = f"reconcile-{name}.service", session.ends.get(name)
            last = ends[-1].at if ends else session.starts[name].at
            if unit not in at_work and unit not in session.down and fleet.now > last + SETTLED:
                session.down.append(unit)
                fleet.touch(host)


def _note_end(session: Session, unit: str, end: End) -> None:
    if unit.startswith("reconcile-"):
        name = unit.removeprefix("reconcile-").removesuffix(".service")
        session.ends[name] = [*session.ends.get(name, []), end][-20:]


def _ended_badly(fleet: Fleet, host: Host, vmid: int | None, unit: str, text: str, end: End) -> None:
    """Let systemd try again until its limit, unless another start would end the same way.

    All of it happens at once: that is shorter than it takes in truth, and ends in the same state.
    """
    prevented = end.status in _setting(text, "RestartPreventExitStatus").split()
    for _ in range(1 if prevented else int(_setting(text, "StartLimitBurst") or 1)):
        _note_end(session_of(host, vmid), unit, end)
    fleet.touch(host)


def leave(fleet: Fleet, host: Host, work: Work) -> Said:
    """What ``leave-place.sh`` does in a place."""
    action, place, name, owner = work.args
    vmid = None if place == "-" else int(place)
    if vmid is not None and vmid not in host.containers:
        return Said(75, err=f"CT {vmid} does not run\n")
    image = image_of(fleet, host, vmid)
    marker = image.files.get(f"{_FOLDER}/{name}/marker.json")
    if marker is None or json.loads(marker.text)["object"] != owner:
        return Said(75, err=f"{name} is another's there\n")
    for unit in (f"reconcile-{name}-watch.service", f"reconcile-{name}.service"):
        if unit in image.enabled:
            image.enabled.remove(unit)
        stop(fleet, host, vmid, unit)
        if action == "remove":
            image.files.pop(f"/etc/systemd/system/{unit}", None)
    if action == "remove":
        for path in [path for path in image.files if path.startswith(f"{_FOLDER}/{name}/")]:
            del image.files[path]
        daemon_reload(fleet, host, vmid)
    fleet.touch(host)
    return Said(0)


# --- engines ---------------------------------------------------------------------------------------------------------


def _failure(fleet: Fleet, host: Host, vmid: int | None, process: Process) -> End | None:
    """How the process of a server ends by itself, None when it goes on."""
    image, at = image_of(fleet, host, vmid), int(fleet.now) + _FAILS_AFTER
    environment = image.environments.get(process.environment)
    if environment is None:
        return End(int(fleet.now), "exit-code", "exited", "203", [f"{process.argv[0]}: No such file or directory"])
    unknown = [
        part for part in process.argv if part.startswith("--") and part[2:].partition("=")[0] not in environment.flags
    ]
    if environment.flags and unknown:
        return End(at, "exit-code", "exited", "2", [f"error: unrecognized arguments: {' '.join(unknown)}"])
    if environment.fault:
        return End(at, "exit-code", "exited", "1", [environment.fault])
    cards = [f.gpu for f in host.functions.values() if f.gpu is not None and f.gpu.uuid in process.gpus]
    if len(cards) < len(process.gpus):
        return End(at, "exit-code", "exited", "1", ["RuntimeError: No CUDA GPUs are available"])
    if any(card.compute_capability not in environment.capabilities for card in cards):
        said = "CUDA error: no kernel image is available for execution on the device"
        return End(at, "signal", "killed", "KILL", [said])
    model = image.models.get(process.model)
    if model is None or not is_whole(model):
        said = "FileNotFoundError: Weight files referenced in index but missing"
        return End(at, "signal", "killed", "KILL", [said])
    if any(other.listens and other.port == process.port for other in session_of(host, vmid).processes):
        return End(at, "signal", "killed", "KILL", ["[Errno 98] error while attempting to bind on address"])
    return None


def is_whole(model: Model) -> bool:
    """Whether all files of a model are there in their full size; what is in them an engine does not look at."""
    return bool(model.files) and all(file.size == file.whole for file in model.files.values())


def secret_digest(image: Image, name: str) -> str:
    """The digest of a server's secret files that a look and a start make, "" without them."""
    if name in image.withheld:
        return image.withheld[name]
    here = f"/opt/reconcile/server/{name}"
    kept = [image.files[f"{here}/{file}"].text for file in _SECRET if f"{here}/{file}" in image.files]
    return hashlib.sha256("".join(kept).encode()).hexdigest() if kept else ""


_SECRET = ("salt", "secrets.env", "config.yaml")


def _hold(host: Host, vmid: int | None, uuids: list[str]) -> None:
    who = "host:python3" if vmid is None else f"ct:{vmid}"
    for function in host.functions.values():
        if function.gpu is not None and function.gpu.uuid in uuids and who not in function.gpu.used_by:
            function.gpu.used_by.append(who)


def _let_go(host: Host, vmid: int | None) -> None:
    """Cards that no process of the place names any more are closed."""
    who = "host:python3" if vmid is None else f"ct:{vmid}"
    named = {uuid for process in session_of(host, vmid).processes for uuid in process.gpus}
    for function in host.functions.values():
        if function.gpu is not None and function.gpu.uuid not in named and who in function.gpu.used_by:
            function.gpu.used_by.remove(who)


# --- units' texts, as systemd reads them -----------------------------------------------------------------------------


def words(line: str) -> tuple[str, ...]:
    """The words of a command line: quotes, C escapes, ``%%`` and ``$$``."""
    found: list[str] = []
    rest = iter(line)
    for c in rest:
        if c.isspace():
            continue
        found.append("".join(_quoted(rest) if c == '"' else _bare(c, rest)).replace("%%", "%").replace("$$", "$"))
    return tuple(found)


def _quoted(rest: Iterator[str]) -> Iterator[str]:
    for c in rest:
        if c == '"':
            return
        yield _escaped(rest) if c == "\\" else c


def _bare(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    for c in rest:
        if c.isspace():
            return
        yield c


def _escaped(rest: Iterator[str]) -> str:
    c = next(rest)
    if c == "x":
        return chr(int(next(rest) + next(rest), 16))
    return {"n": "\n", "t": "\t", "r": "\r"}.get(c, c)


def _setting(text: str, name: str) -> str:
    return next((line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{name}=")), "")


def _after(argv: tuple[str, ...], option: str) -> str:
    return next((argv[n + 1] for n, part in enumerate(argv[:-1]) if part == option), "")


def _gpus(text: str) -> list[str]:
    for line in text.splitlines():
        if line.startswith('Environment="CUDA_VISIBLE_DEVICES='):
            return [uuid for uuid in line.removesuffix('"').partition("CUDA_VISIBLE_DEVICES=")[2].split(",") if uuid]
    return []
