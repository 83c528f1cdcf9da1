"""Which device nodes a container's config passes, and which devices its rules let it open.

How LXC reads a device rule and in which order rules count: cgroups/cgfsng.c ``device_cgroup_rule_parse`` and
cgroups/cgroup2_devices.c of LXC 6. How Proxmox passes a ``dev[n]``: PVE/LXC.pm and PVE/LXC/Config.pm of
pve-container 5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from controller.facts.words import Later
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.shared.pve_conf import Settings

NVIDIA_MAJOR = 195  # of cards and control nodes, fixed: Documentation/admin-guide/devices.txt of Linux
CONTROL_MINOR = 255  # /dev/nvidiactl
MODESET_MINOR = 254  # /dev/nvidia-modeset
SPARE_MINOR = 253  # the last that a card can have; stands for any card that the nvidia driver may be given yet
ALLOW = "lxc.cgroup2.devices.allow"
DENY = "lxc.cgroup2.devices.deny"
ALLOW_V1 = "lxc.cgroup.devices.allow"
DENY_V1 = "lxc.cgroup.devices.deny"
ENTRY = "lxc.mount.entry"
DIRECTORIES = ("nvidia-caps", "nvidia-caps-imex-channels")  # of nodes with the major that is named like them

Number = int | Later
Device = tuple[Number, Number]  # major and minor of a character device


# Rules


class RuleKind(StrEnum):
    """What a device rule is about."""

    EVERYTHING = "everything"  # a lone "a": the default for what no other rule names
    NUMBERS = "numbers"
    PATH = "path"
    BAD = "bad"  # LXC cannot read it and does not start the container


@dataclass(frozen=True, slots=True)
class Rule:
    """One device rule. ``major`` and ``minor`` are None for ``*``; ``type`` is a, b or c.

    ``access`` is as written, at most three of r, w and m; LXC ignores what comes after the third.
    """

    kind: RuleKind
    allow: bool
    type: str = "c"
    major: int | None = None
    minor: int | None = None
    access: str = ""
    path: str = ""

    def names(self, major: int, minor: int) -> bool:
        """Whether the rule is about this character device, whatever the access."""
        if self.kind is not RuleKind.NUMBERS or self.type == "b":
            return False
        return self.major in (None, major) and self.minor in (None, minor)


_NUMBERS = re.compile(r"([abc])(\s+)(\*|\d+):(\*|\d+)(\s+)(\S.*)", re.ASCII)
_PATH_RULE = re.compile(r"(/\S+)\s+(\S.*)", re.ASCII)


def read_rule(key: str, value: str) -> Rule:
    """The rule in a ``…devices.allow`` or ``…devices.deny`` line."""
    allow = key.endswith(".allow")
    if value == "a":
        return Rule(RuleKind.EVERYTHING, allow, "a")
    if match := _NUMBERS.fullmatch(value):
        readable = len(match[2]) == len(match[5]) == 1 and _is_access(match[6])
        kind = RuleKind.NUMBERS if readable else RuleKind.BAD
        return Rule(kind, allow, match[1], _number(match[3]), _number(match[4]), match[6][:3])
    if match := _PATH_RULE.fullmatch(value):
        kind = RuleKind.PATH if _is_access(match[2]) else RuleKind.BAD
        return Rule(kind, allow, "c", access=match[2][:3], path=match[1])
    return Rule(RuleKind.BAD, allow)


def _is_access(text: str) -> bool:
    return bool(text) and set(text[:3]) <= set("rwm")


def _number(text: str) -> int | None:
    return None if text == "*" else int(text)


def allowed(rules: Iterable[Rule], device: tuple[int, int], resolve: Callable[[str], Device | None]) -> bool:
    """Whether a container with these rules, in this order, may open the character device for reading and writing.

    The first rule that names the device with at least this access decides; a rule that differs from an earlier one
    in nothing but allow or deny changes the earlier one in its place; a lone ``a`` sets what holds for the rest, which
    Proxmox's defaults refuse. ``resolve`` gives the device behind a path, as LXC looks it up at the start.
    """
    otherwise = False
    decided: dict[tuple[str, int | None, int | None, str], Rule] = {}
    for rule in rules:
        if rule.kind is RuleKind.EVERYTHING:
            otherwise = rule.allow
            continue
        numbered = _resolved(rule, resolve)
        if numbered is not None:
            decided[numbered.type, numbered.major, numbered.minor, numbered.access] = numbered
    for rule in decided.values():
        if rule.names(*device) and {"r", "w"} <= set(rule.access):
            return rule.allow
    return otherwise


def _resolved(rule: Rule, resolve: Callable[[str], Device | None]) -> Rule | None:
    """The rule in numbers; None for one that is bad, or whose path leads to no known device."""
    if rule.kind is RuleKind.NUMBERS:
        return rule
    if rule.kind is not RuleKind.PATH:
        return None
    device = resolve(rule.path)
    if device is None or isinstance(device[0], Later) or isinstance(device[1], Later):
        return None
    return Rule(RuleKind.NUMBERS, rule.allow, "c", device[0], device[1], rule.access)


# Nodes

_NVIDIA = re.compile(r"(?:.*/rootfs)?/?dev/(nvidia[^/]*(?:/.*)?)")
_CARD = re.compile(r"nvidia(0|[1-9]\d*)", re.ASCII)


def nvidia_node(path: str) -> str:
    """The name below /dev of one of NVIDIA's nodes, by its path on the host or in the container; "" for another."""
    match = _NVIDIA.fullmatch(path.rstrip("/"))
    return match[1] if match else ""


