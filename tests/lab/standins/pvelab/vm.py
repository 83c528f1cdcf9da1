"""Virtual machines: no QEMU, but all that a start of one does to the host's PCI devices.

Read in qemu-server (PVE/QemuServer/PCI.pm) and pve-common (PVE/SysFSTools.pm): a start binds the **whole IOMMU
group** of every device to vfio-pci, through ``new_id`` with vendor and device only, so that from then on vfio-pci takes
every card of that model. After a stop nothing is bound back. What stands for QEMU is the process ``kvm``.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pvelab.base import Die, check_quorum, die_on_fault, fault, lock_file, node, path, read_cfs, warn
from pvelab.ctconf import decode_text
from pvelab.schema import Field, FormatError, parse_property_string

_BDF = r"(?:[a-f0-9]{4,}:)?[a-f0-9]{2}:[a-f0-9]{2}(?:\.[a-f0-9])?"
HOSTPCI = {
    "host": Field(default_key=True, pattern=rf"{_BDF}(;{_BDF})*"),
    "mapping": Field(pattern=r"[a-zA-Z][a-zA-Z0-9_-]+"),
    "rombar": Field("boolean"),
    "romfile": Field(pattern="[^,;]+"),
    "pcie": Field("boolean"),
    "x-vga": Field("boolean"),
    "legacy-igd": Field("boolean"),
    "mdev": Field(pattern=r"[^/.:]+"),
    **{name: Field() for name in ("vendor-id", "device-id", "sub-vendor-id", "sub-device-id")},
}
_NUMBERS = ("cores", "sockets", "onboot", "template")  # ``memory`` is a text here, as the API has it
RUN = "/run/qemu-server"
DEVICES = "/sys/bus/pci/devices"

Conf = dict[str, Any]


# The configuration file


def config_name(vmid: int, host: str | None = None) -> str:
    """The file below /etc/pve."""
    return f"nodes/{host or node()}/qemu-server/{vmid}.conf"


def load(vmid: int, host: str | None = None) -> Conf:
    """The parsed main section; what it cannot parse is dropped with a warning, unlike a container's."""
    raw = read_cfs(config_name(vmid, host))
    if raw is None:
        raise Die(f"Configuration file '{config_name(vmid, host)}' does not exist", 2)
    return parse(raw, vmid)


def parse(raw: str, vmid: int) -> Conf:
    """Parse a file whose bytes are characters: ``pending`` is a section of its own, snapshots are left out."""
    result: Conf = {"digest": hashlib.sha1(raw.encode("latin-1")).hexdigest(), "pending": {}}
    conf, description = result, ""
    for line in raw.split("\n"):
        if not line.strip():
            continue
        if line.startswith("["):
            conf = result["pending"] if line.strip().upper() == "[PENDING]" else {}
        elif line.startswith("#"):
            description += decode_text(line[1:]) + "\n" if conf is result else ""
        elif match := re.match(r"([a-z][a-z_\-]*\d*):\s*(.+?)\s*$", line):
            key, value = match[1], match[2]
            try:
                if re.fullmatch(r"hostpci\d+", key):
                    parse_property_string(HOSTPCI, value)
                conf[key] = int(value) if key in _NUMBERS and value.isdigit() else value
            except FormatError as error:
                warn(f"vm {vmid} - unable to parse value of '{key}' - {error}")
        else:
            warn(f"vm {vmid} - unable to parse config: {line}")
    if description:
        result["description"] = description
    return result


def ids(host: str | None = None) -> list[int]:
    """The VMs of this node (or ``host``)."""
    files = path(f"/etc/pve/nodes/{host or node()}/qemu-server")
    return sorted(int(file.stem) for file in files.glob("*.conf") if file.stem.isdigit())


# What runs


def running_pid(vmid: int) -> int:
    """The process id of a running VM, else 0 (``vm_running_locally``: the pid file, and that the process is it)."""
    with suppress(OSError, ValueError):
        pid = int(path(f"{RUN}/{vmid}.pid").read_text())
        words = path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"-id" in words and words[words.index(b"-id") + 1] == str(vmid).encode():
            return pid
    return 0


