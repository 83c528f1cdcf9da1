"""What the configs of containers of interest mount of their host, and whether the host that was asked has it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from controller.facts.words import ParseError, Section
from controller.layers.shared.volumes import Bind, entry, point


@dataclass(frozen=True, slots=True)
class Mount:
    """A bind or raw mount, and what its source is on the host: dir, file, missing, or unknown when nobody says."""

    bind: Bind
    there: str


@dataclass(frozen=True, slots=True)
class MountFacts:
    """By container: the mounts of its config, wherever in the cluster that lies, looked for on this very host."""

    guests: tuple[tuple[int, tuple[Mount, ...]], ...]

    def of(self, vmid: int) -> tuple[Mount, ...] | None:
        """The mounts of a container; None when its config was not seen."""
        return next((mounts for guest, mounts in self.guests if guest == vmid), None)


_LINE = re.compile(r"(mp\d+|lxc\.mount\.entry)\s*[:=]\s*(.*?)\s*", re.ASCII)


def parse(section: Section) -> MountFacts:
    """Read the section's text. Raises ParseError."""
    found: dict[int, dict[str, Mount]] = {}
    for line in section.out.split("\n")[:-1]:
        kind, _, rest = line.partition("|")
        if kind == "guest":
            found.setdefault(int(rest), {})
            continue
        vmid, what, text = rest.split("|", 2)
        match = _LINE.fullmatch(text)
        if kind != "mount" or what not in ("dir", "file", "missing", "unknown") or match is None:
            raise ParseError("garbage", f"cannot read {line[:100]!r}")
        is_point = match[1].startswith("mp")
        bind = point(match[1], match[2]) if is_point else entry(match[2])
        if bind is not None:  # else it is a line that LXC cannot use either
            # of two equal keys the last one counts, of raw lines each
            found[int(vmid)][match[1] if is_point else text] = Mount(bind, what)
    return MountFacts(tuple((vmid, tuple(mounts.values())) for vmid, mounts in sorted(found.items())))
