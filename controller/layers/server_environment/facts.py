"""The Python environments of ours in every place of a host, as their markers tell of them, and CUDA toolkits there.

An environment lies in ``/opt/reconcile/env/DIGEST``. It is finished when ``/opt/reconcile/env/DIGEST.json`` is there,
which is written last, in one rename: ``{"schema": 1, "object": "ModelServer/NAME", "engine", "version", "python",
"arch": "x86_64", "capabilities": ["8.6"], "requirements": [...], "torch": {"version", "cuda", "archs": ["sm_86", ...]}
or null, "flags": {...} or null (as ``read_flags.py`` prints them), "proofs": [{"uuid", "result": "passed" or "failed"
or "busy", "said", "driver", "boot"}], "size": bytes, "built": Unix seconds}``. A folder without one is what a build has
left, or a build at work.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from controller.engines.flags import FlagList, read_list
from controller.facts.files import File
from controller.facts.words import ParseError, Section
from controller.layers.shared.inside import ROOT, Inside, Told, read

SCHEMA = 1
"""The version of an environment's marker that this release writes; older ones are read, newer ones not understood."""


class Proof(StrEnum):
    """What came of running kernels on a GPU."""

    PASSED = "passed"
    FAILED = "failed"
    BUSY = "busy"
    """Others have taken its memory: it could not be tried."""


@dataclass(frozen=True, slots=True)
class Proven:
    """A GPU on which the environment's kernels were tried, by its UUID, and what was said.

    ``driver`` is the version of the kernel module then, ``boot`` the host's boot id.
    """

    uuid: str
    result: Proof
    said: str = ""
    driver: str = ""
    boot: str = ""


