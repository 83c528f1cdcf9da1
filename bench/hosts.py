"""The hosts of the benchmark: one sshd on loopback that is many Proxmox hosts, each at an address of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from controller.core import probe
from controller.layers.order import ORDER
from controller.spec.model import Container, Host, Specs
from controller.world import units
from tests.world.servers import Sshd

NUMBER = 200
MAX_AGE = 3600.0  # seconds that slow tools may answer from memory; all of them are asked once before anything is timed
CONTAINERS = range(100, 112)
MACHINES = range(200, 208)

_CONTAINER = """\
# served here: a model, and what belongs to it
arch: amd64
cores: 16
dev0: /dev/nvidia0,mode=0666
dev1: /dev/nvidiactl,mode=0666
features: nesting=1
hostname: ct{id}
memory: 131072
mp0: /tank/models,mp=/models,ro=1
net0: name=eth0,bridge=vmbr0,firewall=1,gw=10.0.0.1,hwaddr=BC:24:11:00:00:{id:02X},ip=10.0.0.{id}/24,type=veth
onboot: 1
ostype: debian
rootfs: rbd:vm-{id}-disk-0,size=200G
swap: 0
unprivileged: 1
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.cgroup2.devices.allow: c 510:* rwm
lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file
"""
_MACHINE = """\
agent: 1
boot: order=scsi0
cores: 8
cpu: host
hostpci0: 0000:17:00,pcie=1
machine: q35
memory: 65536
name: vm{id}
net0: virtio=BC:24:11:01:00:{id:02X},bridge=vmbr0
numa: 0
ostype: l26
scsi0: rbd:vm-{id}-disk-0,iothread=1,size=100G
scsihw: virtio-scsi-single
"""


def cluster(pve: Path) -> None:
    """Write /etc/pve of a node with a dozen containers and eight virtual machines, in a cluster of three."""
    nodes = {f"pve{n}": n for n in (1, 2, 3)}
    for node in nodes:
        (pve / "nodes" / node / "lxc").mkdir(parents=True)
        (pve / "nodes" / node / "qemu-server").mkdir()
    for number in CONTAINERS:
        (pve / "nodes" / "pve1" / "lxc" / f"{number}.conf").write_text(_CONTAINER.format(id=number))
    for number in MACHINES:
        (pve / "nodes" / "pve1" / "qemu-server" / f"{number}.conf").write_text(_MACHINE.format(id=number))
    members = ",\n".join(f'"{node}": {{ "id": {n}, "online": 1, "ip": "10.0.0.{n}"}}' for node, n in nodes.items())
    (pve / ".members").write_text(
        '{\n"nodename": "pve1",\n"version": 5,\n"cluster": { "name": "bench", "version": 3, "nodes": 3, '
        f'"quorate": 1 }},\n"nodelist": {{\n{members}\n}}\n}}\n'
    )
    guests = [(n, "lxc") for n in CONTAINERS] + [(n, "qemu") for n in MACHINES]
    lines = ",\n".join(f'"{n}": {{ "node": "pve1", "type": "{kind}", "version": {n} }}' for n, kind in guests)
    (pve / ".vmlist").write_text(f'{{\n"version": 9,\n"ids": {{\n{lines}}}\n\n}}\n')


def address(number: int) -> str:
    """Return the address of a host; all of 127.0.0.0/8 is on the loopback device."""
    return f"127.0.1.{number + 1}"


def specs(count: int, port: int, identity: str) -> Specs:
    """Return the specs of so many hosts, and of the containers on the first."""
    ssh = {"user": "root", "port": port, "identity_file": identity}
    hosts = [
        Host.model_validate({"name": f"host{n}", "address": address(n), "platform": "proxmox", "ssh": ssh})
        for n in range(count)
    ]
    containers = [
        Container.model_validate({"name": f"ct{n}", "id": n, "host": "host0", "state": "running"}) for n in CONTAINERS
    ]
    return Specs(hosts={h.name: h for h in hosts}, containers={c.name: c for c in containers})


class Hosts:
    """One sshd that is ``NUMBER`` hosts, each with its own /run, and the look as one command for other tools.

    By its address sshd puts a session into a root of its own (chroot, which costs nothing): the machine's own files,
    with /etc/pve of a cluster, and a /run of its own, so that hosts do not see each other at work.
    """

    def __init__(self, folder: Path) -> None:
        self.sshd = Sshd(folder)
        self.sshd.mounts = [_MOUNTS.format(folder=folder, number=NUMBER)]
        self.sshd.options = ["MaxSessions 20"]
        self.sshd.last_options = [
            f"Match LocalAddress {address(n)}\n  ChrootDirectory /run/hosts/{n}" for n in range(NUMBER)
        ]
        cluster(folder / "pve")
        for name in ("etc", "work"):
            (folder / name).mkdir()
        self.sshd.start(seconds=120.0)
        self.known_hosts = folder / "known_hosts"
        kind, blob = Path(f"{self.sshd.host_key}.pub").read_text().split()[:2]
        self.known_hosts.write_text("".join(f"[{address(n)}]:{self.sshd.port} {kind} {blob}\n" for n in range(NUMBER)))
        line = probe.look("NONCE-1", MAX_AGE, CONTAINERS).replace("NONCE-1", '"bench$$-1"')
        self.look_script = folder / "look.sh"
        self.look_script.write_text(probe.script(fragments()) + line)
        self.look_script.chmod(0o755)

    def ask_slow_tools(self) -> None:
        """Look at each host once, so that what its slow tools say is known there."""
        look = self.look_script.read_text()
        for number in range(NUMBER):
            subprocess.run(self.shell(number), input=look, text=True, stdout=subprocess.DEVNULL, check=True)

    def shell(self, number: int) -> list[str]:
        """Return the command that starts a shell on a host without SSH."""
        return ["nsenter", "-m", "-t", str(self.sshd.pid), "chroot", f"/run/hosts/{number}", "sh"]

    @property
    def look_command(self) -> str:
        """The look as one command on a host."""
        return f"sh {self.look_script}"

    def stop(self) -> None:
        """End them all."""
        self.sshd.stop()


_MOUNTS = """
mount -t overlay -o lowerdir=/etc,upperdir={folder}/etc,workdir={folder}/work overlay /etc
mkdir -p /etc/pve
mount --bind {folder}/passwd /etc/passwd
mount --bind {folder}/shadow /etc/shadow
n=0
while [ $n -lt {number} ]; do
	host=/run/hosts/$n
	mkdir -p $host
	mount --bind / $host
	for part in /proc /sys /dev /etc; do mount --bind $part $host$part; done
	mount --bind {folder}/pve $host/etc/pve
	mount -t tmpfs -o mode=755 none $host/run
	n=$((n + 1))
done
"""


def fragments() -> Mapping[str, str]:
    """What a Proxmox host is asked, as the ssh world asks it."""
    return {
        "world": units.PROBE,
        **{layer.name: layer.probe for layer in ORDER if layer.probe and "proxmox" in layer.platforms},
    }
