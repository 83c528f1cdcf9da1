"""SSH to one host with paramiko: log in once, keep the connection, open channels on it.

Three things about paramiko are put right here, each measured: it does not set TCP_NODELAY (48 ms for a command on an
open connection without it, 4 ms with), its threads wake ten times a second (6 % of a core at 200 idle connections),
and a request on a channel waits for its answer without any limit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import paramiko
import tenacity
from paramiko.agent import AgentSSH

from controller.world import shell
from controller.world.endpoint import Endpoint
from controller.world.keys import HostKey, KnownHosts, Shown
from controller.world.transport import ConnectionLost, Exit, Reason, Unreachable

CONNECT_TIMEOUT = 15.0  # seconds for connecting and logging in, retries included, for each hop
_ATTEMPTS = 3
_AGENT_TIMEOUT = 10.0  # seconds; an agent may be forwarded from a machine that is gone
_POLL = 30.0  # seconds between two looks of an idle connection's thread at its keepalive and rekey timers
_KEEPALIVE = 60
_DEAD_AFTER = 30_000  # milliseconds that sent data may stay unacknowledged (tcp(7), TCP_USER_TIMEOUT)
_KEY_TYPES = {  # types of host keys, best first, and the algorithms that each signs with
    "ssh-ed25519": ("ssh-ed25519",),
    "ecdsa-sha2-nistp256": ("ecdsa-sha2-nistp256",),
    "ecdsa-sha2-nistp384": ("ecdsa-sha2-nistp384",),
    "ecdsa-sha2-nistp521": ("ecdsa-sha2-nistp521",),
    "ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256"),
}

# What paramiko logs of a connection is raised from it too; its tracebacks would end up on the user's terminal.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)


T = TypeVar("T")


class _Passing(Unreachable):
    """A failure that may pass: worth another attempt."""


class SshTransport:
    """One logged-in connection. See ``transport.Transport``."""

    def __init__(self, endpoint: Endpoint, connection: paramiko.Transport, wire: socket.socket) -> None:
        self.endpoint = endpoint
        self.wire = wire
        self._connection = connection

    def run(self, command: str, stdin: bytes = b"", timeout: float = 60.0, limit: int = 64 * 1024) -> Exit:
        """Run POSIX sh text and wait until it ends."""
        return shell.run(self, command, stdin, timeout, limit, sudo=self.endpoint.sudo)

    def open(self, command: str, wake: Callable[[], None], timeout: float) -> SshStream:
        """Start POSIX sh text, or a shell."""
        host = self.endpoint.host
        deadline = time.monotonic() + timeout
        try:
            channel = self._connection.open_session(timeout=timeout)
        except paramiko.ChannelException as error:
            raise Unreachable(Reason.NO_SHELL, f"{host} opens no session: {error.text}") from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            self.close()  # it answers no more
            raise Unreachable(Reason.CONNECTION_LOST, f"{host} opens no session: {_text(error)}") from error
        # exec_command waits for the answer for ever; closing the channel wakes it
        too_late = threading.Timer(max(0.0, deadline - time.monotonic()), channel.close)
        too_late.daemon = True
        too_late.start()
        try:
            channel.exec_command(shell.command_line(command, sudo=self.endpoint.sudo))
        except (paramiko.SSHException, EOFError, OSError) as error:
            late = time.monotonic() >= deadline
            channel.close()
            if late:
                self.close()
            raise Unreachable(
                Reason.TIMED_OUT if late else Reason.NO_SHELL, f"{host} starts no command: {_text(error)}"
            ) from error
        finally:
            too_late.cancel()
        return SshStream(host, channel, wake)

    def tunnel(self, address: str, port: int, timeout: float) -> paramiko.Channel:
        """Return a TCP connection from this host to another, as a socket. Raises Unreachable."""
        try:
            return self._connection.open_channel("direct-tcpip", (address, port), ("127.0.0.1", 0), timeout=timeout)
        except paramiko.ChannelException as error:
            raise _Passing(
                Reason.UNREACHABLE, f"{self.endpoint} cannot reach {address}:{port}: {error.text}"
            ) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            self.close()
            raise _Passing(Reason.CONNECTION_LOST, f"{self.endpoint} opens no tunnel: {_text(error)}") from error

    def at_hand(self, timeout: float) -> bool:
        """Tell whether a short send would be taken at once: no full socket, no key exchange."""
        if not self._connection.clear_to_send.wait(timeout) or self.wire.fileno() < 0:
            return False
        room = select.poll()
        room.register(self.wire, select.POLLOUT)
        return bool(room.poll(timeout * 1000))

    def alive(self) -> bool:
        """Tell whether the connection is there, as far as is known."""
        return self._connection.is_active()

    def close(self) -> None:
        """End the connection at once."""
        _hang_up(self._connection)


class SshStream:
    """A program on the other end of a channel. See ``transport.Stream``."""

    def __init__(self, host: str, channel: paramiko.Channel, wake: Callable[[], None]) -> None:
        self._host = host
        self._channel = channel
        news = _News(wake)
        channel.in_buffer.set_event(news)  # type: ignore[arg-type]  # wants only set() and clear()
        channel.in_stderr_buffer.set_event(news)  # type: ignore[arg-type]

    def send(self, data: bytes, timeout: float) -> None:
        """Write to its standard input."""
        self._channel.settimeout(timeout)
        try:
            self._channel.sendall(data)
        except TimeoutError as error:
            raise ConnectionLost(Reason.TIMED_OUT, f"{self._host} takes no input for {timeout:g} s") from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise ConnectionLost(Reason.CONNECTION_LOST, f"{self._host} takes no input: {_text(error)}") from error

    def end_input(self) -> None:
        """Close its standard input."""
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            self._channel.shutdown_write()

    def receive(self) -> bytes:
        """Return what has come on its standard output."""
        return _taken(self._channel.recv_ready, self._channel.recv)

    def receive_errors(self) -> bytes:
        """Return what has come on its standard error."""
        return _taken(self._channel.recv_stderr_ready, self._channel.recv_stderr)

    def ended(self) -> bool:
        """Tell whether its output has ended and was all received."""
        return bool(self._channel.eof_received or self._channel.closed) and not self._channel.recv_ready()

    def exit_code(self, timeout: float) -> int | None:
        """Return its exit code."""
        return self._channel.recv_exit_status() if self._channel.status_event.wait(timeout) else None

    def close(self) -> None:
        """Let go of it."""
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            self._channel.close()


class _News:
    """What paramiko's buffers take for an event: ``set`` at data and at the end of data."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.set = wake

    def clear(self) -> None:
        """Do nothing: who is woken looks for himself."""


