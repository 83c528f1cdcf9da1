"""Any faults, in any order, that end: the fleet comes to the spec, and then nothing more is done."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from controller.layers.shared import pve_physics as pve
from controller.layers.shared.truth import Fleet, Host
from controller.world.sim.faults import ANSWERS, Fault, Killed, Moment, Name
from tests.sim.controllers import Controller, specs
from tests.sim.fleets import demo
from tests.sim.test_world import CONF, is_right

SEEDS = int(os.environ.get("RECONCILE_SCHEDULES", "30"))
STEPS = (Moment.BEFORE, Moment.DURING, Moment.AFTER)
HEALING = (
    Fault(Name.SMI_BACK, "kpro5"),
    Fault(Name.DISK_FREED, "kpro5"),
    Fault(Name.HEAL, "kpro5"),
)


def some_fault(chance: random.Random) -> Fault:
    """A fault of kpro5 at a moment that suits it."""
    action = chance.choice(("edit-config", "restart", "start", ""))
    when, skip, times = chance.choice(STEPS), chance.randrange(2), chance.choice((1, 1, 2))
    name = chance.choice(
        (
            *(Name.CONNECTION_LOST, Name.REPLY_LOST, Name.KILLED, Name.REBOOT, Name.PARTITION),
            *(Name.APPEND, Name.DISK_FULL, Name.SMI_HANG, Name.OTHER_CONTROLLER, Name.START_FAILS, *ANSWERS),
        )
    )
    if name in ANSWERS:
        return Fault(name, "kpro5", skip=skip, times=times)
    return Fault(
        name,
        "kpro5",
        when,
        action,
        skip,
        times,
        path=CONF if name is Name.APPEND else "",
        text=f"#note {chance.randrange(99)}\n" if name is Name.APPEND else "startup for container '129' failed",
        sides=(("kpro4",), ("kpro5",)),
        seconds=chance.choice((5, 50, 500)),
    )


def notes(text: str) -> list[str]:
    """What people have written into the config meanwhile."""
    return [line for line in text.split("\n") if line.startswith("#note")]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The notes that were written into a config, in order, whatever came of them."""
    found: list[str] = []
    real = pve.write

    def watched(fleet: Fleet, host: Host, path: str, text: str) -> str:
        before = pve.read(fleet, host, path)
        failed = real(fleet, host, path, text)
        if not failed:
            found.extend(notes(text)[len(notes(before.text if before else "")) :])
        return failed

    monkeypatch.setattr(pve, "write", watched)
    return found


def some_passes(made: Fleet, chance: random.Random) -> None:
    """A controller that is started again and again while things go wrong."""
    faults = [some_fault(chance) for _ in range(chance.randrange(1, 5))]
    for _ in range(4):
        controller = Controller(made, chance.choice(("one", "other")), specs())
        controller.world.inject(*faults)
        try:
            controller.once(timeout=60)
        except Killed:
            pass
        except ValueError as error:
            if "nobody can edit" not in str(error):  # a person cannot either, without quorum
                raise
        faults = list(controller.world.armed)
        controller.world.clock.wait(chance.choice((1, 30, 100)))
        assert {205, 210} >= {*made.hosts["kpro4"].machines, *made.hosts["kpro5"].machines}
        assert made.hosts["kpro5"].functions["0000:17:00.0"].driver in ("vfio-pci", None)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_it_converges_and_then_rests(seed: int, written: list[str]) -> None:
    chance, made = random.Random(seed), demo()
    made.seed = seed
    some_passes(made, chance)
    last = Controller(made)
    last.world.clock.wait(700)
    last.world.inject(*HEALING)
    made.hosts["kpro5"].start_failure = ""
    for _ in range(3):
        report = Controller(made).once()
    assert report.upcoming.in_sync, [j for j in report.upcoming.judged if j.verdict]
    assert report.ended == []
    text = pve.read(made, made.hosts["kpro5"], CONF).text
    assert notes(text) == written
    pve.write(made, made.hosts["kpro5"], CONF, "".join(f"{ln}\n" for ln in text.split("\n")[:-1] if ln not in written))
    is_right(made)


def test_the_faults_are_all_described() -> None:
    described = (Path(__file__).parents[2] / "docs" / "simulated-fleet.md").read_text()
    for name in Name:
        assert f"`{name}`" in described