def start(vmid: int) -> None:
    """Start a VM: take its devices, whoever has them, and let the process for QEMU run."""
    if running_pid(vmid):
        raise Die(f"VM {vmid} already running")
    check_quorum()
    with lock_file(f"/var/lock/qemu-server/lock-{vmid}.conf", 10):
        conf = load(vmid)
        if conf.get("template") == 1:
            raise Die("you can't start a vm if it's a template")
        if conf.get("lock"):
            raise Die(f"VM is locked ({conf['lock']})")
        die_on_fault("qm-start-fail", "start failed: QEMU exited with code 1")
        conf |= {key: value for key, value in conf["pending"].items() if key != "delete"}
        devices = _choose_devices(conf, vmid)
        reserve(devices, vmid, until=time.time() + 35)
        try:
            for device in devices:
                _prepare(device)
            pid = _run(vmid, conf, devices)
        except Die:
            release(vmid)
            raise
        reserve(devices, vmid, pid=pid)


def stop(vmid: int, *, timeout: int = 60) -> None:
    """Stop a VM. Its devices stay with vfio-pci."""
    if pid := running_pid(vmid):
        if fault("qm-stop-fail") is not None:
            raise Die("VM quit/powerdown failed - got timeout")
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + timeout
        while running_pid(vmid):
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
    path(f"{RUN}/{vmid}.pid").unlink(missing_ok=True)
    release(vmid)


def _run(vmid: int, conf: Mapping[str, Any], devices: list[str]) -> int:
    """Start the process for QEMU in a scope of its own, as Proxmox does, and return its id."""
    command = ["/usr/bin/kvm", "-id", str(vmid), "-name", f"{conf.get('name', f'VM{vmid}')},debug-threads=on"]
    command += ["-pidfile", f"{RUN}/{vmid}.pid", "-daemonize", "-m", str(conf.get("memory", 512))]
    for device in devices:
        command += ["-device", f"vfio-pci,host={device}"]
    path(RUN).mkdir(parents=True, exist_ok=True)
    scope = ["systemd-run", "--quiet", "--scope", "--collect", "--slice=qemu", f"--unit={vmid}"]
    done = subprocess.run([*scope, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Die(f"start failed: command '{' '.join(command)}' failed: {done.stderr.strip()}")
    return running_pid(vmid)


# PCI devices


def pci_devices_all() -> list[str]:
    """The addresses of all PCI devices."""
    top = path(DEVICES)
    return sorted(file.name for file in top.iterdir()) if top.is_dir() else []


def pci_devices(prefix: str) -> list[str]:
    """The addresses below "4f:00" or "0000:4f:00.0"; the domain 0000 may be left out."""
    wanted = prefix if prefix.count(":") == 2 else f"0000:{prefix}"
    functions = () if "." in wanted else (f"{wanted}.",)
    return [name for name in pci_devices_all() if name == wanted or name.startswith(functions)]


def attribute(device: str, name: str) -> str:
    """A file of a device in sysfs, without "0x"; empty when it is not there."""
    try:
        return path(f"{DEVICES}/{device}/{name}").read_text().strip().removeprefix("0x")
    except OSError:
        return ""


def iommu_group(device: str) -> int:
    """The number of a device's IOMMU group, -1 for none."""
    try:
        return int(os.readlink(path(f"{DEVICES}/{device}/iommu_group")).rpartition("/")[2])
    except (OSError, ValueError):
        return -1


def group_members(device: str) -> list[str]:
    """All devices of a device's IOMMU group, itself among them."""
    try:
        return sorted(os.listdir(path(f"{DEVICES}/{device}/iommu_group/devices")))
    except OSError as error:
        raise Die(f"Cannot open iommu_group: {error.strerror}") from None


def mappings() -> dict[str, dict[str, Any]]:
    """/etc/pve/mapping/pci.cfg: each mapping's ``map`` lines and other options."""
    found: dict[str, dict[str, Any]] = {}
    section: dict[str, Any] = {}
    for line in (read_cfs("mapping/pci.cfg") or "").split("\n"):
        if re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_-]+", line.strip()) and not line[:1].isspace():
            section = found.setdefault(line.strip(), {"map": []})
        elif option := re.match(r"\s+(\S+)\s+(.*?)\s*$", line):
            if option[1] == "map":
                section["map"].append(option[2])
            else:
                section[option[1]] = option[2]
    return found


def map_fields(text: str) -> dict[str, str]:
    """The parts of one ``map`` line."""
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part)


