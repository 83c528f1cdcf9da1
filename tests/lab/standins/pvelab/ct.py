"""Containers: their configuration files, LXC's configuration made from them, starting, stopping and changing them.

Read in pve-container (PVE/LXC.pm, PVE/LXC/Config.pm, PVE/API2/LXC/Config.pm, PVE/API2/LXC/Status.pm) and
pve-guest-common (PVE/AbstractConfig.pm). What runs is a real LXC container in a unit ``pve-container@ID``.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pvelab import ctconf, storage
from pvelab.base import (
    Die,
    die_on_fault,
    fault,
    lock_file,
    node,
    path,
    read_cfs,
    split_list,
    warn,
    write_cfs,
)
from pvelab.ctconf import Conf
from pvelab.schema import FormatError, parse_property_string

# Changed at once on a running container; all else waits in [pve:pending] for its next start.
_AT_ONCE = frozenset(
    ("description", "onboot", "startup", "protection", "hostname", "hookscript", "cores", "tags", "lock")
)
_LIMITS = frozenset(("memory", "swap", "cpulimit", "cpuunits"))  # written into the control group, where it has them


# The configuration file


def config_name(vmid: int, host: str | None = None) -> str:
    """The file below /etc/pve."""
    return f"nodes/{host or node()}/lxc/{vmid}.conf"


def load(vmid: int, host: str | None = None) -> Conf:
    """The parsed configuration of a container on this node (or ``host``); warnings go to stderr."""
    name = config_name(vmid, host)
    raw = read_cfs(name)
    if raw is None:
        raise Die(f"Configuration file '{name}' does not exist", 2)
    return ctconf.parse(raw, vmid)


def save(vmid: int, conf: Conf) -> None:
    """Write a configuration as Proxmox does: sorted, and without what it could not parse."""
    write_cfs(config_name(vmid), ctconf.write(conf))


def ids(host: str | None = None) -> list[int]:
    """The containers of this node (or ``host``)."""
    files = path(f"/etc/pve/nodes/{host or node()}/lxc")
    return sorted(int(file.stem) for file in files.glob("*.conf") if file.stem.isdigit())


def config_lock(vmid: int) -> AbstractContextManager[None]:
    """Proxmox's own lock of a configuration: an flock of this node, waited for 10 s."""
    return lock_file(f"/run/lock/lxc/pve-config-{vmid}.lock", 10)


def check_lock(conf: Mapping[str, Any]) -> None:
    """Die when the configuration has a ``lock``."""
    if conf.get("lock"):
        raise Die(f"CT is locked ({conf['lock']})")


def remove_lock(vmid: int, kind: str | None = None) -> None:
    """Take the ``lock`` out of a configuration; the caller holds ``config_lock``."""
    conf = load(vmid)
    if not conf.get("lock"):
        raise Die(f"no lock found trying to remove {repr(kind) if kind else 'any'} lock")
    if kind and conf["lock"] != kind:
        raise Die(f"found lock '{conf['lock']}' trying to remove '{kind}' lock")
    del conf["lock"]
    save(vmid, conf)


def check_protection(conf: Mapping[str, Any], what: str) -> None:
    """Die when the container is protected."""
    if conf.get("protection"):
        raise Die(f"{what} - protection mode enabled")


def current(vmid: int, *, without_pending: bool = False) -> Conf:
    """The configuration as ``pct config`` shows it: with what is pending, unless asked otherwise."""
    conf = load(vmid)
    pending = conf.pop("pending")
    del conf["snapshots"]
    if not without_pending:
        for key in pending_deletions(pending):
            conf.pop(key, None)
        conf |= {key: value for key, value in pending.items() if key not in ("delete", "lxc")}
    return conf


def pending_deletions(pending: Mapping[str, Any]) -> list[str]:
    """The keys that ``delete:`` of a [pve:pending] section names."""
    return sorted(key.lstrip("!") for key in split_list(str(pending.get("delete", ""))))


