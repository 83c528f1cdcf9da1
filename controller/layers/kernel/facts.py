"""The kernels of a host: which runs, which boots next, headers, secure boot, and what loads or keeps off modules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from controller.facts.files import read_files
from controller.facts.words import ParseError, Section, Unknown


@dataclass(frozen=True, slots=True)
class Initramfs:
    """What of the graphics drivers a kernel's initramfs holds: module files by path, configuration by path and text.

    ``unread`` says why its content is not known; the rest is then empty.
    """

    kernel: str
    modules: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    unread: Unknown | None = None

    def has_module(self, name: str) -> bool:
        """Whether the module's file is in it, packed or not."""
        pattern = re.compile(rf"(?:.*/)?{re.escape(name).replace('_', '[-_]')}\.ko(?:\.\w+)?")
        return any(pattern.fullmatch(path) for path in self.modules)

    @property
    def modprobe(self) -> tuple[str, ...]:
        """The texts of its modprobe.d."""
        return tuple(text for path, text in self.files if "modprobe.d/" in path)


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """All of it.

    ``installed`` are the kernels in /boot, ``headers`` those with a tree to build modules against. ``secure_boot`` is
    None where the firmware does not tell; ``enrolled_keys`` are the names of the machine owner keys that count then,
    and ``dkms_key_enrolled`` is whether what DKMS builds is signed with one of them. ``modprobe`` is the modprobe.d
    that counts, by path: a file in /etc hides one of the same name below /usr/lib. ``packages`` are those that apt
    would install, of what is lacking; None when it was not asked, or has no answer. ``lists_fresh``: apt's lists are
    less than a day old.
    """

    running: str
    installed: tuple[str, ...]
    headers: tuple[str, ...]
    next_boot_pin: str = ""
    pin: str = ""
    secure_boot: bool | None = False
    enrolled_keys: tuple[str, ...] = ()
    dkms_key_enrolled: bool = False
    nouveau_loaded: bool = False
    dkms: bool = False
    boot_tool: bool = False
    modprobe: tuple[tuple[str, str], ...] = ()
    initramfs: tuple[Initramfs, ...] = ()
    packages: tuple[str, ...] | None = None
    lists_fresh: bool = False

    @property
    def next(self) -> str:
        """The kernel that boots next: the one pinned for once, the one pinned for good, else the newest."""
        for pinned in (self.next_boot_pin, self.pin):
            if pinned in self.installed:
                return pinned
        return max(self.installed, key=version_of, default=self.running)

    @property
    def concerned(self) -> tuple[str, ...]:
        """The running kernel and the next one, each once."""
        return tuple(dict.fromkeys((self.running, self.next)))

    def of(self, kernel: str) -> Initramfs | None:
        """The initramfs of a kernel, None when it has none."""
        return next((image for image in self.initramfs if image.kernel == kernel), None)


def version_of(release: str) -> tuple[int, ...]:
    """The numbers in a kernel's release, for comparing: 6.8.12-9-pve is (6, 8, 12, 9)."""
    return tuple(int(number) for number in re.findall(r"\d+", release))


def keeps_off(module: str, texts: Iterable[str]) -> bool:
    """Whether these modprobe.d texts keep a module from being loaded for a device (modprobe.d(5))."""
    line = re.compile(
        rf"[ \t]*(?:blacklist[ \t]+{module}|install[ \t]+{module}[ \t]+(?:/usr)?/bin/(?:false|true))[ \t]*"
    )
    return any(line.fullmatch(each) for text in texts for each in text.split("\n"))


_FOLDERS = ("/etc/", "/run/", "/usr/local/lib/", "/usr/lib/", "/lib/")
_PART = re.compile(r"^==(\w+)(?: (\S+))?\n", re.MULTILINE)


