"""Which containers of interest run on a Proxmox node, and what is known of what they were started with."""

from __future__ import annotations

import re
from dataclasses import dataclass

from controller.facts.files import read_files
from controller.facts.words import Later, ParseError, Section

TICKS = 100  # of /proc/PID/stat a second: USER_HZ, the same on every architecture of Linux that this runs on


@dataclass(frozen=True, slots=True)
class InnerNode:
    """An NVIDIA node as a container sees it: its name below /dev, what it is, and a device's numbers."""

    name: str
    kind: str
    major: int | Later
    minor: int | Later

    @property
    def is_device(self) -> bool:
        """A character device, not the plain file that ``optional,create=file`` leaves behind."""
        return self.kind == "character special file"


@dataclass(frozen=True, slots=True)
class Running:
    """A running container.

    ``started`` is when its init was started, in clock ticks since the host's boot. ``generated`` is the LXC config
    that it was started with, None when that file was written again since. ``edited`` are the device lines that its
    config had before the first edit of ours since then, None when there was none. ``nodes`` are NVIDIA's inside.
    ``restarted_for`` is the digest of why we restarted it, "" when this start is not ours.
    """

    id: int
    pid: int
    started: int | Later
    generated: str | None
    edited: tuple[str, ...] | Later | None
    nodes: tuple[InnerNode, ...]
    restarted_for: str = ""

    def node(self, name: str) -> InnerNode | None:
        """The node of that name below /dev inside."""
        return next((n for n in self.nodes if n.name == name), None)


@dataclass(frozen=True, slots=True)
class PowerFacts:
    """The running ones of the containers of interest; ``between`` are the ids of those that just start or stop."""

    running: tuple[Running, ...]
    between: frozenset[int] = frozenset()

    def of(self, vmid: int) -> Running | None:
        """The running container of that id, None when it does not run."""
        return next((r for r in self.running if r.id == vmid), None)


_CONFIG = re.compile(r"/var/lib/lxc/(\d+)/config")
_NODE = re.compile(r"/proc/(\d+)/root/dev/(nvidia.*)")


def parse(section: Section) -> PowerFacts:
    """Read the section's text. Raises ParseError."""
    plain, mark, rest = section.out.partition("==files\n")
    if not mark:
        raise ParseError("cut-off", "the list of running containers has no end")
    found: dict[int, tuple[int, int]] = {}
    between: set[int] = set()
    records: dict[tuple[str, int], list[str]] = {}
    nodes: dict[int, list[InnerNode]] = {}
    for line in plain.split("\n")[:-1]:
        kind, _, value = line.partition("|")
        match kind:
            case "running":
                vmid, pid, started = (int(part) for part in value.split("|"))
                found[vmid] = (pid, started)
            case "between":
                between.add(int(value))
            case "edited" | "restarted":
                number, _, text = value.partition("|")
                records.setdefault((kind, int(number)), []).append(text)
            case "node":
                path, what, major, minor = value.rsplit("|", 3)
                if match := _NODE.search(path):
                    node = InnerNode(match[2], what, int(major, 16), int(minor, 16))
                    nodes.setdefault(int(match[1]), []).append(node)
            case _:
                raise ParseError("garbage", f"cannot read {line[:100]!r}")
    generated = {int(m[1]): file.text for path, file in read_files(rest).items() if (m := _CONFIG.search(path))}
    running = [
        Running(
            id=vmid,
            pid=pid,
            started=started,
            generated=generated.get(vmid),
            edited=_edited(records.get(("edited", vmid), []), started),
            nodes=tuple(nodes.get(pid, [])),
            restarted_for=_restarted_for(records.get(("restarted", vmid), []), started),
        )
        for vmid, (pid, started) in sorted(found.items())
    ]
    return PowerFacts(tuple(running), frozenset(between))


def _edited(lines: list[str], started: int) -> tuple[str, ...] | None:
    """The lines of an edit record, whose first says when it was written; one from before the start says nothing."""
    if not lines or int(lines[0]) < started:
        return None
    return tuple(lines[1:])


def _restarted_for(lines: list[str], started: int) -> str:
    """Why we started it, when the record is of this very start."""
    at, _, why = (lines or [""])[0].partition(" ")
    return why if at == str(started) else ""