# What runs


def running_ids() -> set[int]:
    """The containers that run here: those whose LXC monitor listens on its abstract socket."""
    try:
        sockets = path("/proc/net/unix").read_text()
    except OSError:
        return set()
    return {int(number) for number in re.findall(r"@/var/lib/lxc/(\d+)/command$", sockets, re.MULTILINE)}


def is_running(vmid: int) -> bool:
    """Whether a container runs on this node."""
    return vmid in running_ids()


def init_pid(vmid: int) -> int:
    """The process id of a container's init; 0 when it has none."""
    text = _output(["lxc-info", "-n", str(vmid), "-p", "-H"])
    return int(text) if text.isdigit() else 0


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


# LXC's configuration


def id_map(conf: Mapping[str, Any]) -> list[tuple[str, int, int, int]]:
    """How ids in the container map to the host's: from ``lxc.idmap``, else the usual one when unprivileged."""
    entries = [value.split() for key, value in conf.get("lxc", []) if key == "lxc.idmap"]
    try:
        found = [(kind, int(inside), int(outside), int(length)) for kind, inside, outside, length in entries]
    except ValueError:
        values = ", ".join(" ".join(entry) for entry in entries)
        raise Die(f"failed to parse idmap: {values}") from None
    if not found and conf.get("unprivileged"):
        found = [("u", 0, 100000, 65536), ("g", 0, 100000, 65536)]
    return found


def host_id(conf: Mapping[str, Any], kind: str, inside: int) -> int:
    """The host's number of a user ("u") or group ("g") of the container."""
    for this, first, outside, length in id_map(conf):
        if this == kind and first <= inside < first + length:
            return outside - first + inside
    return inside


def device_node(where: str) -> os.stat_result:
    """What a ``devN`` path is; dies when it is missing or no device (``get_device_mode_and_rdev``)."""
    try:
        found = path(where).stat()
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise Die(f"Device {where} {reason}", 2) from None
    if not (stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode)):
        raise Die(f"{where} is not a device")
    return found


def _controllers() -> set[str]:
    try:
        return set(path("/sys/fs/cgroup/cgroup.controllers").read_text().split())
    except OSError:
        return set()


