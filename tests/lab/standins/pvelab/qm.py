"""The command ``qm``."""

from __future__ import annotations

from typing import Any

from pvelab import ctconf, ha, vm
from pvelab.arguments import BOOLEAN, VMID, Command, call
from pvelab.base import Die
from pvelab.schema import Field

PROGRAM = "qm"


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    name = arguments[0] if arguments else ""
    command = COMMANDS.get(name)
    if command is None:
        raise Die(f"the lab does not play 'qm {name}'")
    return call(PROGRAM, name, command, arguments[1:])


def _list(_: dict[str, Any]) -> None:
    found = [vm.status(vmid) for vmid in vm.ids()]
    if found:
        print(f"{'VMID':>10} {'NAME':<20} {'STATUS':<10} {'MEM(MB)':<10} {'BOOTDISK(GB)':>12} {'PID':<10}")
        for it in found:
            memory, pid = it["maxmem"] >> 20, it.get("pid", 0)
            print(f"{it['vmid']:>10} {it['name']:<20} {it['status']:<10} {memory:<10} {0:>12.2f} {pid:<10}")


def _status(values: dict[str, Any]) -> None:
    vm.load(values["vmid"])
    found = vm.status(values["vmid"])
    if values.get("verbose"):
        for key in sorted(found):
            print(f"{key}: {found[key]}")
    else:
        print(f"status: {found['status']}")


def _config(values: dict[str, Any]) -> None:
    conf = vm.load(values["vmid"])
    pending = conf.pop("pending")
    if not values.get("current"):
        conf |= {key: value for key, value in pending.items() if key != "delete"}
    for key in sorted(conf.keys() - {"digest"}):
        print(f"{key}: {ctconf.encode_text(conf[key]) if key == 'description' else conf[key]}")


def _start(values: dict[str, Any]) -> None:
    vmid = values["vmid"]
    if ha.is_managed(f"vm:{vmid}"):
        print(f"Requesting HA start for VM {vmid}", flush=True)
        ha.set_state(f"vm:{vmid}", {"state": "started"})
    else:
        vm.start(vmid)


def _stop(values: dict[str, Any]) -> None:
    vmid = values["vmid"]
    vm.load(vmid)
    if ha.is_managed(f"vm:{vmid}"):
        print(f"Requesting HA stop for VM {vmid}", flush=True)
        ha.request(f"stop vm:{vmid} {values.get('timeout', 0)}")
    else:
        vm.stop(vmid)


_ID = {"vmid": VMID}
_END = {"skiplock": BOOLEAN, "timeout": Field("integer", minimum=0), "forceStop": BOOLEAN}

COMMANDS = {
    "list": Command(_list, options={"full": BOOLEAN}),
    "status": Command(_status, _ID, {"verbose": BOOLEAN}),
    "config": Command(_config, _ID, {"current": BOOLEAN}),
    "start": Command(_start, _ID, {"skiplock": BOOLEAN, "timeout": Field("integer", minimum=0)}),
    "stop": Command(_stop, _ID, _END),
    "shutdown": Command(_stop, _ID, _END),
}
