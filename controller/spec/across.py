"""What no single document can show: whether the objects of a fleet fit together."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from controller.spec.errors import Code, SpecError, written
from controller.spec.model import (
    Connection,
    Container,
    GpuOwner,
    Host,
    Kind,
    Lifecycle,
    ModelServer,
    Place,
    Platform,
    SecretRef,
    ServerState,
    Specs,
)
from controller.spec.ref import Ref
from controller.spec.values import Problem, gpu_model_key, nearest

Path = tuple[str | int, ...]


class Locate(Protocol):
    """Says where a field of an object stands; of the Fleet for None."""

    def __call__(self, ref: Ref | None, path: Path) -> Place:
        """Return the place of the field, or of the nearest thing above it."""


@dataclass(frozen=True)
class Known:
    """What is known from elsewhere."""

    clusters: Mapping[str, str]
    """The cluster of a Proxmox host, by the host's name."""
    check_server: Callable[[ModelServer, int | None], Iterable[Problem]]
    """What its engine has against a server with so many GPUs (None: nobody can say how many)."""


@dataclass(frozen=True)
class Unseen:
    """What failed files keep from being seen, so that nobody complains that it is missing."""

    objects: frozenset[Ref] | None = frozenset()
    """Objects that are named but not valid; None when there may be any."""
    fleet: bool = False
    """True when the Fleet could not be read."""


def check_together(specs: Specs, locate: Locate, known: Known, unseen: Unseen) -> Iterator[SpecError]:
    """Give everything that does not fit together."""
    checks = _Together(specs, locate, known, unseen)
    yield from checks.hosts()
    yield from checks.containers()
    yield from checks.gpus()
    yield from checks.servers()
    yield from checks.renames()