def lxc_config(vmid: int, conf: Conf) -> str:
    """The text of /var/lib/lxc/ID/config: the order of lines is that of ``update_lxc_config``.

    Everything that cannot be is found here: a missing device, a bridge that is not there.
    """
    top = f"/var/lib/lxc/{vmid}"
    for key in ("arch", "ostype"):
        if not conf.get(key):
            raise Die(f"missing '{key}' - internal error at /usr/share/perl5/PVE/LXC.pm line 624.")
    raw_keys = {key for key, _ in conf.get("lxc", [])}
    unprivileged = bool(conf.get("unprivileged")) or "lxc.idmap" in raw_keys
    features = parse_property_string(ctconf.FEATURES, str(conf.get("features", "")))
    lines = [
        "lxc.cgroup.relative = 0",
        f"lxc.cgroup.dir.monitor = lxc.monitor/{vmid}",
        f"lxc.cgroup.dir.container = lxc/{vmid}",
        "lxc.cgroup.dir.container.inner = ns",
        f"lxc.arch = {conf['arch']}",
        f"lxc.include = {_include(conf['ostype'], 'common')}",
    ]
    if unprivileged:
        lines.append(f"lxc.include = {_include(conf['ostype'], 'userns')}")
    if "lxc.apparmor.profile" in raw_keys:
        given = [f"features:{name}" for name in ("fuse", "nesting", "mount") if features.get(name)]
        if given:
            warn(f"explicitly configured lxc.apparmor.profile overrides the following settings: {', '.join(given)}")
    else:
        lines.append("lxc.apparmor.profile = generated")
        if features.get("nesting"):
            lines.append("lxc.apparmor.allow_nesting = 1")
        else:
            lines += [f"lxc.apparmor.raw = deny mount -> /{tree}/," for tree in ("proc", "sys")]
        lines += [f"lxc.apparmor.raw = mount fstype={kind}," for kind in split_list(str(features.get("mount", "")))]
    if features.get("fuse"):
        lines.append("lxc.apparmor.raw = mount fstype=fuse,")
        lines.append("lxc.mount.entry = /dev/fuse dev/fuse none bind,create=file 0 0")
    if unprivileged and not features.get("force_rw_sys"):
        lines.append("lxc.mount.auto = sys:mixed")
    for _, device in ctconf.devices(conf):
        lines += _device_rules(str(device["path"]), bool(device.get("deny-write")))
    lines.append("lxc.monitor.unshare = 1")
    if unprivileged and "lxc.idmap" not in raw_keys:
        lines += ["lxc.idmap = u 0 100000 65536", "lxc.idmap = g 0 100000 65536"]
    if conf.get("console") == 0:
        lines += ["lxc.console.path = none", "lxc.cgroup2.devices.deny = c 5:1 rwm"]
    lines += [
        f"lxc.tty.max = {conf.get('tty', 2)}",
        "lxc.environment = TERM=linux",
        f"lxc.uts.name = {conf.get('hostname', f'CT{vmid}')}",
    ]
    lines += _limits(conf)
    if "rootfs" not in conf:
        raise Die("missing 'rootfs' configuration")
    ctconf.parse_volume("rootfs", conf["rootfs"])
    lines.append(f"lxc.rootfs.path = {top}/rootfs")
    for key in sorted(conf):
        if match := re.fullmatch(r"net(\d+)", key):
            lines += _network(vmid, int(match[1]), parse_property_string(ctconf.NETWORK, conf[key]))
    lines += [f"{key} = {value}" for key, value in conf.get("lxc", [])]
    return "".join(line + "\n" for line in lines)


def _include(ostype: str, kind: str) -> str:
    own = f"/usr/share/lxc/config/{ostype}.{kind}.conf"
    return own if path(own).exists() else f"/usr/share/lxc/config/{kind}.conf"


def _device_rules(where: str, deny_write: bool) -> list[str]:
    found = device_node(where)
    name = f"{'b' if stat.S_ISBLK(found.st_mode) else 'c'} {os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
    if deny_write:
        return [f"lxc.cgroup2.devices.allow = {name} r", f"lxc.cgroup2.devices.deny = {name} w"]
    return [f"lxc.cgroup2.devices.allow = {name} rw"]


def _limits(conf: Mapping[str, Any]) -> list[str]:
    """Memory and CPU, for the controllers that this node has, as Proxmox itself asks."""
    lines = []
    if "memory" in (controllers := _controllers()):
        memory = int(conf.get("memory", 512))
        high = (memory - 128) << 20 if memory >= 16 * 1024 else memory * 1024 * 1016
        lines += [f"lxc.cgroup2.memory.max = {memory << 20}", f"lxc.cgroup2.memory.high = {high}"]
        lines.append(f"lxc.cgroup2.memory.swap.max = {int(conf.get('swap', 0)) << 20}")
    if "cpu" in controllers:
        if limit := float(conf.get("cpulimit", 0)):
            lines.append(f"lxc.cgroup2.cpu.max = {int(100000 * limit)} 100000")
        if "cpuunits" in conf:
            lines.append(f"lxc.cgroup2.cpu.weight = {min(max(int(conf['cpuunits']), 1), 10000)}")
    return lines


