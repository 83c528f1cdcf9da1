"""What binds a host's cards at boot: our unit, its script, its data; and which modules are loaded by name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from controller.facts.files import read_files
from controller.facts.words import Later, ParseError, Section

UNIT = "/etc/systemd/system/reconcile-gpus.service"
UNIT_ENABLED = "/etc/systemd/system/sysinit.target.wants/reconcile-gpus.service"
SCRIPT = "/etc/reconcile/gpus.sh"
DATA = "/etc/reconcile/gpus"


@dataclass(frozen=True, slots=True)
class Marked:
    """A file of ours, by its marker: for which object, by which schema, and whether the rest is still as written.

    ``text`` is all of it. ``ours`` is False for a file without a marker: somebody else's.
    """

    text: str
    ours: bool = False
    object: str = ""
    schema: int = 0
    intact: bool = False

    @property
    def sha256(self) -> str:
        """The digest that a script compares before it replaces the file."""
        return _sha256(self.text)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A card as it is recorded for boot. ``minor`` is None, and ``uuid`` "", while they are not known."""

    pci: str
    device: str  # vendor:device
    driver: str
    minor: int | Later | None = None
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class BootFacts:
    """All of it. ``modules`` are the names in modules-load.d and /etc/modules; a file that is not there is None."""

    enabled: bool = False
    masked: bool = False
    unit: Marked | None = None
    script: Marked | None = None
    data: Marked | None = None
    load: tuple[str, ...] = ()
    cards: tuple[Recorded, ...] = ()
    modules: tuple[str, ...] = ()

    def card(self, pci: str) -> Recorded | None:
        """What is recorded of the card at an address."""
        return next((card for card in self.cards if card.pci == pci), None)


_MARKER = re.compile(r"# reconcile host\.boot object=(\S+) schema=(\d+) digest=([0-9a-f]{64})\n")


def marked(body: str, obj: str, schema: int) -> str:
    """A file's text with its marker before it."""
    return f"# reconcile host.boot object={obj} schema={schema} digest={_sha256(body)}\n{body}"


def parse(section: Section) -> BootFacts:
    """Read the section's text. Raises ParseError."""
    plain, mark, rest = section.out.partition("==files\n")
    said = plain.split()
    if not mark or not set(said) <= {"enabled", "masked"}:
        raise ParseError("garbage", f"cannot read what happens at boot from {section.out[:80]!r}")
    texts = {path: file.text for path, file in read_files(rest).items()}
    data = _ending(texts, DATA)
    load, cards = _data(data) if data is not None else ((), ())
    return BootFacts(
        enabled="enabled" in said,
        masked="masked" in said,
        unit=_marked(_ending(texts, UNIT)),
        script=_marked(_ending(texts, SCRIPT)),
        data=_marked(data),
        load=load,
        cards=cards,
        modules=_modules(texts),
    )


def _ending(texts: Mapping[str, str], path: str) -> str | None:
    return next((text for each, text in texts.items() if each.endswith(path)), None)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _marked(text: str | None) -> Marked | None:
    if text is None:
        return None
    match = _MARKER.match(text)
    if match is None:
        return Marked(text)
    return Marked(text, True, match[1], int(match[2]), _sha256(text[match.end() :]) == match[3])


def _data(text: str) -> tuple[tuple[str, ...], tuple[Recorded, ...]]:
    """The modules and cards of the data; a line that is neither is nobody's (the script passes it over as well)."""
    load: list[str] = []
    cards: list[Recorded] = []
    for words in (line.split() for line in text.splitlines()):
        if words[:1] == ["load"] and len(words) == 2:
            load.append(words[1])
        elif words[:1] == ["card"] and len(words) == 6:
            _, pci, device, driver, minor, uuid = words
            number = int(minor) if minor.isdigit() else None
            cards.append(Recorded(pci, device, driver, number, "" if uuid == "-" else uuid))
    return tuple(load), tuple(cards)


def _modules(texts: Mapping[str, str]) -> tuple[str, ...]:
    """What systemd-modules-load loads by name: a file in /etc hides one of the same name in /usr/lib."""
    chosen: dict[str, str] = {}
    for path, text in texts.items():
        if "modules-load.d/" in path or path.endswith("/etc/modules"):
            chosen.setdefault(path.rsplit("/", 1)[1], text)
    lines = (line.strip() for text in chosen.values() for line in text.splitlines())
    return tuple(line.replace("-", "_") for line in lines if line and not line.startswith(("#", ";")))