def mapping_problem(fields: Mapping[str, str]) -> str:
    """What differs between a mapping and the device that is there (``assert_valid``), or an empty text."""
    for given in fields["path"].split(";"):
        device = given if "." in given else f"{given}.0"
        if not path(f"{DEVICES}/{device}").exists():
            return f"pci device '{device}' not found"
        real = {"id": f"{attribute(device, 'vendor')}:{attribute(device, 'device')}"}
        if iommu_group(device) >= 0:
            real["iommugroup"] = str(iommu_group(device))
        if attribute(device, "subsystem_vendor"):
            real["subsystem-id"] = f"{attribute(device, 'subsystem_vendor')}:{attribute(device, 'subsystem_device')}"
        for name, value in real.items():
            if name not in fields:
                return f"missing expected property '{name}' for device '{device}'"
            if fields[name] != value:
                return f"'{name}' does not match for '{device}' ({fields[name]} != {value})"
    return ""


def _alternatives(value: str) -> list[list[str]]:
    """What one ``hostpciN`` may take: for a mapping one set of devices for each line for this node."""
    options = parse_property_string(HOSTPCI, value)
    host, mapping = options.get("host"), options.get("mapping")
    if host and mapping:
        raise Die("Cannot set both 'host' and 'mapping'.")
    if host:
        choices = [str(host)]
    elif mapping:
        lines = [map_fields(line) for line in mappings().get(str(mapping), {}).get("map", [])]
        here = [fields for fields in lines if fields.get("node") == node()]
        if not here:
            raise Die(f"PCI device mapping not found for '{mapping}'")
        for fields in here:
            if problem := mapping_problem(fields):
                raise Die(f"PCI device mapping invalid (hardware probably changed): {problem}")
        choices = [fields["path"] for fields in here]
    else:
        raise Die("Either 'host' or 'mapping' must be set.")
    return [list(_found(choice)) for choice in choices]


def _found(choice: str) -> Iterator[str]:
    for given in choice.split(";"):
        devices = pci_devices(given)
        if not devices:
            raise Die(f"no PCI device found for '{given}'")
        yield from devices


def _choose_devices(conf: Mapping[str, Any], vmid: int) -> list[str]:
    """The devices of all ``hostpciN``: of a mapping the first set that nobody else has."""
    chosen: list[str] = []
    for n in range(16):
        if f"hostpci{n}" not in conf:
            continue
        options = parse_property_string(HOSTPCI, str(conf[f"hostpci{n}"]))
        if options.get("pcie") and "q35" not in str(conf.get("machine", "")):
            raise Die("q35 machine model is not enabled at /usr/share/perl5/PVE/QemuServer/PCI.pm line 539.")
        choices = _alternatives(str(conf[f"hostpci{n}"]))
        free = [choice for choice in choices if not any(_holder(device, vmid) or device in chosen for device in choice)]
        if len(choices) > 1 and not free:
            raise Die(f"could not find a free device for 'hostpci{n}'")
        picked = free[0] if free else choices[0]
        if twice := [device for device in picked if device in chosen]:
            raise Die(f"PCI device '{twice[0]}' assigned more than once")
        chosen += picked
    return chosen


def _prepare(device: str) -> None:
    """Bind a device and its whole IOMMU group to vfio-pci (``pci_dev_group_bind_to_vfio``)."""
    if not path(f"{DEVICES}/{device}").exists():
        raise Die(f"no pci device info for device '{device}'")
    driver = path("/sys/bus/pci/drivers/vfio-pci")
    if not driver.is_dir():
        subprocess.run(["modprobe", "vfio-pci"], capture_output=True, check=False)
    if not driver.is_dir():
        raise Die("Cannot find vfio-pci module!")
    for member in group_members(device):
        if path(f"{DEVICES}/{member}/pci_bus").exists():
            continue  # a bridge
        if not _bind(member, driver):
            raise Die(f"Cannot bind {member} to vfio")


