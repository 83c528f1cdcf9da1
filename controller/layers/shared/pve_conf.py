"""A container's config file as Proxmox VE 8 reads it, and edits that keep every byte they have no business with.

The grammar is that of ``parse_pct_config`` in pve-container 5 (PVE/LXC/Config.pm): lines end at a line feed alone, a
section header ends the main section, a header that does not match is dropped and what follows it still belongs to the
section before, the last of two equal keys counts, raw ``lxc.*`` lines are an ordered list.

Text is what ``surrogateescape`` makes of the file's bytes, so that an edit gives every byte back.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

Value = str | int

# Perl's \s and \d on byte strings are ASCII's; "." stops at a line feed only, as Python's does.
_BLANK = re.compile(r"\s*", re.ASCII)
_PENDING = re.compile(r"\[pve:pending\]\s*", re.ASCII | re.IGNORECASE)
_SNAPSHOT = re.compile(r"\[([a-z][a-z0-9_\-]+)\]\s*", re.ASCII | re.IGNORECASE)
_RAW = re.compile(r"(lxc\.[a-z0-9_\-.]+)(:|\s*=)\s*(.*?)\s*", re.ASCII)
_DESCRIPTION = re.compile(r"description:\s*(.*\S)\s*", re.ASCII)
_SNAPSTATE = re.compile(r"snapstate:\s*(prepare|delete)\s*$", re.ASCII)
_DELETE = re.compile(r"delete:\s*(.*\S)\s*", re.ASCII)
_KEY = re.compile(r"([a-z][a-z_]*\d*):\s*(.+?)\s*", re.ASCII)

# The settings of PVE 8's containers by the type that their values are checked for (Config.pm, $confdesc).
_BOOLEAN = frozenset({"onboot", "template", "console", "protection", "unprivileged", "debug"})
_INTEGER = frozenset({"tty", "cores", "cpuunits", "memory", "swap", "snaptime"})
_NUMBER = frozenset({"cpulimit"})
_STRING = frozenset(
    {"arch", "cmode", "description", "features", "hookscript", "hostname", "lock", "nameserver", "ostype", "parent"}
    | {"rootfs", "searchdomain", "startup", "tags", "timezone"}
)
_COUNTED = {"net": 32, "mp": 256, "unused": 256, "dev": 256}
_COUNTED_KEY = re.compile(r"(net|mp|unused|dev)(0|[1-9]\d*)", re.ASCII)

# The raw keys that PVE 8 hands on to LXC (Config.pm, $valid_lxc_conf_keys and the renamed ones before LXC 3).
_RAW_PREFIXES = ("lxc.cgroup.", "lxc.cgroup2.", "lxc.prlimit.", "lxc.net.", "lxc.limit.")
_RAW_KEYS = frozenset(
    """
    lxc.apparmor.profile lxc.apparmor.allow_incomplete lxc.apparmor.allow_nesting lxc.apparmor.raw lxc.selinux.context
    lxc.include lxc.arch lxc.uts.name lxc.signal.halt lxc.signal.reboot lxc.signal.stop lxc.init.cmd lxc.pty.max
    lxc.console.logfile lxc.console.path lxc.tty.max lxc.devtty.dir lxc.hook.autodev lxc.autodev lxc.kmsg
    lxc.mount.fstab lxc.mount.entry lxc.mount.auto lxc.rootfs.mount lxc.cap.drop lxc.cap.keep lxc.seccomp.profile
    lxc.seccomp.notify.proxy lxc.seccomp.notify.cookie lxc.idmap lxc.hook.pre-start lxc.hook.pre-mount lxc.hook.mount
    lxc.hook.start lxc.hook.stop lxc.hook.post-stop lxc.hook.clone lxc.hook.destroy lxc.hook.version lxc.log.level
    lxc.log.file lxc.start.auto lxc.start.delay lxc.start.order lxc.group lxc.environment lxc.sysctl.fs.mqueue
    lxc.sysctl.kernel.msgmax lxc.sysctl.kernel.msgmnb lxc.sysctl.kernel.msgmni lxc.sysctl.kernel.sem
    lxc.sysctl.kernel.shmall lxc.sysctl.kernel.shmmax lxc.sysctl.kernel.shmmni lxc.sysctl.kernel.shm_rmid_forced
    lxc.aa_profile lxc.aa_allow_incomplete lxc.console lxc.devttydir lxc.haltsignal lxc.rebootsignal lxc.stopsignal
    lxc.id_map lxc.init_cmd lxc.loglevel lxc.logfile lxc.mount lxc.network.type lxc.network.flags lxc.network.link
    lxc.network.mtu lxc.network.name lxc.network.hwaddr lxc.network.ipv4 lxc.network.ipv4.gateway lxc.network.ipv6
    lxc.network.ipv6.gateway lxc.network.script.up lxc.network.script.down lxc.pts lxc.se_context lxc.seccomp lxc.tty
    lxc.utsname
    """.split()  # noqa: SIM905 - a list of eighty strings says no more
)
_REFUSED = {
    "lxc.rootfs.path": "lxc.rootfs.path is auto generated from rootfs",
    "lxc.rootfs.options": 'lxc.rootfs.options is not supported, please use mount point options in the "rootfs" key',
}


@dataclass(frozen=True, slots=True)
class Settings:
    """One section of a config: its keys with typed values, its raw ``lxc.*`` lines in order, its description."""

    keys: Mapping[str, Value] = field(default_factory=dict)
    lxc: tuple[tuple[str, str], ...] = ()
    description: str = ""

    def text(self, key: str) -> str:
        """A key's value as text, "" when it is not set."""
        return str(self.keys.get(key, ""))

    def flag(self, key: str) -> bool:
        """A boolean key; one that is not set, or holds what is no boolean, is off."""
        return self.keys.get(key) == 1


