"""Brings a model's files into a directory, or compares those that are there once more. Runs in the server's place.

    python weights.py fetch ORDER MARKER WORKER
    python weights.py recheck MARKER

Standard library only, any Python from 3.9 on. ``fetch`` takes files that are there as they are when their content is
right, and has the others brought by a worker (``worker.py``), one way after another: each is watched by the bytes that
it brings to the disk, and killed when those come no more. Nothing takes a file's name before its content was compared;
what is not whole lies in ``.reconcile`` beside, and is gone on from after whatever ended this.

Standard output: ``progress BYTES TOTAL`` now and then, everything else is for people.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import hashlib
import json
import os
import queue
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import IO, Any

SCHEMA = 1
ASIDE = ".reconcile"
MARGIN = 64 << 20  # bytes that are left free on the disk
SLOWEST = 10 << 10  # bytes a second; less is a connection that trickles, which looks alive for ever
PATIENCE = 3600.0  # seconds that a server may ask us to wait
RECHECK = 64 << 20  # bytes a second that are read when nobody waits for it
PIECE = 4 << 20

File = dict[str, Any]  # path, size, sha256, blob; and mtime, damaged in a marker


class Failed(Exception):  # noqa: N818 - it is how a run ends
    """It cannot be done now; the message is for people."""


def main() -> int:
    """Do what the command line says."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if sys.argv[1] == "recheck":
            recheck(Marker.read(sys.argv[2]))
        else:
            order, marker, worker = sys.argv[2:5]
            with open(order, encoding="utf-8") as file:
                said = json.load(file)
            os.unlink(order)  # it may hold the Hub's token
            for peer in said["peers"]:
                with open(peer["token_file"], encoding="ascii") as file:
                    peer["token"] = file.read()
            Fetching(said, Marker.of(said, marker), worker).run()
    except (Failed, OSError) as error:
        print(f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error), flush=True)
        return 1
    return 0


