"""The command ``pct``."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from pvelab import ct, ctconf, ha, remote
from pvelab.arguments import BOOLEAN, SNAPSHOT, VMID, Command, call
from pvelab.base import Die, check_quorum, node, parameter_error, split_list
from pvelab.migrate import Migration
from pvelab.schema import Field

PROGRAM = "pct"

USAGE = """USAGE: pct <COMMAND> [ARGS] [OPTIONS]

       pct clone <vmid> <newid> [OPTIONS]
       pct create <vmid> <ostemplate> [OPTIONS]
       pct destroy <vmid> [OPTIONS]
       pct list 
       pct migrate <vmid> <target> [OPTIONS]
       pct move-volume <vmid> <volume> [<storage>] [<target-vmid>] [<target-volume>] [OPTIONS]
       pct pending <vmid>
       pct resize <vmid> <disk> <size> [OPTIONS]
       pct restore <vmid> <ostemplate> [OPTIONS]
       pct template <vmid>

       pct config <vmid> [OPTIONS]
       pct set <vmid> [OPTIONS]

       pct delsnapshot <vmid> <snapname> [OPTIONS]
       pct listsnapshot <vmid>
       pct rollback <vmid> <snapname> [OPTIONS]
       pct snapshot <vmid> <snapname> [OPTIONS]

       pct reboot <vmid> [OPTIONS]
       pct resume <vmid>
       pct shutdown <vmid> [OPTIONS]
       pct start <vmid> [OPTIONS]
       pct stop <vmid> [OPTIONS]
       pct suspend <vmid>

       pct console <vmid> [OPTIONS]
       pct cpusets 
       pct df <vmid>
       pct enter <vmid> [OPTIONS]
       pct exec <vmid> [<extra-args>] [OPTIONS]
       pct fsck <vmid> [OPTIONS]
       pct fstrim <vmid> [OPTIONS]
       pct mount <vmid>
       pct pull <vmid> <path> <destination> [OPTIONS]
       pct push <vmid> <file> <destination> [OPTIONS]
       pct remote-migrate <vmid> [<target-vmid>] <target-endpoint> --target-bridge <string> \
--target-storage <string> [OPTIONS]
       pct rescan  [OPTIONS]
       pct status <vmid> [OPTIONS]
       pct unlock <vmid>
       pct unmount <vmid>

       pct help [<extra-args>] [OPTIONS]
