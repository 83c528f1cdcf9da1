"""The HA manager: its files in /etc/pve/ha, and one round of what its daemons do.

On a real cluster pve-ha-crm and pve-ha-lrm work every few seconds. Here a round is made only when a test runs
``lab-ha-round`` on a host, so that what is merely queued stays queued for as long as the test wants to look.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

from pvelab import ct, vm
from pvelab.base import Die, check_quorum, members, node, path, read_cfs, write_cfs
from pvelab.migrate import Migration

STATES = ("started", "stopped", "enabled", "disabled", "ignored")


def resources() -> dict[str, dict[str, str]]:
    """/etc/pve/ha/resources.cfg by service id ("ct:129")."""
    found: dict[str, dict[str, str]] = {}
    section: dict[str, str] = {}
    for line in (read_cfs("ha/resources.cfg") or "").split("\n"):
        if header := re.match(r"(ct|vm):\s*(\d+)\s*$", line):
            section = found.setdefault(f"{header[1]}:{header[2]}", {})
        elif option := re.match(r"\s+(\S+)\s+(.*?)\s*$", line):
            section[option[1]] = option[2]
    return found


def write_resources(found: dict[str, dict[str, str]]) -> None:
    """Write resources.cfg."""
    sections = (
        f"{sid.replace(':', ': ')}\n" + "".join(f"\t{key} {value}\n" for key, value in sorted(options.items())) + "\n"
        for sid, options in found.items()
    )
    _folder()
    write_cfs("ha/resources.cfg", "".join(sections))


def is_managed(sid: str) -> bool:
    """Whether HA decides about a guest (``vm_is_ha_managed``)."""
    return sid in resources() and resources()[sid].get("state") != "ignored"


def manager_status() -> dict[str, Any]:
    """/etc/pve/ha/manager_status, which the master writes; empty before the first round."""
    return dict(json.loads(read_cfs("ha/manager_status") or "{}"))


def service_id(text: str) -> str:
    """Complete "129" to "ct:129" or "vm:129"."""
    if re.fullmatch(r"(ct|vm):\d+", text):
        return text
    if text.isdigit():
        for host in members():
            if int(text) in ct.ids(host):
                return f"ct:{text}"
            if int(text) in vm.ids(host):
                return f"vm:{text}"
    raise Die(f"unable to parse service id '{text}'")


def request(command: str) -> None:
    """Queue a command for the master, as ``ha-manager crm-command`` does."""
    check_quorum()
    _folder()
    write_cfs("ha/crm_commands", (read_cfs("ha/crm_commands") or "") + command + "\n")


def set_state(sid: str, options: dict[str, str]) -> None:
    """Change a service's options, for example its requested state."""
    check_quorum()
    found = resources()
    if sid not in found:
        raise Die(f"no such resource '{sid}'")
    found[sid] |= options
    write_resources(found)


def service_status(sid: str) -> dict[str, Any]:
    """What ``status/current`` of a guest says of HA."""
    found = resources()
    if sid not in found:
        return {"managed": 0}
    return {
        "managed": 1,
        "group": found[sid].get("group"),
        "state": manager_status().get("service_status", {}).get(sid, {}).get("state"),
    }


def locate(sid: str) -> str:
    """The node that a guest's configuration lies on, or an empty text."""
    kind, _, number = sid.partition(":")
    guests = ct.ids if kind == "ct" else vm.ids
    return next((host for host in members() if int(number) in guests(host)), "")


def round_on_this_node() -> None:
    """What the master and this node's manager do next: take commands, then start, stop, move or recover services.

    A service on a node that is offline is fenced in one round and recovered onto this node in the next.
    """
    check_quorum()
    found, services = resources(), manager_status().get("service_status", {})
    moves: dict[str, str] = {}
    for line in (read_cfs("ha/crm_commands") or "").split("\n"):
        words = line.split()
        if words[:1] == ["stop"] and words[1] in found:
            found[words[1]]["state"] = "stopped"
        elif words[:1] in (["migrate"], ["relocate"]):
            moves[words[1]] = words[2]
    online = {host for host, it in members().items() if it.get("online")}
    for sid in sorted(found):
        where, wanted = locate(sid), found[sid].get("state", "started")
        if wanted == "ignored" or not where:
            continue
        if where not in online:
            if services.get(sid, {}).get("state") != "fence":
                services[sid] = {"node": where, "state": "fence"}
                continue
            _steal(sid, where)
            where = node()
        state = "started" if wanted in ("started", "enabled") else "stopped"
        if where == node():
            try:
                if moves.get(sid, where) != where:
                    Migration(int(sid.partition(":")[2]), moves[sid], {"restart": 1}).run()
                    where = moves[sid]
                else:
                    _bring_to(sid, wanted)
            except Die as error:
                print(f"service {sid}: {error.message}", flush=True)
                state = state if sid in moves else "error"
        services[sid] = {"node": where, "state": state}
    _folder()
    write_resources(found)
    write_cfs("ha/crm_commands", "")
    status = {
        "master_node": node(),
        "node_status": {host: "online" if host in online else "fence" for host in members()},
        "service_status": {sid: services[sid] for sid in services if sid in found},
        "timestamp": int(time.time()),
    }
    write_cfs("ha/manager_status", json.dumps(status))


def _steal(sid: str, source: str) -> None:
    kind, _, number = sid.partition(":")
    name = ct.config_name if kind == "ct" else vm.config_name
    path(f"/etc/pve/{name(int(number), source)}").rename(path(f"/etc/pve/{name(int(number))}"))


def _bring_to(sid: str, wanted: str) -> None:
    kind, _, number = sid.partition(":")
    vmid, up = int(number), wanted in ("started", "enabled")
    if kind == "ct":
        if up and not ct.is_running(vmid):
            with ct.config_lock(vmid):
                ct.start(vmid)
        elif not up:
            ct.stop(vmid, kill=False, timeout=60, then_kill=True)
    elif up and not vm.running_pid(vmid):
        vm.start(vmid)
    elif not up:
        vm.stop(vmid)


def _folder() -> None:
    try:
        path("/etc/pve/ha").mkdir(exist_ok=True)
    except OSError as error:
        raise Die(f"unable to create /etc/pve/ha: {error.strerror}", error.errno or 255) from None
