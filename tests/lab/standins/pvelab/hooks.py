"""What LXC runs around a container's life: lxc-pve-prestart-hook, -autodev-hook, -poststop-hook of pve-container.

Volumes are mapped and mounted before the start and freed after the end, however it came about. A failing
pre-start hook's own words are lost, as they are on a real host: LXC tells only its exit code.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pvelab import ct, ctconf, storage
from pvelab.base import Die, check_quorum, path, warn
from pvelab.schema import parse_property_string

# What every container of a host sees of the kernel, because there is one kernel: on the lab's hosts it is played,
# so it has to be shown to their containers as well.
KERNEL = (
    "/proc/devices",
    "/proc/driver",
    "/proc/modules",
    "/proc/sys/kernel/osrelease",
    "/proc/version",
    "/sys/bus/pci",
    "/sys/module",
)


def main(hook: Callable[[int], None]) -> None:
    """Run a hook for a container of Proxmox; other LXC containers are left alone."""
    name = os.environ.get("LXC_NAME") or (sys.argv[1] if len(sys.argv) > 1 else "")
    if not name.isdigit():
        return
    try:
        hook(int(name))
    except Die as error:
        warn(error.message)
        sys.exit(error.code)
    except subprocess.CalledProcessError as error:
        warn(f"command '{' '.join(error.cmd)}' failed: exit code {error.returncode}")
        sys.exit(1)


def pre_start(vmid: int) -> None:
    """Map and mount the volumes, and make the nodes of ``devN``, each with its own owner and mode."""
    flag = path(f"/run/lxc/skiplock-{vmid}")
    skip_lock = flag.exists()
    flag.unlink(missing_ok=True)
    check_quorum()
    conf = ct.load(vmid)
    if not skip_lock and conf.get("lock") != "mounted":
        ct.check_lock(conf)
    _check_device_rules(vmid, conf)
    storage.activate(conf)
    for image in storage.images(conf):
        storage.map_image(image)
    rootfs = path(f"/var/lib/lxc/{vmid}/rootfs")
    path(f"/var/lib/lxc/{vmid}/reboot").unlink(missing_ok=True)
    for _, volume in ctconf.volumes(conf):
        _mount(volume, rootfs)
    _hand_over(rootfs, ct.host_id(conf, "u", 0), ct.host_id(conf, "g", 0))
    if hostname := conf.get("hostname"):
        (rootfs / "etc/hostname").write_text(f"{hostname}\n")
    _make_device_nodes(vmid, conf)
    networks = [
        parse_property_string(ctconf.NETWORK, conf[key]) for key in sorted(conf) if re.fullmatch(r"net\d+", key)
    ]
    _networks(vmid).write_text(json.dumps(networks))


def _check_device_rules(vmid: int, conf: ctconf.Conf) -> None:
    """Refuse a device rule as LXC 6 does, which Proxmox VE 8 has; Debian's LXC 5 leaves a bad one out and goes on.

    A rule is ``a``, ``TYPE MAJOR:MINOR ACCESS``, or the path of a node and ACCESS (lxc's cgfsng.c: what follows a full
    "rwm" is not looked at, what follows "rw" has to end there).
    """
    for key, value in conf.get("lxc", []):
        if re.fullmatch(r"lxc\.cgroup2\.devices\.(allow|deny)", key) and not _is_device_rule(value):
            with path(f"/run/pve/ct-{vmid}.stderr").open("a") as log:
                log.write(f'lxc-start: {vmid}: ../src/lxc/cgroups/cgfsng.c: Failed to parse device rule "{value}"\n')
            raise Die(f"Failed to parse device rule {value}", 1)


def _is_device_rule(rule: str) -> bool:
    if rule == "a":
        return True
    access = r"(?:[rwm]{0,2}|[rwm]{3}.*)"
    if match := re.fullmatch(rf"(/\S+)\s{access}", rule):
        return path(match[1]).exists()
    return re.fullmatch(rf"[abc]\s(?:\*|\d+):(?:\*|\d+)\s{access}", rule) is not None


def _mount(volume: dict[str, Any], rootfs: Path) -> None:
    where = str(volume["volume"])
    if volume["type"] == "volume":
        name, image = storage.split_volume(where)
        source = storage.folder(storage.storages()[name], image)
    else:
        source = path(where)
        if volume["type"] == "bind" and not source.is_dir():
            raise Die(f"directory '{where}' does not exist", 2)
    target = rootfs / str(volume["mp"]).lstrip("/")
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--bind", str(source), str(target)], check=True)
    if volume.get("ro"):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(target)], check=True)


def _hand_over(rootfs: Path, owner: int, group: int) -> None:
    """Give a file system to an unprivileged container's ids. On a real host it was made with them."""
    now = rootfs.stat()
    if (now.st_uid, now.st_gid) == (owner, group):
        return
    for folder, folders, files in os.walk(rootfs):
        for name in (".", *folders, *files):
            file = Path(folder, name)
            about = file.lstat()
            if about.st_uid - now.st_uid < 65536 and (name != "." or folder == str(rootfs)):
                os.lchown(file, about.st_uid - now.st_uid + owner, about.st_gid - now.st_gid + group)
                if not stat.S_ISLNK(about.st_mode):
                    file.chmod(stat.S_IMODE(about.st_mode))  # chown takes set-user-id bits away


