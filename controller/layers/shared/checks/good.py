"""The last good unit of a server: kept when it has passed its checks, and put back when its successor has not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from . import files
from .place import Place

STATE = Path("state.json")
PARTS = ("args.json", "secrets.env", "config.yaml", "note.sh", "salt", "checks.json", "watch.marker")
"""What a unit is made of beside its own file and its marker, and its watch; what one has not got, it does not need."""
FAILURES = 10


class Stale(Exception):  # noqa: N818 - it says how things are
    """What was to be done rests on what is no longer so."""


def note(place: Place, measured_on: dict[str, str]) -> None:
    """Keep copies of the unit that passed, and note it. Does nothing when it is noted already."""
    state = read(place.folder)
    marker = files.read(place.folder / "marker.json") or {}
    if marker.get("digest") != measured_on["unit"] or not measured_on["unit"]:
        return
    now = {"unit": measured_on["unit"], "environment": measured_on["environment"]}
    if state["good"] == now and (place.folder / "good/marker.json").exists():
        return
    beside = place.folder / "good.reconcile-new"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(mode=0o700)
    for name in PARTS:
        _copy(place.folder / name, beside / name)
    for name, unit in _units(place).items():
        _copy(unit, beside / name)
    files.write(beside / "marker.json", {name: value for name, value in marker.items() if name != "instead_of"})
    old = place.folder / "good.reconcile-old"
    shutil.rmtree(old, ignore_errors=True)
    if (place.folder / "good").exists():
        (place.folder / "good").rename(old)
    beside.rename(place.folder / "good")
    shutil.rmtree(old, ignore_errors=True)
    state["good"] = now
    state["failed"] = [each for each in state["failed"] if each["unit"] != now["unit"]]
    files.write(place.folder / STATE, state)


def put_back(place: Place, failed: dict[str, Any]) -> None:
    """Put the last good unit in the place of the failed one, and start it. Can be cut off anywhere and done again.

    ``failed`` is the failure as state.json keeps it. Raises Stale, OSError, subprocess.SubprocessError.
    """
    state = read(place.folder)
    kept = place.folder / "good"
    good_marker = files.read(kept / "marker.json")
    marker = files.read(place.folder / "marker.json") or {}
    if state["good"] is None or good_marker is None or good_marker.get("digest") != state["good"]["unit"]:
        raise Stale("there is no good unit to go back to")
    if state["good"]["unit"] == failed["unit"]:
        raise Stale("the good unit is the one that failed")
    if marker.get("digest") not in (failed["unit"], state["good"]["unit"]):
        raise Stale(f"the unit is {str(marker.get('digest'))[:12]} by now, not {failed['unit'][:12]}")
    # First the memory: cut off after it, the failed one is not started again by a fresh look.
    others = [each for each in state["failed"] if each["unit"] != failed["unit"]]
    state["failed"] = [*others, failed][-FAILURES:]
    files.write(place.folder / STATE, state)
    for name in PARTS:
        if (kept / name).exists():
            _copy(kept / name, place.folder / name)
        else:
            (place.folder / name).unlink(missing_ok=True)
    for name, path in _units(place).items():
        _copy(kept / name, path)
    files.write(place.folder / "marker.json", {**good_marker, "instead_of": failed["unit"]})
    unit = str(place.settings["unit"])
    # As any start that was asked for: what ended before it says nothing of this one.
    Path("/run/reconcile-server", f"{place.folder.name}.ends").unlink(missing_ok=True)
    watch = _units(place)["watch"].name
    for command in (["daemon-reload"], ["reset-failed", unit], ["restart", unit], ["restart", watch]):
        rc = subprocess.run(["systemctl", *command], stdin=subprocess.DEVNULL, timeout=300, check=False).returncode
        if rc != 0 and command[-1] != watch and command[0] != "reset-failed":
            raise OSError(f"systemctl {' '.join(command)} ended with {rc}")


def read(folder: Path) -> dict[str, Any]:
    """What is remembered of a server: its good unit, and those that failed."""
    state = files.read(folder / STATE)
    if state is None:
        return {"schema": files.SCHEMA, "good": None, "failed": []}
    if state.get("schema") != files.SCHEMA:
        raise Stale(f"{folder / STATE} has schema {state.get('schema')!r}")
    return state


def _units(place: Place) -> dict[str, Path]:
    """The files of the server's unit and of its watch's, by the names that their copies have."""
    unit = str(place.settings["unit"])
    return {"unit": place.units / unit, "watch": place.units / f"{unit.removesuffix('.service')}-watch.service"}


def _copy(source: Path, target: Path) -> None:
    """A copy with its mode, in one rename; what is not there is not copied."""
    try:
        data = source.read_bytes()
    except FileNotFoundError:
        return
    files.replace(target, data, source.stat().st_mode & 0o777)
