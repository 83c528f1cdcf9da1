"""Who has the cards of a host open."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from controller.facts.words import ParseError, Section, Unknown


@dataclass(frozen=True, slots=True)
class User:
    """A process that has a device node open: ``node`` its path, ``group`` the process's control group (v2)."""

    pid: int
    node: str
    group: str
    name: str

    @property
    def who(self) -> str:
        """For people: the guest, the service, or the process."""
        for pattern, word in _GUESTS:
            if match := pattern.match(self.group):
                return f"{word} {match[1]} ({self.name}, process {self.pid})"
        service = _SERVICE.search(self.group)
        return f"{service[1]}.service (process {self.pid})" if service else f"process {self.pid} ({self.name})"


# Proxmox's control groups: a CT's is /lxc/ID, a VM's /qemu.slice/ID.scope
_GUESTS = ((re.compile(r"/lxc(?:\.payload)?[./](\d+)"), "CT"), (re.compile(r"/qemu\.slice/(\d+)\.scope"), "VM"))
_SERVICE = re.compile(r"/([^/]+)\.service(?:/|$)")


@dataclass(frozen=True, slots=True)
class BindingFacts:
    """``users`` are those of cards' nodes and VFIO groups; ``unknown`` says why they could not be told."""

    users: tuple[User, ...] = ()
    unknown: Unknown | None = None

    def of(self, nodes: Iterable[str]) -> tuple[User, ...]:
        """Who has one of these nodes open, each process once."""
        wanted = set(nodes)
        return tuple({user.pid: user for user in self.users if user.node in wanted}.values())


def parse(section: Section) -> BindingFacts:
    """Read the section's text. Raises ParseError."""
    first, _, body = section.out.partition("\n")
    if first == "idle":
        return BindingFacts()
    if first != "exit 0":
        if not first.startswith(("exit ", "hung ")):
            raise ParseError("garbage", f"cannot read {first[:80]!r} as the users of cards")
        return BindingFacts(unknown=Unknown("users-not-known", f"who uses the cards could not be read ({first})"))
    users: list[User] = []
    for line in body.splitlines():
        try:
            pid, node, group, name = line.split("|", 3)
            users.append(User(int(pid), node, group, name))
        except ValueError:
            raise ParseError("garbage", f"cannot read {line[:80]!r} as a user of a card") from None
    return BindingFacts(tuple(sorted(users, key=lambda user: (user.pid, user.node))))