@dataclass(frozen=True, slots=True)
class PctConf:
    """A whole config: what is in force, what waits for the next start, the snapshots, and what PVE would warn of.

    ``digest`` is PVE's own: the SHA-1 of the file.
    """

    main: Settings
    pending: Settings
    snapshots: Mapping[str, Settings]
    digest: str
    warnings: tuple[str, ...] = ()


class LineKind(StrEnum):
    """What PVE makes of a line of the main section."""

    BLANK = "blank"
    COMMENT = "comment"
    RAW = "raw"
    KEY = "key"
    OTHER = "other"  # description, snapstate, delete, and what it drops with a warning


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the main section: where it is, and its key and value when it has them."""

    index: int
    kind: LineKind
    key: str = ""
    value: str = ""


@dataclass(slots=True)
class _Section:
    keys: dict[str, Value] = field(default_factory=dict)
    lxc: list[tuple[str, str]] = field(default_factory=list)
    description: str = ""

    def settings(self) -> Settings:
        return Settings(dict(self.keys), tuple(self.lxc), self.description)


@lru_cache(maxsize=1024)
def parse(text: str) -> PctConf:
    """Read a config as PVE 8 does: it keeps bad values and drops lines that it cannot read, with a warning each."""
    main = section = _Section()
    pending = _Section()
    snapshots: dict[str, _Section] = {}
    warnings: list[str] = []
    for line in text.split("\n"):
        if _BLANK.fullmatch(line):
            continue
        if _PENDING.fullmatch(line):
            section = pending = _Section()
        elif header := _SNAPSHOT.fullmatch(line):
            section = snapshots[header[1]] = _Section()
        else:
            _read_line(line, section, section is pending, warnings)
    main.keys.pop("snapstate", None)
    return PctConf(
        main.settings(),
        pending.settings(),
        {name: snapshot.settings() for name, snapshot in snapshots.items()},
        hashlib.sha1(text.encode("utf-8", "surrogateescape"), usedforsecurity=False).hexdigest(),
        tuple(warnings),
    )


def _read_line(line: str, section: _Section, is_pending: bool, warnings: list[str]) -> None:
    if line.startswith("#"):
        section.description += _decode(line[1:]) + "\n"
    elif raw := _RAW.fullmatch(line):
        if raw[1] in _REFUSED:
            warnings.append(f"{raw[1]}: {_REFUSED[raw[1]]}")
        elif _is_known_raw(raw[1]):
            section.lxc.append((raw[1], raw[3]))
        else:
            warnings.append(f"unable to parse config: {line}")
    elif description := _DESCRIPTION.fullmatch(line):
        section.description += _decode(description[1])
    elif snapstate := _SNAPSTATE.search(line):
        section.keys["snapstate"] = snapstate[1]
    elif delete := _DELETE.fullmatch(line):
        if is_pending:
            section.keys["delete"] = delete[1]
        else:
            warnings.append("property 'delete' is only allowed in [pve:pending]")
    elif key := _KEY.fullmatch(line):
        value, problem = _typed(key[1], key[2])
        section.keys[key[1]] = value
        if problem:
            warnings.append(f"unable to parse value of '{key[1]}' - {problem}")
    else:
        warnings.append(f"unable to parse config: {line}")


def _is_known_raw(key: str) -> bool:
    return key in _RAW_KEYS or key.startswith(_RAW_PREFIXES)


def _typed(key: str, value: str) -> tuple[Value, str]:
    """A key's value in its type, and what PVE says when it has not got it."""
    counted = _COUNTED_KEY.fullmatch(key)
    known = key in _BOOLEAN | _INTEGER | _NUMBER | _STRING or (counted and int(counted[2]) < _COUNTED[counted[1]])
    if not known:
        return value, f"unknown setting '{key}'"
    if "\r" in value:
        return value, "property contains a line feed"
    if key in _BOOLEAN:
        if value == "1" or value.lower() in ("on", "yes", "true"):
            return 1, ""
        if value == "0" or value.lower() in ("off", "no", "false"):
            return 0, ""
        return value, f"type check ('boolean') failed - got '{value}'"
    if key in _INTEGER:
        if value.isascii() and value.isdigit():
            return int(value), ""
        return value, f"type check ('integer') failed - got '{value}'"
    if key in _NUMBER:
        if re.fullmatch(r"\d+(\.\d+)?", value, re.ASCII):
            return value, ""
        return value, f"type check ('number') failed - got '{value}'"
    return value, ""


