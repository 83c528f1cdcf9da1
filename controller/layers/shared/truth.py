"""The hidden truth of a simulated fleet: what machines are, not what anybody sees of them.

Plain data. What may happen to it is in ``kernel_physics`` and ``pve_physics`` (how machines behave, from the facts)
and in each layer's ``sim`` (what its probe prints, what its scripts do). Times are seconds of the fleet's own clock.
Field names are those of a simulated fleet's file, see docs/simulated-fleet.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

NVIDIA_MAJOR = 195
"""Fixed, of nvidia, nvidiactl and nvidia-modeset (NVIDIA's nv-chardev-numbers.h)."""

USUAL_DEVICES = (
    *("1 mem", "4 /dev/vc/0", "4 tty", "4 ttyS", "5 /dev/tty", "5 /dev/console", "5 /dev/ptmx", "7 vcs", "10 misc"),
    *("13 input", "29 fb", "116 alsa", "128 ptm", "136 pts", "180 usb", "189 usb_device", "202 cpu/msr", "226 drm"),
    *("247 vfio", "248 hidraw", "249 watchdog", "250 bsg", "251 rtc", "252 dimmctl", "253 ndctl", "254 gpiochip"),
)
"""The character devices of ``/proc/devices`` that have nothing to do with NVIDIA."""


@dataclass(slots=True)
class File:
    """A file: its bytes as text (bytes outside UTF-8 as surrogates), permission bits, when it was last changed."""

    text: str = ""
    mode: int = 0o644
    mtime: int = 0


@dataclass(slots=True)
class Node:
    """What lies at a path under ``/dev``: a character device, or a plain file where one should be."""

    major: int = 0
    minor: int = 0
    mode: int = 0o666
    plain: bool = False


@dataclass(slots=True)
class Gpu:
    """What a GPU is beside being a PCI function. ``minor`` is given when the driver probes it."""

    model: str
    uuid: str
    memory_mib: int
    compute_capability: str
    memory_used_mib: int = 0
    minor: int | None = None
    initialised: bool = False  # used once since the driver took it; before that the driver does not tell its UUID
    lost: bool = False  # fallen off the bus (Xid 79)
    used_by: list[str] = field(default_factory=list)  # who has it open: ct:129, unit:dcgm, host:python3


@dataclass(slots=True)
class Function:
    """A PCI function. Ids and class in lower-case hex without 0x; ``override`` is its driver_override."""

    vendor: str
    device: str
    pci_class: str
    driver: str | None = None
    override: str | None = None
    iommu_group: int | None = None
    numa_node: int = 0
    link_width: int = 16
    link_width_max: int = 16
    gpu: Gpu | None = None


@dataclass(slots=True)
class Module:
    """A kernel module as it is installed or loaded. ``flavour`` is open or proprietary for NVIDIA's, else empty."""

    version: str = ""
    flavour: str = ""
    signer: str = ""  # empty: nobody; a distribution's own modules are not looked at


@dataclass(slots=True)
class Initramfs:
    """What of a kernel's initramfs counts here: the names of the modules in it, and its modprobe.d by path."""

    modules: list[str] = field(default_factory=list)
    modprobe: dict[str, str] = field(default_factory=dict)


# What serves models. A place is a container or a plain host itself: its image is what lies in its root file system
# and goes with it, its session is what runs in it and goes with its power.


@dataclass(slots=True)
class Environment:
    """A Python environment in an image, by its path: which engine it has, and which GPUs its kernels are built for.

    ``flags`` are the options that the installed engine takes. ``fault`` is what it says when it is imported, empty
    when it can be. ``nonsense`` is what it answers although its weights are sound, empty when it answers right.
    """

    engine: str
    version: str
    python: str = "3.12"
    arch: str = "x86_64"
    capabilities: list[str] = field(default_factory=list)  # 8.6, 12.0
    flags: list[str] = field(default_factory=list)
    size: int = 0  # bytes
    fault: str = ""
    nonsense: str = ""


@dataclass(slots=True)
class WeightFile:
    """A file of a model: how many bytes are there, how many should be, and whether they are the right ones."""

    size: int
    whole: int
    sound: bool = True
    mtime: int = 0
    sha256: str = ""  # on the Hub, as those of a snapshot are; made up where it is not given
    blob: str = ""


@dataclass(slots=True)
class Model:
    """A model's files in an image, by its directory; names ending in ``.part`` are not whole yet.

    ``texts`` is what is in small files, of a model that the Hub has: its config.json and its index say how big it is.
    """

    repo: str
    revision: str  # a commit
    files: dict[str, WeightFile] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Image:
    """A root file system: small files by path, what is enabled in its systemd, environments and models by directory."""

    files: dict[str, File] = field(default_factory=dict)
    enabled: list[str] = field(default_factory=list)  # units that start with the place
    environments: dict[str, Environment] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    free: int = 1 << 41  # bytes that its disk has left
    withheld: dict[str, str] = field(default_factory=dict)  # of a snapshot: digests of servers' secrets
    tools: list[str] = field(default_factory=lambda: ["systemctl", "nvcc", "ninja"])
    shm: int = 1 << 36  # bytes of /dev/shm


@dataclass(slots=True)
class Process:
    """A process in a place. ``unit`` is the systemd unit that it belongs to; one of another program has a unit too.

    ``started`` is in Unix seconds. It listens on ``port`` from ``ready`` (Unix seconds, None: never) on, ``listens`` is
    whether it does now. ``gpus`` are the UUIDs in its CUDA_VISIBLE_DEVICES.
    """

    pid: int
    started: float
    argv: list[str] = field(default_factory=list)
    unit: str = "init.scope"
    command: str = "python3"
    port: int = 0
    ready: float | None = None
    listens: bool = False
    gpus: list[str] = field(default_factory=list)
    environment: str = ""  # the directory of the environment that it runs from
    model: str = ""  # the directory of its weights
    hangs: bool = False  # it takes requests and answers none any more


@dataclass(slots=True)
class Start:
    """What a unit noted of its last start: the digest that its text names, when, the digest of its secrets."""

    digest: str
    at: int
    secrets: str = "-"


@dataclass(slots=True)
class End:
    """How a process of a unit ended: when (Unix seconds), systemd's result, code and status, what it last said."""

    at: int
    result: str
    code: str
    status: str
    said: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Session:
    """What runs in a place, and what its systemd has loaded: a unit's text is the one of the last daemon-reload."""

    processes: list[Process] = field(default_factory=list)
    loaded: dict[str, str] = field(default_factory=dict)  # text by unit
    starts: dict[str, Start] = field(default_factory=dict)  # the last one, by unit
    ends: dict[str, list[End]] = field(default_factory=dict)  # by unit
    down: list[str] = field(default_factory=list)  # units that have ended so long ago that systemd lets them be


@dataclass(slots=True)
class RunningContainer:
    """A CT that runs, with what it was started with: no later edit of its config changes any of it.

    ``rules`` are its device rules with paths resolved (``allow c 195:0 rwm``), ``dev`` is what lies in its ``/dev``
    beside the usual, ``mounts`` are its bind mounts from target to source. The LXC config that was generated for it
    is a file of the host's (``/var/lib/lxc/ID/config``), which others may write again.
    """

    pid: int
    started: float
    rules: list[str] = field(default_factory=list)
    dev: dict[str, Node] = field(default_factory=dict)
    mounts: dict[str, str] = field(default_factory=dict)
    image: str = ""
    session: Session = field(default_factory=Session)


@dataclass(slots=True)
class RunningMachine:
    """A VM that runs, with the PCI functions that it holds."""

    pid: int
    started: float
    functions: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Work:
    """What a unit does: a layer's action with its arguments and its standard input."""

    step: str
    layer: str
    action: str
    object: str = ""
    args: list[str] = field(default_factory=list)
    stdin: str = field(default="", repr=False)


@dataclass(slots=True)
class Unit:
    """A transient systemd unit of the controller's, and what is left of it in its directory when it has ended.

    ``number`` is the generation at which it was begun, ``began`` and ``ended`` are seconds of the host's uptime in the
    boot ``boot_id``. ``ends`` is when it will end by itself, None for a unit that never does. ``how`` it is or ended is
    running, exit, timeout, killed, interrupted (by a power cut), vanished or never-begun; ``rc`` is None where it has
    none. ``reached`` of ``total`` is a job's progress, ``progressed`` when it last moved, in seconds of uptime.
    """

    work: Work
    number: int
    boot_id: str
    began: float
    ends: float | None = None
    rc: int | None = None
    ended: float | None = None
    how: str = "running"
    controller: str = ""  # whose lease it was begun under
    output: str = ""
    errors: str = ""
    reached: int | None = None
    total: int = 0
    progressed: float = 0.0

    @property
    def runs(self) -> bool:
        """Whether it is at work."""
        return self.how == "running"


@dataclass(slots=True)
class Lease:
    """Who may start steps on a host, and until which uptime of the host, in whole seconds."""

    holder: str
    name: str
    expires: int


@dataclass(slots=True)
class Host:
    """One machine."""

    name: str
    address: str = ""
    platform: str = "proxmox"
    cluster: str | None = None
    powered: bool = True
    boot_id: str = ""
    booted: float = 0.0
    boots: int = 1
    arch: str = "x86_64"
    kernel: str = "6.8.12-9-pve"
    next_kernel: str = ""
    kernels: list[str] = field(default_factory=list)  # in /boot, besides the running one and the next
    headers: list[str] = field(default_factory=list)  # kernels that have a tree to build modules against
    dkms: dict[str, str] | None = None  # flavour of NVIDIA's sources by version; None: DKMS is not installed
    repository: list[str] = field(default_factory=list)  # the packages that apt could install
    lists_fresh: bool = False  # apt has looked at the repository today
    initramfs: dict[str, Initramfs] = field(default_factory=dict)  # by kernel
    secure_boot: bool = False
    enrolled_keys: list[str] = field(default_factory=list)  # machine owner keys that count under secure boot
    module_failures: dict[str, str] = field(default_factory=dict)  # what loading NVIDIA's says, by "version flavour"
    dkms_key: str = ""  # what DKMS signs modules with, empty: nothing
    modules: dict[str, dict[str, Module]] = field(default_factory=dict)  # installed, by kernel
    loaded: dict[str, Module] = field(default_factory=dict)
    majors: dict[str, int] = field(default_factory=dict)  # of what is loaded, given anew at each load
    character_devices: list[str] = field(default_factory=lambda: list(USUAL_DEVICES))  # others' "major name"
    last_majors: dict[str, int] = field(default_factory=dict)  # so that a new load gives others, as it may
    functions: dict[str, Function] = field(default_factory=dict)  # by address, with domain
    new_ids: list[str] = field(default_factory=list)  # vendor:device that vfio-pci accepts besides its options
    dev: dict[str, Node] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)  # all but /etc/pve, /dev and what else is played here
    directories: list[str] = field(default_factory=list)  # those that no file implies
    userspace: str = ""  # version of NVIDIA's libraries and nvidia-smi, empty: not installed
    persistenced: bool = False  # nvidia-persistenced makes the device nodes at boot
    containers: dict[int, RunningContainer] = field(default_factory=dict)
    machines: dict[int, RunningMachine] = field(default_factory=dict)
    image: Image = field(default_factory=Image)
    session: Session = field(default_factory=Session)
    uid: int = 0
    missing_tools: list[str] = field(default_factory=list)
    generation: int = 0
    lease: Lease | None = None
    step: Unit | None = None  # reconcile-step, the running or the last one
    jobs: dict[str, Unit] = field(default_factory=dict)  # reconcile-job-NAME
    smi_hangs: bool = False
    smi_hung_since: float | None = None
    smi_says: str = ""  # what nvidia-smi says all the same, until the driver is loaded anew: "exit N" and its text
    cgroup2: bool = True
    disk_full: bool = False
    services: list[str] = field(default_factory=list)  # systemd services that run, of interest here
    start_failure: str = ""  # what the next start of a CT fails with
    powers_on: float | None = None  # when it will have booted by itself, while it is off
    goes_down: float | None = None  # when it will reboot, as it was asked to
    draws: int = 0  # how often chance was asked
    version: int = field(default=0, compare=False)  # counts changes, for whoever keeps answers