"""  # noqa: W291  # so it is printed


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    name = arguments[0] if arguments else ""
    command = COMMANDS.get(name)
    if command is not None:
        return call(PROGRAM, name, command, arguments[1:])
    if f"       pct {name} " in USAGE:
        raise Die(f"the lab does not play 'pct {name}'")
    wrong = f"unknown command 'pct {name}'" if name else "no command specified"
    raise Die(f"ERROR: {wrong}\n{USAGE}")


# Looking


def _list(_: dict[str, Any]) -> None:
    found = [ct.status(vmid) for vmid in ct.ids()]
    if found:
        print(f"{'VMID':<10} {'Status':<10} {'Lock':<12} {'Name':<20}")
        for it in found:
            print(f"{it['vmid']:<10} {it['status']:<10} {it.get('lock', ''):<12} {it['name']:<20}")


def _status(values: dict[str, Any]) -> None:
    vmid = values["vmid"]
    ct.load(vmid)
    found = ct.status(vmid)
    if values.get("verbose"):
        for key in sorted(found):
            print(f"{key}: {found[key]}")
    else:
        print(f"status: {found['status']}")


def _config(values: dict[str, Any]) -> None:
    vmid, name = values["vmid"], values.get("snapshot")
    if name and values.get("current"):
        text = "cannot use 'snapshot' parameter with 'current'"
        raise parameter_error("pct config <vmid> [OPTIONS]", {"current": text, "snapshot": text}, 255)
    if name:
        snapshots = ct.load(vmid)["snapshots"]
        if name not in snapshots:
            raise Die(f"snapshot '{name}' does not exist")
        conf = snapshots[name]
    else:
        conf = ct.current(vmid, without_pending=bool(values.get("current")))
    for key in sorted(conf.keys() - {"digest", "lxc"}):
        print(f"{key}: {ctconf.encode_text(conf[key]) if key == 'description' else conf[key]}")
    for key, value in conf.get("lxc", []):
        print(f"{key}: {value}")


def _pending(values: dict[str, Any]) -> None:
    """Each key with its present value ("cur"), the waiting one ("new"), or that it will go ("del"); no raw keys."""
    conf = ct.load(values["vmid"])
    pending = conf["pending"]
    deletions = ct.pending_deletions(pending)
    hidden = {"digest", "lxc", "pending", "snapshots", "delete"}

    def shown(key: str, value: Any) -> str:
        return ctconf.encode_text(value) if key == "description" else str(value)

    for key in sorted((conf.keys() | pending.keys()) - hidden):
        if key in conf:
            print(f"{'del' if key in deletions else 'cur'} {key}: {shown(key, conf[key])}")
        if key in pending and key not in deletions:
            print(f"new {key}: {shown(key, pending[key])}")


def _list_snapshots(values: dict[str, Any]) -> None:
    conf = ct.load(values["vmid"])
    children: dict[str, list[str]] = {}
    for name, section in {**conf["snapshots"], "current": conf}.items():
        parent = str(section.get("parent", ""))
        children.setdefault(parent if parent in conf["snapshots"] else "", []).append(name)

    def show(name: str, level: int) -> None:
        section = conf["snapshots"].get(name, {})
        moment, text = "", "You are here!"
        if name != "current":
            moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(int(section.get("snaptime", 0))))
            text = str(section.get("description", "no-description")).split("\n")[0]
        print(f"{'  ' * level}`-> {name:<{27 - 2 * level}} {moment:<23} {text}")
        for child in children.get(name, []):
            show(child, level + 1)

    for name in children.get("", []):
        show(name, 0)


# Changing


def _set(values: dict[str, Any]) -> None:
    vmid, usage = values.pop("vmid"), "pct set <vmid> [OPTIONS]"
    digest = str(values.pop("digest", ""))
    if not values:
        raise Die("no options specified", 2)
    delete, revert = split_list(str(values.pop("delete", ""))), split_list(str(values.pop("revert", "")))
    for what, keys in (("delete", delete), ("revert", revert)):
        for key in keys:
            if key not in ctconf.PROPERTIES:
                raise parameter_error(usage, {what: f"unknown option '{key}'"}, 255)
            if key in values:
                text = f"you can't use '-{key}' and -{what} {key}' at the same time"
                raise parameter_error(usage, {what: text}, 255)
    if "description" in values:
        values["description"] = values["description"].encode("latin-1").decode("utf-8", "replace")
    ct.set_options(vmid, values, delete, revert, digest)


def _unlock(values: dict[str, Any]) -> None:
    with ct.config_lock(values["vmid"]):
        ct.remove_lock(values["vmid"])


def _snapshot(values: dict[str, Any]) -> None:
    ct.snapshot(values["vmid"], values["snapname"], values.get("description", ""))


def _delete_snapshot(values: dict[str, Any]) -> None:
    ct.delete_snapshot(values["vmid"], values["snapname"])


# Power. HA decides about what it manages: there a command only asks it, and 0 does not mean that it happened.


def _start(values: dict[str, Any]) -> None:
    vmid = values["vmid"]
    if ct.is_running(vmid):
        raise Die(f"CT {vmid} already running")
    check_quorum()
    if ha.is_managed(f"ct:{vmid}"):
        print(f"Requesting HA start for CT {vmid}", flush=True)
        ha.set_state(f"ct:{vmid}", {"state": "started"})
        return
    with ct.config_lock(vmid):
        _task(lambda: ct.start(vmid, skip_lock=bool(values.get("skiplock"))))


def _stop(values: dict[str, Any]) -> None:
    vmid = values["vmid"]
    if _asked_ha(vmid, "0"):
        return
    with ct.config_lock(vmid):
        conf = ct.load(vmid)
        if not values.get("skiplock") and conf.get("lock") != "mounted":
            ct.check_lock(conf)
        ct.stop(vmid, kill=True)


def _shutdown(values: dict[str, Any]) -> None:
    vmid, timeout = values["vmid"], values.get("timeout", 60)
    if _asked_ha(vmid, str(timeout)):
        return
    with ct.config_lock(vmid):
        ct.check_lock(ct.load(vmid))
        ct.stop(vmid, kill=False, timeout=timeout, then_kill=bool(values.get("forceStop")))


def _asked_ha(vmid: int, timeout: str) -> bool:
    """Whether HA was asked to stop a container, because it manages it."""
    if not ct.is_running(vmid):
        raise Die(f"CT {vmid} not running")
    if not ha.is_managed(f"ct:{vmid}"):
        return False
    print(f"Requesting HA stop for CT {vmid}", flush=True)
    ha.request(f"stop ct:{vmid} {timeout}")
    return True


def _reboot(values: dict[str, Any]) -> None:
    vmid = values["vmid"]
    if not ct.is_running(vmid):
        raise Die(f"VM {vmid} not running")
    _task(lambda: ct.reboot(vmid, values.get("timeout")))


def _task(work: Callable[[], None]) -> None:
    """Do what Proxmox does in a worker: whatever it fails with, ``pct`` exits with 255."""
    try:
        work()
    except Die as error:
        raise Die(error.message) from None


def _migrate(values: dict[str, Any]) -> None:
    vmid, target = values["vmid"], values["target"]
    usage = "pct migrate <vmid> <target> [OPTIONS]"
    if target == node():
        raise parameter_error(usage, {"target": "target is local node."})
    check_quorum()
    remote.address(target)  # dies when there is no such node
    ct.load(vmid)
    if ct.is_running(vmid) and not values.get("online") and not values.get("restart"):
        raise Die("can't migrate running container without --online or --restart")
    if ha.is_managed(f"ct:{vmid}"):
        print(f"Requesting HA migration for CT {vmid} to node {target}", flush=True)
        ha.request(f"migrate ct:{vmid} {target}")
        return
    Migration(vmid, target, values).run()


# Inside


def _execute(values: dict[str, Any]) -> int:
    """Run a command in a container. Its code comes back, or 128 and a signal, or lxc-attach's own 126 and 127."""
    vmid = values["vmid"]
    ct.load(vmid)
    if not ct.is_running(vmid):
        raise Die(f"container '{vmid}' not running!")
    if not values["extra-args"]:
        raise Die("missing command at /usr/share/perl5/PVE/CLI/pct.pm line 251.")
    command = ["lxc-attach", "-n", str(vmid)]
    if values.get("keep-env") == 0:
        command.append("--clear-env")
    words = [word.encode("latin-1") for word in values["extra-args"]]
    sys.stdout.flush()
    code = subprocess.run([*(word.encode() for word in command), b"--", *words], check=False).returncode
    return code if code >= 0 else 128 - code