def _taken(ready: Callable[[], bool], receive: Callable[[int], bytes]) -> bytes:
    if not ready():
        return b""
    data = receive(1 << 20)
    while ready():
        data += receive(1 << 20)
    return data


class Connector:
    """Logs in to hosts. Connections to jump hosts are shared. Safe to use from several threads."""

    def __init__(self, known: KnownHosts, timeout: float = CONNECT_TIMEOUT) -> None:
        self.known = known
        self.timeout = timeout
        self._jumps: dict[Endpoint, SshTransport] = {}
        self._failed_jumps: dict[Endpoint, tuple[float, Unreachable]] = {}
        self._locks: dict[Endpoint, threading.Lock] = {}
        self._guard = threading.Lock()

    def connect(self, endpoint: Endpoint) -> SshTransport:
        """Log in to a host, through its jump hosts. Raises Unreachable."""
        via = self._jump(endpoint.via) if endpoint.via else None
        return self._retrying(lambda timeout: self._login(endpoint, via, timeout))

    def shown(self, endpoint: Endpoint) -> Iterator[Shown]:
        """Yield the key that each server on the way to a host shows, jump hosts first, without logging in to it.

        Pin the key before asking for the next one: a jump host is logged in to only then. Raises Unreachable.
        """
        via = None
        if endpoint.via:
            yield from self.shown(endpoint.via)
            via = self._jump(endpoint.via)
        connection, _ = self._retrying(lambda timeout: self._greet(endpoint, via, time.monotonic() + timeout))
        key = _key_of(connection)
        _hang_up(connection)
        yield self.known.judge(endpoint, key)

    def close(self) -> None:
        """End the connections to jump hosts."""
        with self._guard:
            jumps, self._jumps = self._jumps, {}
        for transport in jumps.values():
            transport.close()

    def _retrying(self, attempt: Callable[[float], T]) -> T:
        deadline = time.monotonic() + self.timeout
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Passing),
            wait=tenacity.wait_exponential(multiplier=0.1, max=2.0) + tenacity.wait_random(0.0, 0.1),
            stop=tenacity.stop_after_attempt(_ATTEMPTS) | tenacity.stop_before_delay(self.timeout),
            reraise=True,
        )
        return retrying(lambda: attempt(max(0.1, deadline - time.monotonic())))

    def _jump(self, endpoint: Endpoint) -> SshTransport:
        since = time.monotonic()
        with self._guard:
            lock = self._locks.setdefault(endpoint, threading.Lock())
        with lock:
            known = self._jumps.get(endpoint)
            if known is not None and known.alive():
                return known
            failed_at, failure = self._failed_jumps.get(endpoint, (0.0, None))
            if failure is not None and failed_at >= since:
                raise failure  # while this one waited: not every host behind it has to find that out by itself
            try:
                known = self.connect(endpoint)
            except Unreachable as error:
                self._failed_jumps[endpoint] = (time.monotonic(), error)
                raise
            with self._guard:
                self._jumps[endpoint] = known
            return known

    def _login(self, endpoint: Endpoint, via: SshTransport | None, timeout: float) -> SshTransport:
        deadline = time.monotonic() + timeout
        connection, wire = self._trusted(endpoint, via, deadline)
        try:
            _authenticate(connection, endpoint, deadline)
        except BaseException:
            _hang_up(connection)
            raise
        connection.set_keepalive(_KEEPALIVE)
        connection.sock.settimeout(_POLL)
        return SshTransport(endpoint, connection, wire)

    def _trusted(
        self, endpoint: Endpoint, via: SshTransport | None, deadline: float
    ) -> tuple[paramiko.Transport, socket.socket]:
        """Connect to a server that shows a trusted key; nothing of ours was sent to it yet."""
        connection, wire = self._greet(endpoint, via, deadline)
        shown = _key_of(connection)
        try:
            self.known.check(endpoint, shown)
            return connection, wire
        except Unreachable:
            _hang_up(connection)
            if endpoint.fingerprint is None:
                raise
            # The spec's fingerprint may be that of another of the server's keys than the one it showed first.
            for kind in _KEY_TYPES:
                if kind != shown.type:
                    with contextlib.suppress(Unreachable):
                        connection, wire = self._greet(endpoint, via, deadline, (kind,))
                        if self.known.judge(endpoint, _key_of(connection)).trusted:
                            return connection, wire
                        _hang_up(connection)
            raise

    def _greet(
        self, endpoint: Endpoint, via: SshTransport | None, deadline: float, only: Sequence[str] = ()
    ) -> tuple[paramiko.Transport, socket.socket]:
        """Connect and exchange keys. Return the connection, and the TCP socket that carries it in the end."""
        left = _left(deadline)
        if via is None:
            sock: Any = _dial(endpoint, left)
            wire: socket.socket = sock
        else:
            sock = via.tunnel(endpoint.address, endpoint.port, left)
            wire = via.wire
        connection = paramiko.Transport(sock)
        connection.get_security_options().key_types = _algorithms(only, self.known.types(endpoint))
        left = _left(deadline)
        connection.banner_timeout = connection.handshake_timeout = left
        try:
            connection.start_client(timeout=left)
        except Exception as error:
            _hang_up(connection)
            raise _greeting_failed(endpoint, error) from error
        if not connection.initial_kex_done:
            _hang_up(connection)
            raise _Passing(Reason.TIMED_OUT, f"{endpoint.host} ({endpoint}) exchanged no keys within {left:.0f} s")
        return connection, wire


