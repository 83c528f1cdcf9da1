"""What serves in places, as the facts of the server layers tell of it: the part of a snapshot that is about servers.

Secrets are never in it: where a server has some, their digest stands for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar

from controller.engines import registry
from controller.facts.words import HostFacts, Known
from controller.layers.server_environment import facts as environment
from controller.layers.server_health.facts import HealthFacts
from controller.layers.server_output.facts import Judged, OutputFacts
from controller.layers.server_placement.facts import Found, FoundFacts
from controller.layers.server_process.facts import ProcessesHere, ProcessFacts, ServerProcess
from controller.layers.server_unit import facts as unit
from controller.layers.server_weights import facts as weights
from controller.layers.shared import inside, inside_physics, truth

T = TypeVar("T")


def add(fleet: truth.Fleet, host: truth.Host, seen: HostFacts) -> None:
    """Put into every place of a host what was seen there."""
    for vmid in inside_physics.places(host, host.containers):
        image = inside_physics.image_of(fleet, host, vmid)
        _placement(image, _here(seen, "server.placement", FoundFacts, vmid) or ())
        units = _here(seen, "server.unit", unit.ServerUnits, vmid) or unit.UnitsHere()
        for one in units.units:
            _unit(image, one)
        _environments(image, _here(seen, "server.environment", environment.Environments, vmid))
        _weights(image, _here(seen, "server.weights", weights.AllWeights, vmid))
        _judged(image, _here(seen, "server.output", OutputFacts, vmid) or ())
        for health in _here(seen, "server.health", HealthFacts, vmid) or ():
            if health.watch:
                _write(image, f"{unit.folder(health.server)}/watch.marker", {"digest": health.watch})
        processes = _here(seen, "server.process", ProcessFacts, vmid)
        if processes is not None:
            _session(host, inside_physics.session_of(host, vmid), processes, units)
            image.shm = processes.shm if processes.shm is not None else image.shm


def _here(seen: HostFacts, section: str, kind: type[inside.Inside[T]], vmid: int | None) -> T | None:
    known = seen.section(section)
    return known.value.of(vmid) if isinstance(known, Known) and isinstance(known.value, kind) else None


def _write(image: truth.Image, path: str, content: Mapping[str, object] | str) -> None:
    text = content if isinstance(content, str) else f"{json.dumps(content)}\n"
    image.files[path] = truth.File(text)


def _placement(image: truth.Image, found: tuple[Found, ...]) -> None:
    image.enabled = [f"reconcile-{each.name}.service" for each in found if each.enabled]


def _unit(image: truth.Image, one: unit.ServerUnit) -> None:
    here = unit.folder(one.name)
    if one.text is not None:
        image.files[unit.unit_path(one.name)] = truth.File(one.text.text, mtime=one.text.mtime)
    if one.marker is not None:
        names = ("object", "digest", "unit", "asked", "environment", "schema", "instead_of")
        fields = {name: getattr(one.marker, name) for name in names}
        _write(image, f"{here}/marker.json", {name: value for name, value in fields.items() if value != ""})
    if one.arguments is not None:
        _write(image, f"{here}/args.json", unit.as_plain(one.arguments))
    if one.note:
        _write(image, f"{here}/note.sh", "# of a snapshot\n")
    if one.salt:
        _write(image, f"{here}/salt", f"{one.salt}\n")
    if one.secret_digest:
        image.withheld[one.name] = one.secret_digest
    for name in one.dropins:
        _write(image, f"/etc/systemd/system/reconcile-{one.name}.service.d/{name}", "[Service]\n")


def _environments(image: truth.Image, here: environment.EnvironmentsHere | None) -> None:
    for each in here.environments if here is not None else ():
        _write(image, f"{each.directory}.json", environment.as_plain(each))
        engine = registry.engines().get(each.engine)
        flags = each.flags or (engine.shipped_flags(each.version) if engine is not None else None)
        image.environments[each.directory] = truth.Environment(
            each.engine,
            each.version,
            each.python,
            each.arch,
            list(each.capabilities),
            list(flags.names) if flags is not None else [],
            each.size,
        )
    for toolkit in here.toolkits if here is not None else ():
        _write(image, f"{toolkit.path}/version.json", {"cuda": {"version": toolkit.version}})


def _weights(image: truth.Image, here: weights.WeightsHere | None) -> None:
    for each in here.weights if here is not None else ():
        _write(image, f"{weights.FOLDER}/{each.key}.json", weights.as_plain(each))
        told = {file.path: file for file in each.files}
        files = {
            path: truth.WeightFile(
                found.size,
                told[path].size if path in told else found.size,
                sound=path not in told or not told[path].damaged,
                mtime=found.mtime // 10**9,
            )
            for path, found in each.found or ()
        }
        image.models[each.directory] = truth.Model(each.repo, each.revision, files)
    if here is not None and here.disks:
        image.free = max(disk.free for disk in here.disks)


def _judged(image: truth.Image, servers: tuple[Judged, ...]) -> None:
    for each in servers:
        good, failed = each.good, each.failed
        if good is None and not failed:
            continue
        state = {
            "schema": 1,
            "good": {"unit": good.unit, "environment": good.environment} if good is not None else None,
            "failed": [
                {
                    "unit": one.unit,
                    "environment": one.environment,
                    "spec": one.spec,
                    "reasons": list(one.reasons),
                    "evidence": one.evidence,
                }
                for one in failed
            ],
        }
        _write(image, f"{unit.folder(each.server)}/state.json", state)


def _session(host: truth.Host, session: truth.Session, here: ProcessesHere, units: unit.UnitsHere) -> None:
    listens = {listener.unit: listener for listener in here.listeners if listener.pid}
    for server in here.servers:
        name = f"reconcile-{server.name}.service"
        if server.digest:
            session.starts[server.name] = truth.Start(server.digest, server.since, server.secrets or "-")
        if server.ends:
            session.ends[server.name] = [truth.End(end.at, end.result, end.code, end.status) for end in server.ends]
        if server.down:
            session.down.append(name)
        if server.main is not None:
            session.processes.append(_process(host, server, units.of(server.name), listens.get(name)))
    ours = {process.unit for process in session.processes}
    session.processes += [
        truth.Process(each.pid, host.booted, unit=each.unit, command=each.command, port=each.port, listens=True)
        for each in here.listeners
        if each.unit not in ours and each.pid
    ]


def _process(
    host: truth.Host, server: ServerProcess, one: unit.ServerUnit | None, listener: object | None
) -> truth.Process:
    main = server.main
    if main is None:
        raise AssertionError(f"{server.name} has no process")
    arguments = one.arguments if one is not None else None
    return truth.Process(
        main.pid,
        host.booted + int(str(main.started)) / 100,
        list(main.argv),
        f"reconcile-{server.name}.service",
        port=arguments.port if arguments is not None else 0,
        listens=listener is not None,
        gpus=list(main.gpus or ()),
        environment=arguments.env_dir if arguments is not None else "",
        model=arguments.model_dir if arguments is not None else "",
    )
