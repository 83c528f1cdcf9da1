"""What can go wrong in the simulated fleet, by name.

A fault is data: which, on which host, and when. ``SimWorld.inject`` takes it; it strikes at its moment and, unless it
says otherwise, once. docs/simulated-fleet.md lists what each does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Killed(BaseException):
    """The controller's process ends here, as with SIGKILL; no ``except Exception`` may save it."""


class Moment(StrEnum):
    """When a fault strikes."""

    NOW = "now"  # at once, when it is injected
    LOOK = "look"  # as the next look at the host is answered
    BEFORE = "before"  # a step was decided on and nothing of it has come to the host
    DURING = "during"  # the step's unit runs and has done nothing yet
    AFTER = "after"  # the step's unit has ended and the controller has not heard of it


class Name(StrEnum):
    """Every fault there is."""

    # the way to the host
    UNREACHABLE = "unreachable"
    REACHABLE = "reachable"
    CONNECTION_LOST = "connection-lost"
    REPLY_LOST = "reply-lost"
    HOST_KEY_CHANGED = "host-key-changed"
    # what the host answers to a look
    HANG = "hang"
    GARBAGE = "garbage"
    HUGE = "huge"
    HALF = "half"
    FOREIGN = "foreign"
    # the controller
    KILLED = "killed"
    OTHER_CONTROLLER = "other-controller"
    # the host
    POWER_OFF = "power-off"
    POWER_ON = "power-on"
    REBOOT = "reboot"
    SMI_HANG = "nvidia-smi-hang"
    SMI_BACK = "nvidia-smi-back"
    CARD_LOST = "card-lost"
    DISK_FULL = "disk-full"
    DISK_FREED = "disk-freed"
    # the cluster
    PARTITION = "partition"
    HEAL = "heal"
    # what people and others do
    EDIT = "edit"
    APPEND = "append"
    REMOVE = "remove"
    VM_START = "vm-start"
    VM_STOP = "vm-stop"
    CT_START = "ct-start"
    CT_STOP = "ct-stop"
    START_FAILS = "start-fails"


ANSWERS = frozenset({Name.HANG, Name.GARBAGE, Name.HUGE, Name.HALF, Name.FOREIGN})
"""Those that spoil one answer to a look; their moment is always LOOK."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    ``when`` None is the fault's own usual moment: LOOK for a spoilt answer, AFTER for a lost reply, DURING for a lost
    connection and a killed controller, NOW for everything else. ``action`` limits it to steps of that action, ``skip``
    lets as many chances pass, ``times`` is how often it strikes (0: every time). ``path`` and ``text`` are an edit's
    file and its new (or appended) text, ``text`` also what a start fails with; ``guest`` a guest's id; ``card`` an
    address; ``sides`` the nodes of each side of a broken network; ``seconds`` how long a reboot takes or another
    controller's lease lasts.
    """

    name: Name
    host: str
    when: Moment | None = None
    action: str = ""
    skip: int = 0
    times: int = 1
    path: str = ""
    text: str = ""
    guest: int = 0
    card: str = ""
    sides: tuple[tuple[str, ...], ...] = ()
    seconds: float = 60.0

    @property
    def moment(self) -> Moment:
        """When it strikes."""
        if self.when is not None:
            return self.when
        if self.name in ANSWERS:
            return Moment.LOOK
        if self.name is Name.REPLY_LOST:
            return Moment.AFTER
        if self.name in (Name.CONNECTION_LOST, Name.KILLED):
            return Moment.DURING
        return Moment.NOW
