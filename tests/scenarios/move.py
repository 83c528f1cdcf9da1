"""A cluster of three: a container on kpro6 with cards and a mount of its host, which kpro5 can take."""

from __future__ import annotations

from tests.lab import hosts
from tests.scenarios.stage import Stage

SHARED = "/tank/shared"  # kpro6 has it, kpro5 has not

CONF = f"""\
# moves with its cards
arch: amd64
cores: 2
hostname: llm-gpu
memory: 4096
net0: name=eth0,bridge=vmbr0,firewall=1,hwaddr=BC:24:11:00:01:29,type=veth
ostype: debian
rootfs: ceph-rbd:vm-129-disk-0,size=200G
swap: 0
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.cgroup2.devices.allow: c {{uvm}}:* rwm
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
lxc.mount.entry: /dev/nvidia1 dev/nvidia1 none bind,optional,create=file
lxc.mount.entry: /dev/nvidia2 dev/nvidia2 none bind,optional,create=file
lxc.mount.entry: /dev/nvidia3 dev/nvidia3 none bind,optional,create=file
lxc.mount.entry: /dev/nvidiactl dev/nvidiactl none bind,optional,create=file
lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file
lxc.mount.entry: {SHARED} shared none bind,create=dir

[before-upgrade]
arch: amd64
hostname: llm-gpu
ostype: debian
rootfs: ceph-rbd:vm-129-disk-0,size=200G
snaptime: 1764500000
""".replace("{uvm}", "509")
SNAPSHOT = CONF[CONF.index("\n[before-upgrade]") :]
STORAGE = (
    "dir: local\n\tpath /var/lib/vz\n\tcontent iso,vztmpl,backup,rootdir\n\n"
    "rbd: ceph-rbd\n\tcontent images,rootdir\n\tkrbd 1\n\tnodes kpro4,kpro5,kpro6\n\tpool rbd\n"
)
A6000 = ("4f:00.0 RTX A6000 containers", "ce:00.0 RTX A6000 containers")
RTX3090 = ("17:00.0 RTX 3090 vms", "31:00.0 RTX 3090 vms", "b1:00.0 RTX 3090 vms")
PRO6000 = tuple(f"{bus}:00.0 RTX PRO 6000 Blackwell Server Edition containers" for bus in ("01", "41", "81", "c1"))
MOVE = "[move-container, take-over-container, restart-container, edit-container-config]"


def lab_hosts() -> dict[str, hosts.Description]:
    """The lab's Proxmox hosts, the driver loaded on kpro5 and kpro6."""
    return {name: about for name, about in hosts.default().items() if about["platform"] == "proxmox"}


def sim_file() -> str:
    """The same for the simulated fleet."""
    cards = {
        "kpro5": [(one, "vfio-pci") for one in RTX3090] + [(one, "nvidia") for one in A6000],
        "kpro6": [(one, "nvidia") for one in PRO6000],
    }
    made = "simulated_fleet: 1\nhosts:\n  kpro4: {cluster: lab, address: 192.0.2.4}\n"
    for number, (host, listed) in enumerate(cards.items()):
        flavour = ("proprietary", "open")[number]
        made += f"  {host}:\n    cluster: lab\n    address: 192.0.2.{host[-1]}\n"
        made += f"    nvidia: {{version: 580.126.09, flavour: {flavour}, uvm_major: 509}}\n    cards:\n"
        for group, (card, driver) in enumerate(listed, start=20):
            pci, rest = card.split(" ", 1)
            model = rest.rsplit(" ", 1)[0]
            made += f'      - {{pci: "{pci}", model: "{model}", driver: {driver}, iommu_group: {group}}}\n'
        made += "    persistenced: true\n"
    config = "".join(f"          {line}\n" if line else "\n" for line in CONF.splitlines())
    made += f"    directories: [{SHARED}]\n    lxc:\n      129:\n        running: true\n        config: |\n{config}"
    storage = "".join(f"            {line}\n" if line else "\n" for line in STORAGE.splitlines())
    return f"{made}clusters:\n  lab:\n    trees:\n      - files:\n          storage.cfg: |\n{storage}"


def specification(
    stage: Stage,
    host: str = "kpro5",
    kpro6: str = "active",
    gpus: str = '{count: 2, memory: ">=44GiB"}',
    mounts: str = "[{target: /shared, when_missing: drop}]",
    allow: str = MOVE,
    fenced: bool = False,
) -> None:
    """The container is wanted on ``host``; ``kpro6`` is the lifecycle of that host."""
    stage.spec(
        f"{stage.host('kpro4')}---\n"
        f"{stage.host('kpro5')}nvidia: {stage.nvidia(*A6000, *RTX3090)}\n---\n"
        f"{stage.host('kpro6')}nvidia: {stage.nvidia(*PRO6000)}\n"
        f"lifecycle: {kpro6}\nfenced: {str(fenced).lower()}\n---\n"
        f"kind: Container\nname: ct129\nid: 129\nhost: {host}\ngpus: {gpus}\nmounts: {mounts}\n"
        f"policy: {{mode: enforce, allow: {allow}}}\n"
    )