def parse(section: Section) -> KernelFacts:
    """Read the section's text. Raises ParseError."""
    plain, *parts = _split(section.out)
    fields: dict[str, list[str]] = {}
    for line in plain[2].splitlines():
        key, _, value = line.partition(" ")
        fields.setdefault(key, []).append(value)
    images: list[Initramfs] = []
    packages: tuple[str, ...] | None = None
    modprobe: tuple[tuple[str, str], ...] | None = None
    for name, about, text in parts:
        match name:
            case "packages":
                packages = _packages(text)
            case "modprobe":
                modprobe = _counting((path, file.text) for path, file in read_files(text).items())
            case "initramfs":
                images.append(_initramfs(about, text))
            case _:
                raise ParseError("garbage", f"no part of the kernel's facts is called {name}")
    if "running" not in fields or modprobe is None:
        raise ParseError("garbage", f"no running kernel and no modprobe.d in {section.out[:80]!r}")
    secure = fields.get("secure-boot", [""])[0]
    return KernelFacts(
        running=fields["running"][0],
        installed=tuple(fields.get("installed", ())),
        headers=tuple(fields.get("headers", ())),
        next_boot_pin=fields.get("next-boot-pin", [""])[0],
        pin=fields.get("pin", [""])[0],
        secure_boot={"0": False, "1": True}.get(secure),
        enrolled_keys=tuple(fields.get("enrolled", ())),
        dkms_key_enrolled="dkms-key" in fields,
        nouveau_loaded="nouveau" in fields.get("loaded", ()),
        dkms="dkms" in fields,
        boot_tool="boot-tool" in fields,
        modprobe=modprobe,
        initramfs=tuple(images),
        packages=packages,
        lists_fresh=fields.get("lists") == ["fresh"],
    )


def _split(out: str) -> list[tuple[str, str, str]]:
    marks = list(_PART.finditer(out))
    ends = [*(mark.start() for mark in marks[1:]), len(out)][: len(marks)]
    first = marks[0].start() if marks else len(out)
    return [
        ("", "", out[:first]),
        *((m[1], m[2] or "", out[m.end() : end]) for m, end in zip(marks, ends, strict=True)),
    ]


def _counting(files: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The files that count: of those of one name, the one in the first folder."""
    found: dict[str, tuple[int, str, str]] = {}
    for path, text in files:
        folder = path[: path.index("modprobe.d/")]
        rank = next((n for n, each in enumerate(_FOLDERS) if folder.endswith(each)), len(_FOLDERS))
        name = path.rsplit("/", 1)[1]
        if name not in found or rank < found[name][0]:
            found[name] = (rank, path, text)
    return tuple((path, text) for _, (_, path, text) in sorted(found.items()))


def _packages(text: str) -> tuple[str, ...] | None:
    """The names with a candidate in what ``apt-cache policy`` printed."""
    if not text.startswith("exit 0\n"):
        return None
    found = re.findall(r"^(\S+):\n(?:  .*\n)*?  Candidate: (.*)\n", text, re.MULTILINE)
    return tuple(name for name, candidate in found if candidate != "(none)")


def _initramfs(kernel: str, text: str) -> Initramfs:
    first, _, body = text.partition("\n")
    if first.startswith("hung"):
        return Initramfs(kernel, unread=Unknown("initramfs-not-read", f"the initramfs of {kernel} is still being read"))
    if first != "exit 0":
        said = " ".join(body.split())[:200] or first
        return Initramfs(kernel, unread=Unknown("initramfs-unreadable", f"the initramfs of {kernel}: {said}"))
    modules: list[str] = []
    files: dict[str, list[str]] = {}
    for line in body.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "module":
            modules.append(rest)
        elif kind == "line":
            path, _, content = rest.partition(":")
            files.setdefault(path, []).append(content)
        else:
            raise ParseError("garbage", f"cannot read {line[:80]!r} of the initramfs of {kernel}")
    return Initramfs(kernel, tuple(modules), tuple((path, "\n".join(lines)) for path, lines in files.items()))
