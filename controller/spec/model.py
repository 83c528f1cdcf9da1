"""The objects of a spec: ``Fleet``, ``Host``, ``Container`` and ``ModelServer``, and ``Specs``, all of them together.

Field names are those of the spec files. All values are frozen and typed: an object that exists has passed every
check that it can pass alone. What several objects have to agree on is checked where they are loaded.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from controller.spec.base import Model
from controller.spec.policy import Mode, Permission, Policy, Strategy, Window
from controller.spec.ref import Ref
from controller.spec.values import (
    AbsolutePath,
    Address,
    Amount,
    AtLeastOne,
    Bool,
    Capability,
    ComputeCapability,
    ContainerId,
    DownloadUrl,
    DriverVersion,
    Duration,
    EngineName,
    EnvName,
    Fingerprint,
    FlagName,
    FlagValue,
    GpuCount,
    GpuId,
    IndexUrl,
    MemoryAtLeast,
    Name,
    PackageVersion,
    PciAddress,
    Port,
    Problem,
    PythonVersion,
    Repo,
    RequirementLine,
    Revision,
    ServerGpus,
    Service,
    Sha256,
    Str,
    TensorParallel,
    User,
    gpu_model_key,
    is_commit,
    wrong,
)

__all__ = [
    "Capability",
    "Checks",
    "Connection",
    "Container",
    "Draft",
    "Driver",
    "DriverSource",
    "Engine",
    "Fleet",
    "Gpu",
    "GpuOwner",
    "GpuSelector",
    "Host",
    "KernelModules",
    "Kind",
    "Lifecycle",
    "Limits",
    "Mode",
    "ModelServer",
    "Mount",
    "Nvidia",
    "OutputCheck",
    "Passthrough",
    "Permission",
    "Place",
    "Platform",
    "Policy",
    "Prerelease",
    "Range",
    "Ref",
    "SecretRef",
    "SecretSource",
    "Serve",
    "ServerState",
    "Specs",
    "Ssh",
    "State",
    "Strategy",
    "Weights",
    "WhenMissing",
    "Window",
    "gpu_model_key",
]


class Kind(StrEnum):
    """The kinds of objects that have names."""

    HOST = "Host"
    CONTAINER = "Container"
    MODEL_SERVER = "ModelServer"


# Secrets


class SecretRef(Model):
    """A secret by its name under ``Fleet.secrets``; the secret itself is never in a spec."""

    secret: Name
    """The name under Fleet.secrets."""

    @model_validator(mode="before")
    @classmethod
    def _no_literal(cls, data: Any) -> Any:
        if isinstance(data, str):
            raise wrong(
                Problem(
                    "cannot take a secret itself here",
                    allowed="{secret: NAME}",
                    todo="name where it comes from under Fleet.secrets, and write {secret: NAME} here",
                )
            )
        return data


EnvValue = Annotated[
    Annotated[Str, Tag("<text>")] | Annotated[SecretRef, Tag("<secret>")],
    Discriminator(lambda value: "<secret>" if isinstance(value, Mapping | SecretRef) else "<text>"),
]


class SecretSource(Model):
    """Where the controller reads a secret: a file or a variable of its environment, on its own machine."""

    from_file: AbsolutePath | None = None
    """A file on the controller's machine; its content without the last newline is the secret."""
    from_env: EnvName | None = None
    """An environment variable of the controller."""

    @classmethod
    def together(cls, given: frozenset[str]) -> list[Problem]:
        """One of the two."""
        if len(given & {"from_file", "from_env"}) == 1:
            return []
        return [Problem("cannot tell where to read this secret", allowed="one of from_file and from_env")]


# Fleet


class Limits(Model):
    """How much may be disrupted at once."""

    disruptive_at_once: AtLeastOne = 1
    """How many steps that disrupt may run at once, over the whole fleet."""
    never_together: tuple[tuple[Name, ...], ...] = ()
    """Groups of hosts; no two of a group are disrupted at once."""

    @model_validator(mode="after")
    def _groups_of_two_or_more(self) -> Self:
        if lonely := [
            Problem("cannot keep one host apart from nothing", allowed="two hosts or more", field=("never_together", n))
            for n, group in enumerate(self.never_together)
            if len(set(group)) < 2
        ]:
            raise wrong(*lonely)
        return self


