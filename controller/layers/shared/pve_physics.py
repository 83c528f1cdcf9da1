"""How Proxmox VE behaves in the simulated fleet: its cluster file system, starting and stopping guests.

Written from what PVE 8.4 was seen to do and from its source (docs/simulated-fleet.md names the places). The reading of
configs here is a second one on purpose, apart from the controller's: each would show the other's mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from controller.layers.shared import kernel_physics, server_physics
from controller.layers.shared.truth import (
    Cluster,
    File,
    Fleet,
    Host,
    Node,
    RunningContainer,
    RunningMachine,
    Said,
    Tree,
)

MAX_FILE_SIZE = 1024 * 1024  # memdb.h: MEMDB_MAX_FILE_SIZE
_GUEST_CONFIG = re.compile(r"nodes/([^/]+)/(lxc|qemu-server)/(\d+)\.conf")
_OWN = ("lxc", "qemu-server", "local")


# --- the cluster file system -----------------------------------------------------------------------------------------


def in_contact(fleet: Fleet, cluster: Cluster, node: str) -> list[str]:
    """The members that a running member sees, itself included."""
    if not fleet.hosts[node].powered:
        return []
    side = cluster.sides.get(node, 0)
    return [n for n in cluster.nodes if fleet.hosts[n].powered and cluster.sides.get(n, 0) == side]


def is_quorate(fleet: Fleet, host: Host) -> bool:
    """More than half of all members are in contact with this one."""
    cluster = fleet.cluster_of(host)
    return cluster is None or 2 * len(in_contact(fleet, cluster, host.name)) > len(cluster.nodes)


def tree(cluster: Cluster, node: str) -> Tree:
    """The copy of the cluster's files that a node has."""
    return cluster.trees[cluster.tree_of.get(node, 0)]


def meet(fleet: Fleet, cluster: Cluster) -> None:
    """After a node came or went or the network changed: nodes in contact share the copy with the highest version.

    dcdb.c: the leader is whoever has the highest version; a node that was away takes the others' copy.
    """
    trees: list[Tree] = []
    tree_of: dict[str, int] = {}
    for node in cluster.nodes:
        if node in tree_of:
            continue
        group = in_contact(fleet, cluster, node) or [node]
        newest = max((tree(cluster, n) for n in group), key=lambda t: t.version)
        files = {path: File(f.text, f.mode, f.mtime) for path, f in newest.files.items()}
        trees.append(Tree(files, newest.version, dict(newest.guest_versions)))
        tree_of.update(dict.fromkeys(group, len(trees) - 1))
    cluster.trees, cluster.tree_of = trees, tree_of
    cluster.membership += 1
    for node in cluster.nodes:
        fleet.hosts[node].version += 1
    cluster.version += 1


def inside(host: Host, path: str) -> str | None:
    """A path below ``/etc/pve`` in the cluster's tree, its per-node links followed; None for any other path."""
    if not path.startswith("/etc/pve/"):
        return None
    first, _, rest = path.removeprefix("/etc/pve/").partition("/")
    if first in _OWN:
        own = "" if first == "local" else f"{first}/"
        return f"nodes/{host.name}/{own}{rest}"
    return path.removeprefix("/etc/pve/")


def read(fleet: Fleet, host: Host, path: str) -> File | None:
    """The file at a path of the host, the cluster's files included; None when there is none."""
    cluster, below = fleet.cluster_of(host), inside(host, path)
    if below is None:
        return host.files.get(path)
    return tree(cluster, host.name).files.get(below) if cluster is not None else None