class Marker:
    """The file that says which model lies in the directory, and which of its files were compared and when."""

    def __init__(self, path: str, said: dict[str, Any]) -> None:
        self.path = path
        self.said = said
        self.directory: str = said["directory"]

    @classmethod
    def read(cls, path: str) -> Marker:
        """The marker that is there. Raises OSError, ValueError."""
        with open(path, encoding="utf-8") as file:
            return cls(path, json.load(file))

    @classmethod
    def of(cls, order: dict[str, Any], path: str) -> Marker:
        """One for what is ordered, with what an earlier one knows of the same files."""
        known: dict[tuple[str, int, str, str], File] = {}
        try:
            before = cls.read(path)
            if before.said["schema"] > SCHEMA:
                raise Failed(f"{path} was written by a newer release")
            known = {identity(file): file for file in before.said["files"]}
        except (OSError, ValueError, KeyError):
            pass  # none, or one that was cut off: files are compared anew
        files = []
        for file in order["files"]:
            refuse_way_out(file["path"])
            told = known.get(identity(file), {})
            files.append({**file, "mtime": told.get("mtime"), "damaged": bool(told.get("damaged"))})
        names = ("object", "repo", "revision", "directory")
        said = {"schema": SCHEMA, **{name: order[name] for name in names}, "files": files}
        # What looks from the host's side follows no link.
        return cls(path, {**said, "real": os.path.realpath(order["directory"])})

    def write(self) -> None:
        """Put it on disk, in one rename."""
        os.makedirs(os.path.dirname(self.path), mode=0o755, exist_ok=True)
        new = f"{self.path}.reconcile-new"
        with open(new, "w", encoding="utf-8") as file:
            file.write(json.dumps(self.said, indent=1, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path)

    def all_compared(self) -> None:
        """Note that the content of every file was compared just now."""
        path = f"{self.path.removesuffix('.json')}.compared"
        with open(path, "ab"):
            os.utime(path)

    @property
    def files(self) -> list[File]:
        """The files of the revision."""
        files: list[File] = self.said["files"]
        return files

    def where(self, file: File) -> str:
        """Where a file lies."""
        return os.path.join(self.directory, file["path"])

    def is_right(self, file: File) -> bool:
        """Whether it is there, as it was when its content was compared and found right."""
        found = status(self.where(file))
        if found is None or found.st_size != file["size"]:
            return False
        return found.st_mtime_ns == file["mtime"] and not file["damaged"]

    def compared(self, file: File, right: bool) -> None:
        """Note what came of comparing a file's content."""
        found = status(self.where(file))
        file["mtime"] = found.st_mtime_ns if found is not None else None
        file["damaged"] = not right
        self.write()


def identity(file: File) -> tuple[str, int, str, str]:
    """What makes it the same file of the same content."""
    return file["path"], file["size"], file["sha256"], file["blob"]


def refuse_way_out(path: str) -> None:
    """Raise Failed for a file that would lie outside of the model's directory."""
    if path.startswith("/") or any(part in ("", ".", "..", ASIDE) for part in path.split("/")):
        raise Failed(f"cannot take a file called {path!r}")


def status(path: str) -> os.stat_result | None:
    """What the disk says of a plain file; None when there is none, or a link."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def content_is_right(path: str, file: File, pace: float = 0.0, tell: Callable[[int], None] | None = None) -> bool:
    """Whether a file's content is the revision's. Raises OSError.

    ``pace`` is how many bytes a second are read at most, 0 for no limit; ``tell`` hears how many have been.
    """
    found = status(path)
    if found is None or found.st_size != file["size"]:
        return False
    if file["sha256"]:
        digest, wanted = hashlib.sha256(), file["sha256"]
    else:
        # As git names a file's content
        digest, wanted = hashlib.sha1(f"blob {file['size']}\0".encode()), file["blob"]  # noqa: S324
    began, done = time.monotonic(), 0
    with open(path, "rb") as source:
        while piece := source.read(PIECE):
            digest.update(piece)
            done += len(piece)
            if tell is not None:
                tell(done)
            if pace:
                time.sleep(max(0.0, done / pace - (time.monotonic() - began)))
    return bool(digest.hexdigest() == wanted)


def recheck(marker: Marker) -> None:
    """Compare everything once more, slowly."""
    os.nice(19)
    total, done = sum(file["size"] for file in marker.files), 0
    wrong = []
    for file in marker.files:
        if status(marker.where(file)) is not None:
            right = content_is_right(marker.where(file), file, RECHECK)
            marker.compared(file, right)
            if not right:
                wrong.append(file["path"])
        done += file["size"]
        print(f"progress {done} {total}", flush=True)
    marker.all_compared()
    print(f"{len(marker.files)} files compared; not right: {', '.join(wrong) or 'none'}", flush=True)


class Fetching:
    """One run of ``fetch``."""

    def __init__(self, order: dict[str, Any], marker: Marker, worker: str) -> None:
        self.order = order
        self.marker = marker
        self.worker = worker
        self.directory = marker.directory
        self.aside = os.path.join(self.directory, ASIDE)
        self.stalled_after: float = order["stalled_after"]
        self.total = sum(file["size"] for file in marker.files)
        self.right = 0  # bytes of files that are right
        self.said_at = 0.0

    def run(self) -> None:
        """Everything, until all is there."""
        os.makedirs(self.directory, mode=0o755, exist_ok=True)
        with self._alone():
            self.marker.write()
            self._take_what_is_there()
            self._sweep()
            self._fetch_missing()
            shutil.rmtree(self.aside)
            sync(self.directory)
        self.marker.all_compared()
        self._thank()
        print(f"all {len(self.marker.files)} files are right: {self.total} bytes", flush=True)

    def _thank(self) -> None:
        """Tell who has offered files that nobody needs them any more; it would find out by itself."""
        for peer in self.order["peers"]:
            request = urllib.request.Request(f"{peer['url']}/.taken")  # noqa: S310 - http: the order says
            request.add_header("Authorization", f"Bearer {peer['token']}")
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10):  # noqa: S310
                pass

    # --- one at a time ---

    def _alone(self) -> Any:
        """Hold the directory's lock: it may be another container's too, on the same disk."""
        while True:
            os.makedirs(self.aside, mode=0o755, exist_ok=True)
            path = os.path.join(self.aside, "lock")
            try:
                lock = open(path, "ab")  # noqa: SIM115 - it is held until everything is there
            except FileNotFoundError:
                continue  # the one before us has just finished
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self.tell()
                    time.sleep(1.0)
            found = status(path)
            if found is not None and found.st_ino == os.fstat(lock.fileno()).st_ino:
                return lock
            lock.close()

    # --- what is there ---

    def _take_what_is_there(self) -> None:
        """Compare files that somebody else has put there, or that were renamed just before the last end."""
        self.right = sum(file["size"] for file in self.marker.files if self.marker.is_right(file))
        for file in self.marker.files:
            found = status(self.marker.where(file))
            if found is None or found.st_size != file["size"] or self.marker.is_right(file):
                continue
            if file["damaged"] and found.st_mtime_ns == file["mtime"]:
                continue  # compared before, and wrong
            right = content_is_right(self.marker.where(file), file, tell=lambda done: self._tell(self.right + done))
            self.marker.compared(file, right)
            self.right += file["size"] if right else 0
            print(f"{file['path']} was there, and its content is {'right' if right else 'wrong'}", flush=True)

    def _missing(self) -> list[File]:
        return [file for file in self.marker.files if not self.marker.is_right(file)]

    def _sweep(self) -> None:
        """Remove what earlier runs left and no way can go on from."""
        keep = {self._part(file) for file in self._missing()} | {os.path.join(self.aside, "lock")}
        for folder, _, names in os.walk(self.aside):
            for name in names:
                path = os.path.join(folder, name)
                if path not in keep:
                    os.unlink(path)

    def _part(self, file: File) -> str:
        return os.path.join(self.aside, "parts", file["path"])

    # --- what is not ---

    def _fetch_missing(self) -> None:
        """One way after the other, until nothing is missing or no way brings anything any more."""
        ways = self._ways()
        fruitless, turn = 0, 0
        trouble = ""
        while missing := self._missing():
            self._check_space(missing)
            if fruitless >= 2 * len(ways):
                raise Failed(f"nothing more comes, whichever way: {trouble}")
            way = ways[turn % len(ways)]
            # Whatever huggingface_hub left of an earlier try, it does not go on from.
            shutil.rmtree(os.path.join(self.aside, "hub"), ignore_errors=True)
            before = self._bytes_there()
            trouble = Try(self, way, missing).run()
            fruitless = 0 if self._bytes_there() > before else fruitless + 1
            if trouble:
                print(f"{way}: {trouble}", flush=True)
                turn += 1

    def _ways(self) -> list[str]:
        """In which order files are tried to be had: see the decision in docs/decisions."""
        peers = [f"peer {number}" for number in range(len(self.order["peers"]))]
        found = subprocess.run(
            [sys.executable, "-I", self.worker, "ways"], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        return [*peers, "ranged", *found.stdout.decode().split()]

    def _check_space(self, missing: list[File]) -> None:
        """Whether what is missing has room. Raises Failed."""
        needed = 0
        for file in missing:
            part = status(self._part(file))
            needed += file["size"] - min(file["size"], part.st_size if part is not None else 0)
        disk = os.statvfs(self.directory)
        free = disk.f_bavail * disk.f_frsize
        if needed + MARGIN > free:
            raise Failed(f"no space left: {needed} bytes are missing, and {self.directory} has {free} bytes free")

    def _bytes_there(self) -> int:
        """Bytes that are on disk, right or not yet compared."""
        return self.right + sum(size for size, _ in self.aside_sizes())

    def aside_sizes(self) -> Iterator[tuple[int, int]]:
        """Length and allocated bytes of all that is not whole yet."""
        for folder, _, names in os.walk(self.aside):
            for name in names:
                try:
                    found = os.lstat(os.path.join(folder, name))
                except FileNotFoundError:
                    continue
                yield found.st_size, found.st_blocks * 512

    def tell(self) -> None:
        """Say how far it is, once a second at most."""
        self._tell(self._bytes_there())

    def _tell(self, done: int) -> None:
        now = time.monotonic()
        if now - self.said_at >= 1.0 or done >= self.total:
            self.said_at = now
            print(f"progress {min(done, self.total)} {self.total}", flush=True)

    def arrived(self, file: File, path: str) -> bool:
        """Compare a file that a way says is whole; right, it takes its name. Whether it was."""
        if not content_is_right(path, file):
            os.unlink(path)
            return False
        where = self.marker.where(file)
        os.makedirs(os.path.dirname(where), mode=0o755, exist_ok=True)
        os.chmod(path, 0o644)
        with open(path, "rb") as whole:
            os.fsync(whole.fileno())
        os.replace(path, where)
        part = self._part(file)
        if part != path and status(part) is not None:
            os.unlink(part)
        self.marker.compared(file, True)
        self.right += file["size"]
        self.tell()
        return True


def sync(folder: str) -> None:
    """Have the names in a folder on disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class Try:
    """One way at work on what is missing: a process of its own, watched from outside."""

    def __init__(self, fetching: Fetching, way: str, missing: list[File]) -> None:
        self.fetching = fetching
        self.way = way
        self.missing = {file["path"]: file for file in missing}
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.trouble = ""
        self.fatal = ""
        self.patient_until = 0.0

    def run(self) -> str:
        """Let it bring what it can. What was wrong with it, "" when it brought everything. Raises Failed."""
        order = self.fetching.order
        kind, _, number = self.way.partition(" ")
        given = {
            "way": kind,
            "endpoint": order["endpoint"],
            "repo": order["repo"],
            "revision": order["revision"],
            "token": order["token"],
            "peer": order["peers"][int(number)] if number else None,
            "aside": self.fetching.aside,
            "files": list(self.missing.values()),
        }
        worker = subprocess.Popen(
            [sys.executable, "-I", self.fetching.worker, "work"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            threading.Thread(target=self._listen, args=(worker.stdout,), daemon=True).start()
            with contextlib.suppress(BrokenPipeError), worker.stdin as stdin:  # type: ignore[union-attr]
                stdin.write(json.dumps(given).encode())
            self._watch()
        finally:
            worker.kill()
            worker.wait()
        if self.fatal:
            raise Failed(self.fatal)
        left = [path for path, file in self.missing.items() if not self.fetching.marker.is_right(file)]
        return self.trouble or (f"{left[0]} did not come" if left else "")

    def _listen(self, output: IO[bytes]) -> None:
        for line in output:
            try:
                self.lines.put(json.loads(line))
            except ValueError:
                print(line.decode(errors="replace").rstrip(), flush=True)
        self.lines.put(None)

    def _watch(self) -> None:
        """Until it ends, or brings nothing for as long as the spec has patience."""
        window = self.fetching.stalled_after
        samples = collections.deque([(time.monotonic(), self._moved())])
        while True:
            try:
                said = self.lines.get(timeout=0.25)
            except queue.Empty:
                said = {}
            if said is None:
                return
            compared = self._hear(said)
            if self.fatal:
                return
            self.fetching.tell()
            now, moved = time.monotonic(), self._moved()
            # Comparing took its time, in which a worker may have had nothing to do; so does waiting as it was asked to.
            if compared or now < self.patient_until:
                samples.clear()
            samples.append((now, moved))
            while len(samples) > 1 and samples[1][0] <= now - window:
                samples.popleft()
            since, reached = samples[0]
            if since <= now - window and moved - reached < SLOWEST * window:
                self.trouble = f"stalled: {moved - reached} bytes in {now - since:.0f} s; killed"
                return

    def _moved(self) -> int:
        """What grows when anything comes: some ways lay a file down in its full length and fill it."""
        return self.fetching.right + sum(max(size, blocks) for size, blocks in self.fetching.aside_sizes())

    def _hear(self, said: dict[str, Any]) -> bool:
        """Take what the worker says; whether a file was compared."""
        if "fetched" in said:
            file = self.missing[said["fetched"]]
            if not self.fetching.arrived(file, said["at"]):
                self.trouble = f"{file['path']} came with another content than it should have"
            return True
        if "wait" in said:
            if said["wait"] > PATIENCE:
                self.fatal = f"{said['by']} asks to come back in {said['wait']:.0f} s"
            self.patient_until = time.monotonic() + said["wait"]
            print(f"{self.way}: {said['by']} asks to wait for {said['wait']:.0f} s", flush=True)
        if "trouble" in said:
            self.trouble = said["trouble"]
        if "fatal" in said:
            self.fatal = said["fatal"]
        return False


if __name__ == "__main__":
    sys.exit(main())