def _bind(device: str, driver: Path) -> bool:
    bound = driver / device
    if bound.exists():
        return True
    try:
        (driver / "new_id").write_text(f"{attribute(device, 'vendor')} {attribute(device, 'device')}")
    except FileExistsError:
        pass  # another card of the model was first
    except OSError:
        return False
    unbind = path(f"{DEVICES}/{device}/driver/unbind")
    with suppress(FileNotFoundError):
        unbind.write_text(device)  # blocks for as long as somebody uses it
    if not bound.exists():
        with suppress(OSError):
            (driver / "bind").write_text(device)
    return bound.exists()


# Who has which device: lines "BDF VMID pid:PID" or "BDF VMID time:EXPIRY"


def reservations() -> dict[str, tuple[int, str, int]]:
    """The reservation file: by address the VM, "pid" or "time", and its number."""
    try:
        text = path(f"{RUN}/pci-id-reservations").read_text()
    except OSError:
        return {}
    lines = re.findall(r"^(\S+) (\d+) (pid|time):(\d+)$", text, re.MULTILINE)
    return {device: (int(vmid), kind, int(number)) for device, vmid, kind, number in lines}


def _holder(device: str, vmid: int) -> int:
    """The other VM that has a device now, or 0."""
    other, kind, number = reservations().get(device, (vmid, "", 0))
    if other == vmid:
        return 0
    return other if (kind == "pid" and running_pid(other) == number) or (kind == "time" and number > time.time()) else 0


def reserve(devices: list[str], vmid: int, *, pid: int = 0, until: float = 0) -> None:
    """Write down that a VM has devices; dies when another one has one of them."""
    if not devices:
        return
    with lock_file(f"{RUN}/pci-id-reservations.lock", 5):
        found = reservations()
        for device in devices:
            if other := _holder(device, vmid):
                if found[device][1] == "time":
                    raise Die(f"PCI device '{device}' is currently reserved for use by VMID '{other}'")
                raise Die(f"PCI device '{device}' already in use by VMID '{other}'")
            found[device] = (vmid, "pid", pid) if pid else (vmid, "time", int(until))
        _write_reservations(found)


def release(vmid: int) -> None:
    """Take a VM's reservations away."""
    with lock_file(f"{RUN}/pci-id-reservations.lock", 5):
        _write_reservations({device: entry for device, entry in reservations().items() if entry[0] != vmid})


def _write_reservations(found: Mapping[str, tuple[int, str, int]]) -> None:
    file = path(f"{RUN}/pci-id-reservations")
    if found or file.exists():
        entries = sorted(found.items())
        file.write_text("".join(f"{device} {vmid} {kind}:{number}\n" for device, (vmid, kind, number) in entries))


# What others are told


def status(vmid: int) -> dict[str, Any]:
    """One VM as /nodes/N/qemu shows it."""
    conf = parse(read_cfs(config_name(vmid)) or "", vmid)
    pid = running_pid(vmid)
    found: dict[str, Any] = {
        "vmid": vmid,
        "name": conf.get("name", f"VM {vmid}"),
        "status": "running" if pid else "stopped",
        "cpus": int(conf.get("sockets", 1)) * int(conf.get("cores", 1)),
        "maxmem": int(str(conf.get("memory", "512")).split(",")[0]) << 20,
        "maxdisk": 0,
    }
    found |= dict.fromkeys(("cpu", "disk", "diskread", "diskwrite", "mem", "netin", "netout", "uptime"), 0)
    if pid:
        found |= {"pid": pid, "qmpstatus": "running"}
    for key in ("lock", "tags"):
        if key in conf:
            found[key] = conf[key]
    if conf.get("template") == 1:
        found["template"] = 1
    return found