class _Together:
    def __init__(self, specs: Specs, locate: Locate, known: Known, unseen: Unseen) -> None:
        self._specs, self._locate, self._known, self._unseen = specs, locate, known, unseen

    def hosts(self) -> Iterator[SpecError]:
        names = self._specs.hosts
        for number, group in enumerate(self._specs.fleet.limits.never_together):
            for member, name in enumerate(group):
                path: Path = ("limits", "never_together", number, member)
                others = tuple(names[other].ref for other in group if other in names)
                yield from self._must_exist(None, path, Kind.HOST, name, concerns=others)
        seen: dict[tuple[str, int, str | None], Host] = {}
        for host in names.values():
            if host.lifecycle is Lifecycle.DECOMMISSIONED:
                continue  # its address may have gone to its successor
            local = host.ssh.connection is Connection.LOCAL
            way = ("", 0, None) if local else (host.address.casefold(), host.ssh.port, host.ssh.proxy_jump)
            if other := seen.setdefault(way, host):
                if other is host:
                    continue
                yield self._conflict(
                    host.ref,
                    ("ssh", "connection") if local else ("address",),
                    f"cannot reach {host.name} where {other.name} is: one machine is one host",
                    [other.ref],
                    ("address",),
                    todo="correct the address, or remove one of the two",
                )

    def containers(self) -> Iterator[SpecError]:
        by_id: dict[int, list[Container]] = defaultdict(list)
        for container in self._specs.containers.values():
            yield from self._must_exist(container.ref, ("host",), Kind.HOST, container.host)
            host = self._specs.hosts.get(container.host)
            if host and host.platform is not Platform.PROXMOX:
                yield self._conflict(
                    container.ref,
                    ("host",),
                    f"cannot have a container on {host.name}: its platform is {host.platform}",
                    [host.ref],
                    ("platform",),
                    allowed="a host of platform proxmox",
                    todo="name another host; a ModelServer can run on a plain Linux host with host:",
                )
            for other in by_id[container.id]:
                if self._one_cluster(container.host, other.host):
                    yield self._conflict(
                        container.ref,
                        ("id",),
                        f"cannot have the CT {container.id} twice in one cluster: {other.ref} has this id",
                        [other.ref],
                        ("id",),
                        todo="give each its own id; they may be the same only in clusters known to differ",
                    )
                    break
            by_id[container.id].append(container)

    def _one_cluster(self, one: str, other: str) -> bool:
        """Say whether two hosts may share a cluster; what is not known may be so."""
        clusters = self._known.clusters
        return one == other or clusters.get(one) is None or clusters.get(one) == clusters.get(other, clusters.get(one))

    # GPUs

    def gpus(self) -> Iterator[SpecError]:
        for host in self._specs.hosts.values():
            if host.lifecycle is Lifecycle.DECOMMISSIONED:
                continue  # nothing runs there any more
            wanting = [c for c in self._specs.containers.values() if c.host == host.name and c.gpus]
            errors = [error for c in wanting for error in self._devices_exist(host, c)]
            errors += self._devices_once(wanting)
            yield from errors or self._enough_gpus(host, wanting)

    def _devices_exist(self, host: Host, container: Container) -> Iterator[SpecError]:
        listed = {gpu.pci: gpu for gpu in host.gpus}
        ours = [gpu.pci for gpu in host.gpus if gpu.owner is GpuOwner.CONTAINERS]
        for number, address in enumerate(_devices(container)):
            if address.startswith("GPU-"):
                continue  # no spec says which card a UUID is
            gpu = listed.get(address)
            if gpu is None:
                yield self._conflict(
                    container.ref,
                    ("gpus", "devices", number),
                    f"cannot pass {address}: {host.name} lists no such GPU, so it is never touched",
                    [],
                    (),
                    allowed=", ".join(ours) or f"none: {host.name} lists no GPU with owner: containers",
                    nearest=nearest(address, ours),
                    todo=f"correct the address, or list the GPU under nvidia.gpus of {host.ref}",
                )
            elif gpu.owner is not GpuOwner.CONTAINERS:
                yield self._conflict(
                    container.ref,
                    ("gpus", "devices", number),
                    f"cannot pass {address} of {host.name} to a container: its owner is {gpu.owner}",
                    [host.ref],
                    ("nvidia", "gpus", host.gpus.index(gpu), "owner"),
                    allowed=", ".join(ours) or f"none: {host.name} lists no GPU with owner: containers",
                    todo=f"pass another one, or write owner: containers in {host.ref}",
                )

    def _devices_once(self, wanting: Sequence[Container]) -> Iterator[SpecError]:
        taken: dict[str, Container] = {}
        for container in wanting:
            for number, address in enumerate(_devices(container)):
                other = taken.setdefault(address, container)
                if other is container or (_shares(other) and _shares(container)):
                    continue
                both = "" if _shares(other) or _shares(container) else " {devices: […], shared: true} in"
                yield self._conflict(
                    container.ref,
                    ("gpus", "devices", number),
                    f"cannot pass {address} to two containers: {other.ref} has it",
                    [other.ref],
                    ("gpus",),
                    todo=f"pass another one, or write{both or ' shared: true in'} both",
                )

    def _enough_gpus(self, host: Host, wanting: Sequence[Container]) -> Iterator[SpecError]:
        """Compare what is asked for with what is listed, as far as a spec can tell.

        Each demand is for one model, for any, or for certain cards; memory and compute capability are for the cards
        themselves to show. So it can fit only if each model's demand does, and all of them together do.
        """
        models = {gpu.pci: gpu_model_key(gpu.model) for gpu in host.gpus if gpu.owner is GpuOwner.CONTAINERS}
        asked = {gpu_model_key(c.gpus.model): c.gpus.model for c in wanting if c.gpus and c.gpus.model}
        for model, name in asked.items():
            asking = [c for c in wanting if _needed([c], models, model)]
            needed, listed = _needed(asking, models, model), sum(m == model for m in models.values())
            if needed > listed:
                yield self._too_few(host, asking, needed, listed, f"{name} ")
                return
        if (needed := _needed(wanting, models, None)) > len(models):
            yield self._too_few(host, wanting, needed, len(models), "")

    def _too_few(self, host: Host, asking: Sequence[Container], needed: int, listed: int, name: str) -> SpecError:
        *others, last = asking
        says = f"cannot give {needed} {name}GPUs of {host.name} to containers: it lists {listed} with owner: containers"
        todo = f"ask for fewer, move one, list more under nvidia.gpus of {host.ref}, or write shared: true in each"
        return self._conflict(last.ref, ("gpus",), says, [c.ref for c in others], ("gpus",), todo=todo)

    # Servers

    def servers(self) -> Iterator[SpecError]:
        ports: dict[tuple[Ref, int], ModelServer] = {}
        for server in self._specs.servers.values():
            if server.name == "gpus" or server.name.endswith("-watch"):
                yield self._conflict(
                    server.ref,
                    ("name",),
                    f"cannot call a server {server.name}: a unit of ours has the name that its unit would have",
                    [],
                    (),
                    todo="choose another name",
                )
            yield from self._place_exists(server)
            yield from self._gpus_are_assigned(server)
            yield from self._secrets_exist(server)
            yield from self._engine_takes(server)
            if server.state is not ServerState.RUNNING:
                continue  # what is stopped may wait for its turn on the same port
            other = ports.setdefault((server.place, server.serve.port), server)
            if other is not server:
                yield self._conflict(
                    server.ref,
                    ("serve", "port"),
                    f"cannot listen on port {server.serve.port} of {server.place}: {other.ref} does",
                    [other.ref],
                    ("serve", "port"),
                    todo="give one of them another port, or state: stopped",
                )

    def _place_exists(self, server: ModelServer) -> Iterator[SpecError]:
        if server.container is not None:
            yield from self._must_exist(server.ref, ("container",), Kind.CONTAINER, server.container)
            return
        name = server.host or ""
        yield from self._must_exist(server.ref, ("host",), Kind.HOST, name)
        host = self._specs.hosts.get(name)
        if host and host.platform is not Platform.LINUX:
            yield self._conflict(
                server.ref,
                ("host",),
                f"cannot serve on {name} itself: its platform is {host.platform}",
                [],
                (),
                allowed="a host of platform linux, or container: NAME",
                todo="name the container that it runs in",
            )

    def _gpus_are_assigned(self, server: ModelServer) -> Iterator[SpecError]:
        assigned = gpus_at(self._specs, server)
        if assigned is None:
            return
        number, addresses = assigned
        if server.gpus != "all":
            for position, gpu in enumerate(server.gpus):
                path: Path = ("gpus", position)
                if isinstance(gpu, int) and gpu >= number:
                    says = f"cannot use the GPU {gpu}, counted from 0: {server.place} has {number}"
                    allowed = f"0 to {number - 1}" if number else "none"
                    yield self._conflict(server.ref, path, says, [], (), allowed=allowed)
                elif isinstance(gpu, str) and addresses and not gpu.startswith("GPU-") and gpu not in addresses:
                    says = f"cannot use {gpu}: it is not one of the GPUs of {server.place}"
                    guess = nearest(gpu, addresses)
                    yield self._conflict(server.ref, path, says, [], (), allowed=", ".join(addresses), nearest=guess)
            number = len(server.gpus)
        split, nodes = server.serve.tensor_parallel, server.serve.flags.get("nnodes", "1")
        # A model that is spread over several machines (--nnodes) has as many GPUs on each of them.
        if split != "auto" and split > number * (int(nodes) if isinstance(nodes, str) and nodes.isdecimal() else 1):
            yield self._conflict(
                server.ref,
                ("serve", "tensor_parallel"),
                f"cannot split over {split} GPUs: the server has {number}",
                [],
                (),
                allowed=f"auto, or up to {number}" if number else "auto",
                todo="write auto, or assign more GPUs",
            )

    def _secrets_exist(self, server: ModelServer) -> Iterator[SpecError]:
        if self._unseen.fleet:
            return
        used: list[tuple[Path, SecretRef | str | None]] = [
            (("model", "token", "secret"), server.model.token),
            (("serve", "api_key", "secret"), server.serve.api_key),
            *((("serve", "env", name, "secret"), value) for name, value in server.serve.env.items()),
        ]
        defined = self._specs.fleet.secrets
        for path, secret in used:
            if not isinstance(secret, SecretRef) or secret.secret in defined:
                continue
            guess = nearest(secret.secret, defined)
            yield SpecError(
                self._locate(server.ref, path),
                Code.NOT_FOUND,
                f"cannot find a secret called {secret.secret}",
                server.ref,
                written(path),
                allowed=_some(defined) or "none: Fleet.secrets defines no secret",
                nearest=guess,
                todo=f"write {guess}, or " * bool(guess)
                + f"add {secret.secret}: {{from_file: PATH}} (or from_env) under Fleet.secrets",
                concerns=(server.ref,),
            )

    def _engine_takes(self, server: ModelServer) -> Iterator[SpecError]:
        for problem in self._known.check_server(server, gpus_of(self._specs, server)):
            yield self._conflict(
                server.ref,
                problem.field,
                problem.says,
                [],
                (),
                allowed=problem.allowed,
                nearest=problem.nearest,
                todo=problem.todo,
            )

    # Names

    def renames(self) -> Iterator[SpecError]:
        before: dict[Ref, Ref] = {}
        for one in self._specs:
            if one.renamed_from is None:
                continue
            old, path = Ref(one.ref.kind, one.renamed_from), ("renamed_from",)
            if old in self._specs:
                says = f"cannot take over what {old} has: there still is an object of this name"
                todo = "remove one of the two, or the line renamed_from"
                yield self._conflict(one.ref, path, says, [old], ("name",), todo=todo)
            elif (other := before.setdefault(old, one.ref)) != one.ref:
                says = f"cannot take over what {old} had: {other} does"
                yield self._conflict(one.ref, path, says, [other], path, todo="remove one of the two lines")

    # Words

    def _must_exist(
        self, ref: Ref | None, path: Path, kind: Kind, name: str, concerns: tuple[Ref, ...] = ()
    ) -> Iterator[SpecError]:
        wanted = Ref(kind.value, name)
        if wanted in self._specs or self._unseen.objects is None or wanted in self._unseen.objects:
            return
        names = self._specs.hosts if kind is Kind.HOST else self._specs.containers
        guess = nearest(name, names)
        word = kind.value.lower()
        yield SpecError(
            self._locate(ref, path),
            Code.NOT_FOUND,
            f"cannot find a {word} called {name}",
            ref,
            written(path),
            allowed=_some(names) or f"none: no spec defines a {word}",
            nearest=guess,
            todo=f"write {guess}, or define {wanted}" if guess else f"define {wanted}, or correct the name",
            concerns=(ref,) if ref else concerns,
        )

    def _conflict(
        self,
        ref: Ref,
        path: Path,
        says: str,
        others: Sequence[Ref],
        other_path: Path,
        *,
        allowed: str = "",
        nearest: str = "",
        todo: str = "",
    ) -> SpecError:
        also = tuple(self._locate(other, other_path) for other in others)
        return SpecError(
            self._locate(ref, path),
            Code.CONFLICT,
            says,
            ref,
            written(path),
            allowed=allowed,
            nearest=nearest,
            todo=todo or (f"write {nearest}" if nearest else ""),
            also=also,
            concerns=(ref, *others),
        )