@dataclass(slots=True)
class Tree:
    """One copy of a cluster's file system, paths without ``/etc/pve/``. Nodes in contact share one."""

    files: dict[str, File] = field(default_factory=dict)
    version: int = 1
    guest_versions: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Cluster:
    """A Proxmox cluster. ``nodes`` are all members, ``sides`` the parts a broken network has left it in."""

    name: str = ""
    nodes: list[str] = field(default_factory=list)
    sides: dict[str, int] = field(default_factory=dict)  # a node that is not named is on side 0
    trees: list[Tree] = field(default_factory=lambda: [Tree()])
    tree_of: dict[str, int] = field(default_factory=dict)
    membership: int = 1
    version: int = field(default=0, compare=False)


@dataclass(slots=True)
class Fleet:
    """Everything there is. ``now`` is the fleet's clock in Unix seconds; ``seed`` gives its chance."""

    now: float = 1_767_600_000.0
    seed: int = 1
    hosts: dict[str, Host] = field(default_factory=dict)
    clusters: dict[str, Cluster] = field(default_factory=dict)
    userlands: dict[str, str] = field(default_factory=dict)  # version of NVIDIA's libraries in a volume (a CT's image)
    images: dict[str, Image] = field(default_factory=dict)  # of containers, by volume, or HOST:ID without one
    hub: dict[str, Model] = field(default_factory=dict)  # models that can be downloaded, by "repo@revision"
    hub_trouble: str = ""  # why the Hub cannot be asked, empty when it can
    engines: dict[str, Environment] = field(default_factory=dict)  # what can be installed, by "engine==version"
    downloads: dict[str, str] = field(default_factory=dict)  # files of the internet: text by URL
    unreachable: list[str] = field(default_factory=list)  # hosts that the controller's network does not reach
    changed_keys: list[str] = field(default_factory=list)  # hosts that answer with another host key

    def draw(self, host: Host, choices: Sequence[T]) -> T:
        """One of the choices, by chance that the seed decides, host by host: what others do does not change it."""
        return choices[int(self._chance(host)[:16], 16) % len(choices)]

    def draw_id(self, host: Host) -> str:
        """A new id in the form of a boot id."""
        chance = self._chance(host)
        return f"{chance[:8]}-{chance[8:12]}-4{chance[13:16]}-8{chance[17:20]}-{chance[20:32]}"

    def _chance(self, host: Host) -> str:
        host.draws += 1
        return hashlib.sha256(f"{self.seed} {host.name} {host.draws}".encode()).hexdigest()

    def cluster_of(self, host: Host) -> Cluster | None:
        """The cluster of the host, None for a plain one."""
        return self.clusters.get(host.cluster) if host.cluster else None

    def touch(self, host: Host) -> None:
        """Note that something of the host, or of its cluster, is not what it was."""
        host.version += 1
        cluster = self.cluster_of(host)
        if cluster is not None:
            cluster.version += 1

    def uptime(self, host: Host) -> float:
        """Seconds since the host booted."""
        return max(0.0, self.now - host.booted)