class Fleet(Model):
    """What holds for the whole fleet. There is at most one."""

    kind: Literal["Fleet"] = "Fleet"
    defaults: Mapping[Kind, Mapping[str, Any]] = Field(default_factory=dict)
    """Per kind, fields for every object that does not give them itself; maps merge, lists replace."""
    policy: Policy = Policy()
    """The policy of every object that does not give its own, field by field."""
    limits: Limits = Limits()
    """How much may be disrupted at once."""
    secrets: Mapping[Name, SecretSource] = Field(default_factory=dict)
    """Where secrets are read, by name, on the controller's machine."""


class _Object(Model):
    """What every object with a name has."""

    KIND: ClassVar[Kind]

    name: Name
    """The name of the object; unique among its kind."""
    renamed_from: Name | None = None
    """The name it had before; what the object of that name has is kept."""
    policy: Policy = Policy()
    """What may be done to it without asking again."""

    @property
    def ref(self) -> Ref:
        """Return its kind and name."""
        return Ref(self.KIND.value, self.name)

    @model_validator(mode="after")
    def _another_name_before(self) -> Self:
        if self.renamed_from == self.name:
            raise wrong(Problem("cannot rename an object from its own name", field=("renamed_from",)))
        return self


# Host


class Platform(StrEnum):
    """What a host runs."""

    PROXMOX = "proxmox"
    """A Proxmox VE node, with containers."""
    LINUX = "linux"
    """A plain Linux machine."""


class Lifecycle(StrEnum):
    """Where a host is in its life."""

    ACTIVE = "active"
    """It works."""
    MAINTENANCE = "maintenance"
    """No new work goes there and nothing on it is touched."""
    DECOMMISSIONED = "decommissioned"
    """It is drained; that it is gone is as wanted."""


class Connection(StrEnum):
    """How a host is reached."""

    SSH = "ssh"
    """Over SSH."""
    LOCAL = "local"
    """It is the machine the controller runs on."""


class Ssh(Model):
    """How the controller logs in."""

    connection: Connection = Connection.SSH
    """local: this host is the machine the controller runs on."""
    user: User = "root"
    """The user to log in as."""
    port: Port = 22
    """The TCP port of its SSH server."""
    identity_file: Str | None = None
    """A private key on the controller's machine, beside what the agent offers; ~ is the home directory."""
    host_key: Fingerprint | None = None
    """The fingerprint that the host's key must have: SHA256:…; without it, the key pinned by reconcile trust."""
    proxy_jump: Str | None = None
    """The host to go through, as OpenSSH writes it: [user@]host[:port]."""
    sudo: Bool = False
    """Whether a user other than root becomes root with sudo."""


class KernelModules(StrEnum):
    """The two flavours of NVIDIA's kernel modules."""

    OPEN = "open"
    PROPRIETARY = "proprietary"
    AUTO = "auto"
    """Which of the two, by the generation of the GPUs."""


class DriverSource(StrEnum):
    """Where the driver comes from."""

    RUNFILE = "runfile"
    """NVIDIA's self-extracting installer."""
    APT = "apt"
    """The packages of the host's distribution or of NVIDIA's repository."""
    PREINSTALLED = "preinstalled"
    """Somebody else installs it; it is only checked."""