def write(fleet: Fleet, host: Host, path: str, text: str) -> str:
    """Write or replace a file of the host or of its cluster. Returns the error's text, empty when it is written."""
    cluster, below = fleet.cluster_of(host), inside(host, path)
    if below is None:
        return kernel_physics.write(fleet, host, path, text)
    if cluster is None:
        return "No such file or directory"
    if not is_quorate(fleet, host):
        return "Permission denied"
    if len(text.encode("utf-8", "surrogateescape")) > MAX_FILE_SIZE:
        return "File too large"
    mine = tree(cluster, host.name)
    guest = _GUEST_CONFIG.fullmatch(below)
    if guest is not None and any(other != below for other in _configs(mine, guest[3])):
        return "File exists"
    mine.version += 1
    if guest is not None:
        mine.guest_versions[int(guest[3])] = mine.guest_versions.get(int(guest[3]), 0) + 1
    mine.files[below] = File(text, 0o640, int(fleet.now))
    _touch_all(fleet, cluster)
    return ""


def rename(fleet: Fleet, host: Host, source: str, target: str) -> str:
    """``mv`` inside ``/etc/pve``: silently replaces what is there, even another guest's config."""
    cluster, old, new = fleet.cluster_of(host), inside(host, source), inside(host, target)
    if cluster is None or old is None or new is None:
        return "No such file or directory"
    if not is_quorate(fleet, host):
        return "Permission denied"
    mine = tree(cluster, host.name)
    if old not in mine.files:
        return "No such file or directory"
    moved, placed = _GUEST_CONFIG.fullmatch(old), _GUEST_CONFIG.fullmatch(new)
    renumbered = placed is not None and (moved is None or moved[3] != placed[3])
    if placed is not None and renumbered and any(other != new for other in _configs(mine, placed[3])):
        return "File exists"
    mine.version += 1
    mine.files[new] = mine.files.pop(old)
    for guest in filter(None, (moved, placed)):
        mine.guest_versions[int(guest[3])] = mine.guest_versions.get(int(guest[3]), 0) + 1
    _touch_all(fleet, cluster)
    return ""


def remove(fleet: Fleet, host: Host, path: str) -> str:
    """``rm`` of one file."""
    cluster, below = fleet.cluster_of(host), inside(host, path)
    if below is None:
        if host.files.pop(path, None) is None:
            return "No such file or directory"
        fleet.touch(host)
        return ""
    if cluster is None or not is_quorate(fleet, host):
        return "Permission denied" if cluster is not None else "No such file or directory"
    mine = tree(cluster, host.name)
    if mine.files.pop(below, None) is None:
        return "No such file or directory"
    mine.version += 1
    _touch_all(fleet, cluster)
    return ""


def _configs(tree: Tree, vmid: str) -> Iterator[str]:
    for path in tree.files:
        match = _GUEST_CONFIG.fullmatch(path)
        if match is not None and match[3] == vmid:
            yield path


def _touch_all(fleet: Fleet, cluster: Cluster) -> None:
    cluster.version += 1
    for node in cluster.nodes:
        fleet.hosts[node].version += 1


def members(fleet: Fleet, host: Host) -> str:
    """``/etc/pve/.members`` as status.c prints it; a node in no cluster of several lists only itself."""
    cluster = fleet.cluster_of(host)
    if cluster is None:
        return ""
    if len(cluster.nodes) == 1:
        return f'{{\n"nodename": "{host.name}",\n"version": 0\n}}\n'
    present = in_contact(fleet, cluster, host.name)
    nodes = ",\n".join(
        f'  "{name}": {{ "id": {number}, "online": {int(name in present)}, "ip": "{fleet.hosts[name].address}"}}'
        for number, name in enumerate(cluster.nodes, start=1)
    )
    return (
        f'{{\n"nodename": "{host.name}",\n"version": {cluster.membership},\n'
        f'"cluster": {{ "name": "{cluster.name}", "version": {len(cluster.nodes)}, "nodes": {len(cluster.nodes)}, '
        f'"quorate": {int(is_quorate(fleet, host))} }},\n"nodelist": {{\n{nodes}\n  }}\n}}\n'
    )


