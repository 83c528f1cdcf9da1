"""Programs that a script lays down in a place: they travel in the script itself, which prints them by name."""

from __future__ import annotations

from collections.abc import Mapping

from controller.core.words import Script

_END = "END-OF-PROGRAM"


def with_programs(script: Script, programs: Mapping[str, str]) -> Script:
    """The script with a function ``program NAME`` before it that prints one of these texts."""
    cases = []
    for name, text in programs.items():
        if f"\n{_END}\n" in f"\n{text}\n" or not text.endswith("\n"):
            raise ValueError(f"{name} cannot travel in a script")
        cases.append(f"{name}) cat <<'{_END}' ;;\n{text}{_END}\n")
    return Script(script.name, "program() {\ncase $1 in\n" + "".join(cases) + "esac\n}\n" + script.text)