class Driver(Model):
    """The NVIDIA driver that a host has to have."""

    version: DriverVersion
    """As nvidia-smi shows it: 580.126.09."""
    kernel_modules: KernelModules = KernelModules.AUTO
    """The flavour of the kernel modules."""
    source: DriverSource
    """Where it comes from."""
    url: DownloadUrl | None = None
    """Of a runfile: where it lies, a URL or a path on the host; without it, NVIDIA's own place."""
    sha256: Sha256 | None = None
    """Of a runfile: the digest that it must have."""

    @model_validator(mode="after")
    def _only_a_runfile_is_fetched(self) -> Self:
        if self.source is not DriverSource.RUNFILE and (
            given := [
                Problem(
                    f"cannot use {name} with source: {self.source}",
                    allowed="url and sha256 belong to source: runfile",
                    todo="remove it, or write source: runfile",
                    field=(name,),
                )
                for name in ("url", "sha256")
                if getattr(self, name) is not None
            ]
        ):
            raise wrong(*given)
        return self


class GpuOwner(StrEnum):
    """Who uses a GPU, which says the driver it has to be on."""

    CONTAINERS = "containers"
    """Containers of a Proxmox host: the driver is nvidia."""
    VMS = "vms"
    """Virtual machines: the driver is vfio-pci."""
    HOST = "host"
    """The processes of a plain Linux host itself: the driver is nvidia."""


class Gpu(Model):
    """A GPU of a host. One that is not listed is never touched."""

    pci: PciAddress
    """Its PCI address."""
    model: Str
    """The model it has to be, as nvidia-smi names it; "NVIDIA" and "GeForce" may be left out."""
    owner: GpuOwner
    """Who uses it. A plain Linux host's GPUs are its own when this is left out."""


class Nvidia(Model):
    """The NVIDIA side of a host."""

    driver: Driver | None = None
    """The driver it has to have; without it the driver is observed only."""
    holders: tuple[Service, ...] = ()
    """Services that use the GPUs and may be stopped and started again for the driver's sake."""
    gpus: tuple[Gpu, ...] = ()
    """Its GPUs; one that is not listed is never touched."""

    @model_validator(mode="after")
    def _each_gpu_once(self) -> Self:
        addresses = [gpu.pci for gpu in self.gpus]
        if twice := [
            Problem(f"cannot list the GPU {pci} twice", todo="leave one of them out", field=("gpus", n, "pci"))
            for n, pci in enumerate(addresses)
            if pci in addresses[:n]
        ]:
            raise wrong(*twice)
        return self


class Host(_Object):
    """A machine: a Proxmox VE node or a plain Linux box."""

    KIND = Kind.HOST

    kind: Literal["Host"] = "Host"
    address: Address
    """Where it is reached. Not needed with ssh.connection: local."""
    platform: Platform
    """What it runs."""
    lifecycle: Lifecycle = Lifecycle.ACTIVE
    """active, maintenance (no new work, nothing touched) or decommissioned (drained; gone is as wanted)."""
    fenced: Bool = False
    """You have made sure, with your own eyes or a power switch, that it is off and stays off."""
    ssh: Ssh = Ssh()
    """How the controller logs in."""
    nvidia: Nvidia | None = None
    """Its driver and GPUs."""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that it lists."""
        return self.nvidia.gpus if self.nvidia else ()

    @model_validator(mode="before")
    @classmethod
    def _what_goes_without_saying(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        said = dict(data)
        ssh, nvidia = said.get("ssh"), said.get("nvidia")
        if said.get("address") is None and isinstance(ssh, Mapping) and ssh.get("connection") == Connection.LOCAL:
            said["address"] = "localhost"
        if said.get("platform") == Platform.LINUX and isinstance(nvidia, Mapping):
            gpus = nvidia.get("gpus")
            if isinstance(gpus, list | tuple):
                owned = [
                    {**gpu, "owner": GpuOwner.HOST} if isinstance(gpu, Mapping) and gpu.get("owner") is None else gpu
                    for gpu in gpus
                ]
                said["nvidia"] = {**nvidia, "gpus": owned}
        return said

    @model_validator(mode="after")
    def _owners_exist_on_the_platform(self) -> Self:
        missing = GpuOwner.CONTAINERS if self.platform is Platform.LINUX else GpuOwner.HOST
        allowed = [owner.value for owner in GpuOwner if owner is not missing]
        if odd := [
            Problem(
                f"cannot give a GPU to {missing} on a host of platform {self.platform}",
                allowed=" or ".join(allowed),
                todo=f"write owner: {allowed[0]}, or correct the platform",
                field=("nvidia", "gpus", n, "owner"),
            )
            for n, gpu in enumerate(self.gpus)
            if gpu.owner is missing
        ]:
            raise wrong(*odd)
        return self


# Container


class State(StrEnum):
    """Whether a container runs."""

    RUNNING = "running"
    STOPPED = "stopped"


class Passthrough(StrEnum):
    """How a container's config passes devices."""

    KEEP = "keep"
    """In the style that is there; ``dev`` when there is none."""
    DEV = "dev"
    """Proxmox's own ``dev[n]`` lines."""
    LXC = "lxc"
    """Raw ``lxc.cgroup2.devices.allow`` and ``lxc.mount.entry`` lines."""


