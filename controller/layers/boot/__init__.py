"""host.boot: after a reboot the cards are with their owners' drivers, and have their nodes, before any guest starts.

One unit of ours, before anything else loads a driver, with a script that has all values in a small file of data. A
card's minor is recorded with it: one that gets another at boot has no node, so that no container gets another's card.
Which way was chosen and why: docs/decisions/0006-a-unit-of-our-own-at-boot.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from controller.core.package import script, text
from controller.core.view import View
from controller.core.words import Block, Disruption, Drift, Gate, InSync, Layer, Skipped, Step, Verdict
from controller.facts.words import FleetFacts, Known, Later
from controller.layers.boot.facts import DATA, SCRIPT, UNIT, BootFacts, Marked, Recorded, marked, parse
from controller.layers.boot.reasons import Reason
from controller.layers.gpu_health.facts import GpuFacts, Node
from controller.layers.kernel.facts import KernelFacts
from controller.layers.shared.cards import itself
from controller.layers.shared.vfio_ids import vfio_ids
from controller.spec.model import GpuOwner, Host, Lifecycle
from controller.spec.policy import Permission
from controller.spec.ref import Ref

T = TypeVar("T")

NAME = "host.boot"
_PACKAGE = "controller.layers.boot"
SCHEMA = 1
HONOURED = frozenset({1})
"""The schemas of files that this release takes as they are, though it would write them otherwise."""

LOAD = ("nvidia", "nvidia_uvm")
BOOT_SCRIPT = text(_PACKAGE, "gpus.sh")
BOOT_UNIT = f"""\
[Unit]
Description=GPUs to the drivers of their owners, before anything else loads one (reconcile)
DefaultDependencies=no
RequiresMountsFor=/etc /usr
After=systemd-remount-fs.service
Before=systemd-modules-load.service systemd-udev-trigger.service sysinit.target nvidia-persistenced.service
Before=pve-guests.service shutdown.target
Conflicts=shutdown.target

[Service]
Type=oneshot
RemainAfterExit=yes
TimeoutStartSec=180
ExecStart=/bin/sh {SCRIPT}

[Install]
WantedBy=sysinit.target
"""


def check(view: View, host: Host) -> Verdict:
    """Whether the next boot gives every card to its owner's driver, and the nodes are there now."""
    if not host.gpus or host.nvidia is None or host.nvidia.driver is None:
        return Skipped("no GPUs in the spec" if not host.gpus else "no driver in the spec")
    if host.lifecycle is not Lifecycle.ACTIVE:
        return Skipped(str(host.lifecycle))
    boot = view.fact(host.name, NAME, BootFacts)
    gpus = view.fact(host.name, "host.gpu-health", GpuFacts)
    cards = wanted_cards(host, gpus, boot)
    strange = [path for path, file in _files(boot) if file is not None and not file.ours]
    found = _difference(view, host, boot, cards)
    if found is not None:
        reason, message = found
        if strange or boot.masked:
            what = f"{', '.join(strange)} is not ours" if strange else f"{UNIT} is masked"
            block = Block(Reason.NOT_OURS, f"{what} on {host.name}", "move it away (`systemctl unmask` a masked unit)")
            return Drift(reason, f"{message}, and {block.message}", block)
        return Drift(reason, message, _set_up(host, boot, cards, reason))
    lacking = _missing_nodes(gpus, cards)
    if lacking:
        message = f"{', '.join(lacking)} is not there on {host.name}"
        return Drift(Reason.MISSING_NODES, message, _make_nodes(host, cards))
    return InSync()


def wanted_cards(host: Host, gpus: GpuFacts, boot: BootFacts) -> tuple[Recorded, ...]:
    """The cards as they have to be recorded: what is not known now (a minor, a UUID) stays as it was recorded.

    A card that is not there, or is another, is no reason to forget it: host.gpu-health reports it.
    """
    cards: list[Recorded] = []
    for gpu in sorted(host.gpus, key=lambda gpu: gpu.pci):
        before = boot.card(gpu.pci)
        function = itself(gpus, gpu)
        if function is None:
            cards += [before] if before is not None else []
            continue
        if gpu.owner is GpuOwner.VMS:
            cards.append(Recorded(gpu.pci, function.device, "vfio-pci"))
            continue
        card, row = gpus.gpu(gpu.pci), gpus.row(gpu.pci)
        known = before if before is not None and before.device == function.device else None
        minor = card.minor if card is not None else known.minor if known is not None else None
        uuid = (card.uuid if card else "") or (row.uuid if row else "") or (known.uuid if known else "")
        cards.append(Recorded(gpu.pci, function.device, "nvidia", minor, uuid))
    return tuple(cards)


