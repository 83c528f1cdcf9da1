"""States that no schedule comes to by itself: what half-done steps, people and other tools leave on a host."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from controller.layers.shared import kernel_physics as kernel
from controller.layers.shared import pve_physics as pve
from controller.layers.shared.truth import File, Fleet, Host, Initramfs, Module, Node
from tests.proof.fleets import CONTAINER_130, SECRET
from tests.scenarios.story import OLD, VERSION

Odd = Callable[[Random, Fleet, Host], str]
"""Changes a host that is on, and says what it did: "" when there was nothing to do."""


def _in_use(host: Host) -> bool:
    return any(f.gpu is not None and f.gpu.used_by for f in host.functions.values())


def _held(host: Host) -> set[str]:
    return {address.rpartition(".")[0] for machine in host.machines.values() for address in machine.functions}


def _tree(fleet: Fleet, host: Host) -> pve.Tree:
    cluster = fleet.cluster_of(host)
    return pve.tree(cluster, host.name) if cluster is not None else pve.Tree()


def card_without_driver(chance: Random, fleet: Fleet, host: Host) -> str:
    """As a bind that was cut off between unbind and probe leaves it; no virtual machine that runs has the card."""
    held = _held(host)
    free = [a for a, f in host.functions.items() if f.gpu and not f.gpu.used_by and a.rpartition(".")[0] not in held]
    if not free:
        return ""
    address = chance.choice(free)
    kernel.unbind(fleet, host, address)
    host.functions[address].override = chance.choice([None, "nvidia", "vfio-pci"])
    return f"{address} has no driver, override {host.functions[address].override}"


def config_moved_by_hand(chance: Random, fleet: Fleet, host: Host) -> str:
    tree, cluster = _tree(fleet, host), fleet.cluster_of(host)
    configs = [path for path in tree.files if re.fullmatch(r"nodes/[^/]+/lxc/\d+\.conf", path)]
    if not configs or cluster is None:
        return ""
    path = chance.choice(configs)
    _, node, _, name = path.split("/")
    if int(name.removesuffix(".conf")) in fleet.hosts[node].containers:
        return ""
    target = chance.choice([n for n in cluster.nodes if n != node] or [node])
    return f"{path} to {target} {pve.rename(fleet, host, f'/etc/pve/{path}', f'/etc/pve/nodes/{target}/lxc/{name}')}"


def half_written_file(chance: Random, fleet: Fleet, host: Host) -> str:
    ours = [path for path in host.files if "reconcile" in path or "nouveau" in path]
    if not ours:
        return ""
    path, how = chance.choice(sorted(ours)), chance.choice(["half", "gone", "empty"])
    file = host.files[path]
    if how == "gone":
        del host.files[path]
    else:
        host.files[path] = File(file.text[: len(file.text) // 2] if how == "half" else "", file.mode, file.mtime)
    return f"{path} {how}"


def nodes_gone(chance: Random, fleet: Fleet, host: Host) -> str:
    gone = [path for path in sorted(host.dev) if "nvidia" in path and chance.random() < 0.5]
    for path in gone:
        del host.dev[path]
    return " ".join(gone)


def wrong_node(chance: Random, fleet: Fleet, host: Host) -> str:
    path = f"/dev/nvidia{chance.choice(['0', '1', 'ctl', '-uvm', '7'])}"
    host.dev[path] = chance.choice([Node(plain=True, mode=0), Node(195, 9), Node(1, 3)])
    return path


def other_programs(chance: Random, fleet: Fleet, host: Host) -> str:
    host.userspace = chance.choice(["", OLD, VERSION])
    return f"host libraries {host.userspace or 'gone'}"


def modules_gone(chance: Random, fleet: Fleet, host: Host) -> str:
    for there in host.modules.values():
        for name in [name for name in there if name.startswith("nvidia")]:
            del there[name]
    return "module files gone"


def half_installed_driver(chance: Random, fleet: Fleet, host: Host) -> str:
    """As an installer that was cut off leaves it: the old one is away, the new one is there for no kernel, or one."""
    host.userspace, host.dkms = chance.choice(["", VERSION]), {VERSION: "proprietary"}
    modules_gone(chance, fleet, host)
    if chance.random() < 0.5:
        host.modules.setdefault(host.kernel, {})["nvidia"] = Module(VERSION, "proprietary", host.dkms_key)
    return "half a driver"


def half_fetched_driver(chance: Random, fleet: Fleet, host: Host) -> str:
    folder = "/var/lib/reconcile/drivers/"
    name = f"{folder}NVIDIA-Linux-x86_64-{VERSION}.run"
    host.files[name] = File("#!/bin/sh\n# NVID", 0o644, 0)
    if chance.random() < 0.5:
        host.files.pop(f"{name}.sha256", None)
    return "half an installer"


def older_driver_loaded(chance: Random, fleet: Fleet, host: Host) -> str:
    for name in [name for name in host.loaded if name.startswith("nvidia")]:
        loaded = host.loaded[name]
        host.loaded[name] = Module(OLD, loaded.flavour, loaded.signer)
    return "older driver loaded"


def dkms_otherwise(chance: Random, fleet: Fleet, host: Host) -> str:
    host.dkms = chance.choice([None, {}, {OLD: "open"}])
    return f"dkms {host.dkms}"


def newer_kernel_next(chance: Random, fleet: Fleet, host: Host) -> str:
    if host.platform != "proxmox":
        return ""
    host.next_kernel = chance.choice(["", "6.8.12-11-pve", host.kernel])
    host.headers = [kernel for kernel in host.headers if chance.random() < 0.5]
    return f"next kernel {host.next_kernel}, headers {host.headers}"


def modprobe_file_gone(chance: Random, fleet: Fleet, host: Host) -> str:
    found = sorted(path for path in host.files if "modprobe.d" in path or "modules-load" in path)
    if not found:
        return ""
    path = chance.choice(found)
    del host.files[path]
    return f"{path} gone"


def modprobe_file_of_a_person(chance: Random, fleet: Fleet, host: Host) -> str:
    text = chance.choice(
        [
            "options vfio-pci ids=10de:2230,10de:2204\n",
            "blacklist nvidia\n",
            "install nvidia /bin/false\n",
            "softdep nvidia pre: vfio-pci\n",
        ]
    )
    host.files[f"/etc/modprobe.d/{chance.choice('az')}.conf"] = File(text, 0o644, 0)
    return text.strip()


def uvm_unloaded(chance: Random, fleet: Fleet, host: Host) -> str:
    if "nvidia-uvm" not in host.loaded or _in_use(host):
        return ""
    kernel.unload_module(fleet, host, "nvidia-uvm")
    return "nvidia-uvm unloaded"


def other_libraries_in_container(chance: Random, fleet: Fleet, host: Host) -> str:
    version = chance.choice([OLD, VERSION])
    for volume in fleet.userlands:
        fleet.userlands[volume] = version
    for each in fleet.hosts.values():
        fleet.touch(each)
    return f"libraries {version} in containers"


def card_of_a_vm_without_driver(chance: Random, fleet: Fleet, host: Host) -> str:
    held = _held(host)
    idle = [a for a, f in host.functions.items() if f.driver == "vfio-pci" and a.rpartition(".")[0] not in held]
    if not idle:
        return ""
    address = chance.choice(idle)
    host.functions[address].driver = None
    host.functions[address].override = chance.choice([None, "vfio-pci"])
    return f"{address} off vfio-pci"


def container_by_hand(chance: Random, fleet: Fleet, host: Host) -> str:
    if any(re.fullmatch(r"nodes/[^/]+/lxc/130\.conf", path) for path in _tree(fleet, host).files):
        return ""
    passes = chance.choice(
        [
            "",
            "dev0: /dev/nvidia0\n",
            "lxc.mount.entry: /dev/nvidia1 dev/nvidia1 none bind,optional,create=file\n"
            "lxc.cgroup2.devices.allow: c 195:* rwm\n",
        ]
    )
    failed = pve.write(fleet, host, f"/etc/pve/nodes/{host.name}/lxc/130.conf", CONTAINER_130 + passes)
    if not failed and chance.random() < 0.5:
        pve.pct_start(fleet, host, 130)
    return f"container 130, {passes.splitlines()[:1]} {failed}"


def vm_by_hand(chance: Random, fleet: Fleet, host: Host) -> str:
    """Another tenant's machine that claims a card, and may take it."""
    card = chance.choice(sorted({a.rpartition(".")[0].removeprefix("0000:") for a in host.functions}) or ["4f:00"])
    path = f"/etc/pve/nodes/{host.name}/qemu-server/{chance.choice([210, 211])}.conf"
    if any(p.endswith(path.rsplit("/", 1)[1]) for p in _tree(fleet, host).files):
        return ""
    text = f"boot: order=scsi0\nhostpci0: 0000:{card},pcie=1\nmemory: 512\nname: odd\nonboot: {chance.randrange(2)}\n"
    return f"{path} claims {card} {pve.write(fleet, host, path, text)}"