def _dial(endpoint: Endpoint, timeout: float) -> socket.socket:
    """Return a TCP connection without Nagle's delay, that notices a dead peer."""
    where = f"{endpoint.host} ({endpoint})"
    try:
        sock = socket.create_connection((endpoint.address, endpoint.port), timeout)
    except socket.gaierror as error:
        passing = error.errno == socket.EAI_AGAIN
        raise (_Passing if passing else Unreachable)(
            Reason.UNREACHABLE, f"{where}: cannot find the address of {endpoint.address}: {error.strerror}"
        ) from error
    except ConnectionRefusedError as error:
        raise _Passing(Reason.REFUSED, f"{where} refuses the connection: nothing listens there") from error
    except TimeoutError as error:
        raise _Passing(Reason.UNREACHABLE, f"{where} does not answer within {timeout:.0f} s") from error
    except OSError as error:
        raise _Passing(Reason.UNREACHABLE, f"{where} cannot be reached: {error.strerror or error}") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER)
    return sock


def _greeting_failed(endpoint: Endpoint, error: Exception) -> Unreachable:
    where = f"{endpoint.host} ({endpoint})"
    cause = error.__context__ if "banner" in str(error) else error  # paramiko wraps what ended the banner
    if isinstance(cause, TimeoutError):
        return _Passing(Reason.TIMED_OUT, f"{where} takes the connection and says nothing")
    if isinstance(cause, EOFError | OSError):
        # sshd drops connections like this when too many are logging in at once (MaxStartups)
        return _Passing(Reason.CONNECTION_LOST, f"{where} hangs up before the keys are exchanged: {_text(cause)}")
    return Unreachable(Reason.NOT_SSH, f"{where} does not speak SSH with us: {_text(error)}")