def _files(boot: BootFacts) -> tuple[tuple[str, Marked | None], ...]:
    return ((UNIT, boot.unit), (SCRIPT, boot.script), (DATA, boot.data))


def is_set_up(boot: BootFacts, host: str) -> bool:
    """Whether the unit would be started, with the script and data that were written for this host."""
    written = [file for _, file in _files(boot) if file is not None and file.intact and file.object == f"Host/{host}"]
    return boot.enabled and not boot.masked and len(written) == 3 and all(f.schema in HONOURED for f in written)


def _difference(view: View, host: Host, boot: BootFacts, cards: tuple[Recorded, ...]) -> tuple[Reason, str] | None:
    if boot.unit is None or boot.script is None or boot.data is None:
        taken = _taken_by_ids(view, host, cards)
        if taken:
            return (
                Reason.TAKEN_BY_IDS,
                f"`options vfio-pci ids=` gives {', '.join(taken)} of {host.name} to vfio-pci at boot",
            )
        return Reason.NOT_SET_UP, f"nothing binds the cards of {host.name} to their drivers at boot"
    for path, file in ((UNIT, boot.unit), (SCRIPT, boot.script)):
        if not file.intact or file.schema not in HONOURED or file.object != str(Ref("Host", host.name)):
            return Reason.CHANGED_BY_HAND, f"{path} on {host.name} is not as it was written for it"
    if not boot.enabled or boot.masked:
        return Reason.NOT_ENABLED, f"reconcile-gpus.service of {host.name} would not be started at boot"
    if boot.load != LOAD or [_place(c) for c in boot.cards] != [_place(c) for c in cards]:
        return Reason.OTHER_CARDS, f"what is recorded for the boot of {host.name} names other cards or drivers"
    for before, card in zip(boot.cards, cards, strict=True):
        if before.minor != card.minor:
            now = "known later" if isinstance(card.minor, Later) else card.minor
            return Reason.OTHER_MINORS, f"{card.pci} of {host.name} has minor {now}, recorded is {before.minor}"
        if before.uuid != card.uuid:
            return Reason.OTHER_CARDS, f"the UUID of {card.pci} of {host.name} is not recorded"
    return None


def _place(card: Recorded) -> tuple[str, str, str]:
    return card.pci, card.device, card.driver


def _taken_by_ids(view: View, host: Host, cards: tuple[Recorded, ...]) -> list[str]:
    """The cards of containers whose model stands in ``ids=``, as far as modprobe.d is known."""
    found = view.facts[host.name].section("host.kernel")
    if not isinstance(found, Known) or not isinstance(found.value, KernelFacts):
        return []
    ids = vfio_ids(text for _, text in found.value.modprobe)
    return [card.pci for card in cards if card.driver != "vfio-pci" and card.device in ids]


def _missing_nodes(gpus: GpuFacts, cards: tuple[Recorded, ...]) -> list[str]:
    """The nodes that cards on nvidia need and that are not there, or are of another device."""
    minors = [card.minor for card in cards if card.driver == "nvidia" and gpus.gpu(card.pci) is not None]
    if not minors or any(not isinstance(minor, int) for minor in minors) or isinstance(gpus.major("nvidia-uvm"), Later):
        return []
    uvm = gpus.major("nvidia-uvm")
    wanted: dict[str, tuple[object, object]] = {f"/dev/nvidia{minor}": (195, minor) for minor in minors}
    wanted |= {"/dev/nvidiactl": (195, 255), "/dev/nvidia-uvm": (uvm, 0), "/dev/nvidia-uvm-tools": (uvm, 1)}
    return [path for path, number in wanted.items() if not _is_device(gpus.node(path), number)]


def _is_device(node: Node | None, number: tuple[object, object]) -> bool:
    return node is not None and node.is_device and (node.major, node.minor) == number


# Steps


