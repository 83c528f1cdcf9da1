"""host.boot in the simulated fleet: the files that lie there; what the unit does at boot is in kernel_physics."""

from __future__ import annotations

import hashlib

from controller.facts.words import Section
from controller.layers.shared import kernel_physics, probe_text
from controller.layers.shared.truth import Fleet, Host, Said, Work

UNIT = "/etc/systemd/system/reconcile-gpus.service"
WANTED = "/etc/systemd/system/sysinit.target.wants/reconcile-gpus.service"
SCRIPT, DATA = "/etc/reconcile/gpus.sh", "/etc/reconcile/gpus"
_OWN = (UNIT, SCRIPT, DATA, "/etc/modules")


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""
    out = "enabled\n" if WANTED in host.files else ""
    folders = ("/etc/modules-load.d/", "/usr/lib/modules-load.d/")
    loads = [p for folder in folders for p in sorted(host.files) if p.startswith(folder) and p.endswith(".conf")]
    found = {path: host.files[path] for path in (*_OWN, *loads) if path in host.files}
    return Section(0, f"{out}==files\n{probe_text.files(found)}")


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What ``set-up.sh`` and ``make-nodes.sh`` do to this host."""
    if work.action == "make-nodes":
        return _make_nodes(fleet, host)
    rest = work.stdin.encode("utf-8", "surrogateescape")
    new: dict[str, str] = {}
    for number, path in enumerate((UNIT, SCRIPT, DATA)):
        size = int(work.args[number * 2 + 1])
        new[path], rest = rest[:size].decode("utf-8", "surrogateescape"), rest[size:]
    for number, (path, text) in enumerate(new.items()):
        there = host.files.get(path)
        if there is not None and there.text == text:
            continue
        digest = hashlib.sha256(there.text.encode("utf-8", "surrogateescape")).hexdigest() if there else "absent"
        if digest != work.args[number * 2]:
            return Said(75, err=f"{path} has changed since it was read\n")
        if failed := kernel_physics.write(fleet, host, path, text):
            return Said(1, err=f"{failed}\ncannot write beside {path}\n")
    kernel_physics.write(fleet, host, WANTED, "")
    return Said(0)


def _make_nodes(fleet: Fleet, host: Host) -> Said:
    if SCRIPT not in host.files:
        return Said(75, err=f"{SCRIPT} is gone\n")
    wrong = kernel_physics.gpu_unit_nodes(fleet, host)
    return Said(1, err=f"{wrong}\n") if wrong else Said(0)
