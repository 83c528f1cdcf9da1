"""The models of ours in every place of a host: what their markers tell, what of their files is there, and free space.

A model's marker is ``/opt/reconcile/weights/KEY.json``, KEY being the first 16 hexadecimal digits of the SHA-256 of its
directory's path. It is there from the beginning of the first download: ``{"schema": 1, "object": "ModelServer/NAME",
"repo", "revision": COMMIT, "directory", "files": [{"path", "size", "sha256" or "" (a small file that lies in git),
"blob" (git's sha1 of it, or ""), "mtime": ns or null, "damaged": bool}], "real"}``. ``real``, on a line of its own, is
the directory's path without links. ``mtime`` is the file's at the moment when its content was compared. What is not
whole yet lies in ``.reconcile`` in the directory, which goes when everything is there. ``KEY.compared`` is as old as
the last comparison of all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from controller.facts.files import File
from controller.facts.words import ParseError, Section
from controller.layers.shared.inside import ROOT, Inside, Told, read

SCHEMA = 1
"""The version of a model's marker that this release writes; older ones are read, newer ones not understood."""
FOLDER = f"{ROOT}/weights"
ASIDE = ".reconcile"
"""The folder in a model's directory in which lies what is not whole yet."""


class State(StrEnum):
    """What is known of a file of a model."""

    MISSING = "missing"
    OTHER_SIZE = "other-size"
    DAMAGED = "damaged"
    NOT_VERIFIED = "not-verified"
    """Of the right size; its content was not compared since it was changed last."""
    RIGHT = "right"


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A file as the revision has it. ``mtime`` (ns) is that of the file whose content was compared last."""

    path: str
    size: int
    sha256: str = ""
    blob: str = ""
    mtime: int | None = None
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A file on disk: its size in bytes, when it was changed last, in ns."""

    size: int
    mtime: int


@dataclass(frozen=True, slots=True)
class Weights:
    """A model in a directory. ``revision`` is a commit.

    ``found`` are the files in the directory by their paths in it, but for what is aside; None when the directory's disk
    does not answer. ``aside`` are bytes of what is not whole yet, None when there is nothing of the sort. ``due`` is
    whether it was compared so long ago that it should be again.
    """

    key: str
    object: str
    repo: str
    revision: str
    directory: str
    files: tuple[ManifestFile, ...] = ()
    found: tuple[tuple[str, Found], ...] | None = ()
    aside: int | None = None
    due: bool = False
    schema: int = SCHEMA

    def state(self, path: str, size: int, sha256: str, blob: str) -> State:
        """What is known of a file that should be there with this size and content. Not for a disk that hangs."""
        found = next((each for name, each in self.found or () if name == path), None)
        if found is None:
            return State.MISSING
        if found.size != size:
            return State.OTHER_SIZE
        told = next((each for each in self.files if each.path == path), None)
        if told is None or told.mtime != found.mtime or (told.sha256, told.blob) != (sha256, blob):
            return State.NOT_VERIFIED
        return State.DAMAGED if told.damaged else State.RIGHT

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(each.size for _, each in self.found or ()) + (self.aside or 0)


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system that a place sees: its id on the host, where it is mounted in the place, bytes that are free."""

    id: str
    mount: str
    free: int


@dataclass(frozen=True, slots=True)
class WeightsHere:
    """All of a place. ``asked`` are keys of models that it wants from another host, with the SHA-256 of the token."""

    weights: tuple[Weights, ...] = ()
    disks: tuple[Disk, ...] = ()
    asked: tuple[tuple[str, str], ...] = ()

    def of(self, key: str) -> Weights | None:
        """The model in the directory of that key."""
        return next((each for each in self.weights if each.key == key), None)

    def disk_of(self, directory: str) -> Disk | None:
        """The file system that a directory lies on, or would; None when it is none that was looked at."""
        holding = (disk for disk in self.disks if f"{directory}/".startswith(f"{disk.mount.rstrip('/')}/"))
        return max(holding, key=lambda disk: len(disk.mount), default=None)


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that a host offers to who holds a token: at which of its ports, and the token's SHA-256."""

    key: str
    port: int
    token_digest: str


