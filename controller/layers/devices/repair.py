"""From a config's text to the text that passes exactly the assigned cards, and what was wrong with it.

Only lines that are recognisably NVIDIA's are changed; a rule that may be meant for something else stays, and is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from controller.facts.words import Later
from controller.layers.devices.reasons import Reason
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.shared.lxc_devices import (
    ALLOW,
    ALLOW_V1,
    CONTROL_MINOR,
    DENY,
    DEV_KEY,
    DIRECTORIES,
    ENTRY,
    MODESET_MINOR,
    NVIDIA_MAJOR,
    SPARE_MINOR,
    Dev,
    Mount,
    Rule,
    RuleKind,
    allowed,
    card_minor,
    dev_rules,
    device_of,
    nvidia_node,
    read_dev,
    read_mount,
    read_rule,
    resolver,
)
from controller.layers.shared.pve_conf import Insert, Line, LineKind, edit, main_lines, parse
from controller.spec.model import Passthrough

CONTROL, UVM = "nvidiactl", "nvidia-uvm"  # what every user of a card opens besides the card
UVM_TOOLS = "nvidia-uvm-tools"
NEW_MOUNT = "none bind,optional,create=file"

# Where Linux takes a major number from when a driver asks for any (include/linux/fs.h, CHRDEV_MAJOR_DYN_*).
_DYNAMIC = (range(234, 255), range(384, 512))

# Nodes whose major number is fixed (Documentation/admin-guide/devices.txt), so that no rule for a dynamic major can
# stand for them; by the beginning of their path below /dev.
_FIXED = (
    *(
        "null",
        "zero",
        "full",
        "random",
        "urandom",
        "kmsg",
        "tty",
        "console",
        "ptmx",
        "pts",
        "vcs",
        "input",
        "dri",
        "snd",
    ),
    *("net", "fuse", "kvm", "uinput", "uhid", "nvram", "loop", "sd", "sr", "video", "bus/usb", "shm", "mapper", "rtc0"),
)


@dataclass(frozen=True, slots=True)
class Want:
    """What a config shall pass: cards by minor number, in which style.

    ``alone`` is whether the host has no NVIDIA GPU besides them. ``drivers`` are the names that the host's character
    majors are registered under. ``named`` is whether the host has its nodes at each boot before any guest: a new rule
    for a dynamic major is by the node's path then, as LXC looks the major up at each start.
    """

    minors: tuple[int, ...]
    style: Passthrough
    alone: bool
    gpus: GpuFacts
    drivers: tuple[tuple[int, str], ...] = ()
    named: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a config."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Repair:
    """The text that would be right, what was wrong, what stays wrong all the same, and what was left alone and why."""

    text: str
    findings: tuple[Finding, ...]
    remaining: tuple[Finding, ...] = ()
    left: tuple[str, ...] = ()


def repair(text: str, want: Want) -> Repair:
    """Put a config right. A text that is right comes back as it is, with no finding."""
    return _Repairing(text, want).result()


@dataclass(slots=True)
class _DevLine:
    index: int
    number: int
    dev: Dev


@dataclass(slots=True)
class _MountLine:
    index: int
    mount: Mount


@dataclass(slots=True)
class _RuleLine:
    index: int
    key: str
    value: str
    rule: Rule


@dataclass(slots=True)
class _Repairing:
    """The lines of one config that may have to do with NVIDIA, and the changes decided on so far."""

    text: str
    want: Want
    devs: list[_DevLine] = field(default_factory=list)
    mounts: list[_MountLine] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)  # what may bring devices that nobody here knows of
    rules: list[_RuleLine] = field(default_factory=list)
    v1: list[_RuleLine] = field(default_factory=list)
    dev_indexes: dict[str, list[int]] = field(default_factory=dict)
    replace: dict[int, tuple[str, str]] = field(default_factory=dict)
    delete: set[int] = field(default_factory=set)
    insert: list[Insert] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def result(self) -> Repair:
        for line in main_lines(self.text):
            self._read(line)
        self.devs = [dev for dev in self.devs if dev.dev.node and dev.index == self.dev_indexes[f"dev{dev.number}"][-1]]
        raw_before = {line.mount.node for line in self.mounts}
        lacking = {node for node in self._passed() if not self._is_allowed(node, self.rules)}
        self._nodes(lacking)
        self._rules(raw_before, lacking)
        text = edit(self.text, self.replace, self.delete, self.insert)
        return Repair(text, tuple(self.findings), tuple(self._remaining(text)), tuple(self.left))

    def _read(self, line: Line) -> None:
        if line.kind is LineKind.KEY and (match := DEV_KEY.fullmatch(line.key)) and int(match[1]) < 256:
            self.dev_indexes.setdefault(line.key, []).append(line.index)
            self.devs.append(_DevLine(line.index, int(match[1]), read_dev(line.value)))
        elif line.kind is not LineKind.RAW:
            return
        elif line.key == ENTRY:
            mount = read_mount(line.value)
            if mount is not None and mount.node:
                self.mounts.append(_MountLine(line.index, mount))
            elif mount is not None and _may_have_dynamic_major(mount):
                self.strange.append(mount.source)
        elif line.key.startswith(("lxc.hook.", "lxc.include", "lxc.mount.fstab")):
            self.strange.append(f"what {line.key} brings")
        elif line.key in (ALLOW, DENY):
            self.rules.append(_RuleLine(line.index, line.key, line.value, read_rule(line.key, line.value)))
        elif line.key == ALLOW_V1:
            self.v1.append(_RuleLine(line.index, line.key, line.value, read_rule(line.key, line.value)))

    # Nodes

    def _nodes(self, lacking: set[str]) -> None:
        style = self._style()
        required = [*(f"nvidia{minor}" for minor in self.want.minors), *((CONTROL, UVM) if self.want.minors else ())]
        self._fix_targets()
        self._drop_deny_write({node for node in required if node in lacking})
        surplus_devs = [line for line in self.devs if self._is_unassigned(line.dev.node)]
        surplus_mounts = [line for line in self.mounts if self._is_unassigned(line.mount.node)]
        unassigned = sorted({line.dev.node for line in surplus_devs} | {line.mount.node for line in surplus_mounts})
        converted = self._converted(style, required)
        if style is Passthrough.DEV:
            surplus_mounts += [line for line in self.mounts if line.mount.node in converted]
        else:
            surplus_devs += [line for line in self.devs if line.dev.node in converted]
        kept_devs = [line for line in self.devs if line not in surplus_devs]
        kept_mounts = [line for line in self.mounts if line not in surplus_mounts]
        have = {line.dev.node for line in kept_devs}
        have |= {line.mount.node for line in kept_mounts if nvidia_node(line.mount.target) == line.mount.node}
        missing = [node for node in dict.fromkeys((*required, *converted)) if node not in have]
        self._tell_nodes([node for node in missing if node not in converted], unassigned, converted)
        if style is Passthrough.DEV:
            reused = self._pass_as_devs(missing, kept_devs, surplus_devs)
        else:
            reused = self._pass_as_mounts(missing, kept_mounts, surplus_mounts)
        for line in surplus_devs:
            if line.index not in reused:
                self.delete.update(self.dev_indexes[f"dev{line.number}"])
        self.delete.update(line.index for line in surplus_mounts if line.index not in reused)
        for index in self.delete:
            self.replace.pop(index, None)
        self.devs = [line for line in self.devs if line.index not in self.delete]
        self.mounts = [line for line in self.mounts if line.index not in self.delete]

    def _style(self) -> Passthrough:
        """The style of new lines: the one asked for, or the one in which most of the core nodes are passed."""
        if self.want.style is not Passthrough.KEEP:
            return self.want.style
        raw = sum(1 for line in self.mounts if _is_core(line.mount.node))
        return Passthrough.LXC if raw > sum(1 for line in self.devs if _is_core(line.dev.node)) else Passthrough.DEV

    def _is_unassigned(self, node: str) -> bool:
        minor = card_minor(node)
        return minor is not None and minor not in self.want.minors

    def _fix_targets(self) -> None:
        """NVIDIA's userland opens a card by its minor number: its node must have that name inside, too."""
        for line in self.mounts:
            node, target = line.mount.node, nvidia_node(line.mount.target)
            if card_minor(node) is None or target == node or self._is_unassigned(node):
                continue
            line.mount = Mount(line.mount.source, f"dev/{node}", line.mount.rest)
            self.replace[line.index] = (ENTRY, _spelled(line.mount))
            self._find(Reason.WRONG_TARGET, f"/dev/{node} is mounted as {target or 'something else'}")

    def _drop_deny_write(self, nodes: set[str]) -> None:
        """A card is no use without writing to it."""
        for line in self.devs:
            if line.dev.node in nodes and line.dev.denies_writing:
                line.dev = Dev(line.dev.path, _writable(line.dev))
                value = _respelled_dev(self._value(line.index), line.dev.path)
                self.replace[line.index] = (f"dev{line.number}", value)

    def _converted(self, style: Passthrough, required: Sequence[str]) -> list[str]:
        """The nodes to pass in the other style, when the spec names one; what is no device on the host cannot be."""
        if self.want.style is Passthrough.KEEP:
            return []
        lines: Iterable[str] = (
            (line.mount.node for line in self.mounts)
            if style is Passthrough.DEV
            else (line.dev.node for line in self.devs)
        )
        found: list[str] = []
        for node in lines:
            here = self.want.gpus.node(f"/dev/{node}")
            can = node in required or (here is not None and here.is_device)
            if can and node not in found and not self._is_unassigned(node):
                found.append(node)
        return found

    def _pass_as_devs(self, missing: Sequence[str], kept: Sequence[_DevLine], surplus: Sequence[_DevLine]) -> set[int]:
        """Pass nodes as ``dev[n]``, in lines that pass other cards if there are any; those lines are returned."""
        waiting = parse(self.text).pending  # Proxmox puts these in the place of ours at the next start
        named = {*self.dev_indexes, *waiting.keys, *re.split(r"[,;\s]+", waiting.text("delete"))}
        taken = {int(match[1]) for key in named if (match := DEV_KEY.fullmatch(key))}
        spare, reused = iter(surplus), set[int]()
        siblings = [line.dev for line in (*kept, *surplus) if _is_core(line.dev.node)]
        for node in missing:
            old = next(spare, None) if card_minor(node) is not None else None
            if old is not None:
                reused.add(old.index)
                old.dev = Dev(f"/dev/{node}", _writable(old.dev))
                self.replace[old.index] = (f"dev{old.number}", _respelled_dev(self._value(old.index), old.dev.path))
                continue
            number = next(n for n in range(256) if n not in taken)
            taken.add(number)
            dev = Dev(f"/dev/{node}", _writable(siblings[0]) if siblings else self._mode(node))
            self.devs.append(_DevLine(-1, number, dev))
            self.insert.append(Insert(f"dev{number}", _spelled_dev(dev)))
        return reused

    def _mode(self, node: str) -> tuple[str, ...]:
        """The host's own mode of a node, as a bind mount would show it; Proxmox's default keeps all but root out."""
        here = self.want.gpus.node(f"/dev/{node}")
        sane = here is not None and re.fullmatch(r"[67][0-7]{2}", here.mode)
        return (f"mode=0{here.mode}",) if here is not None and sane else ()

    def _pass_as_mounts(
        self, missing: Sequence[str], kept: Sequence[_MountLine], surplus: Sequence[_MountLine]
    ) -> set[int]:
        """Pass nodes as raw mounts, in lines that pass other cards if there are any; those lines are returned."""
        spare, reused = iter(surplus), set[int]()
        like = next((line.mount.rest for line in (*kept, *surplus) if "create=dir" not in line.mount.rest), NEW_MOUNT)
        anchor = max((line.index for line in (*kept, *surplus[: len(missing)])), default=None)
        for node in missing:
            old = next(spare, None) if card_minor(node) is not None else None
            if old is not None:
                reused.add(old.index)
                old.mount = Mount(f"/dev/{node}", f"dev/{node}", old.mount.rest)
                self.replace[old.index] = (ENTRY, _spelled(old.mount))
                continue
            mount = Mount(f"/dev/{node}", f"dev/{node}", like)
            self.mounts.append(_MountLine(-1, mount))
            self.insert.append(Insert(ENTRY, _spelled(mount), anchor))
        return reused

    def _value(self, index: int) -> str:
        return next(line.value for line in main_lines(self.text) if line.index == index)

    def _tell_nodes(self, missing: Sequence[str], unassigned: Sequence[str], converted: Sequence[str]) -> None:
        cards = [node for node in missing if card_minor(node) is not None]
        others = [node for node in missing if card_minor(node) is None]
        extra, lacking = _listed(unassigned), _listed(cards)
        if cards and unassigned:
            self._find(Reason.WRONG_CARDS, f"it passes {extra}, which it is not to have, and not {lacking}")
        elif unassigned:
            self._find(Reason.TOO_MANY_CARDS, f"it passes {extra}, which it is not to have")
        elif cards:
            self._find(Reason.TOO_FEW_CARDS, f"it does not pass {lacking}")
        if others:
            self._find(Reason.NODE_NOT_PASSED, f"it does not pass {_listed(others)}")
        if converted:
            self._find(Reason.WRONG_STYLE, f"{_listed(converted)} are to be passed as {self.want.style} lines")

    # Rules

    def _passed(self) -> list[str]:
        """The nodes that are passed, raw ones first, and that the host has."""
        nodes = (*(line.mount.node for line in self.mounts), *(line.dev.node for line in self.devs))
        return [node for node in dict.fromkeys(nodes) if self._needs_rule(node)]

    def _rules(self, raw_before: set[str], lacking: set[str]) -> None:
        stale = self._stale(self.rules, raw_before)
        bad = [line for line in self.rules if line.rule.kind is RuleKind.BAD and self._is_nvidias(line.rule)]
        surplus = [line for line in self.rules if line not in bad and self._is_unwanted(line.rule)]
        dropped = []
        if self.want.style is Passthrough.DEV and any(f.reason is Reason.WRONG_STYLE for f in self.findings):
            dropped = [line for line in self.rules if line.rule.allow and self._is_nvidias(line.rule)]
        gone = [*stale, *bad, *surplus, *dropped]
        kept = [line for line in self.rules if line not in gone]
        needs = self._passed()
        kept, refusing = self._without_refusals(kept, needs)
        gone = [line for line in self.rules if line in gone or line in refusing]
        spare = list(gone)
        if not spare:  # cgroup v2 has no rules to replace: the lines that v1 had become v2's
            stale_v1 = self._stale(self.v1, raw_before)
            spare = [line for line in self.v1 if line in stale_v1 or line.rule.major == NVIDIA_MAJOR]
        anchor = max((line.index for line in (*gone, *kept) if self._is_nvidias(line.rule)), default=None)
        for node in needs:
            if self._is_allowed(node, kept):
                continue
            old = next((line for line in spare if _is_for_fixed(line.rule) is not _has_dynamic_major(node)), None)
            value = self._rule_for(node, old, kept)
            place = old.index if old is not None else anchor
            new = _RuleLine(len(self.text) if place is None else place, ALLOW, value, read_rule(ALLOW, value))
            if not self._is_allowed(node, [*kept, new]):
                continue  # a rule that is not ours refuses it first; that is told below
            if old is not None:
                spare.remove(old)
                self.replace[old.index] = (ALLOW, value)
                anchor = old.index
            else:
                self.insert.append(Insert(ALLOW, value, anchor))
            kept.append(new)
        self.delete.update(line.index for line in gone if line.index not in self.replace)
        gained = [node for node in needs if node in lacking and self._is_allowed(node, kept)]
        self._tell_rules(bad, surplus, stale, refusing, gained)

    def _needs_rule(self, node: str) -> bool:
        """Whether there is something to allow about this node: the host has such a device."""
        if not _is_core(node) and self.want.gpus.node(f"/dev/{node}") is None:
            return False
        return device_of(node, self.want.gpus) is not None

    def _is_allowed(self, node: str, rules: Sequence[_RuleLine]) -> bool:
        device = device_of(node, self.want.gpus)
        if device is None or isinstance(device[0], Later) or isinstance(device[1], Later):
            return False
        implied = dev_rules([line.dev for line in self.devs], self.want.gpus)
        in_order = sorted(rules, key=lambda line: line.index)
        return allowed([*implied, *(line.rule for line in in_order)], (device[0], device[1]), resolver(self.want.gpus))

    def _is_unwanted(self, rule: Rule) -> bool:
        """Whether a rule lets cards be opened that are not assigned."""
        if not rule.allow:
            return False
        if rule.path:
            return self._is_unassigned(nvidia_node(rule.path))
        if rule.type != "c" or rule.major != NVIDIA_MAJOR:
            return False
        if rule.minor is None:
            return not self.want.alone or not self.want.minors
        return rule.minor <= SPARE_MINOR and rule.minor not in self.want.minors

    def _is_nvidias(self, rule: Rule) -> bool:
        """Whether a rule is for NVIDIA's devices and nothing else."""
        if rule.path:
            return bool(nvidia_node(rule.path))
        own = {NVIDIA_MAJOR, *(number for _, number in self.want.gpus.majors if not isinstance(number, Later))}
        return rule.type == "c" and rule.major in own

    def _stale(self, rules: Sequence[_RuleLine], raw_before: set[str]) -> list[_RuleLine]:
        """Rules for a dynamic major that was NVIDIA's once, recognised by what else the config has.

        A rule stands for a node that is mounted. It is taken for NVIDIA's when the config mounts NVIDIA's nodes, no
        driver of this host has the major, and every other device that the config may bring has a fixed one.
        """
        if not (raw_before or self.mounts):
            return []
        owners = dict(self.want.drivers)
        stale: list[_RuleLine] = []
        for line in rules:
            if not (line.rule.allow and self._is_of_nobody_known(line.rule)):
                continue
            if line.rule.major in owners:
                self._leave(f"`{line.value}`: the major is {owners[line.rule.major or 0]}'s on this host")
            elif self.strange:
                self._leave(f"`{line.value}`: it may be meant for {self.strange[0]}")
            else:
                stale.append(line)
        return stale

    def _is_of_nobody_known(self, rule: Rule) -> bool:
        return (
            rule.kind in (RuleKind.NUMBERS, RuleKind.BAD)
            and rule.type == "c"
            and rule.major is not None
            and any(rule.major in numbers for numbers in _DYNAMIC)
            and not self._is_nvidias(rule)
        )

    def _without_refusals(self, kept: list[_RuleLine], needs: Sequence[str]) -> tuple[list[_RuleLine], list[_RuleLine]]:
        """Take out NVIDIA's own rules that keep a needed node from being opened: refusals, and too little access."""
        refusing: list[_RuleLine] = []
        for node in needs:
            if self._is_allowed(node, kept):
                continue
            device = device_of(node, self.want.gpus)
            for line in list(kept):
                rule = line.rule
                numbers = device is not None and (rule.major, rule.minor) in (device, (device[0], None))
                names = nvidia_node(rule.path) == node if rule.path else numbers
                if self._is_nvidias(rule) and names and not (rule.allow and {"r", "w"} <= set(rule.access)):
                    kept = [other for other in kept if other is not line]
                    refusing.append(line)
        return kept, refusing

    def _rule_for(self, node: str, old: _RuleLine | None, kept: Sequence[_RuleLine]) -> str:
        """A rule by path where the rule that it replaces, or its neighbours, are, or the number would not last."""
        neighbours = [line.rule for line in ([old] if old is not None else kept) if self._is_nvidias(line.rule)]
        lasts = not (self.want.named and node in (UVM, UVM_TOOLS))
        if (any(rule.path for rule in neighbours) or not lasts) and node not in DIRECTORIES:
            return f"/dev/{node} rwm"
        device = device_of(node, self.want.gpus)
        if device is None:
            raise AssertionError(f"no device is known for {node}")
        major, minor = device
        whole = node in (UVM, UVM_TOOLS, *DIRECTORIES)  # no card hangs on a minor of these
        return f"c {major}:* rwm" if whole else f"c {major}:{minor} rwm"

    def _tell_rules(
        self,
        bad: Sequence[_RuleLine],
        surplus: Sequence[_RuleLine],
        stale: Sequence[_RuleLine],
        refusing: Sequence[_RuleLine],
        gained: Sequence[str],
    ) -> None:
        if surplus:
            wide = _quoted(line.value for line in surplus)
            self._find(Reason.TOO_MANY_CARDS, f"{wide} lets it open cards that it is not to have")
        if stale:
            now = self.want.gpus.major(UVM)
            self._find(
                Reason.STALE_MAJOR,
                f"{_quoted(line.value for line in stale)} names no device of this host (nvidia-uvm is {now} now)",
            )
        if bad:
            self._find(Reason.BAD_RULE, f"LXC cannot read {_quoted(line.value for line in bad)} and does not start it")
        unruled = [node for node in gained if not (stale and _has_dynamic_major(node))]
        if unruled:
            self._find(Reason.NO_RULE, f"no rule lets it open {_listed(unruled)}")
        elif refusing and not gained:
            self._find(Reason.NO_RULE, f"{_quoted(line.value for line in refusing)} keeps it from opening what it has")

    # What cannot be put right here

    def _remaining(self, text: str) -> Iterator[Finding]:
        """Judge the new text by its rules alone, as LXC would."""
        lines = main_lines(text)
        rules = [_RuleLine(n.index, n.key, n.value, read_rule(n.key, n.value)) for n in lines if n.key in (ALLOW, DENY)]
        strangers = {gpu.minor for gpu in self.want.gpus.gpus if not isinstance(gpu.minor, Later)}
        if not self.want.alone:
            strangers |= {SPARE_MINOR, *(line.rule.minor for line in rules if line.rule.minor is not None)}
        strangers -= {*self.want.minors, CONTROL_MINOR, MODESET_MINOR}
        if any(self._is_allowed(f"nvidia{minor}", rules) for minor in strangers):
            wide = [line.value for line in rules if line.rule.allow and line.rule.major is None and not line.rule.path]
            yield Finding(
                Reason.ALLOWS_EVERYTHING, f"{_quoted(wide)} lets it open every device, so cards that it is not to have"
            )
        refused = [node for node in self._passed() if not self._is_allowed(node, rules)]
        if refused:
            deny = [line.value for line in rules if not line.rule.allow]
            yield Finding(Reason.DENIED, f"{_quoted(deny)} keeps it from opening {_listed(refused)}")

    def _find(self, reason: Reason, message: str) -> None:
        self.findings.append(Finding(reason, message))

    def _leave(self, what: str) -> None:
        if what not in self.left:
            self.left.append(what)