def config_locked(chance: Random, fleet: Fleet, host: Host) -> str:
    for vmid in pve.own_guests(fleet, host, "lxc"):
        path = f"/etc/pve/nodes/{host.name}/lxc/{vmid}.conf"
        file = pve.read(fleet, host, path)
        if file is None:
            continue
        if file.text.startswith("lock: "):
            return f"unlocked {vmid} {pve.write(fleet, host, path, file.text.partition(chr(10))[2])}"
        if chance.random() < 0.5:
            return f"locked {vmid} {pve.write(fleet, host, path, f'lock: backup{chr(10)}{file.text}')}"
    return ""


def managed_by_ha(chance: Random, fleet: Fleet, host: Host) -> str:
    path = "/etc/pve/ha/resources.cfg"
    if pve.read(fleet, host, path) is not None:
        return f"HA off {pve.remove(fleet, host, path)}"
    return f"HA on {pve.write(fleet, host, path, f'ct: 129{chr(10)}{chr(9)}state started{chr(10)}')}"


def nouveau_in_initramfs(chance: Random, fleet: Fleet, host: Host) -> str:
    host.initramfs[host.kernel] = Initramfs(["nouveau"], {})
    return "nouveau in the initramfs"


def device_lines_of_a_person(chance: Random, fleet: Fleet, host: Host) -> str:
    for vmid in pve.own_guests(fleet, host, "lxc"):
        path = f"/etc/pve/nodes/{host.name}/lxc/{vmid}.conf"
        file = pve.read(fleet, host, path)
        if file is not None:
            line = chance.choice(
                ["dev7: /dev/nvidia0", "dev3: /dev/fuse", "lxc.cgroup2.devices.allow: c 10:229 rwm", "nesting: 1"]
            )
            head, break_, rest = file.text.partition("\n\n[")
            text = f"{head.rstrip(chr(10))}\n{line}\n" + (f"\n[{rest}" if break_ else "")
            return f"{line} in {vmid} {pve.write(fleet, host, path, text)}"
    return ""