class WhenMissing(StrEnum):
    """What to do about a mount whose source is not there on the host where the container will run."""

    BLOCK = "block"
    """Do not move or start the container."""
    DROP = "drop"
    """Take the mount out of the config."""


class Mount(Model):
    """A bind or raw mount that the container's config has."""

    target: AbsolutePath
    """Its place inside the container."""
    when_missing: WhenMissing = WhenMissing.BLOCK
    """What to do when its source is not there on the host."""


class GpuSelector(Model):
    """Which of its host's GPUs a container gets: these (``devices``), or so many (``count``) of a sort.

    In a spec, a list stands for ``devices``.
    """

    count: GpuCount | None = None
    """How many."""
    memory: MemoryAtLeast | None = None
    """The memory that each has to have at least, as ">=44GiB"; in bytes."""
    model: Str | None = None
    """The model that each has to be, as nvidia-smi names it; "NVIDIA" and "GeForce" may be left out."""
    compute_capability: ComputeCapability | None = None
    """The compute capability that each has to have: 8.6, or ">=8.0"."""
    devices: tuple[GpuId, ...] | None = None
    """These ones, by PCI address or UUID, in this order."""
    shared: Bool = False
    """Whether other containers that say so too may have the same GPUs."""

    @classmethod
    def together(cls, given: frozenset[str]) -> list[Problem]:
        """These, or so many of a sort."""
        if len(given & {"count", "devices"}) != 1:
            allowed = "count: and what each has to be, or a list of PCI addresses or UUIDs; one of the two"
            return [Problem("cannot tell which GPUs are meant", allowed=allowed)]
        return [
            Problem(
                f"cannot ask for a {name} of GPUs that are given by address",
                todo=f"remove {name}, or give a count",
                field=(name,),
            )
            for name in ("memory", "model", "compute_capability")
            if "devices" in given and name in given
        ]

    @model_validator(mode="after")
    def _each_gpu_once(self) -> Self:
        devices = self.devices or ()
        if twice := [
            Problem(f"cannot pass the GPU {gpu} twice", todo="leave one of them out", field=("devices", n))
            for n, gpu in enumerate(devices)
            if gpu in devices[:n]
        ]:
            raise wrong(*twice)
        return self

    @property
    def number(self) -> int:
        """Return how many GPUs it asks for."""
        return len(self.devices) if self.devices is not None else self.count or 0


def _list_means_devices(value: Any) -> Any:
    return {"devices": value} if isinstance(value, list | tuple) else value


class Container(_Object):
    """An LXC container of a Proxmox host."""

    KIND = Kind.CONTAINER

    kind: Literal["Container"] = "Container"
    id: ContainerId
    """Its number in Proxmox."""
    host: Name
    """The host it runs on; edit this line to relocate it and what it serves."""
    state: State = State.RUNNING
    """Whether it runs."""
    gpus: Annotated[GpuSelector, BeforeValidator(_list_means_devices)] | None = None
    """The GPUs it gets, and no others. Left out: its devices are not looked after; an empty list: none."""
    passthrough: Passthrough = Passthrough.KEEP
    """The style in which its config passes devices."""
    mounts: tuple[Mount, ...] = ()
    """What to do about mounts whose source is missing; a mount not named here blocks."""

    @model_validator(mode="after")
    def _each_mount_once(self) -> Self:
        targets = [mount.target for mount in self.mounts]
        if twice := [
            Problem(f"cannot treat the mount {target} in two ways", field=("mounts", n, "target"))
            for n, target in enumerate(targets)
            if target in targets[:n]
        ]:
            raise wrong(*twice)
        return self