def _decode(text: str) -> str:
    """PVE::Tools::decode_text: %XX are bytes, and the bytes are UTF-8."""
    data = re.sub(
        rb"%([0-9A-Fa-f]{2})", lambda match: bytes((int(match[1], 16),)), text.encode("utf-8", "surrogateescape")
    )
    return data.decode("utf-8", "replace")


def main_lines(text: str) -> tuple[Line, ...]:
    """The lines of the main section: everything before the first header that PVE takes for one."""
    found: list[Line] = []
    for index, (body, _) in enumerate(_split(text)):
        if _PENDING.fullmatch(body) or _SNAPSHOT.fullmatch(body):
            break
        found.append(_line(index, body))
    return tuple(found)


def _split(text: str) -> list[tuple[str, str]]:
    """Each line and its end: a line feed, or nothing for a last line that has none."""
    bodies = text.split("\n")
    last = bodies.pop()
    return [*((body, "\n") for body in bodies), *([(last, "")] if last else [])]


def _line(index: int, line: str) -> Line:
    if _BLANK.fullmatch(line):
        return Line(index, LineKind.BLANK)
    if line.startswith("#"):
        return Line(index, LineKind.COMMENT)
    if (raw := _RAW.fullmatch(line)) and _is_known_raw(raw[1]):
        return Line(index, LineKind.RAW, raw[1], raw[3])
    if raw or _DESCRIPTION.fullmatch(line) or _SNAPSTATE.search(line) or _DELETE.fullmatch(line):
        return Line(index, LineKind.OTHER)
    if key := _KEY.fullmatch(line):
        return Line(index, LineKind.KEY, key[1], key[2])
    return Line(index, LineKind.OTHER)


@dataclass(frozen=True, slots=True)
class Insert:
    """A new line of the main section. ``after`` is the index of the line that it comes after, None: where it belongs.

    It belongs after the last line of the same key (``dev0`` and ``dev1`` count as the same); a raw line else after the
    last raw line, a key else after the last key that sorts before it, as PVE would write it.
    """

    key: str
    value: str
    after: int | None = None


