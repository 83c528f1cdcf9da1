"""How the scalars of a spec are read: every one is text, and the field's type says what it means.

So ``10:00.0`` is a PCI address, ``0.10`` a version and ``no`` a name or a truth value, as the field has it.
Values that are typed already (from Python, not from a file) pass as they are.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from difflib import get_close_matches
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    Tag,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class Text(str):
    """A scalar as it stands in the file; ``plain`` when it was not in quotes.

    Only what has no type of its own (engine flags, JSON inside them) asks for ``plain``.
    """

    __slots__ = ("plain",)
    plain: bool

    def __new__(cls, text: str, *, plain: bool = True) -> "Text":
        """Keep the text and whether it was in quotes."""
        self = super().__new__(cls, text)
        self.plain = plain
        return self


@dataclass(frozen=True)
class Problem:
    """What is wrong with one value, in words for the person who wrote it."""

    says: str
    """A sentence that begins with "cannot" and names the thing."""
    allowed: str = ""
    """What may stand there."""
    todo: str = ""
    """What to do next."""
    nearest: str = ""
    """The allowed word that was probably meant."""
    field: tuple[str | int, ...] = ()
    """Where, below the value that was checked."""


def wrong(*problems: Problem) -> PydanticCustomError:
    """Make the error that carries *problems* through pydantic."""
    return PydanticCustomError("spec", "{text}", {"text": "; ".join(p.says for p in problems), "problems": problems})


def nearest(word: str, words: Iterable[str]) -> str:
    """Return the one of *words* that *word* is probably a slip of, or nothing."""
    folded = {w.casefold(): w for w in sorted(words, reverse=True)}
    close = get_close_matches(word.casefold(), sorted(folded), n=1, cutoff=0.6)
    return folded[close[0]] if close else ""


_TRUE, _FALSE = frozenset({"true", "yes", "on"}), frozenset({"false", "no", "off"})
_JSON_WORDS: dict[str, JsonValue] = {"true": True, "false": False, "null": None, "~": None, "": None}
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?", re.ASCII)


def read_bool(value: Any) -> Any:
    """Read the words of YAML 1.1 and 1.2: true, yes, on and false, no, off."""
    if not isinstance(value, str):
        return value
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise wrong(Problem("cannot read this as true or false", allowed="true or false (yes, no, on, off)"))


def read_int(value: Any) -> Any:
    """Read a whole number in decimal; ``1e7`` is ten million."""
    if not isinstance(value, str):
        return value
    if _INTEGER.fullmatch(value) and len(value) <= 20:  # longer than any number a field could want
        return int(value)
    if _NUMBER.fullmatch(value) and len(value) <= 20 and float(value).is_integer() and abs(float(value)) < 2**53:
        return int(float(value))
    raise wrong(Problem("cannot read this as a whole number", allowed="a whole number in decimal, for example 30000"))


def read_float(value: Any) -> Any:
    """Read a number in decimal; ``50``, ``0.3`` and ``1e7`` are numbers."""
    if not isinstance(value, str):
        return value
    if _NUMBER.fullmatch(value) and math.isfinite(float(value)):
        return float(value)
    raise wrong(Problem("cannot read this as a number", allowed="a number in decimal, for example 0.3"))


_DURATION = re.compile(r"(?:([0-9]{1,6})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?", re.ASCII)


def read_duration(value: Any) -> Any:
    """Read ``90s``, ``20m``, ``3h``, ``1d`` or a sum, ``1h30m``, the largest unit first."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value)
    days, hours, minutes, seconds = (int(n or 0) for n in match.groups()) if match else (0, 0, 0, 0)
    duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if duration:
        return duration
    raise wrong(
        Problem(
            "cannot read this as a length of time",
            allowed="whole days, hours, minutes, seconds, more than none: 90s, 20m, 1h30m, 1d",
        )
    )


