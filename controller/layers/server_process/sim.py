"""server.process in the simulated fleet: what runs in places and who listens, and starting and stopping units."""

from __future__ import annotations

from collections.abc import Iterator

from controller.core.words import Step
from controller.facts.words import Section
from controller.layers.shared import inside_physics, kernel_physics, server_physics
from controller.layers.shared.truth import Fleet, Host, Process, Said, Session, Work


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""

    def lines(vmid: int | None) -> Iterator[str]:
        session = inside_physics.session_of(host, vmid)
        yield f"shm {inside_physics.image_of(fleet, host, vmid).shm}"
        for name in _names(session):
            yield from _server(host, session, name)
        for process in session.processes:
            if process.listens:
                yield f"listen {process.port} {process.pid} {process.unit} {process.command}"

    return Section(0, inside_physics.answer(fleet, host, guests, lines, lambda _: ()))


def _names(session: Session) -> list[str]:
    """In the order of the shell's three patterns."""
    units = sorted({process.unit for process in session.processes if process.unit.startswith("reconcile-")})
    at_work = [unit.removeprefix("reconcile-").removesuffix(".service") for unit in units]
    return list(dict.fromkeys([*at_work, *sorted(session.starts), *sorted(session.ends)]))


def _server(host: Host, session: Session, name: str) -> Iterator[str]:
    yield f"server {name}"
    start = session.starts.get(name)
    if start is not None:
        yield f"started {name} {start.digest} {start.at} {start.secrets}"
    for end in session.ends.get(name, ()):
        yield f"end {name} {end.at} {end.result} {end.code} {end.status}"
    process = next((each for each in session.processes if each.unit == f"reconcile-{name}.service"), None)
    if process is None:
        if f"reconcile-{name}.service" in session.down:
            yield f"down {name}"
        return
    yield f"main {name} {process.pid} {kernel_physics.ticks(host, process.started)} 0"
    yield f"argv {name} {_line(process)}"
    if process.gpus:
        yield f"gpus {name} {','.join(process.gpus)}"


def _line(process: Process) -> str:
    return "".join(argument.replace("\n", "\x02") + "\x01" for argument in process.argv)


def takes(step: Step) -> float:
    """Seconds that a step takes: an engine drains before it stops."""
    return 8.0 if step.args[0] in ("stop", "restart", "adopt") else 1.0


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What ``control.sh`` and ``leave-place.sh`` do in a place."""
    if work.action in ("stop-server-there", "remove-server"):
        return server_physics.leave(fleet, host, work)
    action, place, name, seen, digest, port, other = work.args
    vmid = None if place == "-" else int(place)
    if vmid is not None and vmid not in host.containers:
        return Said(75, err=f"CT {vmid} does not run\n")
    image, session, unit = (
        inside_physics.image_of(fleet, host, vmid),
        inside_physics.session_of(host, vmid),
        f"reconcile-{name}.service",
    )
    if action == "adopt":
        if other in image.enabled:
            image.enabled.remove(other)
        server_physics.stop(fleet, host, vmid, other)
        return Said(0)
    main = next((each for each in session.processes if each.unit == unit), None)
    now = f"{main.pid}:{kernel_physics.ticks(host, main.started)}" if main is not None else "-"
    if now != seen:
        return Said(75, err=f"the process of {name} has ended or was started anew since\n")
    marker = image.files.get(f"/opt/reconcile/server/{name}/marker.json")
    if action != "stop" and (marker is None or f'"{digest}"' not in marker.text):
        return Said(75, err=f"the unit of {name} has been written again\n")
    if action in ("stop", "restart"):
        server_physics.stop(fleet, host, vmid, unit)
    if action == "stop" and unit in image.enabled:
        image.enabled.remove(unit)
    if action != "stop" and unit not in image.enabled:
        image.enabled.append(unit)
    fleet.touch(host)
    if action in ("stop", "enable"):
        return Said(0)
    if any(each.listens and str(each.port) == port for each in session.processes):
        return Said(75, err=f"somebody else listens on port {port} by now\n")
    session.ends.pop(name, None)
    failed = server_physics.start(fleet, host, vmid, unit)
    return Said(1, err=f"{failed}\n") if failed else Said(0)