def _authenticate(connection: paramiko.Transport, endpoint: Endpoint, deadline: float) -> None:
    """Log in with the first key that is taken. Raises Unreachable."""
    refused: list[str] = []
    unusable: list[str] = []
    with _Agent() as agent:
        for label, key in _identities(endpoint, agent, unusable):
            connection.auth_timeout = _left(deadline)
            try:
                more = connection.auth_publickey(endpoint.user, key)
            except paramiko.BadAuthenticationType as error:
                raise Unreachable(
                    Reason.AUTH_FAILED,
                    f"{endpoint.host} ({endpoint}) takes no keys, only {', '.join(error.allowed_types)}",
                ) from error
            except (paramiko.SSHException, EOFError, OSError) as error:
                if not connection.is_active() and not refused:
                    raise _Passing(
                        Reason.CONNECTION_LOST, f"{endpoint.host} ({endpoint}) hangs up at login: {_text(error)}"
                    ) from error
                if time.monotonic() >= deadline:
                    raise Unreachable(
                        Reason.TIMED_OUT, f"{endpoint.host} ({endpoint}) did not say in time whether it takes {label}"
                    ) from error
                refused.append(label)
                if not connection.is_active():
                    break  # it has had enough of us
                continue
            if not more:
                return
            raise Unreachable(
                Reason.AUTH_FAILED, f"{endpoint.host} ({endpoint}) takes {label} and wants more: {', '.join(more)}"
            )
    says = "; ".join(unusable)
    if not refused:
        raise Unreachable(
            Reason.KEY_UNUSABLE,
            f"no key to log in to {endpoint.host} ({endpoint}) with: {says or 'no agent, no identity file'}",
        )
    raise Unreachable(
        Reason.AUTH_FAILED,
        f"{endpoint.host} ({endpoint}) takes none of: {', '.join(refused)}" + (f" ({says})" if says else ""),
    )


