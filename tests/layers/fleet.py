"""Small Proxmox hosts to judge, for tests of the container layers: two A6000 for containers, three 3090 for VMs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controller.core.view import View
from controller.facts.words import HostFacts, Known
from controller.layers.access.facts import AccessFacts, Cluster, Member
from controller.layers.devices.facts import Guest, GuestFacts
from controller.layers.gpu_health.facts import Function, Gpu, GpuFacts, Module, Node, Smi
from controller.layers.power.facts import InnerNode, PowerFacts, Running
from controller.spec.model import Container, Host, ModelServer, Specs

A6000, RTX3090 = "10de:2230", "10de:2204"
FIRST, SECOND = "0000:4f:00.0", "0000:ce:00.0"
VMS = ("0000:17:00.0", "0000:31:00.0", "0000:b1:00.0")
CHAR = "character special file"
MAJORS = {"nvidia": 195, "nvidiactl": 195, "nvidia-uvm": 508, "nvidia-caps": 511}
NAMES = {A6000: "NVIDIA RTX A6000", RTX3090: "NVIDIA GeForce RTX 3090"}
MEMORY = {A6000: 49140, RTX3090: 24576}


def function(pci: str, device: str, driver: str, mates: Sequence[str] = ()) -> Function:
    return Function(pci, device, "030000", driver, "", "31", tuple(mates) or (pci,), None, 16, 16)


def node(path: str, major: int, minor: int, kind: str = CHAR, mode: str = "666") -> Node:
    return Node(path, kind, major, minor, mode)


def gpu_facts(
    cards: Mapping[str, str] | None = None,
    minors: Mapping[str, int] | None = None,
    majors: Mapping[str, int] | None = None,
    nodes: Sequence[Node] | None = None,
    drivers: Mapping[str, str] | None = None,
) -> GpuFacts:
    """The cards of a host by address and id; those with a minor are on nvidia, the others on vfio-pci."""
    cards = {FIRST: A6000, SECOND: A6000, **dict.fromkeys(VMS, RTX3090)} if cards is None else cards
    minors = {FIRST: 0, SECOND: 1} if minors is None else minors
    majors = MAJORS if majors is None else majors
    drivers = drivers or {}
    if nodes is None:
        nodes = [
            *(node(f"/dev/nvidia{minor}", 195, minor) for minor in minors.values()),
            node("/dev/nvidiactl", 195, 255),
            node("/dev/nvidia-modeset", 195, 254),
            *(node(f"/dev/nvidia-uvm{end}", majors["nvidia-uvm"], n) for n, end in enumerate(("", "-tools"))),
            node("/dev/nvidia-caps", 0, 0, "directory", "755"),
            *(node(f"/dev/nvidia-caps/nvidia-cap{n}", majors["nvidia-caps"], n, mode="400") for n in (1, 2)),
        ]
    return GpuFacts(
        functions=tuple(
            function(pci, device, drivers.get(pci, "nvidia" if pci in minors else "vfio-pci"))
            for pci, device in sorted(cards.items())
        ),
        module=Module("580.126.09", "proprietary"),
        gpus=tuple(Gpu(pci, minor, uuid(pci), NAMES[cards[pci]]) for pci, minor in minors.items() if pci in cards),
        majors=tuple(majors.items()),
        nodes=tuple(nodes),
        smi=tuple(
            Smi(
                n,
                uuid(pci),
                pci,
                NAMES[cards[pci]],
                "580.126.09",
                "8.6",
                MEMORY[cards[pci]] * 1024**2,
                0,
            )
            for n, pci in enumerate(sorted(p for p in minors if p in cards))
        ),
    )


def uuid(pci: str) -> str:
    return f"GPU-00000000-0000-4000-8000-0000{pci.replace(':', '').replace('.', '')[-8:]:0>8}"


def guest_facts(*configs: tuple[int, str], kind: str = "lxc", node: str = "kpro5", **more: object) -> GuestFacts:
    guests = tuple(Guest(kind, vmid, node, text) for vmid, text in configs)
    more.setdefault("drivers", ((1, "mem"), (226, "drm"), (235, "kfd"), (195, "nvidia"), (508, "nvidia-uvm")))
    return GuestFacts("kpro5", True, guests, **more)  # type: ignore[arg-type]


def access_facts(
    guests: Sequence[tuple[int, str, str]] = ((129, "kpro5", "lxc"),), ha: Sequence[int] = (), quorate: bool = True
) -> AccessFacts:
    members = (Member("kpro5", True, "10.1.2.5"), Member("kpro6", False, "10.1.2.6"))
    cluster = Cluster("kpro5", "lab", quorate, members, tuple(guests), frozenset(ha))
    return AccessFacts(0, "kpro5", "6.8.12-9-pve", "x86_64", (), cluster)


def host(**more: object) -> Host:
    gpus = [
        *({"pci": pci, "model": "RTX A6000", "owner": "containers"} for pci in (FIRST, SECOND)),
        *({"pci": pci, "model": "RTX 3090", "owner": "vms"} for pci in VMS),
    ]
    fields = {"name": "kpro5", "address": "10.1.2.5", "platform": "proxmox", "nvidia": {"gpus": gpus}, **more}
    return Host.model_validate({"kind": "Host", **fields})


def container(**more: object) -> Container:
    fields = {"name": "ct129", "id": "129", "host": "kpro5", "gpus": {"count": "2"}, **more}
    policy = {"mode": "enforce", "allow": ["edit-container-config", "restart-container"]}
    return Container.model_validate({"kind": "Container", "policy": policy, **fields})


def server(name: str, ct: str = "ct129") -> ModelServer:
    return ModelServer.model_validate(
        {
            "kind": "ModelServer",
            "name": name,
            "container": ct,
            "model": {"repo": "a/b", "revision": "0" * 40, "directory": "/models"},
            "engine": {"name": "sglang", "version": "0.5.11"},
            "serve": {"port": "30000"},
        }
    )


def specs(*objects: Host | Container | ModelServer) -> Specs:
    objects = objects or (host(), container())
    return Specs(
        hosts={o.name: o for o in objects if isinstance(o, Host)} or {"kpro5": host()},
        containers={o.name: o for o in objects if isinstance(o, Container)},
        servers={o.name: o for o in objects if isinstance(o, ModelServer)},
    )


def view(
    wanted: Specs,
    guests: GuestFacts,
    gpus: GpuFacts | None = None,
    power: PowerFacts | None = None,
    access: AccessFacts | None = None,
) -> View:
    sections = {
        "host.access": Known(access or access_facts()),
        "host.gpu-health": Known(gpus or gpu_facts()),
        "container.devices": Known(guests),
        "container.power": Known(power or PowerFacts(())),
    }
    return View(wanted, {"kpro5": HostFacts("kpro5", sections)})


def running(
    vmid: int = 129,
    generated: str | None = None,
    edited: tuple[str, ...] | None = None,
    nodes: Sequence[tuple[str, str, int, int]] = (),
    restarted_for: str = "",
) -> PowerFacts:
    inner = tuple(InnerNode(*each) for each in nodes)
    return PowerFacts((Running(vmid, 4711, 123456, generated, edited, inner, restarted_for),))