def _is_core(node: str) -> bool:
    return card_minor(node) is not None or node in (CONTROL, UVM)


def _is_for_fixed(rule: Rule) -> bool:
    """Whether a rule is for NVIDIA's fixed major: cards, nvidiactl, nvidia-modeset."""
    return not _has_dynamic_major(nvidia_node(rule.path)) if rule.path else rule.major == NVIDIA_MAJOR


def _has_dynamic_major(node: str) -> bool:
    return card_minor(node) is None and node not in (CONTROL, "nvidia-modeset")


def _may_have_dynamic_major(mount: Mount) -> bool:
    """Whether a mount may bring a device whose major a rule for a dynamic one could be meant for."""
    for path in (mount.source, mount.target):
        below = path.rpartition("/rootfs/")[2].lstrip("/")
        if below.startswith("dev/"):
            return not below.removeprefix("dev/").startswith(_FIXED)
    return False


def _spelled(mount: Mount) -> str:
    return f"{mount.source} {mount.target} {mount.rest}"


def _writable(dev: Dev) -> tuple[str, ...]:
    """The options without ``deny-write``."""
    return tuple(option for option in dev.options if not option.startswith("deny-write="))


def _spelled_dev(dev: Dev) -> str:
    return ",".join((dev.path, *dev.options))


def _respelled_dev(value: str, path: str) -> str:
    """The value with another path, all else as it is spelled, and without ``deny-write``."""
    parts = [part for part in value.split(",") if not part.startswith("deny-write=")]
    for position, part in enumerate(parts):
        if "=" not in part:
            parts[position] = path
        elif part.startswith("path="):
            parts[position] = f"path={path}"
    return ",".join(parts)


def _listed(nodes: Iterable[str]) -> str:
    return ", ".join(f"/dev/{node}" for node in nodes)


def _quoted(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)