def secret_in_config(chance: Random, fleet: Fleet, host: Host) -> str:
    for vmid in pve.own_guests(fleet, host, "lxc"):
        path = f"/etc/pve/nodes/{host.name}/lxc/{vmid}.conf"
        file = pve.read(fleet, host, path)
        if file is not None and SECRET not in file.text:
            line = f"lxc.environment: HF_TOKEN={SECRET}\n"
            return f"a token in {vmid} {pve.write(fleet, host, path, line + file.text)}"
    return ""


ODD: dict[str, Odd] = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(card_without_driver, config_moved_by_hand, half_written_file, nodes_gone, wrong_node, other_programs),
        *(modules_gone, half_installed_driver, half_fetched_driver, older_driver_loaded, dkms_otherwise),
        *(newer_kernel_next, modprobe_file_gone, modprobe_file_of_a_person, uvm_unloaded),
        *(other_libraries_in_container, card_of_a_vm_without_driver, container_by_hand, vm_by_hand, config_locked),
        *(managed_by_ha, nouveau_in_initramfs, device_lines_of_a_person, secret_in_config),
    )
}


def make_odd(chance: Random, fleet: Fleet) -> tuple[str, str]:
    """Do one of them to a host that is on: its name, and what it did."""
    on = [host for host in fleet.hosts.values() if host.powered]
    if not on:
        return "", ""
    host = chance.choice([*on, *(h for h in on if h.functions)])
    name = chance.choice(sorted(ODD))
    said = ODD[name](chance, fleet, host)
    fleet.touch(host)
    return (name, f"{host.name}: {said}") if said else ("", "")
