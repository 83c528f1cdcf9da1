"""container.mounts in the simulated fleet: what configs mount of their host, and what of it this host has."""

from __future__ import annotations

import re
from collections.abc import Iterator

from controller.facts.words import Section
from controller.layers.shared import edit_physics, kernel_physics, pve_physics
from controller.layers.shared.truth import Fleet, Host, Said, Work

_CONFIG = re.compile(r"nodes/[^/]+/lxc/(\d+)\.conf")
_HEADER = re.compile(r"\[[A-Za-z][A-Za-z0-9_:-]+\]\s*")


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""
    cluster = fleet.cluster_of(host)
    files = pve_physics.tree(cluster, host.name).files if cluster is not None else {}
    configs = {int(m[1]): file.text for path, file in files.items() if (m := _CONFIG.fullmatch(path))}
    here = [vmid for vmid in guests if vmid in configs]
    out = "".join(f"guest|{vmid}\n" for vmid in here)
    for vmid in here:
        for line, source in _mounts(configs[vmid]):
            out += f"mount|{vmid}|{_kind(host, source)}|{line}\n"
    return Section(0, out)


def _mounts(config: str) -> Iterator[tuple[str, str]]:
    """Each line of the main section that mounts something of the host's, and what."""
    for line in config.split("\n"):
        if _HEADER.fullmatch(line):
            return
        point = re.match(r"mp\d+:\s*(?:.*,)?(?:volume=)?(/[^,]*)", line)
        raw = re.match(r"lxc\.mount\.entry\s*[:=]\s*(/\S*)", line)
        source = point[1] if point else raw[1].replace("\\040", " ") if raw else ""
        if source and not source.startswith("/dev/"):
            yield line, source


def _kind(host: Host, path: str) -> str:
    if kernel_physics.is_directory(host, path):
        return "dir"
    return "file" if path in host.files else "missing"


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What ``edit-config.sh`` does to this host."""
    if work.action != "edit-config":
        raise ValueError(f"container.mounts has no action {work.action}")
    return edit_physics.edit_config(fleet, host, work)