@dataclass(frozen=True, slots=True)
class Said:
    """What a command or a script printed, and its exit code."""

    rc: int
    out: str = ""
    err: str = ""


class Impossible(ValueError):  # noqa: N818 - it is named for what the truth would be
    """A truth that no real fleet can be in: the simulation or who set it up is wrong."""


def refuse_impossible(fleet: Fleet) -> None:
    """Raise Impossible with everything about the fleet that cannot be."""
    wrong = [*_impossible_clusters(fleet)]
    for host in fleet.hosts.values():
        wrong += (f"{host.name}: {what}" for what in (*_impossible_power(host), *_impossible_cards(host)))
    if wrong:
        raise Impossible("; ".join(wrong))


def _impossible_power(host: Host) -> Iterator[str]:
    alive = {"a running CT": host.containers, "a running VM": host.machines, "a loaded module": host.loaded}
    for what, there in alive.items():
        if there and not host.powered:
            yield f"is switched off and has {what}"
    if any(unit.runs for unit in (host.step, *host.jobs.values()) if unit is not None) and not host.powered:
        yield "is switched off and has a running unit"
    if host.booted > 0 and not host.boot_id:
        yield "has booted and has no boot id"
    both = host.containers.keys() & host.machines.keys()
    if both:
        yield f"guest {min(both)} runs as CT and as VM"