@dataclass(frozen=True, slots=True)
class Torch:
    """The PyTorch in an environment. ``cuda`` is "" for one without; ``archs`` are as it names them: sm_86."""

    version: str
    cuda: str = ""
    archs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Environment:
    """A finished environment, by its digest.

    ``object`` made it. ``capabilities`` are those of the GPUs that it was built for: 8.6. ``flags`` are the options and
    parsers of the installed engine, None where they cannot be read out. ``whole`` is whether its interpreter is there.
    ``size`` is in bytes, ``built`` in Unix seconds.
    """

    digest: str
    object: str
    engine: str
    version: str
    python: str = ""
    arch: str = ""
    capabilities: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    torch: Torch | None = None
    flags: FlagList | None = None
    proofs: tuple[Proven, ...] = ()
    size: int = 0
    built: int = 0
    whole: bool = True
    schema: int = SCHEMA

    @property
    def directory(self) -> str:
        """Where it lies in its place."""
        return directory(self.digest)

    def proof(self, uuid: str, driver: str, boot: str) -> Proven | None:
        """What came of the last try on a GPU that still counts.

        Another driver may take what the last one did not, and the other way round; after a boot of the host, what did
        not pass may.
        """
        found = next((each for each in reversed(self.proofs) if each.uuid == uuid and each.driver == driver), None)
        return found if found is not None and (found.result is Proof.PASSED or found.boot == boot) else None


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A CUDA toolkit: where it lies in the place, and its version: 13.0.1."""

    path: str
    version: str


@dataclass(frozen=True, slots=True)
class EnvironmentsHere:
    """All of a place. ``unfinished`` are digests of folders without a marker: a build at work, or what one left."""

    environments: tuple[Environment, ...] = ()
    unfinished: tuple[str, ...] = ()
    toolkits: tuple[Toolkit, ...] = ()

    def of(self, digest: str) -> Environment | None:
        """The finished environment of that digest."""
        return next((each for each in self.environments if each.digest == digest), None)


@dataclass(frozen=True, slots=True)
class Environments(Inside[EnvironmentsHere]):
    """The environments in every place of a host."""


def directory(digest: str) -> str:
    """Where an environment lies in its place."""
    return f"{ROOT}/env/{digest}"


def cuda_home(here: EnvironmentsHere, environment: Environment) -> str:
    """The toolkit that fits what the environment's PyTorch was built with, "" when none does.

    Binaries of one major version work with any minor one of it (CUDA's minor version compatibility); the nearest is
    taken, of two that are as near the newer.
    """
    wanted = _numbers(environment.torch.cuda) if environment.torch is not None else ()
    fitting = [each for each in here.toolkits if wanted and _numbers(each.version)[:1] == wanted[:1]]
    if not fitting:
        return ""
    minor = (*wanted, 0)[1]

    def distance(toolkit: Toolkit) -> tuple[int, tuple[int, ...]]:
        numbers = _numbers(toolkit.version)
        return -abs((*numbers, 0)[1] - minor), numbers

    return max(fitting, key=distance).path


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def parse(section: Section) -> Environments:
    """Read the section's text. Raises ParseError."""
    places, between = read(section.out)
    return Environments(tuple((where, _here(told)) for where, told in places.items()), between)


def _here(told: Told) -> EnvironmentsHere:
    folders: list[str] = []
    whole: set[str] = set()
    for line in told.lines:
        match line.split(" "):
            case ["env", digest]:
                folders.append(digest)
            case ["whole", digest]:
                whole.add(digest)
            case _:
                raise ParseError("garbage", f"cannot read {line[:80]!r}")
    found: list[Environment] = []
    toolkits: list[Toolkit] = []
    for path, file in sorted(told.files.items()):
        folder, _, name = path.rpartition("/")
        if name == "version.json":
            toolkits += _toolkit(folder, file)
        elif name.endswith(".json"):
            digest = name.removesuffix(".json")
            found.append(_environment(digest, file, digest in whole))
    finished = {each.digest for each in found}
    return EnvironmentsHere(
        tuple(found), tuple(sorted(digest for digest in folders if digest not in finished)), tuple(toolkits)
    )


def _toolkit(folder: str, file: File) -> list[Toolkit]:
    """One that does not say its version cannot be told from none."""
    try:
        return [Toolkit(folder, str(json.loads(file.text)["cuda"]["version"]))]
    except (ValueError, KeyError, TypeError):
        return []


def _environment(digest: str, file: File, whole: bool) -> Environment:
    try:
        said = json.loads(file.text)
        schema = int(said["schema"])
        if schema > SCHEMA:
            # Enough to leave it alone: whose it is, and that it is there.
            return Environment(digest, str(said.get("object", "")), "", "", whole=whole, schema=schema)
        return Environment(
            digest=digest,
            object=str(said["object"]),
            engine=str(said["engine"]),
            version=str(said["version"]),
            python=str(said["python"]),
            arch=str(said["arch"]),
            capabilities=tuple(map(str, said["capabilities"])),
            requirements=tuple(map(str, said["requirements"])),
            torch=_torch(said["torch"]),
            flags=read_list(said["flags"]) if said["flags"] is not None else None,
            proofs=tuple(_proven(each) for each in said["proofs"]),
            size=int(said["size"]),
            built=int(said["built"]),
            whole=whole,
            schema=schema,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParseError("garbage", f"cannot read the marker of environment {digest[:12]}: {error!r}") from None


def _proven(said: Mapping[str, Any]) -> Proven:
    return Proven(
        str(said["uuid"]),
        Proof(said["result"]),
        str(said["said"])[:1000],
        str(said["driver"]),
        str(said["boot"]),
    )


def _torch(said: Mapping[str, Any] | None) -> Torch | None:
    if said is None:
        return None
    return Torch(str(said["version"]), str(said["cuda"] or ""), tuple(map(str, said["archs"])))


def as_plain(what: Environment) -> dict[str, object]:
    """An environment as its marker holds it."""
    torch = what.torch
    return {
        "schema": what.schema,
        "object": what.object,
        "engine": what.engine,
        "version": what.version,
        "python": what.python,
        "arch": what.arch,
        "capabilities": list(what.capabilities),
        "requirements": list(what.requirements),
        "torch": {"version": torch.version, "cuda": torch.cuda, "archs": list(torch.archs)} if torch else None,
        "flags": what.flags.as_json() if what.flags is not None else None,
        "proofs": [dataclasses.asdict(each) for each in what.proofs],
        "size": what.size,
        "built": what.built,
    }
