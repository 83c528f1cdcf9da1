"""A simulated host's truth as a tree of real files, so that the real probe's fragments can be run on it."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from controller.layers.gpu_health.sim import information, module_line
from controller.layers.shared import inside_physics, kernel_physics, pve_physics
from controller.layers.shared.truth import Fleet, Host, Node, Process, Session


def lay(fleet: Fleet, host: Host, root: Path) -> None:
    """Make the files that the fragments read under ``root``. Needs root, for device nodes."""
    _proc(fleet, host, root)
    _pci(host, root)
    _nvidia(host, root)
    for path, node in host.dev.items():
        _node(root, path, node)
    (root / "dev").mkdir(exist_ok=True)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    if host.cgroup2:
        (root / "sys/fs/cgroup/cgroup.controllers").touch()
    for path, file in host.files.items():
        if ".wants/" in path:
            (root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            (root / path.lstrip("/")).symlink_to("/somewhere/else")
        else:
            _file(root, path, file.text, file.mtime)
    for path in host.directories:
        (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    _pve(fleet, host, root)
    _containers(host, root)
    _machines(host, root)
    _servers(fleet, host, root)


def tools(fleet: Fleet, host: Host, folder: Path) -> None:
    """The few programs that the fragments start, answering for this host."""
    folder.mkdir()
    infos = "".join(
        f"'{vmid} -p -H') echo {c.pid} ;;\n{vmid}*) printf 'State: RUNNING\\nPID: {c.pid}\\n' ;;\n"
        for vmid, c in host.containers.items()
    )
    programs = {
        "id": f"echo {host.uid}",
        "uname": f"echo Linux {host.kernel} {host.arch}",
        "lxc-info": f"shift; case $* in\n{infos}esac",
        "rbd": _rbd(fleet, host),
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


def _rbd(fleet: Fleet, host: Host) -> str:
    """``rbd … status IMAGE`` for every image in the cluster: the last argument says which."""
    cluster = fleet.cluster_of(host)
    configs = pve_physics.tree(cluster, host.name).files.values() if cluster is not None else ()
    images = {(m[1], m[2]) for file in configs for m in re.finditer(r"([a-z-]+):(vm-\d+-disk-\d+)", file.text)}
    said = "".join(
        f"{image}) echo '{pve_physics.rbd_status(fleet, host, s, image).out.strip()}' ;;\n" for s, image in images
    )
    return f"for image; do :; done\ncase $image in\n{said}esac"


def _file(root: Path, path: str, text: str, mtime: int | None = None) -> None:
    real = root / path.lstrip("/")
    real.parent.mkdir(parents=True, exist_ok=True)
    real.write_bytes(text.encode("utf-8", "surrogateescape"))
    if mtime is not None:
        os.utime(real, (mtime, mtime))


def _node(root: Path, path: str, node: Node) -> None:
    real = root / path.lstrip("/")
    real.parent.mkdir(parents=True, exist_ok=True)
    real.parent.chmod(0o755)
    if node.plain:
        real.touch()
    else:
        os.mknod(real, stat.S_IFCHR, os.makedev(node.major, node.minor))
    real.chmod(node.mode)


def _proc(fleet: Fleet, host: Host, root: Path) -> None:
    _file(root, "/proc/sys/kernel/hostname", f"{host.name}\n")
    _file(root, "/proc/sys/kernel/random/boot_id", f"{host.boot_id}\n")
    _file(root, "/proc/mounts", "/dev/sda1 / ext4 rw,relatime 0 0\nlxcfs /var/lib/lxcfs fuse.lxcfs rw 0 0\n")
    _file(root, "/proc/uptime", f"{fleet.uptime(host):.2f} 0.00\n")
    _file(root, "/proc/stat", f"cpu 0 0\nbtime {int(host.booted)}\n")
    devices = "".join(f"{major:3} {name}\n" for major, name in kernel_physics.proc_devices(host))
    _file(root, "/proc/devices", f"Character devices:\n{devices}\nBlock devices:\n  7 loop\n195 nvidia-no\n")


def _pci(host: Host, root: Path) -> None:
    for address, function in host.functions.items():
        base = f"/sys/bus/pci/devices/{address}"
        _file(root, f"{base}/vendor", f"0x{function.vendor}\n")
        _file(root, f"{base}/device", f"0x{function.device}\n")
        _file(root, f"{base}/class", f"0x{function.pci_class}\n")
        _file(root, f"{base}/driver_override", f"{function.override or '(null)'}\n")
        _file(root, f"{base}/numa_node", f"{function.numa_node}\n")
        _file(root, f"{base}/current_link_width", f"{function.link_width}\n")
        _file(root, f"{base}/max_link_width", f"{function.link_width_max}\n")
        here = root / base.lstrip("/")
        if function.driver is not None:
            driver = root / f"sys/bus/pci/drivers/{function.driver}"
            driver.mkdir(parents=True, exist_ok=True)
            (here / "driver").symlink_to(driver)
        if function.iommu_group is not None:
            group = root / f"sys/kernel/iommu_groups/{function.iommu_group}/devices"
            group.mkdir(parents=True, exist_ok=True)
            (group / address).symlink_to(here)
            (here / "iommu_group").symlink_to(group.parent)


def _nvidia(host: Host, root: Path) -> None:
    module = host.loaded.get("nvidia")
    if module is None:
        return
    _file(root, "/proc/driver/nvidia/version", f"{module_line(host, module)}\nGCC version:  gcc version 12.2.0\n")
    for address, function in host.functions.items():
        if function.driver == "nvidia" and function.gpu is not None:
            text = "".join(f"{line}\n" for line in information(address, function.gpu))
            _file(root, f"/proc/driver/nvidia/gpus/{address}/information", text)


def _pve(fleet: Fleet, host: Host, root: Path) -> None:
    cluster = fleet.cluster_of(host)
    if cluster is None:
        return
    for node in cluster.nodes:
        for kind in ("lxc", "qemu-server"):
            (root / f"etc/pve/nodes/{node}/{kind}").mkdir(parents=True)
    for path, file in pve_physics.tree(cluster, host.name).files.items():
        _file(root, f"/etc/pve/{path}", file.text, file.mtime)
    _file(root, "/etc/pve/.members", pve_physics.members(fleet, host))
    _file(root, "/etc/pve/.vmlist", pve_physics.vmlist(fleet, host))
    for vmid, machine in host.machines.items():
        _file(root, f"/run/qemu-server/{vmid}.pid", f"{machine.pid}\n")
        (root / f"proc/{machine.pid}").mkdir(parents=True, exist_ok=True)
    reserved = "".join(f"{a} {vmid} pid:{m.pid}\n" for vmid, m in host.machines.items() for a in m.functions)
    if reserved:
        _file(root, "/run/qemu-server/pci-id-reservations", reserved)


def _containers(host: Host, root: Path) -> None:
    sockets = ["Num       RefCount Protocol Flags    Type St Inode Path"]
    for vmid, container in host.containers.items():
        sockets.append(f"0000000000000000: 00000002 00000000 00010000 0001 01 4711 @/var/lib/lxc/{vmid}/command")
        ticks = kernel_physics.ticks(host, container.started)
        fields = " ".join("0" for _ in range(18))
        _file(root, f"/proc/{container.pid}/stat", f"{container.pid} (systemd) S {fields} {ticks} 0 0\n")
        for path, node in container.dev.items():
            _node(root, f"/proc/{container.pid}/root{path}", node)
    _file(root, "/proc/net/unix", "\n".join(sockets) + "\n")


def _machines(host: Host, root: Path) -> None:
    """The processes of running VMs, with the groups that they have open."""
    for vmid, machine in host.machines.items():
        _file(root, f"/proc/{machine.pid}/comm", "kvm\n")
        _file(root, f"/proc/{machine.pid}/cgroup", f"0::/qemu.slice/{vmid}.scope\n")
        groups = sorted({host.functions[a].iommu_group or 0 for a in machine.functions if a in host.functions})
        (root / f"proc/{machine.pid}/fd").mkdir()
        for number, group in enumerate(groups):
            (root / f"proc/{machine.pid}/fd/{number}").symlink_to(f"/dev/vfio/{group}")
            _file(root, f"/dev/vfio/{group}", "")


def _servers(fleet: Fleet, host: Host, root: Path) -> None:
    """What serves in places: their small files, their systemd's units, and the processes of those."""
    for vmid in inside_physics.places(host, host.containers):
        pid = 1 if vmid is None else host.containers[vmid].pid
        place, slice_ = ("", "") if vmid is None else (f"/proc/{pid}/root", f"/lxc/{vmid}/ns")
        image, session = inside_physics.image_of(fleet, host, vmid), inside_physics.session_of(host, vmid)
        (root / f"{place}/usr".lstrip("/")).mkdir(parents=True, exist_ok=True)
        if vmid is not None:
            _file(root, f"/proc/{pid}/cgroup", f"3:cpu:/\n0::{slice_}/init.scope\n")
        for path, file in image.files.items():
            _file(root, place + path, file.text, file.mtime)
        for unit in image.enabled:
            wants = root / f"{place}/etc/systemd/system/multi-user.target.wants".lstrip("/")
            wants.mkdir(parents=True, exist_ok=True)
            (wants / unit).symlink_to(f"../{unit}")
        for name, start in session.starts.items():
            _file(root, f"{place}/run/reconcile-server/{name}.started", f"{start.digest} {start.at} {start.secrets}\n")
        for name, ends in session.ends.items():
            lines = "".join(f"{end.at} {end.result} {end.code} {end.status}\n" for end in ends)
            _file(root, f"{place}/run/reconcile-server/{name}.ends", lines)
        table = ["  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"]
        for process in session.processes:
            _process(host, root, process, slice_, session)
            if process.listens:
                socket = f"00000000:{process.port:04X} 00000000:0000 0A 0:0 0:0 0 0 0 {process.pid}00 1 0"
                table.append(f"   0: {socket}")
        _file(root, f"/proc/{pid}/net/tcp", "\n".join(table) + "\n")