def vmlist(fleet: Fleet, host: Host) -> str:
    """``/etc/pve/.vmlist`` as status.c prints it."""
    cluster = fleet.cluster_of(host)
    if cluster is None:
        return ""
    mine = tree(cluster, host.name)
    ids = [
        f'"{match[3]}": {{ "node": "{match[1]}", "type": "{"lxc" if match[2] == "lxc" else "qemu"}", '
        f'"version": {mine.guest_versions.get(int(match[3]), 1)} }}'
        for match in map(_GUEST_CONFIG.fullmatch, mine.files)
        if match is not None
    ]
    if not ids:
        return f'{{\n"version": {mine.version}\n}}\n'
    listed = ",\n".join(ids)
    return f'{{\n"version": {mine.version},\n"ids": {{\n{listed}}}\n\n}}\n'


def ha_managed(fleet: Fleet, host: Host, vmid: int) -> bool:
    """Whether HA manages a guest."""
    resources = read(fleet, host, "/etc/pve/ha/resources.cfg")
    return resources is not None and re.search(rf"^(?:ct|vm):\s*{vmid}\s*$", resources.text, re.MULTILINE) is not None


# --- configs ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Config:
    """The main section of a guest's config as PVE reads it: the last of equal keys counts, raw lines keep order."""

    keys: dict[str, str] = field(default_factory=dict)
    raw: list[tuple[str, str]] = field(default_factory=list)

    def numbered(self, prefix: str) -> list[str]:
        """The values of ``dev0``, ``dev1`` ... in the order of their numbers."""
        found = [(int(k[len(prefix) :]), v) for k, v in self.keys.items() if re.fullmatch(rf"{prefix}\d+", k)]
        return [value for _, value in sorted(found)]


def read_config(text: str) -> Config:
    """Read the main section (LXC/Config.pm parse_pct_config, QemuServer.pm parse_vm_config).

    A heading that is none is dropped, and its lines then fall to the section before it.
    """
    config = Config()
    for line in text.split("\n"):
        if re.match(r"\[([a-z][a-z0-9_-]+|pve:pending)\]\s*$", line, re.IGNORECASE):
            break
        raw = re.match(r"(lxc\.[a-z0-9_.-]+)(?::|\s*=)\s*(.*?)\s*$", line)
        key = re.match(r"([a-z][a-z_]*\d*):\s*(.+?)\s*$", line)
        if raw is not None:
            config.raw.append((raw[1], raw[2]))
        elif key is not None and key[1] != "delete":
            config.keys[key[1]] = key[2]
    return config


def _option(value: str, name: str, default: str = "") -> str:
    """A named part of a property string (``/dev/nvidia0,mode=0666``); the unnamed first part is ``path``."""
    for index, part in enumerate(value.split(",")):
        key, equals, rest = part.partition("=")
        if equals and key == name:
            return rest
        if not equals and index == 0 and name == "path":
            return part
    return default


def config_of(fleet: Fleet, host: Host, vmid: int, kind: str = "lxc") -> Config | None:
    """The config of a guest that lies under this host's node, None when there is none."""
    file = read(fleet, host, f"/etc/pve/{kind}/{vmid}.conf")
    return read_config(file.text) if file is not None else None


def own_guests(fleet: Fleet, host: Host, kind: str) -> list[int]:
    """The ids of the guests whose config lies under this host's node."""
    cluster = fleet.cluster_of(host)
    if cluster is None:
        return []
    found = map(_GUEST_CONFIG.fullmatch, tree(cluster, host.name).files)
    return sorted(int(m[3]) for m in found if m is not None and m[1] == host.name and m[2] == kind)


# --- containers ------------------------------------------------------------------------------------------------------


class _Fails(Exception):  # noqa: N818 - what the start does
    """The start fails with this text."""