# ModelServer


class ServerState(StrEnum):
    """What becomes of a server."""

    RUNNING = "running"
    STOPPED = "stopped"
    """Installed, not running."""
    ABSENT = "absent"
    """Its unit is removed."""


def _moving(revision: str, allow_moving: bool) -> list[Problem]:
    if allow_moving or is_commit(revision):
        return []
    return [
        Problem(
            "cannot pin a model to what may move",
            allowed="a commit of 40 hexadecimal digits",
            todo="write the commit, or allow_moving: true beside it",
            field=("revision",),
        )
    ]


class Draft(Model):
    """A draft model for speculative decoding, kept beside the model it drafts for."""

    repo: Repo
    """Its repository on the Hub."""
    revision: Revision
    """A commit; a branch or tag needs allow_moving."""
    allow_moving: Bool = False
    """Whether the revision may be a branch or tag."""

    @model_validator(mode="after")
    def _pinned(self) -> Self:
        if problems := _moving(self.revision, self.allow_moving):
            raise wrong(*problems)
        return self


class Weights(Model):
    """The model that a server serves."""

    repo: Repo
    """Its repository on the Hub: Qwen/Qwen3.6-27B."""
    revision: Revision
    """A commit; a branch or tag needs allow_moving."""
    allow_moving: Bool = False
    """Whether the revision may be a branch or tag, which is then looked up again and again."""
    directory: AbsolutePath
    """The directory on the serving machine under which models lie."""
    token: SecretRef | None = None
    """The Hub's token, for a repository that asks for one."""
    draft: Draft | None = None
    """A draft model for speculative decoding."""
    stalled_after: Duration = timedelta(minutes=2)
    """How long a download may bring next to nothing before it is killed and gone on with another way."""

    @model_validator(mode="after")
    def _pinned(self) -> Self:
        if problems := _moving(self.revision, self.allow_moving):
            raise wrong(*problems)
        return self


class Prerelease(StrEnum):
    """Whether pre-releases are installed, in uv's words."""

    DISALLOW = "disallow"
    ALLOW = "allow"
    IF_NECESSARY = "if-necessary"
    EXPLICIT = "explicit"
    IF_NECESSARY_OR_EXPLICIT = "if-necessary-or-explicit"


