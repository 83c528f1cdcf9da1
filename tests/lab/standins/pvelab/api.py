"""The API paths that ``pvesh`` answers. Shapes are those of transcripts of PVE 8.4."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import time
from collections.abc import Callable
from typing import Any

from pvelab import ct, ha, remote, storage, vm
from pvelab.base import Die, check_quorum, fault, members, node, path, read_cfs

Parameters = dict[str, str]


def get(where: str, parameters: Parameters) -> Any:
    """Answer one ``get``; Die when there is no such path."""
    for pattern, answer in _GET:
        if match := re.fullmatch(pattern, where.rstrip("/") or "/"):
            return answer(parameters, **match.groupdict())
    raise Die(f"No 'get' handler defined for '{where}'", 1)


def create(where: str, parameters: Parameters) -> Any:
    """Answer one ``create``."""
    match = re.fullmatch(r"/nodes/(?P<host>[^/]+)/(?P<what>startall|stopall)", where)
    if match is None or match["host"] not in ("localhost", node()):
        raise Die(f"No 'create' handler defined for '{where}'", 1)
    if match["what"] == "startall":
        start_all(force=parameters.get("force") == "1")
    else:
        stop_all()
    return None


# Nodes


def _local(answer: Callable[..., Any]) -> Callable[..., Any]:
    """A path below /nodes/HOST, answered here: ``proxied`` has sent other nodes' paths away."""

    def ask(parameters: Parameters, host: str, **names: str) -> Any:
        return answer(parameters, **names)

    return ask


