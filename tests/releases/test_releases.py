"""A new release changes nothing on a fleet that was in sync: neither a pass nor the loop touches what others wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller import __version__
from controller.world.sim import file as simfile
from tests.proof.fleets import files_of, specs_of
from tests.releases.keep import FLEETS, RELEASES
from tests.sim.controllers import Controller
from tests.sim.loops import Player

KEPT = sorted(file for file in RELEASES.glob("*/*.sim.yaml"))


def plain(fleet: object) -> str:
    """A fleet without what looking and the time change: nvidia-smi's nodes are there, and leases run."""
    made = simfile.to_plain(fleet)  # type: ignore[arg-type]
    made.pop("now")
    made["images"] = {volume: image for volume, image in made.get("images", {}).items() if image}
    for host in made["hosts"].values():
        for passing in ("lease", "draws", "version"):
            host.pop(passing, None)
    return json.dumps(made, sort_keys=True, default=str)


def test_this_release_has_kept_what_it_writes() -> None:
    assert {file.name for file in KEPT if file.parent.name == __version__} == {f"{name}.sim.yaml" for name in FLEETS}


@pytest.mark.parametrize("file", KEPT, ids=lambda file: f"{file.parent.name}-{file.name.partition('.')[0]}")
def test_a_fleet_in_sync_stays_untouched(file: Path, tmp_path: Path) -> None:
    documents = json.loads(file.with_name(file.name.replace(".sim.yaml", ".json")).read_text())
    fleet = simfile.load(file.read_text(), str(file))
    before = plain(fleet)
    report = Controller(fleet, "an upgraded one", specs_of(documents)).once()
    assert report.upcoming.in_sync, [j for j in report.upcoming.judged if j.verdict]
    assert report.ended == []
    player = Player(fleet, tmp_path, files_of(documents), "the loop")
    player.play(600)
    player.kill()
    assert player.performed == []
    assert plain(fleet) == before
