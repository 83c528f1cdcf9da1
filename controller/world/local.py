"""The controller's own machine as a host: the same port as SSH, over pipes to a shell."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable
from typing import IO, cast

from controller.world import shell
from controller.world.transport import ConnectionLost, Exit, Reason, Unreachable

_AHEAD = 4 << 20


class LocalTransport:
    """The machine that the controller runs on. See ``transport.Transport``."""

    def __init__(self, host: str, *, sudo: bool = False) -> None:
        self.host = host
        self.sudo = sudo

    def run(self, command: str, stdin: bytes = b"", timeout: float = 60.0, limit: int = 64 * 1024) -> Exit:
        """Run POSIX sh text and wait until it ends."""
        return shell.run(self, command, stdin, timeout, limit, sudo=self.sudo)

    def open(self, command: str, wake: Callable[[], None], timeout: float) -> LocalStream:
        """Start POSIX sh text, or a shell."""
        try:
            return LocalStream(self.host, shell.command_line(command, sudo=self.sudo), wake)
        except OSError as error:
            raise Unreachable(Reason.NO_SHELL, f"{self.host} (this machine) starts no shell: {error}") from error

    def at_hand(self, timeout: float) -> bool:
        """Tell whether a short send would be taken at once."""
        return True

    def alive(self) -> bool:
        """Tell whether the connection is there: this machine is."""
        return True

    def close(self) -> None:
        """Do nothing: there is no connection."""


class LocalStream:
    """A program of this machine, with a thread for each of its outputs. See ``transport.Stream``."""

    def __init__(self, host: str, command: str, wake: Callable[[], None]) -> None:
        self._host = host
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the controller
            cwd="/",
        )
        self._input = cast("IO[bytes]", self._process.stdin)
        os.set_blocking(self._input.fileno(), False)
        self._out = _Output(cast("IO[bytes]", self._process.stdout), wake)
        self._err = _Output(cast("IO[bytes]", self._process.stderr), wake)
        self._reaper = threading.Thread(target=self._process.wait, daemon=True)
        self._reaper.start()

    def send(self, data: bytes, timeout: float) -> None:
        """Write to its standard input."""
        deadline = time.monotonic() + timeout
        left = memoryview(data)
        try:
            room = select.poll()
            room.register(self._input, select.POLLOUT)
            while left:
                if not room.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise ConnectionLost(Reason.TIMED_OUT, f"{self._host} takes no input for {timeout:g} s")
                left = left[os.write(self._input.fileno(), left) :]
        except (OSError, ValueError) as error:
            raise ConnectionLost(Reason.CONNECTION_LOST, f"{self._host} takes no input: {error}") from error

    def end_input(self) -> None:
        """Close its standard input."""
        with contextlib.suppress(OSError):
            self._input.close()

    def receive(self) -> bytes:
        """Return what has come on its standard output."""
        return self._out.take()

    def receive_errors(self) -> bytes:
        """Return what has come on its standard error."""
        return self._err.take()

    def ended(self) -> bool:
        """Tell whether its output has ended and was all received; of its errors, whether all can be received."""
        return self._out.ended() and self._err.over()

    def exit_code(self, timeout: float) -> int | None:
        """Return its exit code."""
        self._reaper.join(timeout)
        code = self._process.returncode
        return code if code is None or code >= 0 else -1

    def close(self) -> None:
        """Let go of it; what it still says is read and dropped."""
        self.end_input()
        self._out.drop()
        self._err.drop()


class _Output:
    """What a program writes to one pipe, read by a thread, at most ``_AHEAD`` bytes ahead of who takes it."""

    def __init__(self, pipe: IO[bytes], wake: Callable[[], None]) -> None:
        self._pipe = pipe
        self._wake = wake
        self._data = bytearray()
        self._over = False
        self._dropped = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def take(self) -> bytes:
        with self._changed:
            data = bytes(self._data)
            self._data.clear()
            self._changed.notify_all()
        return data

    def ended(self) -> bool:
        with self._changed:
            return self._over and not self._data

    def over(self) -> bool:
        with self._changed:
            return self._over

    def drop(self) -> None:
        with self._changed:
            self._dropped = True
            self._data.clear()
            self._changed.notify_all()

    def _read(self) -> None:
        with self._pipe:
            while data := self._pipe.read(1 << 16):
                with self._changed:
                    self._changed.wait_for(lambda: self._dropped or len(self._data) < _AHEAD)
                    if not self._dropped:
                        self._data += data
                self._wake()
        with self._changed:
            self._over = True
        self._wake()
