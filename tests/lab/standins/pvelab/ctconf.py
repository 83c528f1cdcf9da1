"""The configuration file of a container: parsed and written as ``PVE::LXC::Config`` of pve-container does.

The parser keeps a value that does not fit its type, with a warning, and drops a line that it cannot parse;
the writer sorts. So the next ``pct set`` deletes such lines from the disk and moves comments to the top.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from pvelab.base import warn
from pvelab.schema import Field, FormatError, Value, check_format, parse_boolean, parse_property_string

Conf = dict[str, Any]

LOCKS = (
    *("backup", "create", "destroyed", "disk", "fstrim", "migrate", "mounted", "rollback", "snapshot"),
    "snapshot-delete",
)

_VOLUME = Field(default_key=True, format="pve-lxc-mp-string", optional=False)
_MOUNT_OPTION = r"(discard|lazytime|noatime|nodev|noexec|nosuid)"
ROOTFS = {
    "volume": _VOLUME,
    "size": Field(format="disk-size"),
    "acl": Field("boolean"),
    "mountoptions": Field(pattern=rf"{_MOUNT_OPTION}(;{_MOUNT_OPTION})*"),
    "ro": Field("boolean"),
    "quota": Field("boolean"),
    "replicate": Field("boolean"),
    "shared": Field("boolean"),
}
MOUNT_POINT = ROOTFS | {"backup": Field("boolean"), "mp": Field(format="pve-lxc-mp-string", optional=False)}
UNUSED = {"volume": Field(default_key=True, format="pve-volume-id", optional=False)}
DEVICE = {
    "path": Field(default_key=True, format="pve-lxc-dev-string"),
    "mode": Field(pattern="0[0-7]{3}"),
    "uid": Field("integer", minimum=0),
    "gid": Field("integer", minimum=0),
    "deny-write": Field("boolean"),
}
FEATURES = {
    "mount": Field(pattern="[a-zA-Z0-9_; ]+"),
    "nesting": Field("boolean"),
    "keyctl": Field("boolean"),
    "fuse": Field("boolean"),
    "mknod": Field("boolean"),
    "force_rw_sys": Field("boolean"),
}
NETWORK = {
    "type": Field(enum=("veth",)),
    "name": Field(pattern=r"[-_.\w\d]+", optional=False),
    "bridge": Field(pattern=r"[-_.\w\d]+"),
    "hwaddr": Field(format="mac-addr"),
    "mtu": Field("integer", minimum=64, maximum=65535),
    "ip": Field(format="pve-ipv4-config"),
    "gw": Field(format="ipv4"),
    "ip6": Field(format="pve-ipv6-config"),
    "gw6": Field(format="ipv6"),
    "firewall": Field("boolean"),
    "tag": Field("integer", minimum=1, maximum=4094),
    "trunks": Field(pattern=r"\d+(?:;\d+)*"),
    "rate": Field("number"),
    "link_down": Field("boolean"),
}

PROPERTIES: dict[str, Field] = {
    "lock": Field(enum=LOCKS),
    "onboot": Field("boolean"),
    "startup": Field(format="pve-startup-order"),
    "template": Field("boolean"),
    "arch": Field(enum=("amd64", "i386", "arm64", "armhf", "riscv32", "riscv64")),
    "ostype": Field(
        enum=(
            *("debian", "devuan", "ubuntu", "centos", "fedora", "opensuse", "archlinux", "alpine", "gentoo", "nixos"),
            "unmanaged",
        )
    ),
    "console": Field("boolean"),
    "tty": Field("integer", minimum=0, maximum=6),
    "cores": Field("integer", minimum=1, maximum=8192),
    "cpulimit": Field("number", minimum=0, maximum=8192),
    "cpuunits": Field("integer", minimum=0, maximum=500000),
    "memory": Field("integer", minimum=16),
    "swap": Field("integer", minimum=0),
    "hostname": Field(format="dns-name", max_length=255),
    "description": Field(max_length=8 * 1024),
    "searchdomain": Field(format="dns-name-list"),
    "nameserver": Field(format="address-list"),
    "timezone": Field(format="pve-ct-timezone"),
    "rootfs": Field(format=ROOTFS),
    "parent": Field(format="pve-configid", max_length=40),
    "snaptime": Field("integer", minimum=0),
    "cmode": Field(enum=("shell", "console", "tty")),
    "protection": Field("boolean"),
    "unprivileged": Field("boolean"),
    "features": Field(format=FEATURES),
    "hookscript": Field(format="pve-volume-id"),
    "tags": Field(format="pve-tag-list"),
    "debug": Field("boolean"),
}
PROPERTIES |= {f"net{n}": Field(format=NETWORK) for n in range(32)}
PROPERTIES |= {f"mp{n}": Field(format=MOUNT_POINT) for n in range(256)}
PROPERTIES |= {f"unused{n}": Field(format=UNUSED) for n in range(256)}
PROPERTIES |= {f"dev{n}": Field(format=DEVICE) for n in range(256)}

# Raw keys that PVE 8 lets through; 9 has a few more (lxc.init.cwd, lxc.environment.runtime).
_LXC_KEYS = frozenset(
    "lxc." + key
    for key in """
    apparmor.profile apparmor.allow_incomplete apparmor.allow_nesting apparmor.raw selinux.context include arch
    uts.name signal.halt signal.reboot signal.stop init.cmd pty.max console.logfile console.path tty.max devtty.dir
    hook.autodev autodev kmsg mount.fstab mount.entry mount.auto rootfs.mount cap.drop cap.keep seccomp.profile
    seccomp.notify.proxy seccomp.notify.cookie idmap hook.pre-start hook.pre-mount hook.mount hook.start hook.stop
    hook.post-stop hook.clone hook.destroy hook.version log.level log.file start.auto start.delay start.order group
    environment sysctl.fs.mqueue sysctl.kernel.msgmax sysctl.kernel.msgmnb sysctl.kernel.msgmni sysctl.kernel.sem
    sysctl.kernel.shmall sysctl.kernel.shmmax sysctl.kernel.shmmni sysctl.kernel.shm_rmid_forced
    """.split()  # noqa: SIM905  # a table
)
_LXC_PREFIXES = ("lxc.cgroup.", "lxc.cgroup2.", "lxc.prlimit.", "lxc.net.")
_LXC_REFUSED = {
    "lxc.rootfs.path": "lxc.rootfs.path is auto generated from rootfs",
    "lxc.rootfs.options": 'lxc.rootfs.options is not supported, please use mount point options in the "rootfs" key',
}
_LXC_RENAMED = {
    "lxc.aa_profile": "lxc.apparmor.profile",
    "lxc.aa_allow_incomplete": "lxc.apparmor.allow_incomplete",
    "lxc.console": "lxc.console.path",
    "lxc.devttydir": "lxc.tty.dir",
    "lxc.haltsignal": "lxc.signal.halt",
    "lxc.rebootsignal": "lxc.signal.reboot",
    "lxc.stopsignal": "lxc.signal.stop",
    "lxc.id_map": "lxc.idmap",
    "lxc.init_cmd": "lxc.init.cmd",
    "lxc.loglevel": "lxc.log.level",
    "lxc.logfile": "lxc.log.file",
    "lxc.mount": "lxc.mount.fstab",
    "lxc.network.type": "lxc.net.INDEX.type",
    "lxc.network.flags": "lxc.net.INDEX.flags",
    "lxc.network.link": "lxc.net.INDEX.link",
    "lxc.network.mtu": "lxc.net.INDEX.mtu",
    "lxc.network.name": "lxc.net.INDEX.name",
    "lxc.network.hwaddr": "lxc.net.INDEX.hwaddr",
    "lxc.network.ipv4": "lxc.net.INDEX.ipv4.address",
    "lxc.network.ipv4.gateway": "lxc.net.INDEX.ipv4.gateway",
    "lxc.network.ipv6": "lxc.net.INDEX.ipv6.address",
    "lxc.network.ipv6.gateway": "lxc.net.INDEX.ipv6.gateway",
    "lxc.network.script.up": "lxc.net.INDEX.script.up",
    "lxc.network.script.down": "lxc.net.INDEX.script.down",
    "lxc.pts": "lxc.pty.max",
    "lxc.se_context": "lxc.selinux.context",
    "lxc.seccomp": "lxc.seccomp.profile",
    "lxc.tty": "lxc.tty.max",
    "lxc.utsname": "lxc.uts.name",
}

_PENDING_HEADER = re.compile(r"\[pve:pending\]\s*$", re.IGNORECASE | re.ASCII)
_SNAPSHOT_HEADER = re.compile(r"\[([a-z][a-z0-9_\-]+)\]\s*$", re.IGNORECASE | re.ASCII)
_LXC_LINE = re.compile(r"(lxc\.[a-z0-9_\-.]+)(?::|\s*=)\s*(.*?)\s*$", re.ASCII)
_DESCRIPTION_LINE = re.compile(r"description:\s*(.*\S)\s*$", re.ASCII)
_SNAPSTATE = re.compile(r"snapstate:\s*(prepare|delete)\s*$", re.ASCII)
_DELETE_LINE = re.compile(r"delete:\s*(.*\S)\s*$", re.ASCII)
_KEY_LINE = re.compile(r"([a-z][a-z_]*\d*):\s*(.+?)\s*$", re.ASCII)

# What the writer puts elsewhere than into a "key: value" line.
_NOT_KEYS = frozenset(("digest", "description", "pending", "snapshots", "snapname", "lxc"))


def parse(raw: str, vmid: int, *, strict: bool = False, complain: Callable[[str], None] = warn) -> Conf:
    """Parse a file whose bytes are characters; the result has the file's SHA-1 as ``digest``.

    What is wrong is told to ``complain``, or raised as FormatError with ``strict``.
    """
    result: Conf = {"digest": hashlib.sha1(raw.encode("latin-1")).hexdigest(), "snapshots": {}, "pending": {}}
    conf, section, description = result, "", ""

    def wrong(text: str) -> None:
        if strict:
            raise FormatError(text)
        complain(text)

    for line in raw.split("\n"):
        if not line.strip(" \t\r\f\v"):
            continue
        pending = _PENDING_HEADER.match(line)
        snapshot = _SNAPSHOT_HEADER.match(line)
        if pending or snapshot:
            if description:
                conf["description"] = description
            conf, description = {}, ""
            if pending:
                section, result["pending"] = "pending", conf
            elif snapshot:
                section = snapshot[1]
                result["snapshots"][section] = conf
        elif line.startswith("#"):
            description += decode_text(line[1:]) + "\n"
        elif match := _LXC_LINE.match(line):
            problem = _lxc_key_problem(vmid, match[1], complain)
            if problem is None:
                conf.setdefault("lxc", []).append([match[1], match[2]])
            else:
                wrong(f"vm {vmid} - {problem or 'unable to parse config: ' + line}\n")
        elif match := _DESCRIPTION_LINE.match(line):
            description += decode_text(match[1])
        elif match := _SNAPSTATE.search(line):
            conf["snapstate"] = match[1]
        elif match := _DELETE_LINE.match(line):
            if section == "pending":
                conf["delete"] = match[1]
            else:
                wrong(f"vm {vmid} - property 'delete' is only allowed in [pve:pending]\n")
        elif match := _KEY_LINE.match(line):
            key, value = match[1], match[2]
            try:
                conf[key] = check_type(key, value)
            except FormatError as error:
                conf[key] = value
                wrong(f"vm {vmid} - unable to parse value of '{key}' - {error}")
        else:
            wrong(f"vm {vmid} - unable to parse config: {line}\n")
    if description:
        conf["description"] = description
    result.pop("snapstate", None)
    return result


def _lxc_key_problem(vmid: int, key: str, complain: Callable[[str], None]) -> str | None:
    """None when a raw key may be used, the reason when it is refused, an empty text when it is unknown."""
    if key.startswith("lxc.limit."):
        complain(f"vm {vmid} - {key}: lxc.limit.* was renamed to lxc.prlimit.*\n")
        return None
    if key in _LXC_RENAMED:
        complain(f"vm {vmid} - {key} is deprecated and was renamed to {_LXC_RENAMED[key]}\n")
        return None
    if key in _LXC_REFUSED:
        return f"{key}: {_LXC_REFUSED[key]}"
    return None if key in _LXC_KEYS or key.startswith(_LXC_PREFIXES) else ""


def check_type(key: str, value: str) -> Value:
    """The typed value of a key; FormatError when it does not fit. Limits and enumerations are not looked at here."""
    field = PROPERTIES.get(key)
    if field is None:
        raise FormatError(f"unknown setting '{key}'\n")
    if "\r" in value or "\n" in value:
        raise FormatError("property contains a line feed\n")
    wrong = FormatError(f"type check ('{field.kind}') failed - got '{value}'\n")
    if field.kind == "boolean":
        boolean = parse_boolean(value)
        if isinstance(boolean, str):
            raise wrong
        return boolean
    if field.kind == "integer":
        if not re.fullmatch(r"\d+", value, re.ASCII):
            raise wrong
        return int(value)
    if field.kind == "number":
        if not re.fullmatch(r"\d+(\.\d+)?", value, re.ASCII):
            raise wrong
        return value
    if field.format is not None:
        check_format(field.format, value)
    return value


def write(conf: Mapping[str, Any]) -> str:
    """The text that Proxmox writes for a configuration."""
    used = {volume["volume"] for _, volume in volumes(conf) if volume["type"] == "volume"}
    kept = {key: value for key, value in conf.items() if not (key.startswith("unused") and value in used)}
    text = _write_section(kept)
    if conf.get("pending"):
        text += "\n[pve:pending]\n" + _write_section(conf["pending"])
    for name in sorted(conf.get("snapshots", {})):
        text += f"\n[{name}]\n" + _write_section(conf["snapshots"][name])
    return text


def _write_section(conf: Mapping[str, Any]) -> str:
    description = str(conf.get("description", "")).rstrip("\n")
    lines = ["#" + encode_text(line) for line in description.split("\n")] if description else []
    lines += [f"{key}: {conf[key]}" for key in sorted(conf) if key not in _NOT_KEYS]
    lines += [f"{key}: {value}" for key, value in conf.get("lxc", [])]
    return "".join(line + "\n" for line in lines)


def decode_text(text: str) -> str:
    """Undo percent encoding, then UTF-8."""
    return unquote_to_bytes(text.encode("latin-1")).decode("utf-8", "replace")


def encode_text(text: str) -> str:
    """Percent-encode control characters, what is not ASCII, ``:`` and ``%``; nothing else."""
    return "".join(
        chr(byte) if 0x20 <= byte < 0x7F and byte not in b":%" else f"%{byte:02X}" for byte in text.encode("utf-8")
    )


def parse_volume(key: str, value: str) -> dict[str, Any]:
    """A ``rootfs`` or ``mpN`` value with its ``type`` (volume, bind, device) and ``mp``."""
    fields = ROOTFS if key == "rootfs" else UNUSED if key.startswith("unused") else MOUNT_POINT
    volume: dict[str, Any] = dict(parse_property_string(fields, value))
    name = str(volume["volume"])
    volume["type"] = "volume" if not name.startswith("/") else "device" if name.startswith("/dev/") else "bind"
    if key == "rootfs":
        volume["mp"] = "/"
    return volume


def volumes(conf: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """``rootfs`` and every ``mpN`` in order; what cannot be parsed is left out."""
    for key in ("rootfs", *(f"mp{n}" for n in range(256))):
        if key in conf:
            try:
                yield key, parse_volume(key, str(conf[key]))
            except FormatError:
                continue


def devices(conf: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Value]]]:
    """Every ``devN`` in order of N; one that cannot be parsed raises FormatError."""
    for n in range(256):
        if f"dev{n}" in conf:
            yield f"dev{n}", parse_property_string(DEVICE, str(conf[f"dev{n}"]))


def parse_size(text: str) -> int:
    """Bytes of "200G"."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(text[-1:], 1)
    return int(float(text.rstrip("KMGT")) * factor)
