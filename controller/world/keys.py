"""Host keys: which are trusted, and how one comes to be.

A host's key is right when its fingerprint is the ``host_key`` of the spec. Without one it has to be pinned in the
state directory's ``known_hosts``, and only when nothing is pinned there, in the user's own known_hosts files, which
are read and never written. The files have OpenSSH's format (sshd(8), SSH_KNOWN_HOSTS FILE FORMAT), so that
``ssh -o UserKnownHostsFile=STATE/known_hosts`` agrees with the controller.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import fnmatch
import hashlib
import hmac
import os
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from controller.world.endpoint import Endpoint
from controller.world.transport import Reason, Unreachable

_REVOKED = " as revoked"


@dataclass(frozen=True, slots=True)
class HostKey:
    """A public host key: its type in OpenSSH's words (``ssh-ed25519``) and its blob."""

    type: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """Return what ``ssh-keygen -l`` shows: SHA256 and unpadded base64."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")

    def __str__(self) -> str:
        return f"{self.type} {self.fingerprint}"


@dataclass(frozen=True, slots=True)
class Shown:
    """A key that a server showed, and what is known of that server.

    ``known`` are the keys it was expected to have, and ``where`` says by what: a file, or the spec.
    """

    endpoint: Endpoint
    key: HostKey
    known: tuple[str, ...]
    where: str
    trusted: bool

    @property
    def changed(self) -> bool:
        """Tell whether another key is known for that server."""
        return not self.trusted and bool(self.known)


class NotPinned(Exception):  # noqa: N818 - it is refused, for a reason that is for people
    """A key was not pinned: another one is, or the spec says another."""


class KnownHosts:
    """The pinned keys of one state directory, and the user's own. Safe to use from several threads."""

    def __init__(self, state: str | os.PathLike[str]) -> None:
        self.path = os.path.join(os.fspath(state), "known_hosts")
        self._read: dict[str, tuple[tuple[int, int, int], _File]] = {}
        self._lock = threading.Lock()

    def types(self, endpoint: Endpoint) -> tuple[str, ...]:
        """Return the types of the keys known for a server: those to ask it for."""
        if endpoint.fingerprint:
            return ()
        found, _ = self._known(endpoint)
        return tuple(dict.fromkeys(key.type for key in found))

    def judge(self, endpoint: Endpoint, key: HostKey) -> Shown:
        """Compare the key that a server showed with what is known of it."""
        for path in (self.path, *endpoint.known_hosts):
            if key in self._file(path).revoked:
                return Shown(endpoint, key, (f"{key}{_REVOKED}",), path, trusted=False)
        if endpoint.fingerprint:
            right = hmac.compare_digest(endpoint.fingerprint, key.fingerprint)
            return Shown(endpoint, key, (endpoint.fingerprint,), "host_key in its spec", right)
        found, where = self._known(endpoint)
        return Shown(endpoint, key, tuple(map(str, found)), where, key in found)

    def check(self, endpoint: Endpoint, key: HostKey) -> None:
        """Raise Unreachable unless the key is trusted; the message has both fingerprints and the way out."""
        shown = self.judge(endpoint, key)
        if shown.trusted:
            return
        hop = f"{endpoint.host} ({endpoint})"
        if not shown.known:
            raise Unreachable(
                Reason.HOST_KEY_UNKNOWN,
                f"{hop} shows the host key {key}, and none is pinned for it; "
                f"compare it with the host's own, then run: reconcile trust {endpoint.host}",
            )
        way = (
            "if you know why it changed, correct the spec"
            if endpoint.fingerprint
            else f"if you know why it changed, run: reconcile trust {endpoint.host} --replace"
        )
        raise Unreachable(
            Reason.HOST_KEY_CHANGED,
            f"{hop} shows the host key {key}, and {shown.where} says {', '.join(shown.known)}: "
            f"it was installed anew, or somebody is in between; {way}",
        )

    def pin(self, shown: Shown, *, replace: bool = False) -> None:
        """Pin a key that was shown, in the state directory; the file is replaced in one piece.

        Raises NotPinned when another key is known for that server and ``replace`` is not given, when what is known
        is not what it was when the key was shown, when the spec's ``host_key`` is another one, and for a revoked key.
        """
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        with open(f"{self.path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            now = self.judge(shown.endpoint, shown.key)
            if now.trusted and now.where == self.path:
                return
            if now.known != shown.known:
                raise NotPinned(f"{now.where} says {', '.join(now.known) or 'nothing'} now: look again")
            if now.changed and now.endpoint.fingerprint:
                raise NotPinned(f"the spec of {now.endpoint.host} says host_key: {now.endpoint.fingerprint}")
            if any(known.endswith(_REVOKED) for known in now.known):
                raise NotPinned(f"{now.key} is revoked in {now.where}")
            if now.changed and not replace:
                raise NotPinned(f"{now.where} says {', '.join(now.known)}; --replace pins the new one instead")
            name = now.endpoint.known_as
            lines = self._file(self.path).lines
            kept = [line.text for line in lines if line.marker or line.key is None or not line.means(name)]
            kept.append(f"{name} {now.key.type} {base64.b64encode(now.key.blob).decode()}")
            _write(self.path, "".join(f"{line}\n" for line in kept))

    def _known(self, endpoint: Endpoint) -> tuple[tuple[HostKey, ...], str]:
        for path in (self.path, *endpoint.known_hosts):
            if keys := self._file(path).keys(endpoint.known_as):
                return keys, path
        return (), self.path

    def _file(self, path: str) -> _File:
        """Return what is in a file, read again only when it is another one than last time."""
        with self._lock:
            try:
                stat = os.stat(path)
                version = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                if path not in self._read or self._read[path][0] != version:
                    with open(path, encoding="utf-8", errors="surrogateescape") as file:
                        self._read[path] = (version, _File(tuple(_lines(file.read().splitlines()))))
            except FileNotFoundError:
                return _File(())
            except OSError as error:
                raise Unreachable(Reason.CONFIG, f"cannot read the host keys in {path}: {error.strerror}") from error
            return self._read[path][1]


class _File:
    """The lines of a known_hosts file. Plain names are found without a walk through all lines: fleets are large."""

    def __init__(self, lines: tuple[_Line, ...]) -> None:
        self.lines = lines
        self.revoked = frozenset(line.key for line in lines if line.marker == "@revoked")
        self._plain: dict[str, list[_Line]] = {}
        self._others: list[_Line] = []
        for line in lines:
            if line.marker or line.key is None:
                continue
            if set(line.names) & set("*?!|"):
                self._others.append(line)
            else:
                for name in line.names.lower().split(","):
                    self._plain.setdefault(name, []).append(line)

    def keys(self, name: str) -> tuple[HostKey, ...]:
        """Return the keys of a server."""
        found = [*self._plain.get(name.lower(), ()), *(line for line in self._others if line.means(name))]
        return tuple(line.key for line in found if line.key is not None)


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    marker: str
    names: str
    key: HostKey | None

    def means(self, name: str) -> bool:
        """Tell whether the line is about a server: plain, hashed, and with patterns."""
        if self.names.startswith("|1|"):
            try:
                salt, digest = (base64.b64decode(part, validate=True) for part in self.names[3:].split("|"))
            except (ValueError, binascii.Error):
                return False
            return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
        found = False
        for pattern in self.names.lower().split(","):
            # "[" is part of "[address]:port" here, not a set of characters
            if fnmatch.fnmatchcase(name.lower(), pattern.removeprefix("!").replace("[", "[[]")):
                if pattern.startswith("!"):
                    return False
                found = True
        return found


def _lines(lines: Iterable[str]) -> Iterable[_Line]:
    for text in lines:
        words = text.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or text.lstrip().startswith("#"):
            yield _Line(text, marker, "", None)
            continue
        try:
            key = HostKey(words[1], base64.b64decode(words[2], validate=True))
        except (ValueError, binascii.Error):
            key = None
        yield _Line(text, marker, words[0], key)


def _write(path: str, text: str) -> None:
    descriptor, beside = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".known_hosts-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