def _make_device_nodes(vmid: int, conf: ctconf.Conf) -> None:
    top = path(f"/var/lib/lxc/{vmid}/passthrough")
    for old in sorted(top.rglob("*"), reverse=True) if top.exists() else []:
        old.rmdir() if old.is_dir() else old.unlink()
    for _, device in ctconf.devices(conf):
        real = ct.device_node(str(device["path"]))
        node_file = top / str(device["path"]).lstrip("/")
        node_file.parent.mkdir(parents=True, exist_ok=True)
        node_file.unlink(missing_ok=True)
        os.mknod(node_file, stat.S_IFMT(real.st_mode), real.st_rdev)
        os.chmod(node_file, int(str(device.get("mode", "0660")), 8))
        owner, group = int(device.get("uid", 0)), int(device.get("gid", 0))
        os.chown(node_file, ct.host_id(conf, "u", owner), ct.host_id(conf, "g", group))


def auto_dev(vmid: int) -> None:
    """Inside the container's mounts, /dev made: put the nodes of ``devN`` there."""
    top = path(f"/var/lib/lxc/{vmid}/passthrough")
    inside = Path(os.environ["LXC_ROOTFS_MOUNT"])
    for source in sorted(top.rglob("*")) if top.exists() else []:
        if not source.is_dir():
            target = inside / source.relative_to(top)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
            subprocess.run(["mount", "--bind", str(source), str(target)], check=True)


def mount_kernel() -> None:
    """Show the host's played kernel, where the host has one."""
    inside = Path(os.environ["LXC_ROOTFS_MOUNT"])
    played = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    for name in KERNEL:
        if not any(mount == name or mount.startswith(f"{name}/") for mount in played):
            continue
        target = inside / name.lstrip("/")
        if target.exists():
            subprocess.run(["mount", "--rbind", name, str(target)], check=True)
            if name.startswith("/sys/"):  # as all of sysfs is in a container
                subprocess.run(["mount", "-o", "remount,bind,ro", str(target)], check=True)


def mount(vmid: int) -> None:
    """Inside the container's namespaces, before its init: what a real host does not have to do."""
    mount_kernel()
    set_addresses(vmid)


def set_addresses(vmid: int) -> None:
    """Bring the network cards up with their static addresses. Proxmox writes files for the system inside instead."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for net in json.loads(_networks(vmid).read_text()):
        card = net["name"]
        subprocess.run(["ip", "link", "set", card, "down" if net.get("link_down") else "up"], check=True)
        for address in (net.get("ip", ""), net.get("ip6", "")):
            if "/" in address:
                subprocess.run(["ip", "address", "replace", address, "dev", card], check=True)
        for gateway in (net.get("gw"), net.get("gw6")):
            if gateway:
                subprocess.run(["ip", "route", "replace", "default", "via", gateway, "dev", card], check=False)


def _networks(vmid: int) -> Path:
    """What the hooks inside need to know of ``netN``: as an unprivileged user they cannot read /etc/pve."""
    return path(f"/run/pve/ct-{vmid}.networks")


def post_stop(vmid: int) -> None:
    """Free the volumes. A container that reboots itself is stopped here and started anew, with pending changes."""
    subprocess.run(["umount", "--recursive", f"/var/lib/lxc/{vmid}/rootfs"], capture_output=True, check=False)
    with suppress(Die):
        for image in storage.images(ct.load(vmid)):
            storage.unmap_image(image)
    ct.publish_status()
    if os.environ.get("LXC_TARGET") == "reboot":
        path(f"/var/lib/lxc/{vmid}/reboot").touch()
        sys.exit(1)  # else LXC would start it again by itself, with the configuration that it has read


def reboot_trigger(vmid: int) -> None:
    """After the unit's end: start the container again if it asked for a reboot."""
    flag = path(f"/var/lib/lxc/{vmid}/reboot")
    if flag.exists():
        flag.unlink()
        subprocess.run(["systemd-run", "--collect", "--no-block", "--quiet", "pct", "start", str(vmid)], check=False)