def data_text(cards: tuple[Recorded, ...]) -> str:
    """The data of the boot script, without its marker."""
    lines = [f"load {module}" for module in LOAD]
    for card in cards:
        minor = card.minor if isinstance(card.minor, int) else "-"
        lines.append(f"card {card.pci} {card.device} {card.driver} {minor} {card.uuid or '-'}")
    return "\n".join(lines) + "\n"


def _shown(cards: tuple[Recorded, ...]) -> list[str]:
    """The data for people: what is known only after an earlier step of a plan says so."""
    lines = data_text(cards).splitlines()
    later = {card.pci: card.minor.step for card in cards if isinstance(card.minor, Later)}
    return [f"{line}  (known after {later[pci]})" if (pci := line.split()[1]) in later else line for line in lines]


def _set_up(host: Host, boot: BootFacts, cards: tuple[Recorded, ...], reason: Reason) -> Step:
    obj = str(Ref("Host", host.name))
    texts = [marked(body, obj, SCHEMA) for body in (BOOT_UNIT, BOOT_SCRIPT, data_text(cards))]
    args: list[str] = []
    for (_, file), new in zip(_files(boot), texts, strict=True):
        args += [file.sha256 if file is not None else "absent", str(len(new.encode()))]
    unit, boot_script, data = (Marked(new, True, obj, SCHEMA, True) for new in texts)

    def after(facts: BootFacts) -> BootFacts:
        return dataclasses.replace(
            facts, enabled=True, unit=unit, script=boot_script, data=data, load=LOAD, cards=cards
        )

    return dataclasses.replace(
        _step(
            host, "set-up-boot", reason, f"bind the cards of {host.name} at boot (reconcile-gpus.service)", "set-up.sh"
        ),
        args=tuple(args),
        stdin="".join(texts).encode(),
        provisional=any(isinstance(card.minor, Later) for card in cards),
        diff="\n".join(f"+{line}" for line in _shown(cards)),
        effect=lambda facts: _predicted(facts, host.name, NAME, BootFacts, after),
    )


def _make_nodes(host: Host, cards: tuple[Recorded, ...]) -> Step:
    step = _step(host, "make-nodes", Reason.MISSING_NODES, f"make the device nodes of {host.name}", "make-nodes.sh")

    def after(facts: GpuFacts) -> GpuFacts:
        uvm = facts.major("nvidia-uvm")
        if uvm is None:
            uvm = Later(step.id)
        numbers: dict[str, tuple[int | Later, int]] = {
            f"/dev/nvidia{c.minor}": (195, c.minor) for c in cards if isinstance(c.minor, int)
        }
        numbers |= {"/dev/nvidiactl": (195, 255), "/dev/nvidia-uvm": (uvm, 0), "/dev/nvidia-uvm-tools": (uvm, 1)}
        nodes = [node for node in facts.nodes if node.path not in numbers]
        nodes += (Node(path, "character special file", *number, "666") for path, number in numbers.items())
        majors = tuple({**dict(facts.majors), "nvidia-uvm": uvm}.items())
        return dataclasses.replace(facts, nodes=tuple(nodes), majors=majors)

    return dataclasses.replace(
        step, effect=lambda facts: _predicted(facts, host.name, "host.gpu-health", GpuFacts, after)
    )


def _step(host: Host, action: str, reason: Reason, summary: str, file: str) -> Step:
    ref = Ref("Host", host.name)
    return Step(
        action=action,
        object=ref,
        layer=NAME,
        reason=reason,
        summary=summary,
        hosts=(host.name,),
        script=script(_PACKAGE, file),
        disrupts=(Disruption(ref, Permission.REBIND_GPU),),
        timeout=60.0,
    )


def _predicted(facts: FleetFacts, host: str, section: str, kind: type[T], after: Callable[[T], T]) -> FleetFacts:
    found = facts[host].section(section)
    if not isinstance(found, Known) or not isinstance(found.value, kind):
        return facts
    return {**facts, host: facts[host].with_section(section, after(found.value))}


LAYER = Layer(
    name=NAME,
    kind="Host",
    reasons=Reason,
    check=check,
    probe=text(_PACKAGE, "probe.sh"),
    parse=parse,
    gates=Gate.NOTHING,  # the next boot is no reason to keep a container from its cards now
)
