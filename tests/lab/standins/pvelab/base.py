"""Where things lie, which node this is, errors with Perl's exit codes, the log of calls, and injected faults."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# A prefix for every path, so that parser, writer and messages can be tried without a host.
ROOT = Path(os.environ.get("PVELAB_ROOT", "/"))


def path(absolute: str) -> Path:
    """The file of this name on this node."""
    return ROOT / absolute.lstrip("/")


def node() -> str:
    """The name of this node, as ``PVE::INotify::nodename`` has it."""
    return os.environ.get("PVELAB_NODE") or socket.gethostname().split(".")[0]


class Die(Exception):  # noqa: N818  # Perl's word
    """The end of a Perl program: a message on stderr and an exit code.

    Perl's ``die`` exits with errno where one was left over, else with 255: the code is no vocabulary,
    so each place here names the one that was seen in a transcript.
    """

    def __init__(self, message: str, code: int = 255) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


def parameter_error(usage: str, errors: dict[str, str], code: int = 2) -> Die:
    """What ``raise_param_exc`` prints: each wrong parameter, then how the command is called."""
    lines = "".join(f"{name}: {text}\n" for name, text in sorted(errors.items()))
    return Die(f"400 Parameter verification failed.\n{lines}{usage}", code)


def warn(text: str) -> None:
    """Print to stderr as Perl's ``warn`` does."""
    sys.stderr.write(text if text.endswith("\n") else text + "\n")


def fault(name: str) -> str | None:
    """The text of an injected fault, or None: a file of that name in /run/lab-faults."""
    try:
        return path(f"/run/lab-faults/{name}").read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def die_on_fault(name: str, default: str) -> None:
    """Fail as the fault of that name says, if it is there."""
    text = fault(name)
    if text is not None:
        raise Die(text or default)


def hang_on_fault(program: str, command: str) -> None:
    """Hang while ``PROGRAM-hang`` is there: in every command, or in those that it lists."""
    while (text := fault(f"{program}-hang")) is not None and (not text or command in text.split()):
        time.sleep(0.2)


class CallLog:
    """One line a call in /run/lab-log/PROGRAM.log, written at the start and completed in place at the end.

    ``start`` and ``end`` are Unix times. A call that was killed, or still runs, keeps dashes for ``end`` and ``rc``.
    """

    def __init__(self, program: str, arguments: Sequence[str]) -> None:
        directory = path("/run/lab-log")
        directory.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(directory / f"{program}.log", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._offset = os.lseek(self._fd, 0, os.SEEK_END)
        self._start = time.time()
        self._arguments = json.dumps(list(arguments))
        os.write(self._fd, self._line("-", "-").encode())
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def finish(self, code: int) -> None:
        os.pwrite(self._fd, self._line(f"{time.time():.3f}", str(code)).encode(), self._offset)
        os.close(self._fd)

    def _line(self, end: str, code: str) -> str:
        return f"start={self._start:.3f} end={end:<14} rc={code:<3} pid={os.getpid():<7} args={self._arguments}\n"


def main(program: str, run: Callable[[list[str]], int]) -> None:
    """Run a command line: log the call, and turn a ``Die`` into its message and exit code."""
    # Proxmox handles configuration as bytes; here each byte is one character.
    arguments = [os.fsencode(argument).decode("latin-1") for argument in sys.argv[1:]]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="latin-1", errors="replace")  # type: ignore[union-attr]
    log = CallLog(program, arguments)
    code = 255
    try:
        hang_on_fault(program, arguments[0] if arguments else "")
        code = run(arguments)
        sys.stdout.flush()
    except Die as end:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        warn(end.message)
        code = end.code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    finally:
        log.finish(code)
    sys.exit(code)


@contextlib.contextmanager
def lock_file(name: str, timeout: float) -> Iterator[None]:
    """Hold an flock as ``PVE::Tools::lock_file`` does: exclusive, waited for at most ``timeout`` seconds.

    Seen when somebody else holds it: "trying to acquire lock..." at once, "can't lock file … - got timeout"
    after the time, exit code 4, nothing written.
    """
    file = path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write("trying to acquire lock...")
            sys.stderr.flush()
            if not _wait_for_lock(fd, timeout):
                raise Die(f"\ncan't lock file '{name}' - got timeout", 4) from None
            sys.stderr.write(" OK\n")
        yield
    finally:
        os.close(fd)


def _wait_for_lock(fd: int, timeout: float) -> bool:
    def ring(*_: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except TimeoutError:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return True


def members() -> dict[str, dict[str, Any]]:
    """The cluster's nodes from /etc/pve/.members: id, online, ip. This node alone where there is no cluster."""
    with contextlib.suppress(FileNotFoundError):
        found = json.loads(path("/etc/pve/.members").read_text()).get("nodelist")
        if found:
            return dict(found)
    return {node(): {"id": 1, "online": 1}}


def check_quorum() -> None:
    """Die without quorum, which pmxcfs shows by taking the write bit of /etc/pve/local (``check_cfs_quorum``)."""
    try:
        writable = path("/etc/pve/local").stat().st_mode & 0o200
    except OSError:
        writable = 0
    if not writable:
        raise Die("cluster not ready - no quorum?")


def write_cfs(name: str, text: str) -> None:
    """Replace a file of /etc/pve as ``PVE::Tools::file_set_contents`` does: beside it, then renamed.

    Without quorum the first step fails with EACCES, and Perl exits with that errno.
    """
    target = path(f"/etc/pve/{name}")
    beside = target.with_name(f"{target.name}.tmp.{os.getpid()}")
    try:
        beside.write_bytes(text.encode("latin-1"))
    except OSError as error:
        message = f"unable to open file '/etc/pve/{name}.tmp.{os.getpid()}' - {error.strerror}"
        raise Die(message, error.errno or 255) from None
    try:
        beside.rename(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        message = f"close (rename) atomic file '/etc/pve/{name}' failed: {error.strerror}"
        raise Die(message, error.errno or 255) from None


def read_cfs(name: str) -> str | None:
    """A file of /etc/pve, each byte one character; None when it is not there."""
    try:
        return path(f"/etc/pve/{name}").read_bytes().decode("latin-1")
    except (FileNotFoundError, NotADirectoryError):
        return None


def split_list(text: str) -> list[str]:
    """Perl's ``PVE::Tools::split_list``: separated by commas, semicolons, spaces or NUL."""
    for separator in ",;\0\t\n":
        text = text.replace(separator, " ")
    return text.split()
