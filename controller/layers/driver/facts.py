"""The NVIDIA driver of a host as it is installed on disk."""

from __future__ import annotations

import re
from dataclasses import dataclass

from controller.facts.words import ParseError, Section


@dataclass(frozen=True, slots=True)
class Installed:
    """The nvidia module's file for one kernel. ``signer`` is who signed it, "" for nobody."""

    kernel: str
    version: str
    flavour: str
    signer: str = ""


@dataclass(frozen=True, slots=True)
class Runfile:
    """An installer that was fetched and checked, by its file's name and digest."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A driver that was installed and did not load: its version, its flavour, on which kernel, and what was said."""

    version: str
    flavour: str
    kernel: str
    said: str


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """All of it.

    ``modules`` are the files that would be loaded, by kernel; ``dkms`` the versions that DKMS builds for new kernels;
    ``libraries`` the versions of libnvidia-ml that programs on the host get. ``loaded`` are NVIDIA's modules in the
    kernel. ``stopped`` are services that a step of ours stopped and did not start again, as ``service NAME``.
    """

    modules: tuple[Installed, ...] = ()
    dkms: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    runfiles: tuple[Runfile, ...] = ()
    loaded: tuple[str, ...] = ()
    refusal: Refusal | None = None
    stopped: tuple[str, ...] = ()

    def module(self, kernel: str) -> Installed | None:
        """The module's file for a kernel."""
        return next((module for module in self.modules if module.kernel == kernel), None)

    def runfile(self, version: str, sha256: str | None) -> Runfile | None:
        """The fetched installer of a version, if it has that digest (any, when None is asked for)."""
        named = (each for each in self.runfiles if each.name.endswith(f"-{version}.run"))
        return next((each for each in named if sha256 in (None, each.sha256)), None)


_LIBRARY = re.compile(r"(?:.*/)?libnvidia-ml\.so\.(\d+\.\d+(?:\.\d+)?)")


def parse(section: Section) -> DriverFacts:
    """Read the section's text. Raises ParseError."""
    fields: dict[str, list[str]] = {}
    for line in section.out.splitlines():
        key, _, value = line.partition(" ")
        if key not in ("module", "dkms", "library", "runfile", "refused", "stopped", "loaded"):
            raise ParseError("garbage", f"cannot read {line[:80]!r}")
        fields.setdefault(key, []).append(value)
    libraries = (_LIBRARY.fullmatch(target) for target in fields.get("library", ()))
    return DriverFacts(
        modules=_modules(fields.get("module", [])),
        dkms=tuple(fields.get("dkms", ())),
        libraries=tuple(dict.fromkeys(match[1] for match in libraries if match)),
        runfiles=tuple(
            Runfile(name, digest) for digest, _, name in (r.partition(" ") for r in fields.get("runfile", ()))
        ),
        loaded=tuple(line.split(" ")[0] for line in fields.get("loaded", ())),
        refusal=_refusal(fields.get("refused", [])),
        stopped=tuple(fields.get("stopped", ())),
    )


def _modules(lines: list[str]) -> tuple[Installed, ...]:
    about: dict[str, dict[str, str]] = {}
    for line in lines:
        kernel, _, rest = line.partition(" ")
        key, _, value = rest.partition(":")
        about.setdefault(kernel, {})[key] = value.strip()
    return tuple(
        Installed(
            kernel,
            fields.get("version", ""),
            # NVIDIA's own licence is the proprietary one's; the open one is "Dual MIT/GPL"
            "proprietary" if fields.get("license") == "NVIDIA" else "open",
            fields.get("signer", ""),
        )
        for kernel, fields in about.items()
    )


def _refusal(lines: list[str]) -> Refusal | None:
    if not lines:
        return None
    try:
        version, flavour, kernel, said = lines[0].split(" ", 3)
    except ValueError:
        raise ParseError("garbage", f"cannot read {lines[0][:80]!r} as a driver that did not load") from None
    return Refusal(version, flavour, kernel, said)