def edit(
    text: str,
    replace: Mapping[int, tuple[str, str]] | None = None,
    delete: Collection[int] = (),
    insert: Sequence[Insert] = (),
) -> str:
    """Change lines of the main section and keep every other byte.

    ``replace`` maps indexes to new keys and values; a line whose key stays keeps how it is spelled (``:`` or ``=``,
    spaces, carriage return). Inserts after the same line stand in the order given. A file without a last newline has
    none afterwards, unless its last line goes.

    Raises:
        ValueError: an index is no key or raw line of the main section, or a value would not read back as it is.
    """
    lines = main_lines(text)
    editable = {line.index: line for line in lines if line.kind in (LineKind.KEY, LineKind.RAW)}
    replace = replace or {}
    for index in (*replace, *delete):
        if index not in editable:
            raise ValueError(f"line {index + 1} is no setting of the main section")
    old = _split(text)
    new: list[tuple[str, str]] = []
    places = _places(lines, insert)
    for index in range(-1, len(old)):
        if index >= 0 and index not in delete:
            body, end = old[index]
            if index in replace:
                body = _respelled(body, editable[index], *replace[index])
            new.append((body, end))
        for wanted in places.get(index, ()):
            _add(new, wanted)
    return "".join(body + end for body, end in new)


def _places(lines: Sequence[Line], inserts: Iterable[Insert]) -> dict[int, list[Insert]]:
    """The index after which each insert goes; -1 is before the first line."""
    places: dict[int, list[Insert]] = {}
    indexes = {line.index for line in lines}
    for wanted in inserts:
        if wanted.after is not None and wanted.after not in indexes:
            raise ValueError(f"line {wanted.after + 1} is not in the main section")
        after = wanted.after if wanted.after is not None else _belongs_after(lines, wanted.key)
        places.setdefault(after, []).append(wanted)
    return places


def _belongs_after(lines: Sequence[Line], key: str) -> int:
    kind = LineKind.RAW if key.startswith("lxc.") else LineKind.KEY
    alike = [line for line in lines if line.kind is kind]
    if same := [line for line in alike if _family(line.key) == _family(key)]:
        return same[-1].index
    if kind is LineKind.RAW:
        content = alike or [line for line in lines if line.kind is not LineKind.BLANK]
        return content[-1].index if content else -1
    if before := [line for line in alike if line.key < key]:
        return before[-1].index
    if settings := [line for line in lines if line.kind in (LineKind.KEY, LineKind.RAW)]:
        return settings[0].index - 1
    content = [line for line in lines if line.kind is not LineKind.BLANK]
    return content[-1].index if content else -1


def _family(key: str) -> str:
    return key if key.startswith("lxc.") else key.rstrip("0123456789")


def _respelled(body: str, line: Line, key: str, value: str) -> str:
    _check(key, value)
    if key != line.key:
        return f"{key}: {value}" + ("\r" if body.endswith("\r") else "")
    match = _RAW.fullmatch(body) if key.startswith("lxc.") else _KEY.fullmatch(body)
    if match is None:  # an editable line is one of the two
        raise AssertionError(body)
    if not line.value:  # "lxc.cap.drop:" and what blanks follow it
        return body.rstrip() + " " + value + ("\r" if body.endswith("\r") else "")
    start, end = match.span(3 if key.startswith("lxc.") else 2)
    return body[:start] + value + body[end:]


def _add(new: list[tuple[str, str]], wanted: Insert) -> None:
    """Append a line. It ends as its neighbour does; a file's last line without an end gets the least there is."""
    _check(wanted.key, wanted.value)
    body = f"{wanted.key}: {wanted.value}"
    if new and not new[-1][1]:
        new[-1] = (new[-1][0], "\n")
        new.append((body, ""))
    else:
        new.append((body + ("\r" if new and new[-1][0].endswith("\r") else ""), "\n"))


def _check(key: str, value: str) -> None:
    """Raise ValueError when PVE would not read the line back as this key and value."""
    line = _line(0, f"{key}: {value}")
    if "\n" in value or "\r" in value or (line.key, line.value) != (key, value):
        raise ValueError(f"cannot write {key}: {value!r} as a line that Proxmox reads back as it is")