@dataclass(frozen=True, slots=True)
class AllWeights(Inside[WeightsHere]):
    """The models in every place of a host, and what the host offers to others."""

    offers: tuple[Offer, ...] = ()


def parse(section: Section) -> AllWeights:
    """Read the section's text. Raises ParseError."""
    places, between = read(section.out)
    here = tuple((where, _here(told)) for where, told in places.items())
    return AllWeights(here, between, _offers(places[None].lines) if None in places else ())


def _offers(lines: tuple[str, ...]) -> tuple[Offer, ...]:
    words = (line.split(" ") for line in lines if line.startswith("offer "))
    return tuple(Offer(key, int(port), digest) for _, key, port, digest in words)


def _here(told: Told) -> WeightsHere:
    found: dict[str, list[tuple[str, Found]]] = {}
    aside: dict[str, int] = {}
    hangs: set[str] = set()
    due: set[str] = set()
    disks: list[Disk] = []
    asked: list[tuple[str, str]] = []
    for line in told.lines:
        try:
            match line.split(" ", 4):
                case ["file", key, size, mtime, path]:
                    inside, _, _ = path.partition("/")
                    if inside == ASIDE:
                        aside[key] = aside.get(key, 0) + int(size)
                    else:
                        found.setdefault(key, []).append((path, Found(int(size), _nanoseconds(mtime))))
                case ["hangs", key]:
                    hangs.add(key)
                case ["due", key]:
                    due.add(key)
                case ["asked", key, digest]:
                    asked.append((key, digest))
                case ["offer", _, port, _] if port.isdigit():
                    pass  # the host's, not this place's
                case ["disk", number, free, mount]:
                    disks.append(Disk(number, mount, int(free)))
                case _:
                    raise ValueError("no line of this layer")
        except ValueError:
            raise ParseError("garbage", f"cannot read {line[:80]!r}") from None
    models = (
        _weights(key, file, None if key in hangs else tuple(sorted(found.get(key, ()))), aside.get(key), key in due)
        for key, file in _markers(told)
    )
    return WeightsHere(tuple(models), tuple(disks), tuple(asked))


def _markers(told: Told) -> Iterator[tuple[str, File]]:
    for path, file in sorted(told.files.items()):
        yield path.rpartition("/")[2].removesuffix(".json"), file


def _nanoseconds(text: str) -> int:
    """From the seconds that ``find`` prints, with ten digits behind the point."""
    seconds, _, fraction = text.partition(".")
    return int(seconds) * 10**9 + int(f"{fraction[:9]:<09}")


def _weights(
    key: str, marker: File, found: tuple[tuple[str, Found], ...] | None, aside: int | None, due: bool
) -> Weights:
    try:
        said = json.loads(marker.text)
        schema = int(said["schema"])
        return Weights(
            key=key,
            object=str(said["object"]),
            repo=str(said["repo"]),
            revision=str(said["revision"]),
            directory=str(said["directory"]),
            files=tuple(
                ManifestFile(
                    str(each["path"]),
                    int(each["size"]),
                    str(each["sha256"]),
                    str(each["blob"]),
                    int(each["mtime"]) if each["mtime"] is not None else None,
                    bool(each["damaged"]),
                )
                for each in (said["files"] if schema <= SCHEMA else ())
            ),
            found=found,
            aside=aside,
            due=due,
            schema=schema,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParseError("garbage", f"cannot read the marker of the weights {key}: {error!r}") from None


def as_plain(what: Weights) -> dict[str, object]:
    """A model as its marker holds it."""
    return {
        "schema": what.schema,
        "object": what.object,
        "repo": what.repo,
        "revision": what.revision,
        "directory": what.directory,
        "files": [
            {
                "path": each.path,
                "size": each.size,
                "sha256": each.sha256,
                "blob": each.blob,
                "mtime": each.mtime,
                "damaged": each.damaged,
            }
            for each in what.files
        ],
    }
