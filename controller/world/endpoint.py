"""Where and as whom to log in: a host's spec, and what the user's OpenSSH configuration says beside it.

What the spec says wins. What it leaves open is looked up in ``~/.ssh/config`` under the host's address, as ``ssh``
would: HostName, User, Port, IdentityFile, ProxyJump, UserKnownHostsFile, HostKeyAlias, ``Include`` and ``Match``. Host
keys are always checked, whatever StrictHostKeyChecking says. A ProxyCommand is refused with a reason, not ignored.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import paramiko

from controller.spec.model import Host
from controller.world.transport import Reason, Unreachable

_INCLUDE_DEPTH = 16  # as OpenSSH: readconf.c READCONF_MAX_DEPTH
_HOPS = 8


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One SSH server to log in to.

    ``host`` is the name of the host in the specs that this login is for: what messages and ``reconcile trust`` say.
    ``known_as`` is its name in known_hosts files. ``via`` is the server to go through, which has its own ``via``.
    """

    host: str
    address: str
    port: int
    user: str
    known_as: str
    identities: tuple[str, ...] = ()
    fingerprint: str | None = None
    known_hosts: tuple[str, ...] = ()
    via: Endpoint | None = None
    sudo: bool = False

    def __str__(self) -> str:
        return f"{self.user}@{self.address}:{self.port}"


class UserConfig:
    """The user's OpenSSH client configuration, read once."""

    def __init__(self, path: str | None = "~/.ssh/config") -> None:
        self.path = os.path.expanduser(path) if path else None
        self.error: str | None = None
        self._config = paramiko.SSHConfig()
        if self.path and os.path.exists(self.path):
            try:
                self._config = paramiko.SSHConfig.from_text(_with_includes(self.path))
            except (OSError, UnicodeDecodeError, paramiko.SSHException) as error:
                self.error = f"cannot read {self.path}: {error}"

    def of(self, name: str) -> Mapping[str, str | list[str]]:
        """Return the options for a host name. Raises Unreachable when they cannot be understood."""
        if self.error:
            raise Unreachable(Reason.CONFIG, self.error)
        try:
            return self._config.lookup(name)
        except Exception as error:  # Match exec without the library for it, CanonicalizeHostname that fails
            raise Unreachable(Reason.CONFIG, f"cannot use {self.path} for {name}: {error}") from error


def endpoint(host: Host, config: UserConfig, hosts: Mapping[str, Host]) -> Endpoint:
    """Return where to log in for a host. A ``proxy_jump`` may name other ``hosts`` of the specs.

    Raises Unreachable (reason ``ssh-config``).
    """
    return _of_spec(host, config, hosts, host.name, ())


def _of_spec(host: Host, config: UserConfig, hosts: Mapping[str, Host], asked: str, seen: tuple[str, ...]) -> Endpoint:
    ssh, said = host.ssh, host.ssh.model_fields_set
    options = config.of(host.address)
    seen = _not_again(host.name, seen)
    jump = ssh.proxy_jump if "proxy_jump" in said else _jump(options, host.address, asked)
    return _endpoint(
        asked,
        options,
        address=host.address,
        user=ssh.user if "user" in said else None,
        port=ssh.port if "port" in said else None,
        default_user=ssh.user,
        identity=ssh.identity_file,
        fingerprint=ssh.host_key,
        via=_through(jump, config, hosts, asked, seen),
        sudo=ssh.sudo,
    )


def _through(
    jump: str | None, config: UserConfig, hosts: Mapping[str, Host], asked: str, seen: tuple[str, ...]
) -> Endpoint | None:
    """Return the last hop of a ProxyJump list; each hop goes through the one before it."""
    via: Endpoint | None = None
    for index, hop in enumerate(part.strip() for part in (jump or "").split(",") if part.strip()):
        user, address, port = _parse_hop(hop)
        if address in hosts and user is None and port is None:
            found = _of_spec(hosts[address], config, hosts, asked, seen) if index == 0 else None
            if found is not None:
                via = found
                continue
            spec = hosts[address]
            user, port, address = spec.ssh.user, spec.ssh.port, spec.address
        options = config.of(address)
        if index == 0:  # as OpenSSH: only the first hop's own ProxyJump counts
            inner = _jump(options, address, asked)
            # `Host *` with a ProxyJump covers the jump host itself; it is reached directly then.
            names = {address, str(options.get("hostname", address))}
            if inner and _parse_hop(inner.split(",")[0].strip())[1] not in names:
                via = _through(inner, config, hosts, asked, _not_again(address, seen))
        via = _endpoint(asked, options, address=address, user=user, port=port, default_user="root", via=via)
    return via