def proxied(method: str, where: str, options: list[str]) -> str | None:
    """The text that another node's pvesh prints for a path of its own, or None when the path is this node's."""
    match = re.match(r"/nodes/([^/]+)/", where)
    if match is None or match[1] in ("localhost", node()):
        return None
    host = match[1]
    if host not in members():
        raise Die(f"proxy handler failed: Could not resolve hostname {host}: Name or service not known")
    done = subprocess.run(
        [*remote.command(host), "pvesh", method, where, *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 255 and done.stderr.startswith("ssh:"):
        raise Die(f"proxy handler failed: {done.stderr.strip()}")
    if done.returncode:
        raise Die(done.stderr.strip(), done.returncode)
    return done.stdout


def _nodes(_: Parameters) -> list[dict[str, Any]]:
    return [
        {
            "id": f"node/{host}",
            "node": host,
            "ssl_fingerprint": ":".join(re.findall("..", hashlib.sha256(host.encode()).hexdigest().upper())),
            "status": "online" if it.get("online") else "offline",
            "type": "node",
        }
        for host, it in sorted(members().items())
    ]


def _node_status(_: Parameters) -> dict[str, Any]:
    memory = {
        key: int(value) * 1024
        for key, value in re.findall(r"^(\w+):\s+(\d+) kB", path("/proc/meminfo").read_text(), re.MULTILINE)
    }
    uname = os.uname()
    release = subprocess.run(["uname", "-r"], capture_output=True, text=True, check=False).stdout.strip()
    file_system = os.statvfs(path("/"))
    total, free = file_system.f_blocks * file_system.f_frsize, file_system.f_bavail * file_system.f_frsize
    cpus = os.cpu_count() or 1
    used = total - file_system.f_bfree * file_system.f_frsize
    return {
        "boot-info": _boot_info(),
        "cpu": 0,
        "cpuinfo": {
            "cores": cpus,
            "cpus": cpus,
            "flags": "fpu vme",
            "hvm": "1",
            "mhz": "2299.998",
            "model": "Intel(R) Xeon(R) Processor",
            "sockets": 1,
            "user_hz": 100,
        },
        "current-kernel": {"machine": uname.machine, "release": release, "sysname": "Linux", "version": uname.version},
        "idle": 0,
        "ksm": {"shared": 0},
        "kversion": f"Linux {release} {uname.version}",
        "loadavg": path("/proc/loadavg").read_text().split()[:3],
        "memory": {
            "free": memory["MemFree"],
            "total": memory["MemTotal"],
            "used": memory["MemTotal"] - memory["MemAvailable"],
        },
        "pveversion": "pve-manager/8.4.21/2606ac8",
        "rootfs": {"avail": free, "free": free, "total": total, "used": used},
        "swap": {key: memory.get(f"Swap{key.capitalize()}", 0) for key in ("free", "total")} | {"used": 0},
        "uptime": int(float(path("/proc/uptime").read_text().split()[0])),
        "wait": 0,
    }


def _boot_info() -> dict[str, Any]:
    """How the host booted: UEFI without secure boot, unless the fault ``boot-info`` says otherwise."""
    text = fault("boot-info")
    return {"mode": "legacy-bios"} if text == "legacy-bios" else {"mode": "efi", "secureboot": int(text == "secure")}


def _pci(parameters: Parameters) -> list[dict[str, Any]]:
    """The host's PCI devices. There is no driver in it, and memory, bridges and processors are left out by default."""
    hidden = parameters.get("pci-class-blacklist", "05;06;0b").split(";")
    verbose = parameters.get("verbose", "1") not in ("0", "off", "no", "false")
    found = []
    for device in vm.pci_devices_all():
        kind = vm.attribute(device, "class")
        if any(prefix and kind.startswith(prefix) for prefix in hidden):
            continue
        entry: dict[str, Any] = {"id": device, "class": f"0x{kind}", "iommugroup": vm.iommu_group(device)}
        entry |= {name: f"0x{vm.attribute(device, name)}" for name in ("vendor", "device")}
        if verbose:
            for name in ("subsystem_vendor", "subsystem_device"):
                if vm.attribute(device, name):
                    entry[name] = f"0x{vm.attribute(device, name)}"
            entry |= _pci_names(device)
        found.append(entry)
    return found


def _pci_names(device: str) -> dict[str, str]:
    """Names from the machine's own list of PCI ids, if it is there."""
    vendor, model = vm.attribute(device, "vendor"), vm.attribute(device, "device")
    names: dict[str, str] = {}
    try:
        lines = path("/usr/share/misc/pci.ids").read_text(errors="replace").split("\n")
    except OSError:
        return names
    inside = False
    for line in lines:
        if line.startswith(f"{vendor}  "):
            names["vendor_name"], inside = line[6:], True
        elif inside and line.startswith(f"\t{model}  "):
            names["device_name"] = line[7:]
        elif inside and line and not line.startswith(("\t", "#")):
            break
    return names


# Guests


def _containers(_: Parameters) -> list[dict[str, Any]]:
    return [ct.status(vmid) for vmid in ct.ids()]


def _container_status(_: Parameters, vmid: str) -> dict[str, Any]:
    ct.load(int(vmid))
    return ct.status(int(vmid)) | {"ha": ha.service_status(f"ct:{vmid}")}


def _container_config(parameters: Parameters, vmid: str) -> dict[str, Any]:
    if name := parameters.get("snapshot"):
        conf = ct.load(int(vmid))
        if name not in conf["snapshots"]:
            raise Die(f"snapshot '{name}' does not exist")
        return {**conf["snapshots"][name], "digest": conf["digest"]}
    return ct.current(int(vmid), without_pending=parameters.get("current", "0") in ("", "1"))


def _machines(_: Parameters) -> list[dict[str, Any]]:
    return [vm.status(vmid) for vmid in vm.ids()]


def _machine_status(_: Parameters, vmid: str) -> dict[str, Any]:
    vm.load(int(vmid))
    return vm.status(int(vmid)) | {"ha": ha.service_status(f"vm:{vmid}")}


def _machine_config(parameters: Parameters, vmid: str) -> dict[str, Any]:
    conf = vm.load(int(vmid))
    pending = conf.pop("pending")
    if parameters.get("current", "0") not in ("", "1"):
        conf |= {key: value for key, value in pending.items() if key != "delete"}
    return conf


# The cluster


def _resources(parameters: Parameters) -> list[dict[str, Any]]:
    """Guests, nodes and storages of the cluster. "unknown" is what is said of a node that is not online."""
    found: list[dict[str, Any]] = []
    online = {host for host, it in members().items() if it.get("online")}
    for host in members():
        for kind, module in (("lxc", ct), ("qemu", vm)):
            found += [_guest(kind, vmid, host, host in online) for vmid in module.ids(host)]
    for host in members():
        entry: dict[str, Any] = {"id": f"node/{host}", "node": host, "type": "node"}
        found.append(entry | {"status": "online" if host in online else "offline"})
    for host in members():
        for name, it in sorted(storage.storages().items()):
            if it.usable_on(host):
                found.append(
                    {
                        "content": ",".join(it.content),
                        "id": f"storage/{host}/{name}",
                        "node": host,
                        "plugintype": it.kind,
                        "shared": int(it.shared),
                        "status": "available" if host in online else "unknown",
                        "storage": name,
                        "type": "storage",
                    }
                )
    kinds = {"vm": ("lxc", "qemu"), "node": ("node",), "storage": ("storage",)}.get(parameters.get("type", ""))
    return [entry for entry in found if kinds is None or entry["type"] in kinds]


def _guest(kind: str, vmid: int, host: str, online: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": f"{kind}/{vmid}", "node": host, "type": kind, "vmid": vmid, "status": "unknown"}
    if host == node():
        module: Any = ct if kind == "lxc" else vm
        entry |= {key: value for key, value in module.status(vmid).items() if key != "pid"}
        entry.setdefault("template", 0)
    elif online and kind == "lxc":
        try:
            there = path(f"{storage.RBD}/.pvestatd/{host}").read_text().split()
        except OSError:
            return entry
        entry["status"] = "running" if str(vmid) in there else "stopped"
    sid = f"{'ct' if kind == 'lxc' else 'vm'}:{vmid}"
    if ha.is_managed(sid):
        entry["hastate"] = ha.service_status(sid)["state"]
    return entry


def _cluster_status(_: Parameters) -> list[dict[str, Any]]:
    there = members()
    name = re.search(r"cluster_name:\s*(\S+)", read_cfs("corosync.conf") or "")
    found: list[dict[str, Any]] = []
    if name:
        quorate = int(bool(path("/etc/pve/local").stat().st_mode & 0o200))
        about = {"id": "cluster", "name": name[1], "nodes": len(there), "quorate": quorate, "version": 3}
        found.append(about | {"type": "cluster"})
    for host, it in there.items():
        found.append(
            {
                "id": f"node/{host}",
                "ip": it.get("ip", ""),
                "level": "",
                "local": int(host == node()),
                "name": host,
                "nodeid": it["id"],
                "online": int(it.get("online", 0)),
                "type": "node",
            }
        )
    return found


def _ha_resources(_: Parameters) -> list[dict[str, Any]]:
    text = read_cfs("ha/resources.cfg")
    digest = hashlib.sha1((text or "").encode("latin-1")).hexdigest()
    found = []
    for sid, options in ha.resources().items():
        entry: dict[str, Any] = {"digest": digest, "sid": sid, "type": sid.partition(":")[0], "state": "started"}
        entry |= {key: int(value) if value.isdigit() else value for key, value in options.items()}
        found.append(entry)
    return found


def _ha_status(_: Parameters) -> list[dict[str, Any]]:
    quorate = int(bool(path("/etc/pve/local").stat().st_mode & 0o200))
    about = {"id": "quorum", "node": node(), "quorate": quorate, "status": "OK" if quorate else "No quorum!"}
    found: list[dict[str, Any]] = [about | {"type": "quorum"}]
    status = ha.manager_status()
    if master := status.get("master_node"):
        moment = time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(status["timestamp"]))
        found.append({"id": "master", "node": master, "status": f"{master} (active, {moment})", "type": "master"})
    for sid, it in status.get("service_status", {}).items():
        text = f"{sid} ({it['node']}, {it['state']})"
        found.append({"id": f"service:{sid}", "sid": sid, "status": text, "type": "service"} | it)
    return found


def _mappings(parameters: Parameters) -> list[dict[str, Any]]:
    digest = hashlib.sha1((read_cfs("mapping/pci.cfg") or "").encode("latin-1")).hexdigest()
    found = []
    for name, section in sorted(vm.mappings().items()):
        entry: dict[str, Any] = {**section, "digest": digest, "id": name, "type": "pci"}
        if host := parameters.get("check-node"):
            if host != node():
                raise Die("the lab checks the mappings of a node on that node only")
            checks = []
            here = [fields for fields in map(vm.map_fields, section["map"]) if fields.get("node") == host]
            if not here:
                checks.append({"message": f"No mapping for node {host}.", "severity": "warning"})
            problems = [problem for fields in here if (problem := vm.mapping_problem(fields))]
            checks += [{"message": f"Invalid configuration: {it}\n", "severity": "error"} for it in problems]
            entry["checks"] = checks
        found.append(entry)
    return found


def _storages(_: Parameters) -> list[dict[str, Any]]:
    digest = hashlib.sha1((read_cfs("storage.cfg") or "").encode("latin-1")).hexdigest()
    found = []
    for name, it in sorted(storage.storages().items()):
        entry: dict[str, Any] = {"storage": name, "type": it.kind, "digest": digest, "content": ",".join(it.content)}
        options = {key: value for key, value in it.options.items() if key != "content"}
        entry |= {key: int(value) if value.isdigit() else value for key, value in options.items()}
        found.append(entry)
    return found


def _node_storages(_: Parameters) -> list[dict[str, Any]]:
    file_system = os.statvfs(path("/"))
    total, free = file_system.f_blocks * file_system.f_frsize, file_system.f_bavail * file_system.f_frsize
    return [
        {
            "active": 1,
            "avail": free,
            "content": ",".join(it.content),
            "enabled": 1,
            "shared": int(it.shared),
            "storage": name,
            "total": total,
            "type": it.kind,
            "used": total - free,
            "used_fraction": round((total - free) / total, 6) if total else 0,
        }
        for name, it in sorted(storage.storages().items())
        if it.usable_on(node())
    ]


_HOST = r"/nodes/(?P<host>[^/]+)"
_GET: list[tuple[str, Callable[..., Any]]] = [
    (r"/nodes", _nodes),
    (rf"{_HOST}/status", _local(_node_status)),
    (rf"{_HOST}/hardware/pci", _local(_pci)),
    (rf"{_HOST}/storage", _local(_node_storages)),
    (rf"{_HOST}/lxc", _local(_containers)),
    (rf"{_HOST}/lxc/(?P<vmid>\d+)/config", _local(_container_config)),
    (rf"{_HOST}/lxc/(?P<vmid>\d+)/status/current", _local(_container_status)),
    (rf"{_HOST}/qemu", _local(_machines)),
    (rf"{_HOST}/qemu/(?P<vmid>\d+)/config", _local(_machine_config)),
    (rf"{_HOST}/qemu/(?P<vmid>\d+)/status/current", _local(_machine_status)),
    (r"/cluster/resources", _resources),
    (r"/cluster/status", _cluster_status),
    (r"/cluster/ha/resources", _ha_resources),
    (r"/cluster/ha/status/current", _ha_status),
    (r"/cluster/mapping/pci", _mappings),
    (r"/storage", _storages),
]


# Boot and shutdown of a node


def start_all(*, force: bool = False) -> None:
    """Start what has ``onboot`` on this node, in the order of ``startup``, once there is quorum: pve-guests.service.

    Guests that HA manages are left to it. One that fails does not keep the others from starting.
    """
    ct.publish_status()
    _wait_for_quorum()
    guests: list[tuple[int, int, str]] = []
    for kind, module in (("lxc", ct), ("qemu", vm)):
        for vmid in module.ids():
            conf = module.load(vmid)
            managed = ha.is_managed(f"{'ct' if kind == 'lxc' else 'vm'}:{vmid}")
            if (force or conf.get("onboot") == 1) and conf.get("template") != 1 and not managed:
                order = re.search(r"(?:order=)?(\d+)", str(conf.get("startup", "")))
                guests.append((int(order[1]) if order else 1 << 30, vmid, kind))
    for _, vmid, kind in sorted(guests):
        print(f"Starting {'CT' if kind == 'lxc' else 'VM'} {vmid}", flush=True)
        try:
            if kind == "lxc" and not ct.is_running(vmid):
                with ct.config_lock(vmid):
                    ct.start(vmid)
            elif kind == "qemu" and not vm.running_pid(vmid):
                vm.start(vmid)
        except Die as error:
            print(f"Starting {'CT' if kind == 'lxc' else 'VM'} {vmid} failed: {error.message}", flush=True)


def _wait_for_quorum() -> None:
    for _ in range(60):
        try:
            return check_quorum()
        except Die:
            time.sleep(1)
    raise Die("cluster not ready - no quorum?")


def stop_all() -> None:
    """Stop every guest of this node."""
    for vmid in sorted(ct.running_ids()):
        ct.stop(vmid, kill=False, timeout=60, then_kill=True)
    for vmid in vm.ids():
        vm.stop(vmid)