def _impossible_cards(host: Host) -> Iterator[str]:
    minors: dict[int, str] = {}
    uuids: dict[str, str] = {}
    for address, function in host.functions.items():
        if function.driver is not None and function.driver.startswith(("nvidia", "nouveau")):
            if function.driver not in host.loaded:
                yield f"{address} is bound to {function.driver}, which is not loaded"
            if function.vendor != "10de":
                yield f"{address} of vendor {function.vendor} is bound to {function.driver}"
        gpu = function.gpu
        if gpu is None:
            continue
        if (gpu.minor is not None) != (function.driver == "nvidia"):
            yield f"{address} on {function.driver or 'no driver'} has minor {gpu.minor}"
        if gpu.minor is not None and minors.setdefault(gpu.minor, address) != address:
            yield f"{address} and {minors[gpu.minor]} both have minor {gpu.minor}"
        if uuids.setdefault(gpu.uuid, address) != address:
            yield f"{address} and {uuids[gpu.uuid]} both have the UUID {gpu.uuid}"
    for vmid, machine in host.machines.items():
        for address in machine.functions:
            held = host.functions.get(address)
            if held is None or held.driver != "vfio-pci":
                yield f"VM {vmid} runs with {address}, which is not on vfio-pci"
    held_twice = [address for machine in host.machines.values() for address in machine.functions]
    if len(held_twice) != len(set(held_twice)):
        yield "two running VMs hold one PCI function"
    if "nvidia-uvm" in host.loaded and "nvidia" not in host.loaded:
        yield "nvidia-uvm is loaded without nvidia"
    for module in ("nvidia", "nvidia-uvm"):
        if (module in host.loaded) != (module in host.majors):
            yield f"module {module} and its major do not go together"
    dynamic = [major for name, major in host.majors.items() if major != NVIDIA_MAJOR]
    if len(dynamic) != len(set(dynamic)):
        yield "two drivers have one major"


def _impossible_clusters(fleet: Fleet) -> Iterator[str]:
    for cluster in fleet.clusters.values():
        for node in cluster.nodes:
            host = fleet.hosts.get(node)
            if host is None or host.cluster != cluster.name:
                yield f"cluster {cluster.name} has the node {node}, which is no host of it"
            if cluster.tree_of.get(node, 0) >= len(cluster.trees):
                yield f"{node} has no copy of the cluster's files"
        for tree in cluster.trees:
            places: dict[str, str] = {}
            for path in tree.files:
                parts = path.split("/")
                if len(parts) == 4 and parts[0] == "nodes" and parts[2] in ("lxc", "qemu-server"):
                    if parts[1] not in cluster.nodes:
                        yield f"{path} lies under a node that cluster {cluster.name} does not have"
                    if places.setdefault(parts[3], path) != path:
                        yield f"{path} and {places[parts[3]]} are two configs of one guest"
    for host in fleet.hosts.values():
        if host.cluster is not None and host.name not in fleet.clusters[host.cluster].nodes:
            yield f"{host.name} is in no cluster {host.cluster}"