def card_minor(node: str) -> int | None:
    """The minor number of the card that a node like ``nvidia0`` stands for, None for any other node."""
    match = _CARD.fullmatch(node)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Mount:
    """A raw mount: where from, where to, and the rest of the line (file system, options, …)."""

    source: str
    target: str
    rest: str

    @property
    def node(self) -> str:
        """The NVIDIA node that it passes, "" when it is another mount.

        The source tells which device comes; a source outside /dev (a node made by hand) is taken by its target.
        """
        return nvidia_node(self.source) if self.source.startswith("/dev/") else nvidia_node(self.target)

    @property
    def is_optional(self) -> bool:
        """Whether the container starts without it."""
        return "optional" in self.rest.split()[1].split(",") if len(self.rest.split()) > 1 else False


def read_mount(value: str) -> Mount | None:
    """The mount in an ``lxc.mount.entry`` line, None when it has not got the three fields that it needs."""
    fields = value.split(maxsplit=2)
    return Mount(*fields) if len(fields) == 3 else None


@dataclass(frozen=True, slots=True)
class Dev:
    """A ``dev[n]``: the host's path, and the other options in their order, as written."""

    path: str
    options: tuple[str, ...] = ()

    @property
    def node(self) -> str:
        """The NVIDIA node that it passes, "" when it is another device."""
        return nvidia_node(self.path)

    @property
    def denies_writing(self) -> bool:
        """Whether ``deny-write`` is on."""
        return any(option in ("deny-write=1", "deny-write=yes", "deny-write=on") for option in self.options)


DEV_KEY = re.compile(r"dev(0|[1-9]\d{0,2})", re.ASCII)


def read_dev(value: str) -> Dev:
    """The device in a ``dev[n]`` line."""
    path, options = "", []
    for part in value.split(","):
        name, equals, rest = part.partition("=")
        if not equals:
            path = part
        elif name == "path":
            path = rest
        else:
            options.append(part)
    return Dev(path, tuple(options))


@dataclass(frozen=True, slots=True)
class Passed:
    """What a section of a config passes: its ``dev[n]`` by number, its raw mounts, and its device rules in order."""

    devs: tuple[tuple[int, Dev], ...]
    mounts: tuple[Mount, ...]
    rules: tuple[Rule, ...]

    @property
    def nodes(self) -> frozenset[str]:
        """The NVIDIA nodes that it passes, by name below /dev."""
        nodes = (*(dev.node for _, dev in self.devs), *(mount.node for mount in self.mounts))
        return frozenset(node for node in nodes if node)

    @property
    def cards(self) -> frozenset[int]:
        """The minor numbers of the cards whose nodes it passes."""
        return frozenset(minor for node in self.nodes if (minor := card_minor(node)) is not None)


def passed(settings: Settings) -> Passed:
    """What a section of a config passes."""
    devs = []
    for key, value in settings.keys.items():
        match = DEV_KEY.fullmatch(key)
        if match and int(match[1]) < 256:
            devs.append((int(match[1]), read_dev(str(value))))
    mounts = [read_mount(value) for key, value in settings.lxc if key == ENTRY]
    rules = [read_rule(key, value) for key, value in settings.lxc if key in (ALLOW, DENY)]
    return Passed(tuple(sorted(devs, key=lambda dev: dev[0])), tuple(m for m in mounts if m), tuple(rules))


def dev_rules(devs: Sequence[Dev], gpus: GpuFacts) -> list[Rule]:
    """The rules that Proxmox makes of ``dev[n]`` for NVIDIA's nodes; they come before the raw ones."""
    rules = []
    for dev in devs:
        device = device_of(dev.node, gpus) if dev.node else None
        if device is None or isinstance(device[0], Later) or isinstance(device[1], Later):
            continue
        access = "r" if dev.denies_writing else "rw"
        rules.append(Rule(RuleKind.NUMBERS, True, "c", device[0], device[1], access))
    return rules


def device_of(node: str, gpus: GpuFacts) -> Device | None:
    """The device that an NVIDIA node has to be on this host now, None when the host cannot tell.

    Cards and control nodes have the fixed major; nvidia-uvm's is looked up in /proc/devices by its exact name; of any
    other node the host's own node tells. A directory of nodes stands for its first one.
    """
    minor = card_minor(node)
    if minor is not None:
        return NVIDIA_MAJOR, minor
    if node == "nvidiactl":
        return NVIDIA_MAJOR, CONTROL_MINOR
    if node == "nvidia-modeset":
        return NVIDIA_MAJOR, MODESET_MINOR
    if node in ("nvidia-uvm", "nvidia-uvm-tools"):
        major = gpus.major("nvidia-uvm")
        return None if major is None else (major, 0 if node == "nvidia-uvm" else 1)
    if node in DIRECTORIES:
        major = gpus.major(node)
        return None if major is None else (major, 1)
    here = gpus.node(f"/dev/{node}")
    return (here.major, here.minor) if here is not None and here.is_device else None


def resolver(gpus: GpuFacts) -> Callable[[str], Device | None]:
    """How LXC would look up the path of a rule on this host, for NVIDIA's nodes."""

    def resolve(path: str) -> Device | None:
        here = gpus.node(path)
        return (here.major, here.minor) if here is not None and here.is_device else None

    return resolve