def pct_start(fleet: Fleet, host: Host, vmid: int) -> Said:
    """``pct start``: what the config says now is resolved now, and stays so until the CT is stopped."""
    config = config_of(fleet, host, vmid)
    if config is None:
        return Said(2, err=f"Configuration file 'nodes/{host.name}/lxc/{vmid}.conf' does not exist\n")
    if "lock" in config.keys:
        return Said(255, err=f"CT is locked ({config.keys['lock']})\n")
    if config.keys.get("template") == "1":
        return Said(255, err="you can't start a CT if it's a template\n")
    if vmid in host.containers:
        return Said(255, err=f"CT {vmid} already running\n")
    if ha_managed(fleet, host, vmid):
        return Said(0, out=f"Requesting HA start for CT {vmid}\n")
    try:
        host.containers[vmid] = _started(fleet, host, vmid, config)
    except _Fails as failure:
        return Said(255, err=f"{failure}\n")
    server_physics.boot(fleet, host, vmid)
    fleet.touch(host)
    return Said(0)


def _started(fleet: Fleet, host: Host, vmid: int, config: Config) -> RunningContainer:
    if host.start_failure:
        text, host.start_failure = host.start_failure, ""
        raise _Fails(text)
    image = _option(config.keys.get("rootfs", ""), "path")
    _need_storage(fleet, host, image)
    volume = "" if image.startswith("/") else image
    container = RunningContainer(fleet.draw(host, range(2000, 4_000_000)), fleet.now, image=volume)
    lines = _heading(config, vmid)
    _pass_devices(host, config, container, lines)
    lines += _body(config, vmid)
    for key, value in config.raw:
        lines.append(f"{key} = {value}")
    if not any(key.startswith("lxc.cgroup2.cpuset") for key, _ in config.raw):
        lines.append("lxc.cgroup.cpuset.cpus = ")
    failed = kernel_physics.write(fleet, host, f"/var/lib/lxc/{vmid}/config", "\n".join(lines) + "\n")
    if failed:
        raise _Fails(f"unable to write '/var/lib/lxc/{vmid}/config': {failed}")
    _mount_points(host, config, container, vmid)
    for key, value in config.raw:
        if key in ("lxc.cgroup2.devices.allow", "lxc.cgroup2.devices.deny"):
            container.rules.append(f"{key.rsplit('.', 1)[1]} {_resolved_rule(host, value, vmid)}")
        elif key == "lxc.mount.entry":
            _mount_entry(host, value, container, vmid)
    return container


def _need_storage(fleet: Fleet, host: Host, image: str) -> None:
    storage, colon, _ = image.partition(":")
    known = read(fleet, host, "/etc/pve/storage.cfg")
    if not colon or known is None:
        return
    block = re.search(rf"^[a-z0-9]+:\s*{re.escape(storage)}\n((?:[ \t]+.*\n?)*)", known.text, re.MULTILINE)
    if block is None:
        raise _Fails(f"storage '{storage}' does not exist")
    nodes = re.search(r"^\s+nodes\s+(\S+)", block[1], re.MULTILINE)
    if nodes is not None and host.name not in nodes[1].split(","):
        raise _Fails(f"storage '{storage}' is not available on node '{host.name}'")
    if re.search(r"^\s+disable\b", block[1], re.MULTILINE):
        raise _Fails(f"storage '{storage}' is disabled")


def _heading(config: Config, vmid: int) -> list[str]:
    """The generated config up to the device rules, as /var/lib/lxc/ID/config begins."""
    lines = [
        "lxc.cgroup.relative = 0",
        f"lxc.cgroup.dir.monitor = lxc.monitor/{vmid}",
        f"lxc.cgroup.dir.container = lxc/{vmid}",
        "lxc.cgroup.dir.container.inner = ns",
        f"lxc.arch = {config.keys.get('arch', 'amd64')}",
        f"lxc.include = /usr/share/lxc/config/{config.keys.get('ostype', 'debian')}.common.conf",
        "lxc.apparmor.profile = generated",
    ]
    if "nesting=1" in config.keys.get("features", ""):
        lines.append("lxc.apparmor.allow_nesting = 1")
    return lines


