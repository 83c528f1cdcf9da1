"""The command ``ha-manager``. What it asks for happens in the next round: see ``pvelab.ha``."""

from __future__ import annotations

import time
from typing import Any

from pvelab import ha
from pvelab.arguments import BOOLEAN, Command, call
from pvelab.base import Die, check_quorum, members
from pvelab.schema import Field

PROGRAM = "ha-manager"


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    words = list(arguments)
    name = words.pop(0) if words else ""
    if name == "crm-command" and words:
        name = f"crm-command {words.pop(0)}"
    command = COMMANDS.get(name)
    if command is None:
        raise Die(f"ERROR: unknown command 'ha-manager {' '.join(arguments[:1])}'")
    return call(PROGRAM, name, command, words)


def _config(_: dict[str, Any]) -> None:
    for sid, options in ha.resources().items():
        print(sid)
        for key in sorted(options):
            print(f"\t{key} {options[key]}")
        print()


def _status(_: dict[str, Any]) -> None:
    try:
        check_quorum()
        print("quorum OK")
    except Die:
        print("quorum No quorum on node!")
    status = ha.manager_status()
    moment = time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(status.get("timestamp", 0)))
    if "master_node" in status:
        print(f"master {status['master_node']} (active, {moment})")
    for host in members():
        print(f"lrm {host} ({'active' if status else 'idle'}, {moment})")
    services = status.get("service_status", {})
    for sid, options in ha.resources().items():
        it = services.get(sid, {"node": ha.locate(sid), "state": "queued"})
        print(f"service {sid} ({it['node']}, {'ignored' if options.get('state') == 'ignored' else it['state']})")


def _add(values: dict[str, Any]) -> None:
    check_quorum()
    sid, found = ha.service_id(values.pop("sid")), ha.resources()
    if sid in found:
        raise Die(f"resource ID '{sid}' already defined")
    if not ha.locate(sid):
        raise Die(f"unable to add resource '{sid}': no such guest")
    found[sid] = {"state": "started", **{key: str(value) for key, value in values.items()}}
    ha.write_resources(found)


def _remove(values: dict[str, Any]) -> None:
    check_quorum()
    sid, found = ha.service_id(values["sid"]), ha.resources()
    if sid not in found:
        raise Die(f"cannot delete service '{sid}', not HA managed!")
    del found[sid]
    ha.write_resources(found)


def _set(values: dict[str, Any]) -> None:
    sid = ha.service_id(values.pop("sid"))
    ha.set_state(sid, {key: str(value) for key, value in values.items()})


def _migrate(values: dict[str, Any]) -> None:
    sid = ha.service_id(values["sid"])
    if not ha.is_managed(sid):
        raise Die(f"no such resource '{sid}'")
    if values["node"] not in members():
        raise Die(f"no such cluster node '{values['node']}'", 2)
    ha.request(f"migrate {sid} {values['node']}")


def _stop(values: dict[str, Any]) -> None:
    ha.request(f"stop {ha.service_id(values['sid'])} {values['timeout']}")


_SID = {"sid": Field()}
_OPTIONS = {
    "state": Field(enum=ha.STATES),
    "group": Field(format="pve-configid"),
    "max_restart": Field("integer", minimum=0),
    "max_relocate": Field("integer", minimum=0),
    "comment": Field(),
}
_MOVE = Command(_migrate, {**_SID, "node": Field(format="pve-node")}, usage="")

COMMANDS = {
    "config": Command(_config, options={"type": Field()}),
    "status": Command(_status, options={"verbose": BOOLEAN}),
    "add": Command(_add, _SID, _OPTIONS),
    "remove": Command(_remove, _SID, usage=""),
    "set": Command(_set, _SID, _OPTIONS),
    "migrate": _MOVE,
    "relocate": _MOVE,
    "crm-command migrate": _MOVE,
    "crm-command relocate": _MOVE,
    "crm-command stop": Command(_stop, {**_SID, "timeout": Field("integer", minimum=0)}, usage=""),
}