def _push(values: dict[str, Any]) -> None:
    vmid = values["vmid"]
    ct.load(vmid)
    if not ct.is_running(vmid):
        raise Die("can only push files to a running CT")
    try:
        content = open(values["file"].encode("latin-1"), "rb")  # noqa: SIM115
    except OSError:
        raise Die(f"failed to open {values['file']} for reading") from None
    mode, owner, group = values.get("perms", ""), values.get("user", ""), values.get("group", "")
    steps = ['cat > "$1"']
    if mode:
        steps.append(f'chmod {mode} "$1"')
    if owner or group:
        steps.append(f'chown {owner}:{group} "$1"')
    _inside(vmid, " && ".join(steps), values["destination"], stdin=content)


def _pull(values: dict[str, Any]) -> None:
    vmid = values["vmid"]
    ct.load(vmid)
    if not ct.is_running(vmid):
        raise Die("can only pull files from a running VM at /usr/share/perl5/PVE/CLI/pct.pm line 476.")
    with open(values["destination"].encode("latin-1"), "wb") as target:
        _inside(vmid, 'cat "$1"', values["path"], stdout=target)


def _inside(vmid: int, script: str, argument: str, **streams: Any) -> None:
    command = ["lxc-attach", "-n", str(vmid), "--", "/bin/sh", "-c", script, "sh", argument]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=False, check=False, **streams)
    if done.returncode:
        raise Die(done.stderr.decode("latin-1").strip())


_ID = {"vmid": VMID}
_SKIP_LOCK = {"skiplock": BOOLEAN}
_SETTABLE = {name: it for name, it in ctconf.PROPERTIES.items() if name not in ("parent", "snaptime")}
_KEYS = Field(format="pve-configid-list")
_SECONDS = Field("integer", minimum=0)
_OWNER = {"user": Field(), "group": Field(), "perms": Field()}

COMMANDS = {
    "list": Command(_list, usage=""),
    "status": Command(_status, _ID, {"verbose": BOOLEAN}),
    "config": Command(_config, _ID, {"current": BOOLEAN, "snapshot": SNAPSHOT}),
    "pending": Command(_pending, _ID, usage=""),
    "listsnapshot": Command(_list_snapshots, _ID, usage=""),
    "set": Command(_set, _ID, {**_SETTABLE, "delete": _KEYS, "revert": _KEYS, "digest": Field(max_length=64)}),
    "unlock": Command(_unlock, _ID, usage=""),
    "snapshot": Command(_snapshot, {**_ID, "snapname": SNAPSHOT}, {"description": Field()}),
    "delsnapshot": Command(_delete_snapshot, {**_ID, "snapname": SNAPSHOT}, {"force": BOOLEAN}),
    "start": Command(_start, _ID, {**_SKIP_LOCK, "debug": BOOLEAN}),
    "stop": Command(_stop, _ID, {**_SKIP_LOCK, "overrule-shutdown": BOOLEAN}),
    "shutdown": Command(_shutdown, _ID, {"timeout": _SECONDS, "forceStop": BOOLEAN}),
    "reboot": Command(_reboot, _ID, {"timeout": _SECONDS}),
    "migrate": Command(
        _migrate,
        {**_ID, "target": Field(format="pve-node")},
        {
            "online": BOOLEAN,
            "restart": BOOLEAN,
            "timeout": Field("integer"),
            "target-storage": Field(),
            "bwlimit": Field("number"),
        },
    ),
    "exec": Command(_execute, _ID, {"keep-env": BOOLEAN}, usage="[<extra-args>] [OPTIONS]", takes_rest=True),
    "push": Command(_push, {**_ID, "file": Field(), "destination": Field()}, _OWNER),
    "pull": Command(_pull, {**_ID, "path": Field(), "destination": Field()}, _OWNER),
}