def _body(config: Config, vmid: int) -> list[str]:
    return [
        "lxc.monitor.unshare = 1",
        "lxc.tty.max = 2",
        "lxc.environment = TERM=linux",
        f"lxc.uts.name = {config.keys.get('hostname', f'CT{vmid}')}",
        f"lxc.rootfs.path = /var/lib/lxc/{vmid}/rootfs",
    ]


def _pass_devices(host: Host, config: Config, container: RunningContainer, lines: list[str]) -> None:
    """``devN``: a private node with the path's number at this moment; no path, no start (LXC.pm, LXC/Tools.pm)."""
    for value in config.numbered("dev"):
        path = _option(value, "path")
        node = host.dev.get(path)
        if node is None:
            raise _Fails(f"Device {path} does not exist")
        if node.plain:
            raise _Fails(f"{path} is not a device")
        number = f"c {node.major}:{node.minor}"
        read_only = _option(value, "deny-write") == "1"
        given = [f"allow {number} r", f"deny {number} w"] if read_only else [f"allow {number} rw"]
        container.rules += given
        for rule in given:
            verb, _, rest = rule.partition(" ")
            lines.append(f"lxc.cgroup2.devices.{verb} = {rest}")
        container.dev[path] = Node(node.major, node.minor, int(_option(value, "mode", "0660"), 8))


def _mount_points(host: Host, config: Config, container: RunningContainer, vmid: int) -> None:
    for value in config.numbered("mp"):
        source, target = _option(value, "path") or value.split(",")[0], _option(value, "mp")
        if source.startswith("/") and not source.startswith("/dev/"):
            if not kernel_physics.is_directory(host, source):
                raise _Fails(_hook_failure(vmid))
            container.mounts[target] = source


def _hook_failure(vmid: int) -> str:
    return (
        "run_buffer: 571 Script exited with status 2\n"
        f'lxc_init: 845 Failed to run lxc.hook.pre-start for container "{vmid}"\n'
        f'__lxc_start: 2034 Failed to initialize container "{vmid}"\n'
        f"startup for container '{vmid}' failed"
    )


def _resolved_rule(host: Host, value: str, vmid: int) -> str:
    """A raw device rule: ``a``, type and numbers, or a path that is looked up now. A bad one is fatal (cgfsng.c)."""
    if value == "a" or re.match(r"[abc] (\*|\d+):(\*|\d+) [rwm]{1,2}$|[abc] (\*|\d+):(\*|\d+) [rwm]{3}", value):
        return value
    path, _, access = value.partition(" ")
    node = host.dev.get(path)
    if not path.startswith("/") or node is None or node.plain:
        raise _Fails(f"lxc_start: Failed to parse device rule\nstartup for container '{vmid}' failed")
    return f"c {node.major}:{node.minor} {access or 'rwm'}"


def _mount_entry(host: Host, value: str, container: RunningContainer, vmid: int) -> None:
    """A raw mount: with ``optional`` a missing source is passed over, but ``create=`` has made the target before."""
    parts = value.split()
    if len(parts) < 4:
        raise _Fails(f"startup for container '{vmid}' failed")
    source, target, options = parts[0], "/" + parts[1].lstrip("/"), parts[3].split(",")
    node = host.dev.get(source)
    folder = node is None and kernel_physics.is_directory(host, source)
    if target not in container.dev and "create=file" in options and target.startswith("/dev/"):
        _create_target(host, target, container)
    if node is not None:
        container.dev[target] = Node(node.major, node.minor, node.mode, node.plain)
    elif folder:
        container.mounts[target] = source
        for path, lies in host.dev.items():
            if path.startswith(source + "/"):
                container.dev[target + path[len(source) :]] = Node(lies.major, lies.minor, lies.mode, lies.plain)
    elif source in host.files:
        container.mounts[target] = source
    elif "optional" not in options:
        raise _Fails(f"startup for container '{vmid}' failed")


