"""The command ``pvecm``: ``status`` and ``nodes``, in the form of pve-docs' pvecm.adoc."""

from __future__ import annotations

import re
import time

from pvelab.base import Die, members, node, read_cfs


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    if arguments not in (["status"], ["nodes"]):
        raise Die(f"the lab does not play 'pvecm {' '.join(arguments)}'")
    corosync = read_cfs("corosync.conf")
    if corosync is None:
        raise Die("Error: Corosync config '/etc/pve/corosync.conf' does not exist - is this node part of a cluster?", 2)
    if arguments == ["status"]:
        _status(corosync)
    _membership(columns=arguments == ["status"])
    return 0


def _status(corosync: str) -> None:
    there = members()
    present = [it for it in there.values() if it.get("online")]
    needed = len(there) // 2 + 1
    quorate = len(present) >= needed
    options = dict(re.findall(r"^\s*(cluster_name|config_version|secauth):\s*(\S+)", corosync, re.MULTILINE))
    ring = min((it["id"] for it in present), default=there[node()]["id"])
    sections = (
        (
            "Cluster information",
            "-------------------",
            ("Name", options.get("cluster_name", "")),
            ("Config Version", options.get("config_version", "")),
            ("Transport", "knet"),
            ("Secure auth", options.get("secauth", "on")),
        ),
        (
            "Quorum information",
            "------------------",
            ("Date", time.strftime("%a %b %e %H:%M:%S %Y")),
            ("Quorum provider", "corosync_votequorum"),
            ("Nodes", str(len(present))),
            ("Node ID", f"0x{there[node()]['id']:08x}"),
            ("Ring ID", f"{ring}.1a8"),
            ("Quorate", "Yes" if quorate else "No"),
        ),
        (
            "Votequorum information",
            "----------------------",
            ("Expected votes", str(len(there))),
            ("Highest expected", str(len(there))),
            ("Total votes", str(len(present))),
            ("Quorum", str(needed) if quorate else f"{needed} Activity blocked"),
            ("Flags", "Quorate" if quorate else ""),
        ),
    )
    for title, line, *rows in sections:
        print(title, line, *(f"{name + ':':<17} {value}".rstrip() for name, value in rows), "", sep="\n")


def _membership(*, columns: bool) -> None:
    print("Membership information", "----------------------", "    Nodeid      Votes Name", sep="\n")
    for host, it in sorted(members().items(), key=lambda item: int(item[1]["id"])):
        if it.get("online"):
            number = f"0x{it['id']:08x}" if columns else f"{it['id']:>10}"
            name = it.get("ip", host) if columns else host
            print(f"{number}          1 {name}{' (local)' if host == node() else ''}")
