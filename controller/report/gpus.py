"""Who has which card of every host, and what is pending."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import click

from controller.core.next_steps import Next
from controller.core.view import View
from controller.core.words import Drift, NotKnown
from controller.facts.words import FleetFacts, Later
from controller.layers.devices.facts import GuestFacts
from controller.layers.gpu_health import problem_of
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.shared.assignment import Assigned, assign, memory_of, model_of
from controller.layers.shared.claims import claims
from controller.layers.shared.lxc_devices import passed
from controller.layers.shared.pve_conf import parse
from controller.report import model
from controller.report.text import table, wrapped
from controller.spec.model import Gpu, GpuOwner, Host, Platform, Specs
from controller.spec.ref import Ref

GIB = 1024**3
_DRIVERS = {GpuOwner.CONTAINERS: "nvidia", GpuOwner.HOST: "nvidia", GpuOwner.VMS: "vfio-pci"}


@dataclass
class _Users:
    """Who is to have each card of a host, and who has it, by address."""

    containers: Mapping[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    servers: Mapping[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    guests: Mapping[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def gpus_report(specs: Specs, facts: FleetFacts, upcoming: Next, hosts: Iterable[str]) -> model.GpusReport:
    """The cards of these hosts: those on the bus, and those that the spec lists and that are not there."""
    view = View(specs, facts)
    rows: list[model.GpuRow] = []
    unknown: list[model.UnknownRow] = []
    for name in hosts:
        try:
            rows += _of_host(view, specs.hosts[name], upcoming)
        except NotKnown as why:
            unknown.append(
                model.UnknownRow(object=f"Host/{name}", layer="host.gpu-health", reason=why.reason, message=why.message)
            )
    return model.GpusReport(gpus=rows, unknown=unknown)


def _of_host(view: View, host: Host, upcoming: Next) -> list[model.GpuRow]:
    gpus = view.fact(host.name, "host.gpu-health", GpuFacts)
    users = _users(view, host, gpus)
    listed = {gpu.pci: gpu for gpu in host.gpus}
    there = {function.pci for function in gpus.functions if function.is_gpu}
    return [_row(view, host, gpus, pci, listed.get(pci), users, upcoming) for pci in sorted({*there, *listed})]


def _users(view: View, host: Host, gpus: GpuFacts) -> _Users:
    users = _Users()
    places: dict[Ref, tuple[str, ...]] = {
        Ref("Host", host.name): tuple(gpu.pci for gpu in host.gpus if gpu.owner is GpuOwner.HOST)
    }
    if host.platform is Platform.PROXMOX:
        guests = view.fact(host.name, "container.devices", GuestFacts)
        for name, assignment in assign(view.specs, host, gpus, guests).items():
            if isinstance(assignment, Assigned):
                places[Ref("Container", name)] = assignment.pcis
                for pci in assignment.pcis:
                    users.containers[pci].append(name)
        _have(users, gpus, guests)
    for server in view.specs.servers.values():
        pcis = places.get(server.place, ())
        for place, pci in enumerate(pcis):
            if server.gpus == "all" or {place, pci, _uuid(gpus, pci)} & set(server.gpus):
                users.servers[pci].append(server.name)
    return users


def _have(users: _Users, gpus: GpuFacts, guests: GuestFacts) -> None:
    """Which guests have a card by their configs: virtual machines by its address, containers by its minor."""
    for function in gpus.functions:
        for claim in claims(guests):
            if function.is_gpu and claim.covers(function.pci):
                users.guests[function.pci].append(claim.by.partition(" (")[0])
    for guest in guests.here("lxc"):
        minors = passed(parse(guest.text).main).cards
        for card in gpus.gpus:
            if not isinstance(card.minor, Later) and card.minor in minors:
                users.guests[card.pci].append(f"CT {guest.id}")


def _row(
    view: View, host: Host, gpus: GpuFacts, pci: str, gpu: Gpu | None, users: _Users, upcoming: Next
) -> model.GpuRow:
    function, row = gpus.function(pci), gpus.row(pci)
    return model.GpuRow(
        host=host.name,
        pci=pci,
        model=model_of(gpus, pci) or (gpu.model if gpu is not None else ""),
        uuid=_uuid(gpus, pci),
        memory_used=row.memory_used if row is not None and row.memory_total else None,
        memory_total=(row.memory_total if row is not None else 0) or memory_of(gpus, pci),
        owner=gpu.owner if gpu is not None else "",
        driver=function.driver if function is not None else "",
        containers=users.containers.get(pci, []),
        servers=users.servers.get(pci, []),
        guests=list(dict.fromkeys(users.guests.get(pci, []))),
        pending=list(dict.fromkeys(_pending(view, host, gpus, pci, gpu, users, upcoming))),
    )


def _pending(
    view: View, host: Host, gpus: GpuFacts, pci: str, gpu: Gpu | None, users: _Users, upcoming: Next
) -> Iterator[str]:
    if gpu is None:
        return
    if (problem := problem_of(view, host, gpu)) is not None:
        yield f"{problem[0]}: {problem[1]}"
    function = gpus.function(pci)
    if function is not None and function.driver != _DRIVERS[gpu.owner]:
        yield f"to be bound to {_DRIVERS[gpu.owner]}"
    ids = {f"CT {container.id}": name for name, container in view.specs.containers.items()}
    to_have = users.containers.get(pci, [])
    for name in to_have:
        for layer in ("container.placement", "container.devices"):
            verdict = upcoming.verdict(Ref("Container", name), layer)
            if isinstance(verdict, Drift):
                yield f"{verdict.reason}: {verdict.message}"
    for guest in users.guests.get(pci, []):
        if gpu.owner is GpuOwner.CONTAINERS and ids.get(guest) not in to_have:
            yield f"{guest} has it, and is not to have it"


def _uuid(gpus: GpuFacts, pci: str) -> str:
    row, card = gpus.row(pci), gpus.gpu(pci)
    return (row.uuid if row is not None else "") or (card.uuid if card is not None else "")


def gpus_text(report: model.GpusReport) -> str:
    """A card a line: where it is, what it is, how full, and whose; below it what is pending."""
    rows = [
        (
            row.host,
            row.pci.removeprefix("0000:"),
            row.model.removeprefix("NVIDIA ").removeprefix("GeForce ") or "?",
            _memory(row),
            row.driver or "-",
            _whose(row),
        )
        for row in report.gpus
    ]
    lines = table(("HOST", "CARD", "MODEL", "MEMORY", "DRIVER", "USED BY"), rows).splitlines()
    told = [lines[0]]
    for row, line in zip(report.gpus, lines[1:], strict=True):
        told.append(line)
        told += [click.style(wrapped(each, "    ", "      "), fg="yellow") for each in row.pending]
    for unseen in report.unknown:
        told.append(f"{unseen.object}: {click.style(unseen.reason, fg='red')}")
        told.append(wrapped(unseen.message))
    return "\n".join(told)


def _memory(row: model.GpuRow) -> str:
    if row.memory_total is None:
        return "?"
    total = f"{row.memory_total / GIB:.0f} GiB"
    return total if row.memory_used is None else f"{row.memory_used / GIB:.0f} of {total}"


def _whose(row: model.GpuRow) -> str:
    if not row.owner:
        return f"{', '.join(row.guests) or 'not looked after'} (in no spec)"
    if row.owner == GpuOwner.VMS:
        return ", ".join(row.guests) or "free, for VMs"
    users = [*row.containers, *row.servers]
    return ", ".join(users) or ("the host" if row.owner == GpuOwner.HOST else "free")
