"""The port to one host: run a command, or open a program and talk to it.

``ssh.py`` and ``local.py`` implement it. ``shell.py`` asks looks over a ``Stream``, ``units.py`` starts steps by
``run``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Reason(StrEnum):
    """Why a host gave no usable answer. Closed: people, alerts and tests read these."""

    UNREACHABLE = "unreachable"  # no route, no such name, no answer to a connect
    REFUSED = "refused"  # something is there and nothing listens on the port
    NOT_SSH = "not-ssh"  # something listens and does not speak SSH with us
    HOST_KEY_UNKNOWN = "host-key-unknown"
    HOST_KEY_CHANGED = "host-key-changed"
    AUTH_FAILED = "auth-failed"
    KEY_UNUSABLE = "key-unusable"  # an identity file that is missing, encrypted without an agent, or no key at all
    CONFIG = "ssh-config"  # the spec or ~/.ssh/config asks for what cannot be done
    SUDO_REFUSED = "sudo-refused"
    NO_SHELL = "no-shell"  # logged in, and no POSIX shell answers
    CONNECTION_LOST = "connection-lost"
    TIMED_OUT = "timed-out"
    CUT_OFF = "cut-off"  # an answer that began and did not end
    GARBAGE = "garbage"  # an answer that is none
    TOO_LONG = "too-long"
    PROBE_STUCK = "probe-stuck"  # an earlier look still hangs on the host


class HostError(Exception):
    """A host did not do what it was asked. ``reason`` is closed, the text is for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Unreachable(HostError):  # noqa: N818 - the field's own word
    """The host could not be asked at all: nothing was started there."""


class ConnectionLost(HostError):  # noqa: N818
    """The connection ended, or the time was up, after the command may have been started."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a command ended. ``rc`` is -1 when it ended without one (a signal); output is at most the limit asked.

    ``cut`` is True when there was more output than the limit: it was read and dropped.
    """

    rc: int
    out: bytes
    err: bytes
    cut: bool = False


class Stream(Protocol):
    """A program at work on a host, with its standard streams. ``send`` and ``exit_code`` wait, for a bounded time."""

    def send(self, data: bytes, timeout: float) -> None:
        """Write to its standard input, in at most so many seconds. Raises ConnectionLost."""
        ...

    def end_input(self) -> None:
        """Close its standard input."""
        ...

    def receive(self) -> bytes:
        """Return what has come on its standard output since the last call; empty when there is nothing now."""
        ...

    def receive_errors(self) -> bytes:
        """Return what has come on its standard error since the last call."""
        ...

    def ended(self) -> bool:
        """Tell whether its output has ended and was all received."""
        ...

    def exit_code(self, timeout: float) -> int | None:
        """Return its exit code, waiting so many seconds for it; None when it has not come, -1 for none (a signal)."""
        ...

    def close(self) -> None:
        """Let go of it. The program sees its streams closed; it is not killed."""
        ...


class Transport(Protocol):
    """One host, connected. Safe to use from several threads."""

    def run(self, command: str, stdin: bytes = b"", timeout: float = 60.0, limit: int = 64 * 1024) -> Exit:
        """Run POSIX sh text with the rights that the spec asks for, and wait until it ends.

        ``timeout`` in seconds is for all of it; ``limit`` is in bytes, for each of stdout and stderr.
        Raises Unreachable (nothing was started) or ConnectionLost (it may have been, and may be at work still).
        """
        ...

    def open(self, command: str, wake: Callable[[], None], timeout: float) -> Stream:
        """Start POSIX sh text (empty: a shell that reads its commands from standard input) and return its streams.

        ``wake`` is called, from another thread, whenever there is something to receive or the output has ended.
        Raises Unreachable.
        """
        ...

    def at_hand(self, timeout: float) -> bool:
        """Tell whether a short ``send`` on this connection would be taken at once, waiting so long for that."""
        ...

    def alive(self) -> bool:
        """Tell whether the connection is there, as far as is known without asking."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...