def _endpoint(
    asked: str,
    options: Mapping[str, str | list[str]],
    *,
    address: str,
    user: str | None,
    port: int | None,
    default_user: str,
    identity: str | None = None,
    fingerprint: str | None = None,
    via: Endpoint | None = None,
    sudo: bool = False,
) -> Endpoint:
    where = str(options.get("hostname") or address)
    at = port or int(str(options.get("port") or 22))
    files = [identity] if identity else list(options.get("identityfile") or [])
    known = str(options.get("userknownhostsfile") or "~/.ssh/known_hosts ~/.ssh/known_hosts2").split()
    return Endpoint(
        host=asked,
        address=where,
        port=at,
        user=user or str(options.get("user") or default_user),
        known_as=str(options.get("hostkeyalias") or (where if at == 22 else f"[{where}]:{at}")),
        identities=tuple(os.path.expanduser(path) for path in files if path.lower() != "none"),
        fingerprint=fingerprint,
        known_hosts=(*(os.path.expanduser(path) for path in known), "/etc/ssh/ssh_known_hosts"),
        via=via,
        sudo=sudo,
    )


def _jump(options: Mapping[str, str | list[str]], address: str, asked: str) -> str | None:
    """Return the ProxyJump of the user's configuration; refuse what would have to be ignored."""
    jump = options.get("proxyjump")
    if jump and str(jump).lower() != "none":
        return str(jump)
    if options.get("proxycommand") and not jump:
        raise Unreachable(
            Reason.CONFIG,
            f"cannot reach {asked}: the ssh configuration has a ProxyCommand for {address}, which is not used here; "
            "give the host a proxy_jump in its spec",
        )
    return None


_HOP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?:\[(?P<v6>[^\]]+)\]|(?P<name>[^:@\[\]]+))(?::(?P<port>\d+))?/?")


def _parse_hop(hop: str) -> tuple[str | None, str, int | None]:
    match = _HOP.fullmatch(hop)
    if match is None:
        raise Unreachable(Reason.CONFIG, f"cannot read {hop!r} as a jump host: [user@]host[:port]")
    return match["user"], match["v6"] or match["name"], int(match["port"]) if match["port"] else None


def _not_again(name: str, seen: tuple[str, ...]) -> tuple[str, ...]:
    if name in seen or len(seen) >= _HOPS:
        raise Unreachable(Reason.CONFIG, "cannot go through jump hosts in a circle: " + " -> ".join((*seen, name)))
    return (*seen, name)


def _with_includes(path: str, depth: int = 0) -> str:
    """Return the text of a configuration with its Includes in place.

    paramiko does not know Include. After an included file the block around it is opened again, as OpenSSH does.
    """
    if depth > _INCLUDE_DEPTH:
        raise OSError(f"too many Includes inside each other at {path}")
    with open(path, encoding="utf-8") as file:
        lines = file.read().splitlines()
    text: list[str] = []
    block = "Host *"
    for line in lines:
        word, _, rest = line.strip().replace("=", " ", 1).partition(" ")
        if word.lower() in {"host", "match"}:
            block = line
        if word.lower() != "include":
            text.append(line)
            continue
        for pattern in rest.replace('"', " ").split():
            place = os.path.expanduser(pattern)
            if not os.path.isabs(place):
                place = os.path.join(os.path.dirname(path) if depth == 0 else os.path.expanduser("~/.ssh"), place)
            for found in sorted(glob.glob(place)):
                text += [_with_includes(found, depth + 1), block]
    return "\n".join(text) + "\n"