class Engine(Model):
    """The software that serves, in a Python environment of its own."""

    name: EngineName
    """sglang, vllm, transformers, or the name of a plug-in."""
    version: PackageVersion
    """The exact version of its package."""
    python: PythonVersion | None = None
    """The version of Python; without it, the engine's own choice."""
    requirements: tuple[RequirementLine, ...] = ()
    """More packages, pins and overrides, one requirement each."""
    index_url: IndexUrl | None = None
    """The package index, instead of the usual one."""
    wheels: tuple[DownloadUrl, ...] = ()
    """More places to find wheels: directories on the serving machine, or URLs."""
    prerelease: Prerelease | None = None
    """Whether pre-releases are installed; without it, uv's own rule."""
    allow_known_bad: Bool = False
    """Whether a version is used that is known not to serve such a model right."""

    @model_validator(mode="before")
    @classmethod
    def _external_has_no_version(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("name") == "external" and data.get("version") is None:
            return {**data, "version": "0"}
        return data


class Serve(Model):
    """How the server is started and reached."""

    address: Address = "127.0.0.1"
    """The address it listens on; 0.0.0.0 is every one."""
    port: Port
    """The TCP port it listens on."""
    served_model_name: Str | None = None
    """The name that clients ask for; without it, the repository's."""
    api_key: SecretRef | None = None
    """The key that clients have to show."""
    tensor_parallel: TensorParallel = "auto"
    """Over how many GPUs each layer is split; auto: all that are assigned."""
    flags: Mapping[FlagName, FlagValue] = Field(default_factory=dict)
    """The engine's own options, long names without dashes.

    true is a bare flag, a list repeated values, a mapping JSON, anything else its text.
    """
    env: Mapping[EnvName, EnvValue] = Field(default_factory=dict)
    """Environment variables: a value, or {secret: NAME}."""


class OutputCheck(StrEnum):
    """What the answers of a server are checked for."""

    ARITHMETIC = "arithmetic"
    """Small sums come out right."""
    TOOL_CALL = "tool-call"
    """A tool is called as it was declared, and the call is parsed."""
    REASONING = "reasoning"
    """Reasoning comes apart from the answer."""
    STRUCTURED = "structured"
    """An answer that was asked to keep to a JSON schema keeps to it."""


class Range(Model):
    """The numbers that are all right."""

    at_least: Amount | None = None
    """Below this is wrong."""
    at_most: Amount | None = None
    """Above this is wrong."""

    @classmethod
    def together(cls, given: frozenset[str]) -> list[Problem]:
        """A bound, or two."""
        if given & {"at_least", "at_most"}:
            return []
        return [Problem("cannot check against no bound", allowed="at_least, at_most, or both")]

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise wrong(Problem("cannot be more than at_most", allowed=f"up to {self.at_most}", field=("at_least",)))
        return self


class Checks(Model):
    """What a server has to pass to be called good."""

    startup_budget: Duration = timedelta(minutes=20)
    """How long it may take from start to ready."""
    output: tuple[OutputCheck, ...] = ()
    """What its answers are checked for."""
    min_context: AtLeastOne | None = None
    """The number of tokens that one request has to be able to hold."""
    tokens_per_second: Range | None = None
    """The speed of one stream, in generated tokens a second."""
    draft_acceptance: Range | None = None
    """The accepted part of drafted tokens, from 0 to 1; far too much is as suspicious as far too little."""

    @model_validator(mode="after")
    def _acceptance_is_a_ratio(self) -> Self:
        if self.draft_acceptance and (
            beyond := [
                Problem(
                    "cannot accept more than every drafted token",
                    allowed="a part, from 0 to 1",
                    field=("draft_acceptance", name),
                )
                for name in ("at_least", "at_most")
                if (getattr(self.draft_acceptance, name) or 0) > 1
            ]
        ):
            raise wrong(*beyond)
        return self


def _name_means_engine(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class ModelServer(_Object):
    """One engine serving one model, in a container or on a plain Linux host."""

    KIND = Kind.MODEL_SERVER

    kind: Literal["ModelServer"] = "ModelServer"
    container: Name | None = None
    """The container it runs in. This, or host."""
    host: Name | None = None
    """The plain Linux host it runs on. This, or container."""
    state: ServerState = ServerState.RUNNING
    """Whether it runs, is installed but stopped, or is removed."""
    gpus: ServerGpus = "all"
    """Which GPUs of its container or host: all, or a list of places in the assignment (from 0), addresses, UUIDs."""
    model: Weights
    """The model it serves."""
    engine: Annotated[Engine, BeforeValidator(_name_means_engine)]
    """The software that serves it; ``engine: external`` is a server that is only watched."""
    serve: Serve
    """How it is started and reached."""
    checks: Checks = Checks()
    """What it has to pass to be called good."""

    @property
    def place(self) -> Ref:
        """Return where it runs: a Container or a Host."""
        if self.container is not None:
            return Ref(Kind.CONTAINER.value, self.container)
        return Ref(Kind.HOST.value, self.host or "")

    @classmethod
    def together(cls, given: frozenset[str]) -> list[Problem]:
        """One place."""
        if {"container", "host"} <= given:
            return [
                Problem(
                    "cannot run one server in two places",
                    allowed="container, or host, not both",
                    todo="remove one of the two lines",
                    field=("host",),
                )
            ]
        if not {"container", "host"} & given:
            return [
                Problem(
                    "cannot tell where this server runs",
                    allowed="container: NAME, or host: NAME of a plain Linux host",
                    todo="add one of the two",
                )
            ]
        return []

    @model_validator(mode="after")
    def _each_gpu_once(self) -> Self:
        if self.gpus != "all" and (
            twice := [
                Problem(f"cannot use the GPU {gpu} twice", field=("gpus", n))
                for n, gpu in enumerate(self.gpus)
                if gpu in self.gpus[:n]
            ]
        ):
            raise wrong(*twice)
        return self


# All of them


@dataclass(frozen=True)
class Unreadable:
    """A secret that could not be read: it is not known, which is not the same as empty. ``why`` is for people."""

    why: str


@dataclass(frozen=True)
class Place:
    """Where something stands in the spec files; lines and columns are counted from 1."""

    file: str
    line: int
    column: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


Object = Host | Container | ModelServer


@dataclass(frozen=True)
class Specs:
    """Everything that is wanted, with defaults merged in."""

    fleet: Fleet = field(default_factory=Fleet)
    hosts: Mapping[str, Host] = field(default_factory=dict)
    containers: Mapping[str, Container] = field(default_factory=dict)
    servers: Mapping[str, ModelServer] = field(default_factory=dict)
    places: Mapping[Ref, Place] = field(default_factory=dict)
    """Where each object's document begins."""
    secrets: Mapping[str, str | Unreadable] = field(default_factory=dict, repr=False, compare=False)
    """The secrets of ``fleet.secrets`` as the controller's machine has them now; none of them is ever shown."""

    def __iter__(self) -> Iterator[Object]:
        yield from self.hosts.values()
        yield from self.containers.values()
        yield from self.servers.values()

    def __contains__(self, ref: Ref) -> bool:
        return self.get(ref) is not None

    def get(self, ref: Ref) -> Object | None:
        """Return an object, or None when no spec defines it."""
        by_kind: Mapping[str, Mapping[str, Object]] = {
            Kind.HOST: self.hosts,
            Kind.CONTAINER: self.containers,
            Kind.MODEL_SERVER: self.servers,
        }
        return by_kind.get(ref.kind, {}).get(ref.name)

    def host_of(self, server: ModelServer) -> str | None:
        """Return the name of the host that a server ends up on, None when its container is in no spec."""
        if server.container is None:
            return server.host
        container = self.containers.get(server.container)
        return container.host if container else None

    def below(self, ref: Ref) -> tuple[Ref, ...]:
        """Return an object and what it stands on: a server its container and that its host. In no spec: itself."""
        match self.get(ref):
            case ModelServer(container=str() as container):
                return (ref, *self.below(Ref(Kind.CONTAINER, container)))
            case ModelServer(host=str() as host) | Container(host=host):
                return (ref, Ref(Kind.HOST, host))
        return (ref,)

    def canonical(self, ref: Ref) -> str:
        """Return what an object means as JSON text, the same for the same meaning; secrets are in it by name only.

        Raises:
            KeyError: no spec defines the object.
        """
        wanted = self.get(ref)
        if wanted is None:
            raise KeyError(str(ref))
        meaning = wanted.model_dump(mode="json", exclude_defaults=True, exclude={"name", "renamed_from"})
        return json.dumps({"kind": ref.kind, **meaning}, sort_keys=True, ensure_ascii=True, separators=(",", ":"))

    def digest_of(self, ref: Ref) -> str:
        """Return a digest of what an object means, 64 hexadecimal digits.

        It stays the same when the object is renamed, a default is written out, text is laid out another way, or a
        release adds a field that nobody has set.

        Raises:
            KeyError: no spec defines the object.
        """
        return hashlib.sha256(self.canonical(ref).encode()).hexdigest()