def _network(vmid: int, number: int, net: Mapping[str, Any]) -> list[str]:
    bridge = net.get("bridge")
    mtu_file = path(f"/sys/class/net/{bridge}/mtu")
    if not bridge or not mtu_file.exists():
        raise Die(f"bridge '{bridge}' does not exist", 2)
    bridge_mtu = int(mtu_file.read_text())
    mtu = int(net.get("mtu", bridge_mtu))
    if mtu > bridge_mtu:
        raise Die(f"net{number}: MTU size '{mtu}' is bigger than bridge MTU '{bridge_mtu}'")
    lines = [f"lxc.net.{number}.type = veth", f"lxc.net.{number}.veth.pair = veth{vmid}i{number}"]
    if "hwaddr" in net:
        lines.append(f"lxc.net.{number}.hwaddr = {net['hwaddr']}")
    return [
        *lines,
        f"lxc.net.{number}.name = {net['name']}",
        f"lxc.net.{number}.mtu = {mtu}",
        f"lxc.net.{number}.script.up = /usr/share/lxc/lxcnetaddbr",
    ]


def update_lxc_config(vmid: int, conf: Conf) -> None:
    """Write /var/lib/lxc/ID/config from a configuration."""
    top = path(f"/var/lib/lxc/{vmid}")
    if conf.get("template"):
        (top / "config").unlink(missing_ok=True)
        return
    text = lxc_config(vmid, conf)
    (top / "rootfs").mkdir(parents=True, exist_ok=True)
    beside = top / f"config.tmp.{os.getpid()}"
    beside.write_bytes(text.encode("latin-1"))
    beside.rename(top / "config")


# Start and stop


def start(vmid: int, *, skip_lock: bool = False) -> None:
    """Start a container and wait until it runs: the task of ``pct start``."""
    die_on_fault("pct-start-fail", f"startup for container '{vmid}' failed")
    conf = load(vmid)
    if conf.get("template"):
        raise Die("you can't start a CT if it's a template")
    if not skip_lock and conf.get("lock") != "mounted":
        check_lock(conf)
    vm_start(vmid, conf, skip_lock=skip_lock)


def vm_start(vmid: int, conf: Conf, *, skip_lock: bool = False) -> None:
    """Apply what is pending, write LXC's configuration, start the unit, wait for the container."""
    try:
        if conf["pending"]:
            apply_pending(vmid, conf)
            save(vmid, conf)
            conf = load(vmid)
        update_lxc_config(vmid, conf)
    except Die as error:
        raise Die(error.message) from None  # a task that fails is always 255
    storage.activate(conf)
    if skip_lock:
        flag = path(f"/run/lxc/skiplock-{vmid}")
        flag.parent.mkdir(parents=True, exist_ok=True)
        flag.touch()
    errors = path(f"/run/pve/ct-{vmid}.stderr")
    errors.parent.mkdir(parents=True, exist_ok=True)
    errors.unlink(missing_ok=True)
    unit = f"pve-container@{vmid}"
    subprocess.run(["systemctl", "reset-failed", unit], capture_output=True, check=False)
    begun = subprocess.run(["systemctl", "start", unit], capture_output=True, text=True, check=False)
    if begun.returncode:
        raise Die(begun.stderr + f"command 'systemctl start {unit}' failed: exit code {begun.returncode}")
    if not _comes_up(vmid, unit):
        _print_start_errors(vmid, errors)
        raise Die(f"startup for container '{vmid}' failed")
    publish_status()


def _comes_up(vmid: int, unit: str) -> bool:
    """Wait until the container runs (True) or its unit has ended (False). LXC's own end is always one of the two."""
    while True:
        if _output(["lxc-info", "-n", str(vmid), "-s", "-H"]) == "RUNNING":
            return True
        if _output(["systemctl", "show", "--property=ActiveState", "--value", unit]) in ("failed", "inactive"):
            return False
        time.sleep(0.05)


def _print_start_errors(vmid: int, errors: Path) -> None:
    """Print what lxc-start said, without its own prefix (``print_ct_stderr_log``)."""
    if errors.exists():
        for line in errors.read_text(errors="replace").splitlines():
            warn(re.sub(rf"^\s*(lxc-start:?\s+{vmid}:?\s*\S+\s*)?", "", line).rstrip())


