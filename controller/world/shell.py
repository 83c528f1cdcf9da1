"""Shells on hosts: commands that end, and the one shell per host that answers looks."""

from __future__ import annotations

import re
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from controller.core import probe
from controller.facts.words import Section
from controller.world.transport import ConnectionLost, Exit, HostError, Reason, Stream, Transport, Unreachable

_NOISE = 64 * 1024  # bytes that a login may say before the first answer (a profile that greets)
_ERRORS = 4096
_SEND_TIMEOUT = 10.0
_SUDO_SAYS = re.compile(rb"^(?:\S+: )*sudo: ", re.MULTILINE)  # the second one is a shell that does not find it
_GRACE = 1.0  # seconds that output may go on after the exit: a child that was left behind keeps it open for ever


def command_line(command: str, *, sudo: bool) -> str:
    """Return what to give to a login shell of any kind so that /bin/sh runs the command (empty: its standard input).

    Login shells differ in quoting: in fish, backslashes count between single quotes; in csh, line ends and ``!`` do.
    What they would read differently is written as octal escapes, which ``printf %b`` of the inner shell undoes.
    """
    become = "sudo -n " if sudo else ""
    if not command:
        return f"exec {become}/bin/sh"
    if re.search(r"[\\'!\n]", command):
        plain = re.sub(rb"[^A-Za-z0-9 _./:=,-]", lambda match: b"\\0%03o" % ord(match[0]), command.encode()).decode()
        return f"""exec {become}/bin/sh -c 'eval "$(printf %b "$0")"' '{plain}'"""
    return f"exec {become}/bin/sh -c {shlex.quote(command)}"


def run(transport: Transport, command: str, stdin: bytes, timeout: float, limit: int, *, sudo: bool) -> Exit:
    """Run a command over a transport and wait until it ends. See ``Transport.run``."""
    done = _run(transport, command, stdin, timeout, limit)
    if sudo and done.rc == 1 and not done.out and _SUDO_SAYS.search(done.err):
        raise Unreachable(Reason.SUDO_REFUSED, f"sudo does not run commands without a password: {_shown(done.err)}")
    return done


def _run(transport: Transport, command: str, stdin: bytes, timeout: float, limit: int) -> Exit:
    deadline = time.monotonic() + timeout
    news = threading.Event()
    stream = transport.open(command, news.set, timeout)
    out, err = _Kept(limit), _Kept(limit)
    exited: float | None = None
    try:
        _feed(stream, stdin, deadline)
        while True:
            news.clear()
            out.add(stream.receive())
            err.add(stream.receive_errors())
            now = time.monotonic()
            ended = stream.ended()
            rc = stream.exit_code(max(0.0, deadline - now) if ended else 0.0)
            if rc is not None:
                exited = exited or now
                if ended or now > exited + _GRACE:
                    err.add(stream.receive_errors())
                    if rc < 0 and not transport.alive():
                        raise ConnectionLost(Reason.CONNECTION_LOST, "the connection ended before the command did")
                    return Exit(rc, bytes(out.data), bytes(err.data), out.cut or err.cut)
            if now >= deadline:
                raise ConnectionLost(Reason.TIMED_OUT, f"the command has not ended within {timeout:g} s")
            # Nothing wakes us at an exit that leaves the output open, so that is looked for now and then.
            news.wait(min(deadline - now, 0.2))
    finally:
        stream.close()


def _feed(stream: Stream, stdin: bytes, deadline: float) -> None:
    """Give a command its standard input; what may not fit at once goes from a thread of its own.

    A command may end without reading it all: then how it ended is what counts, and not that it took no more input.
    """

    def feed() -> None:
        try:
            stream.send(stdin, max(0.1, deadline - time.monotonic()))
        except ConnectionLost:
            return
        stream.end_input()

    if len(stdin) <= 32 * 1024:
        feed()
    else:
        threading.Thread(target=feed, daemon=True).start()