def _create_target(host: Host, target: str, container: RunningContainer) -> None:
    """LXC makes the missing target first, an empty plain file of mode 0, in whatever is mounted there by then.

    Below a directory of the host's that an earlier entry has mounted, that is on the host itself.
    """
    container.dev[target] = Node(plain=True, mode=0)
    for mounted, source in container.mounts.items():
        if target.startswith(mounted + "/") and source.startswith("/dev/"):
            host.dev.setdefault(source + target[len(mounted) :], Node(plain=True, mode=0))


def pct_stop(fleet: Fleet, host: Host, vmid: int) -> Said:
    """``pct stop`` or ``pct shutdown``."""
    config = config_of(fleet, host, vmid)
    if config is None:
        return Said(2, err=f"Configuration file 'nodes/{host.name}/lxc/{vmid}.conf' does not exist\n")
    if "lock" in config.keys:
        return Said(255, err=f"CT is locked ({config.keys['lock']})\n")
    if vmid not in host.containers:
        return Said(255, err=f"CT {vmid} not running\n")
    if ha_managed(fleet, host, vmid):
        return Said(0, out=f"Requesting HA stop for CT {vmid}\n")
    _gone(fleet, host, vmid)
    return Said(0)


def _gone(fleet: Fleet, host: Host, vmid: int) -> None:
    del host.containers[vmid]
    for function in host.functions.values():
        if function.gpu is not None and f"ct:{vmid}" in function.gpu.used_by:
            function.gpu.used_by.remove(f"ct:{vmid}")
    fleet.touch(host)


def opens(host: Host, vmid: int, path: str) -> str:
    """What a process in a running CT gets when it opens a device for reading and writing; empty: it is open.

    Last of the matching device rules counts for each kind of access, and what no rule allows is refused.
    """
    container = host.containers[vmid]
    node = container.dev.get(path)
    if node is None:
        return "No such file or directory"
    if node.plain:
        return "not a device"
    allowed = {"r": False, "w": False}
    for rule in container.rules:
        verb, _, what = rule.partition(" ")
        matched = re.match(r"a(?:$|\s)|([abc]) (\*|\d+):(\*|\d+) ([rwm]+)", what)
        if matched is None:
            continue
        if matched[1] is None:
            allowed = dict.fromkeys(allowed, verb == "allow")
        elif matched[1] in "ac" and matched[2] in ("*", str(node.major)) and matched[3] in ("*", str(node.minor)):
            allowed.update({access: verb == "allow" for access in matched[4] if access in allowed})
    if not all(allowed.values()):
        return "Operation not permitted"
    return "" if kernel_physics.serves(host, node) else "No such device or address"


# --- storages, and moving containers ---------------------------------------------------------------------------------


def _storage(fleet: Fleet, host: Host, name: str) -> tuple[str, dict[str, str]] | None:
    """The kind and the options of a storage, None when storage.cfg does not define it."""
    config = read(fleet, host, "/etc/pve/storage.cfg")
    block = re.search(
        rf"^([a-z0-9]+):\s*{re.escape(name)}\n((?:[ \t]+.*\n?)*)", config.text if config else "", re.MULTILINE
    )
    if block is None:
        return ("dir", {"path": "/var/lib/vz"}) if name == "local" else None
    return block[1], {m[1]: m[2].strip() for m in re.finditer(r"^[ \t]+(\S+)(.*)$", block[2], re.MULTILINE)}


def storage_kind(fleet: Fleet, host: Host, name: str) -> str:
    """``rbd``, ``dir``, …; empty for one that is not defined."""
    found = _storage(fleet, host, name)
    return found[0] if found is not None else ""