def write_duration(duration: timedelta) -> str:
    """Write a duration as a spec does; the opposite of reading one."""
    minutes, seconds = divmod(int(duration.total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    return "".join(f"{n}{unit}" for n, unit in ((hours, "h"), (minutes, "m"), (seconds, "s")) if n)


_UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}
_UNITS["B"] = 1
_AT_LEAST = re.compile(r">=\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([KMGT]i?B|B)", re.ASCII)


def read_memory_at_least(value: Any) -> Any:
    """Read ``>=44GiB`` as bytes."""
    if not isinstance(value, str):
        return value
    if match := _AT_LEAST.fullmatch(value.strip()):
        return int(Decimal(match[1]) * _UNITS[match[2]])
    raise wrong(
        Problem(
            "cannot read this as an amount of GPU memory",
            nearest=f">={value.strip()}" if _AT_LEAST.fullmatch(f">={value.strip()}") else "",
            allowed='">=" with a number and a unit (MiB, GiB, GB …), for example ">=44GiB"',
        )
    )


def write_memory_at_least(size: int) -> str:
    """Write bytes as ``>=44GiB``, in the first unit that divides them."""
    unit = next(unit for unit, size_of in _UNITS.items() if size % size_of == 0)
    return f">={size // _UNITS[unit]}{unit}"


@dataclass(frozen=True)
class Capability:
    """A CUDA compute capability that a GPU has to have, for example 8.6."""

    major: int
    minor: int
    at_least: bool = False
    """True: this one or a later one."""

    def admits(self, major: int, minor: int) -> bool:
        """Say whether a GPU of this compute capability will do."""
        have, want = (major, minor), (self.major, self.minor)
        return have >= want if self.at_least else have == want

    def __str__(self) -> str:
        return f"{'>=' * self.at_least}{self.major}.{self.minor}"


_CAPABILITY = re.compile(r"(>=)?\s*([0-9]{1,2})\.([0-9])", re.ASCII)


def read_capability(value: Any) -> Any:
    """Read ``8.6`` (this one) or ``>=8.0`` (this one or later)."""
    if not isinstance(value, str):
        return value
    if match := _CAPABILITY.fullmatch(value.strip()):
        return Capability(int(match[2]), int(match[3]), at_least=bool(match[1]))
    raise wrong(Problem("cannot read this as a compute capability", allowed='for example 8.6, or ">=8.0" and later'))


_PCI = re.compile(r"(?:(?:0000)?([0-9a-f]{4}):)?([0-9a-f]{2}):([01][0-9a-f])\.([0-7])", re.ASCII | re.IGNORECASE)
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE)


def read_pci(value: Any) -> Any:
    """Read a PCI address with or without its domain, and give it as sysfs does: ``0000:4f:00.0``.

    nvidia-smi writes eight digits of domain in upper case (00000000:4F:00.0): the same card.
    """
    if not isinstance(value, str):
        return value
    if match := _PCI.fullmatch(value):
        domain, bus, device, function = match.groups()
        return f"{domain or '0000'}:{bus}:{device}.{function}".lower()
    raise wrong(
        Problem(
            "cannot read this as a PCI address",
            allowed='bus, device and function in hexadecimal, as lspci shows it: "4f:00.0" or "0000:4f:00.0"',
        )
    )


def read_gpu_id(value: Any) -> Any:
    """Read a GPU by its PCI address, as ``read_pci`` does, or by its UUID, given as nvidia-smi writes it."""
    if not isinstance(value, str):
        return value
    if _UUID.fullmatch(value):
        return "GPU-" + value[4:].lower()
    if _PCI.fullmatch(value):
        return read_pci(value)
    raise wrong(
        Problem(
            "cannot read this as a GPU",
            allowed='a PCI address ("4f:00.0") or a UUID (GPU-8a05f1c2-…, whole, as nvidia-smi -L shows it)',
        )
    )