def stop(vmid: int, *, kill: bool, timeout: int | None = None, then_kill: bool = False) -> None:
    """Stop a container and wait until nothing of it is left: ``vm_stop``. Returns at once when it does not run.

    Without ``kill`` its init is asked, and waited for ``timeout`` seconds (60 when None).
    """
    if not is_running(vmid):
        return
    die_on_fault("pct-stop-fail", "container did not stop")
    if not kill and fault("pct-shutdown-ignored") is not None:
        time.sleep(60 if timeout is None else timeout)
        if not then_kill:
            raise Die("container did not stop")
        kill = True
    command = ["lxc-stop", "-n", str(vmid)]
    if kill:
        command.append("--kill")
    else:
        command += [] if then_kill else ["--nokill"]
        command += [] if timeout is None else ["--timeout", str(timeout)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and is_running(vmid):
        warn(f"{done.stderr}command '{' '.join(command)}' failed: exit code {done.returncode}")
        if not _ends(vmid, (timeout or 0) + 5):
            raise Die("container did not stop")
    _wait_for_unit(vmid)


def _ends(vmid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while is_running(vmid):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _wait_for_unit(vmid: int) -> None:
    """Wait until the unit has ended, hooks included: only then the volumes are free."""
    unit = f"pve-container@{vmid}"
    show = ["systemctl", "show", "--property=ActiveState", "--value", unit]
    while _output(show) in ("active", "deactivating"):
        time.sleep(0.05)


def reboot(vmid: int, timeout: int | None) -> None:
    """Shut a container down (kill it after the time) and start it again, with what was pending."""
    with config_lock(vmid):
        if not is_running(vmid):
            return
        stop(vmid, kill=False, timeout=timeout, then_kill=True)
        vm_start(vmid, load(vmid))


def publish_status() -> None:
    """Tell the other nodes what runs here: a part of what pvestatd broadcasts."""
    file = path(f"{storage.RBD}/.pvestatd/{node()}")
    try:
        file.parent.mkdir(exist_ok=True)
        beside = file.with_suffix(f".{os.getpid()}")
        beside.write_text("".join(f"{vmid}\n" for vmid in sorted(running_ids())))
        beside.rename(file)
    except OSError:
        return  # no shared storage in this lab


# Change


def set_options(vmid: int, changes: dict[str, Any], delete: Sequence[str], revert: Sequence[str], digest: str) -> None:
    """The work of ``pct set``, with the lock held: **the file is written before the start configuration is checked**.

    So a change that exits with "Device /dev/nvidia0 does not exist" is on the disk all the same.
    """
    with config_lock(vmid):
        conf = load(vmid)
        check_lock(conf)
        if digest and digest != conf["digest"]:
            raise Die("detected modified configuration - file changed by other user? Try again.")
        running = is_running(vmid)
        problems = _change(vmid, conf, running, changes, delete, revert)
        save(vmid, conf)
        if fault("pct-die-after-write") is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        die_on_fault("pct-set-fail-after-write", "interrupted by signal")
        update_lxc_config(vmid, load(vmid))
        if problems:
            raise Die("400 Parameter verification failed.\n" + "".join(f"{k}: {v}\n" for k, v in problems.items()))


def _change(
    vmid: int, conf: Conf, running: bool, changes: dict[str, Any], delete: Sequence[str], revert: Sequence[str]
) -> dict[str, str]:
    pending = conf["pending"]
    deletions = set(pending_deletions(pending))
    for key in revert:
        pending.pop(key, None)
        deletions.discard(key)
    touched = set()
    for key in delete:
        if key not in conf and key not in pending:
            warn(f"cannot delete '{key}' - not set in current configuration!")
            continue
        touched.add(key)
        if key in ("memory", "rootfs", "ostype"):
            raise Die(f"unable to delete required option '{key}'")
        if key == "unprivileged":
            raise Die("unable to delete read-only option: 'unprivileged'")
        if re.fullmatch(r"(mp|unused)\d+", key):
            check_protection(conf, f"can't remove CT {vmid} drive '{key}'")
        deletions.add(key)
    for key in sorted(changes):
        touched.add(key)
        pending[key] = _checked(vmid, conf, key, changes[key])
        deletions.discard(key)
    for key in [key for key in pending if key != "delete" and key in conf and str(pending[key]) == str(conf[key])]:
        del pending[key]
    _keep_deletions(conf, deletions)
    if running:
        return _apply_to_running(conf, touched)
    apply_pending(vmid, conf, touched)
    return {}


def _checked(vmid: int, conf: Conf, key: str, value: Any) -> Any:
    if key == "rootfs" or re.fullmatch(r"mp\d+", key):
        check_protection(conf, f"can't update CT {vmid} drive '{key}'")
        volume = ctconf.parse_volume(key, value)
        if volume["type"] == "volume":
            name, _ = storage.split_volume(str(volume["volume"]))
            found = storage.storages().get(name)
            if found is None:
                raise Die(f"storage '{name}' does not exist")
            if "rootdir" not in found.content:
                raise Die(f"storage '{name}' does not allow content type 'rootdir' (Container)")
    elif key == "unprivileged":
        raise Die("unable to modify read-only option: 'unprivileged'")
    elif key == "tags":
        return ";".join(sorted(set(split_list(str(value)))))
    elif re.fullmatch(r"dev\d+", key):
        device = parse_property_string(ctconf.DEVICE, str(value))
        if "path" not in device:
            raise Die("Path has to be defined")
        device_node(str(device["path"]))
    return value


def _keep_deletions(conf: Conf, keys: set[str]) -> None:
    """Write the deletions back into [pve:pending], without those of what is not there."""
    left = sorted(key for key in keys if key in conf)
    conf["pending"].pop("delete", None)
    if left:
        conf["pending"]["delete"] = ",".join(left)


def _apply_to_running(conf: Conf, touched: set[str]) -> dict[str, str]:
    """Apply what can be changed at once. A ``devN`` cannot, new or not (PVE 8): it stays pending."""
    pending, problems = conf["pending"], {}
    deletions = set(pending_deletions(pending))
    for key in sorted(deletions & touched):
        if key in _AT_ONCE | _LIMITS - {"memory"}:
            conf.pop(key, None)
            deletions.discard(key)
    _keep_deletions(conf, deletions)
    for key in sorted(touched & set(pending) - {"delete"}):
        if key in _AT_ONCE | _LIMITS:
            conf[key] = pending.pop(key)
        elif re.fullmatch(r"net\d+", key) or (re.fullmatch(r"mp\d+", key) and key not in conf):
            problems[key] = f"unable to hotplug {key}: the lab does not play this"
    return problems


def apply_pending(vmid: int, conf: Conf, selection: set[str] | None = None) -> None:
    """Make pending changes real on a stopped container: all of them, or those of a selection."""
    pending = conf["pending"]
    deletions = set(pending_deletions(pending))
    for key in sorted(deletions if selection is None else deletions & selection):
        if re.fullmatch(r"mp\d+", key) and key in conf:
            _keep_as_unused(conf, key)
        conf.pop(key, None)
        deletions.discard(key)
    _keep_deletions(conf, deletions)
    for key in sorted(set(pending) - {"delete"} if selection is None else set(pending) & selection - {"delete"}):
        if key == "rootfs" or re.fullmatch(r"mp\d+", key):
            try:
                _rescan(pending[key], key)
            except (Die, FormatError) as error:
                warn(f"Could not rescan volume size - {error}\n")
            if key in conf:
                _keep_as_unused(conf, key)
        conf[key] = pending.pop(key)


def _keep_as_unused(conf: Conf, key: str) -> None:
    """A volume that a container no longer mounts stays its own, under the first free ``unusedN``."""
    volume = ctconf.parse_volume(key, str(conf[key]))
    unused = [value for name, value in conf.items() if name.startswith("unused")]
    if volume["type"] != "volume" or volume["volume"] in unused:
        return
    free = next(f"unused{n}" for n in range(256) if f"unused{n}" not in conf)
    conf[free] = str(volume["volume"])


def _rescan(value: str, key: str) -> None:
    volume = ctconf.parse_volume(key, value)
    if volume["type"] == "volume" and ":" in str(volume["volume"]):
        name, image = storage.split_volume(str(volume["volume"]))
        found = storage.storages().get(name)
        if found and not storage.folder(found, image).exists():
            raise Die(f"volume '{volume['volume']}' does not exist")


# Snapshots: the configuration only, the lab's storages keep none of the data


def snapshot(vmid: int, name: str, description: str) -> None:
    """Keep a copy of the configuration under a name."""
    with config_lock(vmid):
        conf = load(vmid)
        check_lock(conf)
        if conf.get("template"):
            raise Die("snapshot feature is not available")
        if name in conf["snapshots"]:
            raise Die(f"snapshot name '{name}' already used")
        for _, volume in ctconf.volumes(conf):
            kind = storage.storages().get(str(volume["volume"]).partition(":")[0])
            if volume["type"] != "volume" or kind is None or kind.kind not in ("rbd", "zfspool", "lvmthin"):
                raise Die("snapshot feature is not available")
        kept = {
            key: value
            for key, value in conf.items()
            if key not in ("digest", "snapshots", "pending", "lock", "snapstate", "snaptime", "description")
            and not key.startswith("unused")
        }
        kept["snaptime"] = int(time.time())
        if description:
            kept["description"] = description
        conf["snapshots"][name] = kept
        conf["parent"] = name
        save(vmid, conf)


def delete_snapshot(vmid: int, name: str) -> None:
    """Forget a snapshot; its children get its parent."""
    with config_lock(vmid):
        conf = load(vmid)
        check_lock(conf)
        if name not in conf["snapshots"]:
            raise Die(f"snapshot '{name}' does not exist")
        parent = conf["snapshots"].pop(name).get("parent")
        for section in (conf, *conf["snapshots"].values()):
            if section.get("parent") == name:
                del section["parent"]
                if parent:
                    section["parent"] = parent
        save(vmid, conf)


# What others are told


def status(vmid: int) -> dict[str, Any]:
    """One container as /nodes/N/lxc and ``pct status --verbose`` show it; times and sizes that cost a look are 0."""
    conf = ctconf.parse(read_cfs(config_name(vmid)) or "", vmid, complain=lambda text: None)
    size = 4 << 30
    for key, volume in ctconf.volumes(conf):
        if key == "rootfs" and "size" in volume:
            size = ctconf.parse_size(str(volume["size"]))
    running = is_running(vmid)
    found: dict[str, Any] = {
        "vmid": vmid,
        "type": "lxc",
        "name": re.sub(r"\s", "", str(conf.get("hostname", f"CT{vmid}"))),
        "status": "running" if running else "stopped",
        "cpus": conf.get("cores") or conf.get("cpulimit") or os.cpu_count() or 1,
        "maxmem": int(conf.get("memory", 512)) << 20,
        "maxswap": int(conf.get("swap", 0)) << 20,
        "maxdisk": size,
    }
    found |= dict.fromkeys(("cpu", "disk", "diskread", "diskwrite", "mem", "netin", "netout", "swap", "uptime"), 0)
    if running and (pid := init_pid(vmid)):
        found["pid"] = pid
        found["uptime"] = _age(pid)
    for key in ("lock", "tags"):
        if key in conf:
            found[key] = conf[key]
    if conf.get("template") == 1:
        found["template"] = 1
    return found


def _age(pid: int) -> int:
    try:
        started = int(path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return int(float(path("/proc/uptime").read_text().split()[0]) - started / os.sysconf("SC_CLK_TCK"))
    except OSError:
        return 0
