"""Steps as units on a simulated host: what receiver.sh (controller/world/host) refuses and begins, world.sh tells."""

from __future__ import annotations

from collections.abc import Iterator

from controller.facts.words import Section
from controller.layers.shared.truth import Fleet, Host, Lease, Unit, Work
from controller.world.port import Order, Refused

LEASE = 60  # seconds
STALLED = 180  # seconds without progress


def refuse(fleet: Fleet, host: Host, order: Order, controller: str) -> Refused | None:
    """Why the order may not be begun, in the receiver's order of looking; None when it may."""
    now = int(fleet.uptime(host))
    if host.uid != 0:
        return Refused("rights", f"cannot write to /run/reconcile as uid {host.uid}")
    if host.disk_full:
        return Refused("unable", "cannot write to /var/lib/reconcile")
    if host.missing_tools:
        return Refused("unable", f"there is no {host.missing_tools[0]} on the host")
    lease = host.lease
    if lease is not None and lease.holder != controller and lease.expires > now:
        return Refused("lease", f"held by {lease.name} for {lease.expires - now} s more")
    if host.boot_id != order.boot_id:
        return Refused("stale", "the host has booted since it was looked at")
    if host.generation != order.generation:
        message = f"the host is at generation {host.generation}, and was at {order.generation} when it was looked at"
        return Refused("stale", message)
    unit = host.jobs.get(order.step.job) if order.step.job is not None else host.step
    if unit is not None and unit.runs:
        return Refused("busy", f"{unit.work.step} of {unit.work.object} is running")
    return None


def begin(fleet: Fleet, host: Host, order: Order, controller: str, name: str, seconds: float) -> Unit:
    """Lay the step down and start its unit; it ends after ``seconds``."""
    step = order.step
    host.generation += 1
    host.lease = Lease(controller, name, int(fleet.uptime(host)) + LEASE)
    stdin = step.stdin.decode("utf-8", "surrogateescape")
    work = Work(step.id, step.layer, step.action, str(step.object), list(step.args), stdin)
    unit = Unit(work, host.generation, host.boot_id, fleet.uptime(host), fleet.now + seconds, controller=controller)
    if step.job is None:
        host.step = unit
    else:
        host.jobs[step.job] = unit
    fleet.touch(host)
    return unit


def end(fleet: Fleet, host: Host, unit: Unit, rc: int, out: str, err: str) -> None:
    """Note how a unit ended; its controller's lease runs from the end of a short step."""
    unit.how, unit.rc, unit.output, unit.errors, unit.ended = "exit", rc, out, err, fleet.uptime(host)
    unit.work.stdin = ""
    if unit is host.step and host.lease is not None and host.lease.holder == unit.controller:
        host.lease.expires = int(fleet.uptime(host)) + LEASE
    fleet.touch(host)


def sign(fleet: Fleet, host: Host) -> tuple[object, ...]:
    """What in the answer changes by time alone: a lease that has run out, jobs that have stalled."""
    return (
        host.lease is not None and host.lease.expires > int(fleet.uptime(host)),
        tuple(name for name, unit in host.jobs.items() if _how(fleet, host, unit) == "stalled"),
    )


def answer(fleet: Fleet, host: Host) -> Section:
    """The section ``world``."""
    return Section(0, "".join(f"{line}\n" for line in _lines(fleet, host)))


def _lines(fleet: Fleet, host: Host) -> Iterator[str]:
    yield from ("schema 1", f"generation {host.generation}", f"boot {host.boot_id}")
    lease = host.lease
    if lease is not None and lease.expires > int(fleet.uptime(host)):
        yield f"lease {lease.holder} {lease.expires} {lease.name}"
    if host.step is not None:
        yield f"step {host.step.number} {_told(fleet, host, host.step)}"
    for name, unit in sorted(host.jobs.items()):
        yield f"job {name} {_told(fleet, host, unit)}"
        same_boot = unit.boot_id == host.boot_id
        if unit.reached is not None:
            yield f"progress {unit.reached} {unit.total} {f'{unit.progressed:.2f}' if same_boot else '-'}"
        log = (unit.output + unit.errors)[-4096:].rstrip("\n")
        if unit.rc != 0 and log:
            yield f"log {len(log.encode('utf-8', 'surrogateescape'))}"
            yield log
    yield "end"


def _told(fleet: Fleet, host: Host, unit: Unit) -> str:
    same_boot = unit.boot_id == host.boot_id
    began = f"{unit.began:.2f}" if same_boot else "-"
    ended = f"{unit.ended:.2f}" if same_boot and unit.ended is not None else "-"
    rc = str(unit.rc) if unit.rc is not None else "-"
    return f"{_how(fleet, host, unit)} {rc} {began} {ended} {unit.work.step} {unit.work.object}"


def _how(fleet: Fleet, host: Host, unit: Unit) -> str:
    if unit.runs and unit.reached is not None and fleet.uptime(host) - unit.progressed >= STALLED:
        return "stalled"
    return unit.how