def _identities(endpoint: Endpoint, agent: _Agent, unusable: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    """Yield the keys to try, each once; what is wrong with a file goes to ``unusable``.

    Files that the spec or the user's configuration names come first, then what the agent offers. When none is named,
    the agent comes first and then the files that ``ssh`` tries by itself.
    """
    files = _from_files(endpoint.identities or _default_files(), agent, unusable)
    offered: set[tuple[str, bytes]] = set()
    for label, key in (*files, *agent.keys) if endpoint.identities else (*agent.keys, *files):
        what = (key.public_blob.key_type if key.public_blob else key.get_name(), key.asbytes())
        if what not in offered:
            offered.add(what)
            yield label, key


def _from_files(paths: Iterable[str], agent: _Agent, unusable: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    for path in paths:
        try:
            yield path, paramiko.PKey.from_path(path)  # with the certificate PATH-cert.pub, when there is one
        except OSError as error:
            unusable.append(f"{path}: {error.strerror}")
        except (paramiko.PasswordRequiredException, TypeError):  # TypeError: what cryptography raises of these
            held = agent.with_certificate(path)
            if held is not None:
                yield f"{path} (agent)", held
            else:
                unusable.append(f"{path} is encrypted and no agent has it: ssh-add {path}")
        except (paramiko.SSHException, ValueError) as error:
            unusable.append(f"{path} is no private key that can be used: {_text(error)}")


def _default_files() -> tuple[str, ...]:
    paths = (os.path.expanduser(f"~/.ssh/{name}") for name in ("id_ed25519", "id_ecdsa", "id_rsa"))
    return tuple(path for path in paths if os.path.exists(path))


class _Agent(AgentSSH):
    """The user's agent, asked with a time limit. One for each login: paramiko's is not safe between threads."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[tuple[str, paramiko.PKey]] = []
        path = os.environ.get("SSH_AUTH_SOCK")
        if not path:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(_AGENT_TIMEOUT)
        try:
            sock.connect(path)
            self._connect(sock)  # type: ignore[attr-defined]  # the stubs leave it out
        except (paramiko.SSHException, OSError, EOFError):
            sock.close()  # an agent that is not there is no agent
            return
        for key in self.get_keys():
            if key.get_name().endswith("-cert-v01@openssh.com"):
                key.public_blob = paramiko.pkey.PublicBlob(key.get_name(), key.blob)  # type: ignore[assignment]
            self.keys.append((f"{key.get_name()} {key.comment} (agent)", key))

    def with_certificate(self, path: str) -> paramiko.PKey | None:
        """Return the agent's key of an identity file, with the certificate beside the file when there is one."""
        try:
            with open(f"{path}.pub", encoding="utf-8") as file:
                public = paramiko.pkey.PublicBlob.from_string(file.read())
        except (OSError, ValueError):
            return None
        for _, key in self.keys:
            if key.asbytes() == public.key_blob and not key.public_blob:
                with contextlib.suppress(OSError, ValueError):
                    key.load_certificate(f"{path}-cert.pub")
                return key
        return None

    def __enter__(self) -> _Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()  # type: ignore[attr-defined]


def _algorithms(only: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the host key algorithms to ask for: those of known keys first, so that the server shows one of them."""
    first = [name for kind in only or known for name in _KEY_TYPES.get(kind, (kind,))]
    rest = [name for names in _KEY_TYPES.values() for name in names if name not in first and not only]
    return [name for name in first if any(name in names for names in _KEY_TYPES.values())] + rest


def _key_of(connection: paramiko.Transport) -> HostKey:
    key = connection.get_remote_server_key()
    return HostKey(key.get_name(), key.asbytes())


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def _hang_up(connection: paramiko.Transport) -> None:
    """End a connection at once: its thread sees the end of its socket, and closes what there is to close.

    Closing the socket under that thread would leave it to its next poll, on a number that may be another's by then.
    """
    if isinstance(connection.sock, socket.socket):
        with contextlib.suppress(OSError):  # it is not connected any more
            connection.sock.shutdown(socket.SHUT_RDWR)
        connection.join(1.0)
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        connection.close()


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
