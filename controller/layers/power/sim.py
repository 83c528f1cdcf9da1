"""container.power in the simulated fleet: which containers run, and what they were started with."""

from __future__ import annotations

from collections.abc import Iterator

from controller.facts.words import Section
from controller.layers.power.facts import TICKS
from controller.layers.shared import probe_text
from controller.layers.shared.truth import Fleet, Host, Node, RunningContainer


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""
    here = [(vmid, host.containers[vmid]) for vmid in guests if vmid in host.containers]
    lines: list[str] = []
    configs = {}
    for vmid, container in here:
        ticks = int((container.started - host.booted) * TICKS)
        lines.append(f"running|{vmid}|{container.pid}|{ticks}")
        for note in ("edited", "restarted"):
            record = host.files.get(f"/run/reconcile/{note}/{vmid}")
            if record is not None:
                lines += (f"{note}|{vmid}|{line}" for line in record.text.split("\n")[:-1])
        config = host.files.get(f"/var/lib/lxc/{vmid}/config")
        if config is not None and config.mtime <= int(host.booted) + ticks // TICKS + 1:
            configs[f"/var/lib/lxc/{vmid}/config"] = config
    for _, container in here:
        lines += _nodes(container)
    return Section(0, "".join(f"{line}\n" for line in lines) + "==files\n" + probe_text.files(configs))


def _nodes(container: RunningContainer) -> Iterator[str]:
    """In the order of the shell's two patterns; the folder of the second is among the first."""
    nodes = {path: node for path, node in container.dev.items() if path.startswith("/dev/nvidia")}
    flat = {path: node for path, node in nodes.items() if path.count("/") == 2}
    caps = {path: node for path, node in nodes.items() if path.startswith("/dev/nvidia-caps/")}
    kinds = {path: _kind(node) for path, node in flat.items()} | ({"/dev/nvidia-caps": "directory|0|0"} if caps else {})
    for path in sorted(kinds):
        yield f"node|/proc/{container.pid}/root{path}|{kinds[path]}"
    for path in sorted(caps):
        yield f"node|/proc/{container.pid}/root{path}|{_kind(caps[path])}"


def _kind(node: Node) -> str:
    if node.plain:
        return "regular empty file|0|0"
    return f"character special file|{node.major:x}|{node.minor:x}"
