"""Going back: the last good unit is kept whole and put back in place of one that failed; cut off anywhere, again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controller.layers.shared.checks import files, good
from controller.layers.shared.checks.place import Place

FAILURE = {"unit": "u2", "environment": "e2", "spec": "s2", "reasons": ["wrong-output"], "evidence": "What What"}


def unit(tmp_path: Path, number: int, **more: str) -> Place:
    """A server's folder as the unit of that number leaves it."""
    folder, units = tmp_path / "qwen", tmp_path / "units"
    units.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)
    files.write(folder / "checks.json", {"schema": 1, "unit": "reconcile-qwen.service", "number": number})
    for name in ("secrets.env", "config.yaml", "note.sh", "salt"):
        (folder / name).unlink(missing_ok=True)
    for name, text in more.items():
        files.replace(folder / name.replace("_", "."), text.encode(), 0o600)
    files.write(folder / "args.json", {"number": number})
    files.write(folder / "watch.marker", {"digest": f"w{number}"})
    (units / "reconcile-qwen.service").write_text(f"unit {number}\n")
    (units / "reconcile-qwen-watch.service").write_text(f"watch {number}\n")
    files.write(folder / "marker.json", {"digest": f"u{number}", "environment": f"e{number}", "schema": 1})
    return Place(folder, units)


def measured(number: int) -> dict[str, str]:
    return {"unit": f"u{number}", "environment": f"e{number}", "process": "1 1", "asked": "a"}


def state(place: Place) -> Any:
    return json.loads((place.folder / "state.json").read_text())


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemctl that notes what it is told."""
    told = tmp_path / "told"
    told.write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/systemctl").write_text(f'#!/bin/sh\necho "$*" >>{told}\n[ "$1" != "$FAILS" ]\n')
    (tmp_path / "bin/systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("FAILS", "reset-failed")  # it says so when there is nothing to reset
    return told


def test_the_good_unit_comes_back_whole(tmp_path: Path, systemctl: Path) -> None:
    good.note(unit(tmp_path, 1, secrets_env='KEY="one"\n', salt="s\n"), measured(1))
    place = unit(tmp_path, 2, config_yaml="api-key: two\n")
    good.put_back(place, FAILURE)
    folder = place.folder
    assert (place.units / "reconcile-qwen.service").read_text() == "unit 1\n"
    assert (place.units / "reconcile-qwen-watch.service").read_text() == "watch 1\n"
    assert json.loads((folder / "args.json").read_text()) == {"number": 1}
    assert (folder / "secrets.env").read_text() == 'KEY="one"\n'
    assert (folder / "secrets.env").stat().st_mode & 0o777 == 0o600
    assert not (folder / "config.yaml").exists()
    marker = json.loads((folder / "marker.json").read_text())
    assert marker == {"digest": "u1", "environment": "e1", "schema": 1, "instead_of": "u2"}
    assert state(place)["failed"] == [FAILURE]
    assert systemctl.read_text().splitlines() == [
        "daemon-reload", "reset-failed reconcile-qwen.service", "restart reconcile-qwen.service",
        "restart reconcile-qwen-watch.service",
    ]  # fmt: skip


@pytest.mark.parametrize("cut", range(1, 40))
def test_cut_off_anywhere_it_is_done_again(
    tmp_path: Path, systemctl: Path, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    good.note(unit(tmp_path, 1, secrets_env="one\n"), measured(1))
    place = unit(tmp_path, 2)
    real, count = files.replace, 0

    class CutError(Exception):
        pass

    def replace(path: Path, data: bytes, mode: int) -> None:
        nonlocal count
        count += 1
        if count == cut:
            raise CutError
        real(path, data, mode)

    monkeypatch.setattr(files, "replace", replace)
    try:
        good.put_back(place, FAILURE)
    except CutError:
        monkeypatch.setattr(files, "replace", real)
        good.put_back(place, FAILURE)
    assert (place.units / "reconcile-qwen.service").read_text() == "unit 1\n"
    assert json.loads((place.folder / "marker.json").read_text())["instead_of"] == "u2"
    assert [each["unit"] for each in state(place)["failed"]] == ["u2"]


@pytest.mark.parametrize("cut", range(1, 14))
def test_noting_what_is_good_can_be_cut_off(tmp_path: Path, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    place = unit(tmp_path, 1, secrets_env="one\n")
    good.note(place, measured(1))
    place = unit(tmp_path, 2, secrets_env="two\n")
    real, count = files.replace, 0

    def replace(path: Path, data: bytes, mode: int) -> None:
        nonlocal count
        count += 1
        if count == cut:
            raise OSError("cut")
        real(path, data, mode)

    monkeypatch.setattr(files, "replace", replace)
    try:
        good.note(place, measured(2))
    except OSError:
        said = state(place)["good"]
        kept = files.read(place.folder / "good/marker.json") or {}
        # Whoever would go back now finds the one that is noted, or that there is none.
        assert said == {"unit": "u1", "environment": "e1"}
        assert kept.get("digest") in ("u1", "u2", None)
        monkeypatch.setattr(files, "replace", real)
        good.note(place, measured(2))
    assert state(place)["good"] == {"unit": "u2", "environment": "e2"}
    assert json.loads((place.folder / "good/marker.json").read_text())["digest"] == "u2"
    assert (place.folder / "good/secrets.env").read_text() == "two\n"


def test_what_passed_is_forgotten_as_a_failure(tmp_path: Path, systemctl: Path) -> None:
    good.note(unit(tmp_path, 1), measured(1))
    good.put_back(unit(tmp_path, 2), FAILURE)
    place = unit(tmp_path, 2)
    good.note(place, measured(2))
    assert state(place) == {"schema": 1, "good": {"unit": "u2", "environment": "e2"}, "failed": []}


def test_there_has_to_be_a_good_one(tmp_path: Path) -> None:
    with pytest.raises(good.Stale, match="no good unit"):
        good.put_back(unit(tmp_path, 2), FAILURE)


def test_another_unit_by_now_is_left_alone(tmp_path: Path) -> None:
    good.note(unit(tmp_path, 1), measured(1))
    place = unit(tmp_path, 3)
    with pytest.raises(good.Stale, match="u3"):
        good.put_back(place, FAILURE)
    assert (place.units / "reconcile-qwen.service").read_text() == "unit 3\n"
    assert state(place)["failed"] == []


def test_the_unit_that_was_measured_is_noted_and_no_other(tmp_path: Path) -> None:
    place = unit(tmp_path, 2)
    good.note(place, measured(1))
    assert not (place.folder / "state.json").exists()


def test_a_newer_schema_is_not_touched(tmp_path: Path) -> None:
    place = unit(tmp_path, 1)
    files.write(place.folder / "state.json", {"schema": 2, "good": "?"})
    with pytest.raises(good.Stale, match="schema"):
        good.note(place, measured(1))
    assert state(place) == {"schema": 2, "good": "?"}


def test_ten_failures_are_remembered(tmp_path: Path, systemctl: Path) -> None:
    good.note(unit(tmp_path, 1), measured(1))
    for number in range(2, 15):
        place = unit(tmp_path, number)
        good.put_back(place, {**FAILURE, "unit": f"u{number}"})
    assert [each["unit"] for each in state(place)["failed"]] == [f"u{number}" for number in range(5, 15)]
