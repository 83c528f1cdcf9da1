"""Real SSH servers for tests: OpenSSH's sshd on loopback, and a TCP proxy that does what networks do."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
ROOT = os.geteuid() == 0


def wait_for(what: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until something holds; the test fails when it does not in time."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"did not come about within {seconds} s"
        time.sleep(0.01)


def keygen(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", path.name, "-f", path], check=True)
    return path


def fingerprint(path: Path) -> str:
    return subprocess.run(
        ["ssh-keygen", "-l", "-f", f"{path}.pub"], check=True, capture_output=True, text=True
    ).stdout.split()[1]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Sshd:
    """One sshd with its own keys, on a port of its own, on every loopback address.

    As root it runs in a mount namespace of its own, with its own /run and with the users that a test adds, so that
    it neither sees nor leaves anything on the machine. Without root only the user of the tests can log in.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.host_key = keygen(folder / "host_key")
        self.identity = keygen(folder / "identity")
        self.authorized = folder / "authorized_keys"
        self.authorize(self.identity)
        self.user = getpass.getuser()
        self.options: list[str] = []
        self.last_options: list[str] = []
        self.users: list[tuple[str, int, str]] = []  # name, uid, shell
        self.sudoers = ""
        self.mounts: list[str] = []  # commands that make the machine, as its sessions see it, another one
        self.log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def authorize(self, key: Path, options: str = "") -> None:
        with self.authorized.open("a") as file:
            file.write(f"{options} {Path(f'{key}.pub').read_text().strip()}\n".lstrip())

    @property
    def home(self) -> Path:
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        return home

    def start(self, seconds: float = 10.0) -> None:
        config = self.folder / "sshd_config"
        config.write_text(
            "\n".join(
                [
                    *self.options,  # of what is said twice, the first counts
                    f"Port {self.port}",
                    "ListenAddress 0.0.0.0",
                    f"HostKey {self.host_key}",
                    f"AuthorizedKeysFile {self.authorized}",
                    "StrictModes no",
                    "UsePAM no",
                    "PasswordAuthentication no",
                    "KbdInteractiveAuthentication no",
                    "PermitRootLogin prohibit-password",
                    "PidFile none",
                    "LogLevel VERBOSE",
                    "MaxStartups 1000",
                    *self.last_options,
                    "",
                ]
            )
        )
        command = [str(SSHD), "-D", "-f", str(config), "-E", str(self.log)]
        if ROOT:
            command = ["unshare", "--mount", "--", "/bin/sh", "-ec", self._namespace(), "sh", *command]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        wait_for(self._listening, seconds)

    def _namespace(self) -> str:
        passwd, shadow = self.folder / "passwd", self.folder / "shadow"
        users = [f"{name}:x:{uid}:{uid}::{self.home}:{shell}" for name, uid, shell in self.users]
        root = [f"root:x:0:0::{self.home}:/bin/bash"]
        others = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
        passwd.write_text("\n".join([*root, *others, *users]) + "\n")
        shadow.write_text("".join(f"{line.split(':')[0]}:*:19000::::::\n" for line in passwd.read_text().splitlines()))
        for _, uid, _ in self.users:
            os.chown(self.home, uid, uid)
        lines = [
            "mount -t tmpfs -o mode=755 none /run",
            "mkdir -p /run/sshd",
            f"mount --bind {passwd} /etc/passwd",
            f"mount --bind {shadow} /etc/shadow",
            *self.mounts,
        ]
        if self.sudoers:
            sudoers = self.folder / "sudoers"
            sudoers.write_text(self.sudoers)
            sudoers.chmod(0o440)
            lines.append(f"mount --bind {sudoers} /etc/sudoers")
        return "\n".join([*lines, 'exec "$@"'])

    def _listening(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text() if self.log.exists() else "sshd did not start"
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """End the server and the sessions that it serves, as a host that goes down does."""
        if self._process is not None:
            for pid in self._sessions():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.terminate()
            self._process.wait(10)
            self._process = None

    def _sessions(self) -> list[int]:
        """Return the processes of this server's connections: its children, and theirs that are sshd too."""
        assert self._process is not None
        found, left = [], [self._process.pid]
        while left:
            children = _children(left.pop())
            found += children
            left += children
        return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


class Proxy:
    """A TCP proxy to a port of loopback.

    ``delay`` in seconds is added each way. ``cut_after`` ends the connection after so many bytes of the server.
    ``silent`` takes connections and says nothing. ``hang_up`` ends that many connections as soon as they are made.
    """

    def __init__(self, port: int, *, delay: float = 0.0, cut_after: int | None = None, silent: bool = False) -> None:
        self._target = port
        self.delay = delay
        self.cut_after = cut_after
        self.silent = silent
        self.hang_up = 0
        self.connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End the connections that there are."""
        for sock in self.connections:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.hang_up:
                    self.hang_up -= 1
                    client.close()
                    continue
                self.connections.append(client)
                if self.silent:
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                self.connections.append(server)
                for sock in (client, server):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._copy, args=(client, server, None), daemon=True).start()
                threading.Thread(target=self._copy, args=(server, client, self.cut_after), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        left = limit
        late = _Late(target, self.delay) if self.delay else None
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if left is not None:
                    data, left = data[:left], left - len(data[:left])
                if late:
                    late.send(data)
                else:
                    target.sendall(data)
                if left == 0:
                    break
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class _Late:
    """Sends data some time after it was given, without holding up what comes after."""

    def __init__(self, target: socket.socket, delay: float) -> None:
        self._target, self._delay = target, delay
        self._queue: list[tuple[float, bytes]] = []
        self._news = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, data: bytes) -> None:
        with self._news:
            self._queue.append((time.monotonic() + self._delay, data))
            self._news.notify()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self._news:
                    self._news.wait_for(lambda: bool(self._queue))
                    at, data = self._queue.pop(0)
                time.sleep(max(0.0, at - time.monotonic()))
                self._target.sendall(data)


@contextlib.contextmanager
def agent(folder: Path) -> Iterator[str]:
    """A running ssh-agent; yields the path of its socket."""
    path = str(folder / "agent.sock")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: os.path.exists(path))
        yield path
    finally:
        process.terminate()
        process.wait(10)
