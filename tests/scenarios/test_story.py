"""The story: a container and its GPUs follow one edited line to another host. Played in both worlds."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.fixtures import need_lab
from tests.lab.lab import Lab, wait_until
from tests.scenarios import story
from tests.scenarios.stage import LabStage, Ran, SimStage, Stage
from tests.scenarios.story import A6000, LINE, MOVED, TAKEN_OVER, VERSION, Watch, machines, module, smi
from tests.scenarios.test_interrupted import begin, wait_for

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def story_lab() -> Iterator[Lab]:
    """A lab with the story's hosts."""
    need_lab()
    with Lab(hosts=story.lab_hosts(), pve_files=story.pve_files()) as started:
        yield started


def _stage(request: pytest.FixtureRequest, place: Path, *, alive: bool) -> Stage:
    stage: Stage
    if request.param == "sim":
        stage = SimStage(place, story.sim_file(alive=alive))
    else:
        lab: Lab = request.getfixturevalue("story_lab")
        lab.reset()
        story.set_up_lab(lab, alive=alive)
        stage = LabStage(place, lab)
    story.specification(stage)
    return stage


WORLDS = ["sim", pytest.param("lab", marks=pytest.mark.lab)]


@pytest.fixture(params=WORLDS)
def gone(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    """The story's first world: kpro6 is switched off."""
    return _stage(request, tmp_path, alive=False)


@pytest.fixture(params=WORLDS)
def alive(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    """The same with kpro6 switched on, and the container at work there."""
    return _stage(request, tmp_path, alive=True)


def chain(ran: Ran) -> list[tuple[str, str]]:
    assert ran.rc == 0, ran.out + ran.err
    assert ran.json["blocked"] == [], ran.json["blocked"]
    assert ran.json["unknown"] == [], ran.json["unknown"]
    return [(step["layer"], step["action"]) for step in ran.json["steps"]]


def at_work_on_kpro5(stage: Stage) -> None:
    """It runs there, sees exactly its two cards, with libraries of the module's version, and without the mount."""
    assert stage.node(129) == "kpro5"
    assert stage.started(129).startswith("kpro5 ")
    assert module(stage) == VERSION
    assert smi(stage) == (set(A6000), (VERSION,))
    assert [stage.opens(129, f"/dev/nvidia{n}") for n in range(3)] == ["allowed", "allowed", "absent"]
    conf = stage.conf(129).decode()
    assert LINE not in conf
    first = story.pve_files()["nodes/kpro6/lxc/129.conf"].decode() if isinstance(stage, LabStage) else story.CONF
    assert story.snapshot(conf) == story.snapshot(first)
    assert "# Language models. Ask Ada before touching the GPUs." in conf


def rests(stage: Stage) -> None:
    """A further run does nothing, and says so."""
    started, conf = stage.started(129), stage.conf(129)
    again = stage.reconcile("--once")
    assert again.rc == 0, again.out + again.err
    assert "Nothing was done" in again.out
    assert stage.reconcile("plan", "--detailed-exitcode").rc == 0
    assert (stage.started(129), stage.conf(129)) == (started, conf)


def off_and_on(stage: Stage, *hosts: str) -> None:
    """The power goes, and comes back; what has ``onboot`` is started when the cluster is quorate."""
    for host in hosts:
        stage.power_off(host)
    for host in hosts:
        stage.power_on(host)
    wait_until(lambda: stage.started(129) != "", 60, "the container was not started after the boot")
    if isinstance(stage, LabStage):
        wait_until(
            lambda: machines(stage.lab) == {201, 202}, 60, "the virtual machines were not started after the boot"
        )


def test_the_plan_shows_the_whole_chain_and_touches_nothing(gone: Stage) -> None:
    watch, before = Watch(gone), gone.conf(129)
    plan = gone.reconcile("plan", "-o", "json")
    assert chain(plan) == TAKEN_OVER
    certain = [step["action"] for step in plan.json["steps"] if not step["provisional"]]
    assert certain == [action for _, action in TAKEN_OVER[:7]] + ["take-over-container", "edit-config"]
    assert "17:00.0, 31:00.0, b1:00.0" in str(plan.json["summary"])
    told = gone.reconcile("plan").out
    assert "Leaves alone:" in told
    assert "GPUs of virtual machines: 17:00.0, 31:00.0, b1:00.0" in told
    assert (gone.node(129), gone.conf(129), gone.started(129)) == ("kpro6", before, "")
    watch.untouched()


def test_the_story(gone: Stage) -> None:
    watch = Watch(gone)
    done = gone.reconcile("--once", timeout=300)
    assert done.rc == 0, done.out + done.err
    at_work_on_kpro5(gone)
    watch.untouched()
    rests(gone)

    coming = gone.reconcile("plan", "--next-boot", "--host", "kpro5", "--detailed-exitcode")
    assert coming.rc == 0, coming.out
    off_and_on(gone, "kpro4", "kpro5")
    watch.again()
    at_work_on_kpro5(gone)
    watch.untouched()
    rests(gone)
    watch.untouched()


def test_with_kpro6_alive_it_is_moved_and_back_again(alive: Stage) -> None:
    watch = Watch(alive)
    assert chain(alive.reconcile("plan", "-o", "json")) == MOVED
    assert alive.started(129).startswith("kpro6 ")
    done = alive.reconcile("--once", timeout=300)
    assert done.rc == 0, done.out + done.err
    at_work_on_kpro5(alive)
    rests(alive)

    story.specification(alive, host="kpro6", kpro6="active")
    back = alive.reconcile("--once", timeout=300)
    assert back.rc == 0, back.out + back.err
    assert alive.node(129) == "kpro6"
    assert alive.started(129).startswith("kpro6 ")
    cards, versions = smi(alive, "kpro6")
    assert (len(cards), versions, module(alive, "kpro6")) == (2, (VERSION,), VERSION)
    rests(alive)
    watch.untouched()


# --- cut off in the lab, at moments that can be seen from outside; test_story_cut_off.py has all of them ---


def _kpro5_has(path: str) -> Callable[[LabStage], bool]:
    return lambda stage: stage.lab.path("kpro5", path).exists()


def _loading(stage: LabStage) -> bool:
    return "nvidia" in stage.lab.kernel("state", "kpro5")["modules"]


def _taken_over(stage: LabStage) -> bool:
    try:
        stage.lab.pve_read("nodes/kpro5/lxc/129.conf")
    except FileNotFoundError:
        return False
    return True


def _starting(stage: LabStage) -> bool:
    log = stage.lab.path("kpro5", "/run/lab-log/pct.log")
    return log.exists() and START in log.read_text()


def _inside(stage: LabStage) -> bool:
    return any((stage.lab.state / "rbd/vm-129-disk-0").glob(f"usr/lib/*/libnvidia-ml.so.{VERSION}"))


START = 'args=["start", "129"]'
_installing = _kpro5_has("/var/lib/dkms/nvidia")
LAB = pytest.mark.parametrize("gone", [pytest.param("lab", marks=pytest.mark.lab)], indirect=True)


def same_end(stage: LabStage, watch: Watch) -> None:
    done = stage.reconcile("--once", timeout=300)
    assert done.rc == 0, done.out + done.err
    at_work_on_kpro5(stage)
    watch.untouched()
    log = stage.lab.path("kpro5", "/run/lab-log/pct.log").read_text()
    assert log.count(START) == 1, log
    rests(stage)


@LAB
@pytest.mark.parametrize("moment", [_installing, _taken_over, _inside], ids=["installing", "taken-over", "inside"])
def test_killed(gone: LabStage, moment: Callable[[LabStage], bool]) -> None:
    watch = Watch(gone)
    process = begin(gone)
    wait_for(gone, moment, process)
    process.kill()
    process.communicate()
    same_end(gone, watch)


@LAB
@pytest.mark.parametrize("moment", [_loading, _starting], ids=["loading", "starting"])
def test_connection_cut(gone: LabStage, moment: Callable[[LabStage], bool]) -> None:
    watch = Watch(gone)
    process = begin(gone)
    wait_for(gone, moment, process)
    gone.lab.cut("kpro5")
    try:
        # It gives up by itself, or is ended like one whose network is gone for good
        process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    gone.lab.heal()
    same_end(gone, watch)


def test_what_the_container_serves_follows_it(tmp_path: Path) -> None:
    """One edited line, and in the end an answer that makes sense: environment, weights, unit, process, checks."""
    stage = SimStage(tmp_path, story.sim_file())
    story.specification(stage, served=True)
    assert chain(stage.reconcile("plan", "-o", "json")) == [*TAKEN_OVER, *story.SERVED]
    done = stage.reconcile("--once")
    assert done.rc == 0, done.out + done.err
    assert "Everything is as the specs say" in done.out
    assert "Nothing was done" in stage.reconcile("--once").out
    (process,) = stage.world().fleet.hosts["kpro5"].containers[129].session.processes[:1]
    assert process.listens
    assert "--speculative-algorithm" in process.argv


def test_what_moves_with_its_container_is_made_ready_before_that_stops(tmp_path: Path) -> None:
    """The build and the download go on inside the container that still runs; the move comes after them."""
    stage = SimStage(tmp_path, story.sim_file(alive=True))
    story.specification(stage, served=True)
    ahead = [("server.environment", "build-environment"), ("server.weights", "fetch-weights")]
    planned = chain(stage.reconcile("plan", "-o", "json"))
    move = planned.index(("container.placement", "move-container"))
    assert [planned.index(step) < move for step in ahead] == [True, True]
    began = stage.started(129)
    assert began.startswith("kpro6 ")
    done = stage.reconcile("--once", "-o", "json")
    assert done.rc == 0, done.out + done.err
    performed = [row["action"] for row in done.json["performed"]]
    assert performed.index("fetch-weights") < performed.index("move-container") < performed.index("prove-environment")
    assert performed.count("build-environment") == performed.count("fetch-weights") == 1
    assert stage.node(129) == "kpro5"