def _process(host: Host, root: Path, process: Process, slice_: str, session: Session) -> None:
    group = f"{slice_}/system.slice/{process.unit}"
    pids = "".join(f"{each.pid}\n" for each in session.processes if each.unit == process.unit)
    _file(root, f"/sys/fs/cgroup{group}/cgroup.procs", pids)
    _file(root, f"/sys/fs/cgroup{group}/cgroup.events", "populated 1\nfrozen 0\n")
    here, ticks = f"/proc/{process.pid}", kernel_physics.ticks(host, process.started)
    _file(
        root, f"{here}/stat", f"{process.pid} ({process.command}) S 1 {' '.join('0' for _ in range(17))} {ticks} 0 0\n"
    )
    _file(root, f"{here}/cgroup", f"3:cpu:/\n0::{group}\n")
    _file(root, f"{here}/comm", f"{process.command}\n")
    _file(root, f"{here}/cmdline", "".join(f"{argument}\0" for argument in process.argv))
    _file(root, f"{here}/environ", f"A=b\0CUDA_VISIBLE_DEVICES={','.join(process.gpus)}\0")
    (root / here.lstrip("/") / "fd").mkdir()
    if process.listens:
        (root / here.lstrip("/") / "fd/7").symlink_to(f"socket:[{process.pid}00]")