class _Kept:
    """The first bytes of an output; the rest is dropped."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.data = bytearray()
        self.cut = False

    def add(self, data: bytes) -> None:
        room = self.limit - len(self.data)
        self.cut = self.cut or len(data) > room
        self.data += data[:room]


@dataclass
class Counts:
    """What looking at a host has cost: waits for an answer, answers that were split into sections, logins."""

    rounds: int = 0
    reads: int = 0
    logins: int = 0


class ProbeShell:
    """The shell of one host that answers looks, and what it answered last.

    ``open`` starts it on the host's connection and waits. ``ask`` sends one line (the first one with the script
    before it); ``hear`` is called at news until it returns the answer. A failure raises HostError and drops the
    shell: the next look needs another one, on the same connection.

    A host whose login gives no shell that stays (a forced command that reads all its input first) is asked with a
    shell for each look instead, the whole input at once.
    """

    def __init__(self, host: str, fragments: Mapping[str, str]) -> None:
        self.host = host
        self.counts = Counts()
        self._token = secrets.token_hex(4)
        self._script = probe.script(fragments)
        self._one_shot = False
        self._stream: Stream | None = None
        self._greeted = False
        self._nonce = ""
        self._answer = bytearray()
        self._errors = b""
        self._last = b""
        self._sections: Mapping[str, Section] = {}

    def is_open(self) -> bool:
        """Tell whether there is a shell to ask."""
        return self._stream is not None

    def open(self, transport: Transport, wake: Callable[[], None], timeout: float) -> None:
        """Start the shell. Raises Unreachable."""
        self._stream = transport.open("", wake, timeout)
        self._greeted = False

    def ask(self, max_age: float, guests: Iterable[int]) -> None:
        """Ask for one look. Raises ConnectionLost."""
        stream = self._at_work()
        # Whose look it is: a shell that finds its own predecessor at work knows that it was given up.
        self._nonce = f"{self._token}-{secrets.token_hex(8)}"
        self._answer.clear()
        self._errors = b""
        line = probe.look(self._nonce, max_age, guests)
        text = line if self._greeted else self._script + line
        self.counts.rounds += 1
        try:
            stream.send(text.encode("utf-8", "surrogateescape"), _SEND_TIMEOUT)
        except ConnectionLost as error:
            if error.reason is not Reason.TIMED_OUT:
                return  # it went, and may have said why before: hear will tell
            self.drop()
            raise
        if self._one_shot:
            stream.end_input()

    def hear(self) -> Mapping[str, Section] | None:
        """Take in what has come. Return the whole answer's sections, None while there is more to come.

        Sections that are byte for byte what they were are the same objects as before, and so is the mapping when all
        of them are. Raises HostError.
        """
        stream = self._at_work()
        self._answer += stream.receive()
        self._errors = (self._errors + stream.receive_errors())[-_ERRORS:]
        if probe.complete(self._answer, self._nonce):
            self._greeted = True
            try:
                return self._understood()
            finally:
                self._answer = bytearray()
                if self._one_shot:
                    self.drop()
        if not self._begun() and len(self._answer) > _NOISE:
            raise self._failed(Reason.GARBAGE, f"says {_shown(self._answer)} and more, and no answer")
        if len(self._answer) > probe.LIMIT:
            raise self._failed(Reason.TOO_LONG, f"answers with more than {probe.LIMIT} bytes")
        if stream.ended():
            raise self._ended()
        return None

    def give_up(self, seconds: float) -> HostError:
        """Drop a shell that has not answered in time, and return why."""
        if self._begun():
            return self._failed(
                Reason.TIMED_OUT, f"has not ended its answer within {seconds:g} s ({len(self._answer)} bytes so far)"
            )
        if self._answer:
            return self._failed(Reason.GARBAGE, f"says {_shown(self._answer)}, and no answer within {seconds:g} s")
        return self._failed(Reason.TIMED_OUT, f"has not begun to answer within {seconds:g} s")

    def drop(self) -> None:
        """Let go of the shell; the connection stays."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._greeted = False

    def _at_work(self) -> Stream:
        if self._stream is None:
            raise ConnectionLost(Reason.CONNECTION_LOST, f"{self.host} has no shell open")
        return self._stream

    def _begun(self) -> bool:
        return self._begin() >= 0

    def _begin(self) -> int:
        begin = f"{self._nonce} begin\n".encode()
        return 0 if self._answer.startswith(begin) else self._answer.find(begin, 0, _NOISE + len(begin))

    def _understood(self) -> Mapping[str, Section]:
        begin = self._begin()
        if begin < 0:
            raise self._failed(Reason.GARBAGE, f"says {_shown(self._answer)}, which is no answer to this look")
        data = bytes(self._answer) if begin == 0 else bytes(self._answer[begin:])
        told = data.replace(self._nonce.encode(), b"")
        if told == self._last:
            return self._sections
        self.counts.reads += 1
        try:
            sections = probe.read(data, self._nonce)
        except probe.Stuck as error:
            # The shell itself is well: it can be asked again.
            raise HostError(Reason.PROBE_STUCK, f"{self.host} {error}") from error
        except probe.FrameError as error:
            raise self._failed(Reason.GARBAGE, f"gives no answer that can be read: {error}") from error
        before = self._sections
        same = {name: before[name] for name, section in sections.items() if before.get(name) == section}
        self._last, self._sections = told, {**sections, **same}
        return self._sections

    def _ended(self) -> HostError:
        """Tell why the shell went away before it had answered."""
        said = _shown(self._errors) if self._errors.strip() else _shown(self._answer) if self._answer else "nothing"
        if self._begun():
            return self._failed(Reason.CUT_OFF, f"ends in the middle of its answer, after {len(self._answer)} bytes")
        if _SUDO_SAYS.search(self._errors):
            return self._failed(Reason.SUDO_REFUSED, f"does not let us become root without a password: {said}")
        return self._failed(Reason.NO_SHELL, f"gives no shell: it ends and says {said}")

    def _failed(self, reason: Reason, message: str) -> HostError:
        if not self._greeted and not self._begun():
            self._one_shot = not self._one_shot
        self.drop()
        return HostError(reason, f"{self.host} {message}")


def _shown(data: bytes | bytearray) -> str:
    """Return the beginning of what a host said, safe to print."""
    return repr(bytes(data[:200]).decode("utf-8", "backslashreplace").strip())
