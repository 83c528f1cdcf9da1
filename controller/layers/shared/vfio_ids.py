"""``options vfio-pci ids=``: which models vfio-pci takes whenever it is loaded, whoever's they are."""

from __future__ import annotations

import re
from collections.abc import Iterable

_OPTION = re.compile(r"[ \t]*options[ \t]+vfio[-_]pci[ \t](?:.*[ \t])?ids=(\S+)(?:[ \t].*)?")


def vfio_ids(modprobe: Iterable[str]) -> tuple[str, ...]:
    """The vendor:device pairs in modprobe.d texts. Of several such lines the last one counts."""
    ids: tuple[str, ...] = ()
    for text in modprobe:
        for line in text.split("\n"):
            if match := _OPTION.fullmatch(line):
                ids = tuple(":".join(each.lower().split(":")[:2]) for each in match[1].split(",") if each)
    return ids
