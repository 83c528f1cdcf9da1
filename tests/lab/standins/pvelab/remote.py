"""Other nodes of the cluster, reached by root's SSH key as Proxmox does."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from pvelab.base import Die, members


def address(host: str) -> str:
    """The address of a node of the cluster."""
    found = members().get(host)
    if found is None:
        raise Die(f"no such cluster node '{host}'", 2)
    return str(found.get("ip", ""))


def command(host: str) -> list[str]:
    """The SSH command to a node (``ssh_info_to_command``)."""
    options = ["-e", "none", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", f"HostKeyAlias={host}"]
    return ["/usr/bin/ssh", *options, f"root@{address(host)}"]


def run(host: str, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command on a node and return what it said, stderr within stdout."""
    return subprocess.run(
        [*command(host), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