def rbd_status(fleet: Fleet, host: Host, storage: str, image: str) -> Said:
    """``rbd status --format json``: every host that runs a container on the image watches it, whatever its cluster."""
    watchers = [
        f'{{"address":"{other.address}:0/{container.pid}","client":{4100 + container.pid % 997},"cookie":1}}'
        for other in fleet.hosts.values()
        for container in other.containers.values()
        if other.cluster == host.cluster and container.image == f"{storage}:{image}"
    ]
    return Said(0, out=f'{{"watchers":[{",".join(watchers)}]}}\n')


def pct_migrate(fleet: Fleet, host: Host, vmid: int, target: str) -> Said:
    """``pct migrate`` of a stopped CT on shared storage (LXC/Migrate.pm): what it needs there is not looked at."""
    cluster, config = fleet.cluster_of(host), config_of(fleet, host, vmid)
    if cluster is None or config is None:
        return Said(2, err=f"Configuration file 'nodes/{host.name}/lxc/{vmid}.conf' does not exist\n")
    if ha_managed(fleet, host, vmid):
        return Said(0, out=f"Requesting HA migration for CT {vmid} to node {target}\n")
    try:
        _check_migration(fleet, host, vmid, target, config)
    except _Fails as failure:
        return Said(255, err=f"ERROR: migration aborted (duration 00:00:00): {failure}\nmigration aborted\n")
    failed = rename(fleet, host, f"/etc/pve/lxc/{vmid}.conf", f"/etc/pve/nodes/{target}/lxc/{vmid}.conf")
    if failed:
        return Said(255, err=f"Failed to move config to node '{target}' - rename failed: {failed}\nmigration aborted\n")
    return Said(0, out="migration finished successfully (duration 00:00:01)\n")


def _check_migration(fleet: Fleet, host: Host, vmid: int, target: str, config: Config) -> None:
    if "lock" in config.keys:
        raise _Fails(f"CT is locked ({config.keys['lock']})")
    if vmid in host.containers:
        raise _Fails("running container can only be migrated in restart mode")
    for key in sorted(key for key in config.keys if re.fullmatch(r"rootfs|mp\d+", key)):
        value = config.keys[key]
        volume = _option(value, "volume") or _option(value, "path")
        if volume.startswith("/"):
            if _option(value, "shared") != "1":
                raise _Fails(
                    f"cannot migrate local {'device' if volume.startswith('/dev/') else 'bind'} mount point '{key}'"
                )
            continue
        name = volume.partition(":")[0]
        for node in (host.name, target):
            found = _storage(fleet, host, name)
            if found is None:
                raise _Fails(f"storage '{name}' does not exist")
            if "nodes" in found[1] and node not in found[1]["nodes"].split(","):
                raise _Fails(f"storage '{name}' is not available on node '{node}'")


# --- virtual machines ------------------------------------------------------------------------------------------------


def qm_start(fleet: Fleet, host: Host, vmid: int) -> Said:
    """``qm start``: takes the whole IOMMU group of each card that the config names and binds it to vfio-pci.

    It does so through ``new_id`` with vendor and device only (SysFSTools.pm), so that vfio-pci accepts every card of
    that model from then on. Raises kernel_physics.Hang while a card is in use on nvidia.
    """
    config = config_of(fleet, host, vmid, "qemu-server")
    if config is None:
        return Said(2, err=f"Configuration file 'nodes/{host.name}/qemu-server/{vmid}.conf' does not exist\n")
    if "lock" in config.keys:
        return Said(255, err=f"VM is locked ({config.keys['lock']})\n")
    if vmid in host.machines:
        return Said(255, err=f"VM {vmid} already running\n")
    wanted: list[str] = []
    for value in config.numbered("hostpci"):
        for address in claimed(host, _option(value, "host") or _option(value, "path")):
            if address not in host.functions:
                return Said(255, err=f"no PCI device found for '{address}'\n")
            wanted.append(address)
    for other, machine in host.machines.items():
        for address in set(wanted) & set(machine.functions):
            return Said(255, err=f"PCI device '{address}' already in use by VMID '{other}'\n")
    kernel_physics.load_module(fleet, host, "vfio-pci")
    for address in wanted:
        function = host.functions[address]
        host.new_ids.append(f"{function.vendor}:{function.device}")
        group = function.iommu_group
        mates = [a for a, f in host.functions.items() if f.iommu_group == group] if group is not None else [address]
        for mate in mates:
            if host.functions[mate].driver != "vfio-pci" and not host.functions[mate].pci_class.startswith("0604"):
                kernel_physics.unbind(fleet, host, mate)
                host.functions[mate].driver = "vfio-pci"
    host.machines[vmid] = RunningMachine(fleet.draw(host, range(2000, 4_000_000)), fleet.now, wanted)
    fleet.touch(host)
    return Said(0)


