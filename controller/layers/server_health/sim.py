"""server.health in the simulated fleet: what watches see of the engines beside them, installing a watch, restarting."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from controller.core.words import Step
from controller.facts.words import Section
from controller.layers.shared import inside_physics, kernel_physics, server_physics
from controller.layers.shared.truth import File, Fleet, Host, Process, Said, Work

FOLDER = "/opt/reconcile/server"


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host. A watch has just looked, whenever it is asked for what it saw."""

    def wanted(vmid: int | None) -> Iterator[str]:
        image = inside_physics.image_of(fleet, host, vmid)
        names = {path.split("/")[4] for path in image.files if path.startswith(f"{FOLDER}/")}
        for name in sorted(names):
            if f"{FOLDER}/{name}/watch.marker" in image.files and (seen := _seen(host, vmid, name)) is not None:
                text = json.dumps(seen, indent=1, sort_keys=True) + "\n"
                image.files[f"{FOLDER}/{name}/health.json"] = File(text)
            yield f"{FOLDER}/{name}/health.json"
            yield f"{FOLDER}/{name}/watch.marker"

    return Section(0, inside_physics.answer(fleet, host, guests, lambda _: (), wanted))


def _seen(host: Host, vmid: int | None, name: str) -> Mapping[str, Any] | None:
    """What a watch writes; None for one that has ended, because its server was stopped on purpose."""
    session, unit = inside_physics.session_of(host, vmid), f"reconcile-{name}.service"
    process = next((each for each in session.processes if each.unit == unit), None)
    ends = [end for end in session.ends.get(name, ()) if end.result != "success"]
    if process is None and not ends:
        return None
    level, evidence = _level(process)
    started = kernel_physics.ticks(host, process.started) if process is not None else 0
    up = process is not None and process.listens
    return {
        "schema": 1,
        "level": level,
        "evidence": evidence,
        "process": f"{process.pid} {started}" if process is not None else "",
        "unit": "active" if process is not None else "failed",
        "starting": 0,  # it is not played how the figure grows while nothing else changes
        "took": server_physics.LOADING if up else None,
        "stuck": 600 if up and process is not None and process.hangs else 0,
        "running": int(process.hangs) if up and process is not None else None,
        "waiting": 0 if up else None,
        "ends": len(ends),
        "crashes": [
            {"how": f"{end.result}: {end.code} {end.status}", "lines": list(end.said)[-40:]} for end in ends[-3:]
        ],
    }


def _level(process: Process | None) -> tuple[str, str]:
    if process is None:
        return "no-answer", "it does not run"
    if not process.listens:
        return "no-answer", "nothing listens on its port"
    if process.hangs:
        return "generation-fails", "asked to say OK: no answer within 60 s"
    return "generates", ""


def takes(step: Step) -> float:
    """Seconds that a step takes."""
    return 3.0 if step.action == "install-watch" else 8.0


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What ``install-watch.sh`` and ``restart.sh`` do in a place."""
    place, name, *rest = work.args
    vmid = None if place == "-" else int(place)
    if vmid is not None and vmid not in host.containers:
        return Said(75, err=f"CT {vmid} does not run\n")
    if work.action != "install-watch":
        return _restart(fleet, host, vmid, name, rest[0])
    image = inside_physics.image_of(fleet, host, vmid)
    python, *sizes = rest
    here, unit = f"{FOLDER}/{name}", f"reconcile-{name}-watch.service"
    if python.removesuffix("/bin/python") not in image.environments or f"{here}/marker.json" not in image.files:
        return Said(75, err=f"{name} has no unit or no environment any more\n")
    given, position, parts = work.stdin.encode("utf-8", "surrogateescape"), 0, []
    for size in map(int, sizes):
        parts.append(given[position : position + size].decode("utf-8", "surrogateescape"))
        position += size
    # The program itself is not played: what it would find is in this module.
    paths = (f"{here}/checks.json", f"/etc/systemd/system/{unit}", f"{here}/watch.marker")
    image.files.update({path: File(part, 0o644, int(fleet.now)) for path, part in zip(paths, parts[1:], strict=True)})
    server_physics.daemon_reload(fleet, host, vmid)
    fleet.touch(host)
    return Said(0)


def _restart(fleet: Fleet, host: Host, vmid: int | None, name: str, seen: str) -> Said:
    session, unit = inside_physics.session_of(host, vmid), f"reconcile-{name}.service"
    process = next((each for each in session.processes if each.unit == unit), None)
    if process is None or f"{process.pid} {kernel_physics.ticks(host, process.started)}" != seen:
        return Said(75, err=f"{name} was started anew since\n")
    server_physics.stop(fleet, host, vmid, unit)
    session.ends.pop(name, None)
    failed = server_physics.start(fleet, host, vmid, unit)
    fleet.touch(host)
    return Said(1, err=f"{failed}\n") if failed else Said(0)