def read_server_gpu(value: Any) -> Any:
    """Read a GPU as ``read_gpu_id`` does, or as its place in the assignment, counted from 0."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,3}", value, re.ASCII):
        return int(value)
    return read_gpu_id(value)


def gpu_model_key(name: str) -> str:
    """Return what is the same for every way to write one GPU model.

    A spec says ``RTX A6000`` where nvidia-smi says ``NVIDIA RTX A6000`` and ``RTX 3090`` where it says
    ``NVIDIA GeForce RTX 3090``.
    """
    return " ".join(word for word in name.casefold().split() if word not in ("nvidia", "geforce"))


@dataclass(frozen=True)
class Matching:
    """Marks text that has to match *pattern* as a whole; *lower* makes it lower case."""

    pattern: str
    cannot: str
    allowed: str
    todo: str = ""
    lower: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check the text before it is taken as a string."""
        return core_schema.no_info_before_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Give editors the pattern."""
        return {**handler(schema), "pattern": f"^(?:{self.pattern})$"}

    def _read(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if re.fullmatch(self.pattern, value, re.ASCII):
            return value.lower() if self.lower else str(value)
        folded = value.lower()
        meant = folded if re.fullmatch(self.pattern, folded, re.ASCII) else ""
        raise wrong(Problem(self.cannot, self.allowed, self.todo, nearest=meant))


def read_version(value: Any) -> Any:
    """Read the version of a Python package (PEP 440), and keep it as it is written."""
    if isinstance(value, str):
        try:
            Version(value)
        except InvalidVersion:
            raise wrong(
                Problem("cannot read this as a version", allowed="one exact version, for example 0.5.11")
            ) from None
    return value


def read_requirement(value: Any) -> Any:
    """Read one requirement as pip and uv do (PEP 508), and keep it as it is written."""
    if isinstance(value, str):
        try:
            Requirement(value)
        except InvalidRequirement:
            raise wrong(
                Problem("cannot read this as a requirement", allowed="as pip reads it, for example numpy==2.2.1")
            ) from None
    return value


def read_cron(value: Any) -> Any:
    """Read the five fields of a cron expression: minute, hour, day of month, month, day of week."""
    if isinstance(value, str):
        allowed = 'five fields: minute, hour, day, month, day of week, for example "0 2 * * SUN"'
        if len(value.split()) != 5:
            raise wrong(Problem(f"cannot read this as a cron expression: it has {len(value.split())} fields", allowed))
        try:
            # Any moment will do: what is asked is whether a next time exists.
            next(CronSim(str(value), datetime(2024, 1, 1, tzinfo=UTC)))
        except CronSimError as error:
            raise wrong(Problem(f"cannot read this as a cron expression: {str(error).lower()}", allowed)) from None
        except StopIteration:
            raise wrong(Problem("cannot use a window that never comes", allowed)) from None
    return value


def read_timezone(value: Any) -> Any:
    """Read the name of a time zone of the IANA database, for example ``Europe/Berlin``."""
    if isinstance(value, str):
        try:
            ZoneInfo(str(value))
        except (ValueError, OSError):  # ZoneInfoNotFoundError is a KeyError
            known = False
        except KeyError:
            known = False
        else:
            known = True
        if not known:
            raise wrong(
                Problem(
                    "cannot find this time zone",
                    allowed="a name of the IANA database, for example Europe/Berlin, or UTC",
                    nearest=nearest(value, available_timezones()),
                )
            )
    return value


def read_json(value: Any) -> JsonValue:
    """Give JSON inside a spec its types: what is not in quotes is a number, true, false or null if it looks like it."""
    if isinstance(value, Mapping):
        return {str(key): read_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [read_json(item) for item in value]
    if isinstance(value, Text) and value.plain:
        if value in _JSON_WORDS:
            return _JSON_WORDS[value]
        if _INTEGER.fullmatch(value) and len(value) <= 300:
            return int(value)
        if _NUMBER.fullmatch(value) and math.isfinite(float(value)):
            return float(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)


def read_flag(value: Any) -> Any:
    """Read what an engine's flag is given.

    ``true`` (without quotes) is a bare flag, a list repeated values, a mapping JSON, and anything else its own text.
    """
    if isinstance(value, bool) or (isinstance(value, Text) and value.plain and value.lower() in ("true", "false")):
        if str(value).lower() == "true":
            return True
        raise wrong(
            Problem(
                "cannot tell what false means for a flag",
                allowed="true for a bare flag, text, a list of repeated values, or a mapping, passed as JSON",
                todo="leave the flag out; or use the engine's own opposite (no-…: true); or write the word in quotes",
            )
        )
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, Mapping):
        if set(value) == {"secret"}:
            raise wrong(
                Problem(
                    "cannot pass a secret as a flag: everyone on the host could read it",
                    todo="use serve.api_key, or serve.env with {secret: NAME}",
                )
            )
        return read_json(value)
    if isinstance(value, list | tuple) and value and all(isinstance(v, str | int | float | Mapping) for v in value):
        return tuple(read_json(item) if isinstance(item, Mapping) else str(item) for item in value)
    raise wrong(
        Problem(
            "cannot use a flag without a value" if not value else "cannot use this as the value of a flag",
            allowed="true for a bare flag, text, a list of text, or a mapping, passed as JSON",
        )
    )


def read_count_or_auto(value: Any) -> Any:
    """Read ``auto`` or a number from 1 on."""
    if value == "auto":
        return "auto"
    if isinstance(value, str) and not _INTEGER.fullmatch(value):
        raise wrong(Problem("cannot read this as a number of GPUs", allowed="auto, or a whole number from 1 on"))
    number = read_int(value)
    if isinstance(number, int) and number < 1:
        raise wrong(Problem("cannot spread a model over less than one GPU", allowed="auto, or a number from 1 on"))
    return number


def is_name(text: str) -> bool:
    """Say whether a text can be the name of an object."""
    return re.fullmatch(_NAME, text, re.ASCII) is not None


def is_commit(revision: str) -> bool:
    """Say whether a revision is a whole commit, which never moves."""
    return re.fullmatch("[0-9a-f]{40}", revision, re.ASCII) is not None


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value


def _schema(**schema: Any) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", **schema})


# The types of fields.

Bool = Annotated[bool, BeforeValidator(read_bool)]
Port = Annotated[int, Field(ge=1, le=65535), BeforeValidator(read_int)]
ContainerId = Annotated[int, Field(ge=100, le=999_999_999), BeforeValidator(read_int)]
AtLeastOne = Annotated[int, Field(ge=1), BeforeValidator(read_int)]
GpuCount = Annotated[int, Field(ge=0, le=64), BeforeValidator(read_int)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(read_float)]
Str = Annotated[str, BeforeValidator(_text)]
Duration = Annotated[
    timedelta,
    BeforeValidator(read_duration),
    PlainSerializer(write_duration, return_type=str, when_used="json"),
    _schema(pattern=f"^{_DURATION.pattern}$", minLength=2, examples=["90s", "20m", "1h30m", "1d"]),
]
MemoryAtLeast = Annotated[
    int,
    BeforeValidator(read_memory_at_least),
    PlainSerializer(write_memory_at_least, return_type=str, when_used="json"),
    _schema(pattern=f"^{_AT_LEAST.pattern}$", examples=[">=44GiB"]),
]
ComputeCapability = Annotated[
    Capability,
    BeforeValidator(read_capability),
    PlainSerializer(str, return_type=str, when_used="json"),
    WithJsonSchema({"type": ["string", "number"], "pattern": f"^{_CAPABILITY.pattern}$", "examples": ["8.6", ">=8.0"]}),
]
PciAddress = Annotated[
    str,
    BeforeValidator(read_pci),
    _schema(
        pattern=r"^(?:(?:0000)?[0-9A-Fa-f]{4}:)?[0-9A-Fa-f]{2}:[01][0-9A-Fa-f]\.[0-7]$",
        examples=["4f:00.0", "0000:4f:00.0"],
    ),
]
GpuId = Annotated[
    str, BeforeValidator(read_gpu_id), _schema(examples=["4f:00.0", "GPU-8a05f1c2-6d3e-4f7b-9a10-2c54e8b7d901"])
]
ServerGpu = Annotated[
    int | str,
    BeforeValidator(read_server_gpu),
    WithJsonSchema({"type": ["string", "integer"], "examples": [0, "4f:00.0"]}),
]
ServerGpus = Annotated[
    Annotated[Literal["all"], Tag("<all>")] | Annotated[tuple[ServerGpu, ...], Tag("<list>")],
    Discriminator(lambda value: "<all>" if isinstance(value, str) else "<list>"),
]
TensorParallel = Annotated[
    Literal["auto"] | int,
    BeforeValidator(read_count_or_auto),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}]}),
]
FlagValue = Annotated[
    Literal[True] | str | tuple[str | dict[str, JsonValue], ...] | dict[str, JsonValue],
    PlainValidator(read_flag),
    PlainSerializer(lambda value: value, return_type=Any),  # as it is: pydantic cannot tell tuples in unions
    WithJsonSchema(
        {
            "anyOf": [
                {"const": True},
                {"type": ["string", "number"]},
                {"type": "array", "minItems": 1},
                {"type": "object"},
            ]
        }
    ),
]
Name = Annotated[
    str,
    Matching(
        _NAME,
        "cannot use this as a name",
        "1 to 63 letters, digits, dots, dashes and underscores, the first and the last a letter or digit",
    ),
]
AbsolutePath = Annotated[
    str, Matching(r"/[^\x00-\x1f\x7f]*", "cannot use this as a path", "a path from the root on: /models")
]
Address = Annotated[
    str,
    Matching(
        r"[A-Za-z0-9:_][A-Za-z0-9._:%-]{0,253}", "cannot use this as an address", "an IP address or the name of a host"
    ),
]
User = Annotated[
    str, Matching(r"[A-Za-z_][A-Za-z0-9._-]{0,31}", "cannot use this as a user", "the name of a user: root")
]
Revision = Annotated[
    str,
    Matching(
        r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,199}",
        "cannot use this as a revision",
        "a commit of 40 hexadecimal digits; with allow_moving: true a branch or tag too",
    ),
]
Repo = Annotated[
    str,
    Matching(
        r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*",
        "cannot use this as the repository of a model",
        "owner and name as on the Hub: Qwen/Qwen3.6-27B",
    ),
]
Fingerprint = Annotated[
    str,
    Matching(
        r"SHA256:[A-Za-z0-9+/]{43}",
        "cannot read this as the fingerprint of a host key",
        "SHA256: and 43 characters, as ssh-keygen -lf shows it",
        todo="run reconcile trust HOST: it shows the key that the host has",
    ),
]
Sha256 = Annotated[
    str, Matching(r"[0-9A-Fa-f]{64}", "cannot read this as a SHA-256 digest", "64 hexadecimal digits", lower=True)
]
DriverVersion = Annotated[
    str,
    Matching(
        r"[0-9]{3,4}\.[0-9]{2,3}(?:\.[0-9]{2})?",
        "cannot read this as the version of an NVIDIA driver",
        "as nvidia-smi shows it: 580.126.09",
    ),
]
DownloadUrl = Annotated[
    str,
    Matching(
        r"(?:https?://[^\s@]+|/[^\x00-\x1f\x7f]+)",
        "cannot use this as a source",
        "an http(s) URL, or a path on the host",
    ),
]
IndexUrl = Annotated[
    str, Matching(r"https?://[^\s@]+", "cannot use this as a package index", "an http(s) URL without a password")
]
PythonVersion = Annotated[
    str, Matching(r"3\.[0-9]{1,2}(?:\.[0-9]{1,2})?", "cannot read this as a version of Python", "for example 3.12")
]
EngineName = Annotated[
    str,
    Matching(
        r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?",
        "cannot use this as an engine",
        "sglang, vllm, transformers, or a plug-in",
    ),
]
FlagName = Annotated[
    str,
    Matching(
        r"[A-Za-z0-9][A-Za-z0-9._-]*",
        "cannot use this as a flag",
        "the long name of an option without its dashes: context-length",
    ),
]
EnvName = Annotated[
    str,
    Matching(
        r"[A-Za-z_][A-Za-z0-9_]*", "cannot use this as the name of an environment variable", "for example HF_HOME"
    ),
]
Service = Annotated[
    str,
    Matching(
        r"[A-Za-z0-9][A-Za-z0-9:_.@\\-]{0,200}",
        "cannot use this as a systemd service",
        "for example nvidia-persistenced",
    ),
]
PackageVersion = Annotated[str, BeforeValidator(read_version)]
RequirementLine = Annotated[str, BeforeValidator(read_requirement)]
Cron = Annotated[str, BeforeValidator(read_cron), _schema(examples=["0 2 * * SUN"])]
TimeZone = Annotated[str, BeforeValidator(read_timezone), _schema(examples=["Europe/Berlin", "UTC"])]