def _some(names: Collection[str]) -> str:
    """List names, the first ones if there are many."""
    listed = ", ".join(list(names)[:12])
    return listed if len(names) <= 12 else f"{listed}, … ({len(names)} in all)"


def _devices(container: Container) -> tuple[str, ...]:
    return (container.gpus.devices or ()) if container.gpus else ()


def _shares(container: Container) -> bool:
    return container.gpus is not None and container.gpus.shared


def _needed(wanting: Sequence[Container], models: Mapping[str, str], model: str | None) -> int:
    """Count the GPUs of a model (None: of any) that containers need at least.

    Those who share need together what one of them needs most.
    """
    exclusive, most, shared = 0, 0, set[str]()
    for container in wanting:
        gpus = container.gpus
        if gpus is None:
            continue
        these = {d for d in _devices(container) if model is None or models.get(d) == model}
        count = gpus.count or 0
        if model is not None and gpu_model_key(gpus.model or "") != model:
            count = 0
        if gpus.shared:
            most, shared = max(most, count), shared | these
        else:
            exclusive += count + len(these)
    return exclusive + max(most, len(shared))


def gpus_of(specs: Specs, server: ModelServer) -> int | None:
    """Return how many GPUs a server has, None when the specs do not say it."""
    if server.gpus != "all":
        return len(server.gpus)
    known = gpus_at(specs, server)
    return known[0] if known else None


def gpus_at(specs: Specs, server: ModelServer) -> tuple[int, tuple[str, ...]] | None:
    """Return how many GPUs the place of a server has, and their addresses if the spec says which they are.

    None when it does not say how many.
    """
    if server.container is not None:
        container = specs.containers.get(server.container)
        if container is None or container.gpus is None:
            return None
        devices = _devices(container)
        return container.gpus.number, () if any(d.startswith("GPU-") for d in devices) else devices
    host = specs.hosts.get(server.host or "")
    if host is None or host.nvidia is None:
        return None
    own = tuple(gpu.pci for gpu in host.gpus if gpu.owner is GpuOwner.HOST)
    return len(own), own
