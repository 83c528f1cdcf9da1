"""What containers have of NVIDIA's libraries and programs, and which cards nvidia-smi sees in them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from controller.facts.words import ParseError, Section, Unknown
from controller.layers.gpu_health.facts import normal_pci


@dataclass(frozen=True, slots=True)
class Userland:
    """Of one running container.

    ``libraries`` are the versions that programs in it get libnvidia-ml of; ``packages`` those of its distribution
    that bring such libraries. ``cards`` are what nvidia-smi sees, by UUID and PCI address, None when it was not
    asked: it is missing, or of another version than the module. ``failure`` says why it gave no answer.
    """

    id: int
    libraries: tuple[str, ...] = ()
    program: bool = False
    packages: tuple[str, ...] = ()
    cards: tuple[tuple[str, str], ...] | None = None
    failure: Unknown | None = None


@dataclass(frozen=True, slots=True)
class UserlandFacts:
    """The running ones of the containers of interest; ``between`` are those that just start or stop."""

    containers: tuple[Userland, ...] = ()
    between: frozenset[int] = frozenset()

    def of(self, vmid: int) -> Userland | None:
        """What the container of that id has, None when it does not run."""
        return next((each for each in self.containers if each.id == vmid), None)


_VERSION = re.compile(r"libnvidia-ml\.so\.(\d+\.\d+(?:\.\d+)?)")


def parse(section: Section) -> UserlandFacts:
    """Read the section's text. Raises ParseError."""
    found: dict[int, dict[str, list[str]]] = {}
    between: set[int] = set()
    answers: dict[int, list[str]] = {}
    lines = iter(section.out.splitlines())
    for line in lines:
        kind, _, rest = line.partition(" ")
        number, _, value = rest.partition(" ")
        if not number.isdigit() or kind not in ("between", "container", "library", "package", "program", "smi"):
            raise ParseError("garbage", f"cannot read {line[:80]!r}")
        vmid = int(number)
        if kind == "between":
            between.add(vmid)
            continue
        found.setdefault(vmid, {}).setdefault(kind, []).append(value)
        if kind == "smi":
            answers[vmid] = []
            while (said := next(lines, None)) != ".":
                if said is None:
                    raise ParseError("cut-off", f"nvidia-smi's answer in CT {vmid} has no end")
                answers[vmid].append(said)
    containers = tuple(_userland(vmid, about, answers.get(vmid)) for vmid, about in sorted(found.items()))
    return UserlandFacts(containers, frozenset(between))


def _userland(vmid: int, about: dict[str, list[str]], answer: list[str] | None) -> Userland:
    versions = (_VERSION.fullmatch(target) for target in about.get("library", ()))
    cards, failure = _cards(vmid, answer) if answer is not None else (None, None)
    return Userland(
        vmid,
        tuple(dict.fromkeys(match[1] for match in versions if match)),
        "smi" in about or "program" in about,
        tuple(about.get("package", ())),
        cards,
        failure,
    )


def _cards(vmid: int, answer: list[str]) -> tuple[tuple[tuple[str, str], ...] | None, Unknown | None]:
    first, said = answer[0] if answer else "", " ".join(" ".join(answer[1:]).split())[:200]
    if first.startswith("hung"):
        return None, Unknown("nvidia-smi-hangs", f"nvidia-smi does not come back in CT {vmid}")
    if first != "exit 0":
        return None, Unknown("nvidia-smi-failed", f"nvidia-smi in CT {vmid}: {said or first}")
    try:
        pairs = [tuple(part.strip() for part in line.split(",")) for line in answer[1:] if line.strip()]
        return tuple((uuid, normal_pci(bus)) for uuid, bus in pairs), None
    except ValueError:
        return None, Unknown("nvidia-smi-failed", f"nvidia-smi in CT {vmid} answered {said!r}")
