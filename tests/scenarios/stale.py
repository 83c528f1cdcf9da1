"""The fleet of a container that passes four cards with the majors of another boot, where two are wanted."""

from __future__ import annotations

from tests.lab import hosts
from tests.scenarios.stage import Stage

STALE = 507  # nvidia-uvm's major of another boot; neither world has it now

CONF = """\
# Language models. Ask Ada before touching the GPUs.
# moved here: 100%25 by hand
arch: amd64
cores: 2
features: nesting=1
hostname: llm-gpu
memory: 4096
net0: name=eth0,bridge=vmbr0,firewall=1,hwaddr=BC:24:11:00:01:29,type=veth
ostype: debian
rootfs: ceph-rbd:vm-129-disk-0,size=200G
swap: 0
# --- GPU passthrough ---
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.cgroup2.devices.allow: c {stale}:* rwm
lxc.cgroup2.devices.allow: c 10:200 rwm
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
lxc.mount.entry: /dev/nvidia1 dev/nvidia1 none bind,optional,create=file
lxc.mount.entry: /dev/nvidia2 dev/nvidia2 none bind,optional,create=file
lxc.mount.entry: /dev/nvidia3 dev/nvidia3 none bind,optional,create=file
lxc.mount.entry: /dev/nvidiactl dev/nvidiactl none bind,optional,create=file
lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file

[before-upgrade]
#a note%3A with a colon
arch: amd64
hostname: llm-gpu
memory: 2048
ostype: debian
rootfs: ceph-rbd:vm-129-disk-0,size=200G
snaptime: 1764500000
lxc.cgroup2.devices.allow: c 508:* rwm
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
""".replace("{stale}", str(STALE))
COMMENTS = [line for line in CONF.splitlines() if line.startswith("#")]
SNAPSHOT = CONF[CONF.index("\n[before-upgrade]") :]

CARDS = (
    ("17:00", "NVIDIA GeForce RTX 3090", 21),
    ("31:00", "NVIDIA GeForce RTX 3090", 27),
    ("4f:00", "NVIDIA RTX A6000", 31),
    ("ce:00", "NVIDIA RTX A6000", 52),
)
LISTED = (
    "17:00.0 RTX 3090 containers",
    "31:00.0 RTX 3090 containers",
    "4f:00.0 RTX A6000 containers",
    "ce:00.0 RTX A6000 containers",
)


def lab_hosts() -> dict[str, hosts.Description]:
    """kpro5 with four cards on the nvidia driver."""
    described = hosts.default()
    described["kpro5"]["cards"] = [hosts.card(slot, model, group, "nvidia") for slot, model, group in CARDS]
    return described


def sim_file() -> str:
    """The same for the simulated fleet."""
    cards = "".join(
        f'      - {{pci: "{slot}.0", model: "{model}", driver: nvidia, iommu_group: {group}}}\n'
        for slot, model, group in CARDS
    )
    config = "".join(f"          {line}\n" if line else "\n" for line in CONF.splitlines())
    return (
        "simulated_fleet: 1\nhosts:\n  kpro5:\n    cluster: lab\n"
        "    nvidia: {version: 580.126.09, flavour: proprietary, uvm_major: 509}\n"
        f"    cards:\n{cards}    persistenced: true\n"
        f"    lxc:\n      129:\n        running: true\n        config: |\n{config}"
        "clusters:\n  lab:\n    trees:\n      - files:\n          storage.cfg: |\n"
        "            rbd: ceph-rbd\n            \tcontent images,rootdir\n"
        "            \tkrbd 1\n            \tpool rbd\n"
    )


def specification(stage: Stage, allow: str = "[restart-container, edit-container-config]") -> None:
    stage.spec(
        f"{stage.host('kpro5')}nvidia: {stage.nvidia(*LISTED)}\n---\n"
        'kind: Container\nname: ct129\nid: 129\nhost: kpro5\ngpus: {count: 2, memory: ">=44GiB"}\n'
        f"policy: {{mode: enforce, allow: {allow}}}\n"
    )