def claimed(host: Host, text: str) -> list[str]:
    """The functions that ``hostpci`` means: addresses in lower case only, all functions when none is named."""
    found: list[str] = []
    for part in text.split(";"):
        if re.fullmatch(r"(?:[a-f0-9]{4,}:)?[a-f0-9]{2}:[a-f0-9]{2}(?:\.[a-f0-9])?", part) is None:
            continue
        address = part if part.count(":") == 2 else f"0000:{part}"
        if "." in address:
            found.append(address)
        else:
            found += [a for a in host.functions if a.startswith(f"{address}.")] or [f"{address}.0"]
    return found


def qm_stop(fleet: Fleet, host: Host, vmid: int) -> Said:
    """``qm stop``: the cards stay on vfio-pci."""
    if vmid not in host.machines:
        return Said(255, err=f"VM {vmid} not running\n")
    del host.machines[vmid]
    fleet.touch(host)
    return Said(0)


# --- power -----------------------------------------------------------------------------------------------------------


def power_off(fleet: Fleet, host: Host) -> None:
    """Cut a host's power; the cluster notices."""
    host.goes_down = None
    kernel_physics.power_off(fleet, host)
    cluster = fleet.cluster_of(host)
    if cluster is not None:
        meet(fleet, cluster)


def power_on(fleet: Fleet, host: Host) -> None:
    """Boot a host: its kernel, then the cluster, then, once quorate, the guests of its node that start on boot."""
    kernel_physics.boot(fleet, host)
    server_physics.boot(fleet, host, None)
    cluster = fleet.cluster_of(host)
    if cluster is None:
        return
    meet(fleet, cluster)
    if is_quorate(fleet, host):
        start_on_boot(fleet, host)


def ask_reboot(fleet: Fleet, host: Host) -> Said:
    """What ``reboot.sh`` does: the host goes down in two seconds, unless its cluster would lose quorum."""
    cluster = fleet.cluster_of(host)
    if cluster is not None and len(cluster.nodes) > 1:
        left = len(in_contact(fleet, cluster, host.name)) - 1
        if 2 * left <= len(cluster.nodes):
            return Said(75, err=f"without this node {left} of {len(cluster.nodes)} would be left, no quorum\n")
    host.goes_down = fleet.now + 2
    return Said(0)


def start_on_boot(fleet: Fleet, host: Host) -> None:
    """pve-guests: start what has ``onboot: 1`` under this node, in order of id; a failure stops nobody else."""
    starts = {"qemu-server": qm_start, "lxc": pct_start}
    guests = sorted((vmid, kind) for kind in starts for vmid in own_guests(fleet, host, kind))
    for vmid, kind in guests:
        config = config_of(fleet, host, vmid, kind)
        if config is not None and config.keys.get("onboot") == "1":
            starts[kind](fleet, host, vmid)


def part(fleet: Fleet, cluster: Cluster, sides: list[list[str]]) -> None:
    """Break the cluster's network into sides; a node that is named in none is on a side with the other such nodes."""
    cluster.sides = {node: number for number, side in enumerate(sides, start=1) for node in side}
    meet(fleet, cluster)
