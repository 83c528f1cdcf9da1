"""Weights, really fetched: real processes, the tests' own Hub, everything that goes wrong with downloads."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.core.words import InSync
from controller.facts.hub import HubFacts, NotDescribed, Trouble
from controller.layers import server_weights
from controller.layers.server_weights import Reason
from controller.layers.server_weights.facts import State
from controller.spec.model import Mode
from tests.hub.server import COMMIT, Fault, Hub, running
from tests.layers.inside import Ground
from tests.layers.server_weights.box import REPO, SHARD, SHARDS, Box, kill, model, wait

RANGED = "Python-urllib"
HUB = "hf_hub"
TOTAL = 3 * SHARD


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as hub:
        hub.repos[REPO] = model()
        yield hub


@pytest.fixture
def box(tmp_path: Path, hub: Hub) -> Box:
    return Box(Ground(tmp_path), hub)


def sent_of_shards(hub: Hub) -> int:
    return sum(hub.bytes_of(name) for name in SHARDS)


def test_fetched_compared_and_then_left_alone(box: Box, hub: Hub) -> None:
    drift = box.drift()
    assert drift.reason == Reason.NOT_THERE
    assert "7 of 7 files of org/tiny are not there" in drift.message
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert isinstance(box.check(), InSync)
    assert box.is_whole()
    assert sent_of_shards(hub) == TOTAL
    assert box.ground.progress.split()[:2] == [str(box.here.size)] * 2
    assert {name: box.here.state(f.path, f.size, f.sha256, f.blob) for name, f in _manifest(box)} == dict.fromkeys(
        hub.repos[REPO].files, State.RIGHT
    )
    left = {path.name for path in box.ground.path("/opt/reconcile/weights").iterdir()}
    assert left == {f"{box.here.key}.json", f"{box.here.key}.compared"}


def _manifest(box: Box):  # type: ignore[no-untyped-def]
    return [(file.path, file) for file in box.here.files]


def test_the_effect_says_what_the_script_does(box: Box) -> None:
    step = box.step()
    foretold = step.effect(box.look().facts)
    view = box.look()
    assert isinstance(server_weights.check(type(view)(view.specs, foretold), view.specs.servers["served"]), InSync)
    assert box.ground.run(step) == 0, box.ground.said
    expected = foretold["box1"].section("server.weights").value.of(None).weights[0]  # type: ignore[union-attr, attr-defined]
    assert (expected.key, expected.repo, expected.revision) == (box.here.key, box.here.repo, box.here.revision)
    assert [f.path for f in expected.files] == [f.path for f in box.here.files]
    assert [path for path, _ in expected.found] == [path for path, _ in box.here.found or ()]


def test_a_download_that_stalls_at_sixty_percent_is_killed_and_finished_another_way(box: Box, hub: Hub) -> None:
    box.stalled_after = 3
    box.with_hub_ways()
    hub.faults = [Fault("stall", SHARDS[1], after=SHARD * 6 // 10, agent=RANGED)]
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert "stalled" in box.ground.said
    assert "killed" in box.ground.said
    assert box.is_whole()
    # What was whole and right by then came once.
    assert hub.bytes_of(SHARDS[0]) == hub.bytes_of(SHARDS[2]) == SHARD
    assert hub.bytes_of(SHARDS[1], HUB) == SHARD
    assert isinstance(box.check(), InSync)


def test_a_trickle_is_a_stall(box: Box, hub: Hub) -> None:
    box.stalled_after = 3
    hub.faults = [Fault("trickle", SHARDS[0], after=SHARD // 2, times=1)]
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert "stalled" in box.ground.said
    assert box.is_whole()
    # The part is gone on from: no more than what came while it trickled is lost.
    assert hub.bytes_of(SHARDS[0]) <= SHARD + 64
    assert hub.bytes_of(SHARDS[1]) == SHARD


def test_huggingface_hub_that_stalls_is_killed_too(box: Box, hub: Hub) -> None:
    box.stalled_after = 3
    box.with_hub_ways()
    hub.faults = [
        Fault("stall", SHARDS[1], after=SHARD // 2, agent=RANGED, times=1),
        Fault("stall", SHARDS[1], after=SHARD // 3, agent=HUB),
    ]
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert box.ground.said.count("stalled") >= 3
    assert box.is_whole()
    assert not (box.directory / ".reconcile").exists()


def test_a_connection_that_is_cut_again_and_again_loses_nothing(box: Box, hub: Hub) -> None:
    hub.faults = [Fault("cut", "safetensors", after=SHARD // 4)]
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert box.is_whole()
    assert sent_of_shards(hub) == TOTAL


def test_waits_as_long_as_it_is_asked_to(box: Box, hub: Hub) -> None:
    hub.faults = [Fault("status", SHARDS[0], status=429, headers={"Retry-After": "2"}, times=2)]
    box.stalled_after = 3
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert box.ground.said.count("asks to wait for 2 s") == 2
    assert box.is_whole()


def test_is_not_put_off_for_hours(box: Box, hub: Hub) -> None:
    hub.faults = [Fault("status", SHARDS[0], status=429, headers={"Retry-After": "86400"})]
    assert box.ground.run(box.step()) == 1
    assert "asks to come back in 86400 s" in box.ground.said


def test_errors_of_the_server_are_tried_again(box: Box, hub: Hub) -> None:
    hub.faults = [Fault("status", "", status=503, times=3), Fault("status", "", status=500, times=3)]
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert box.is_whole()
    assert sent_of_shards(hub) == TOTAL


def test_a_wrong_byte_is_seen_and_that_file_alone_fetched_again(box: Box, hub: Hub) -> None:
    hub.faults = [Fault("wrong", SHARDS[2], after=1000, times=1)]
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert "another content" in box.ground.said
    assert box.is_whole()
    assert hub.bytes_of(SHARDS[2]) == 2 * SHARD
    assert hub.bytes_of(SHARDS[0]) == SHARD


def test_a_file_that_always_comes_wrong_never_gets_its_name(box: Box, hub: Hub) -> None:
    hub.faults = [Fault("wrong", "config.json", after=3)]
    assert box.ground.run(box.step()) == 1
    assert "config.json came with another content than it should have" in box.ground.said
    assert not (box.directory / "config.json").exists()
    assert box.drift().reason == Reason.NOT_THERE
    hub.faults = []
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert sent_of_shards(hub) == TOTAL


@pytest.mark.parametrize("at", [0, SHARD // 2, TOTAL // 2, TOTAL - SHARD // 4])
def test_killed_anywhere_it_is_gone_on_with(box: Box, hub: Hub, at: int) -> None:
    hub.pace = 0.005
    step = box.step()
    job = box.ground.begin(step)
    wait(lambda: box.directory.exists() and box.bytes_there() >= at)
    kill(job, box.ground.root)
    hub.pace = 0.0
    wait(lambda: hub.sending == 0)
    hub.sent.clear()
    there = {
        str(path.relative_to(box.directory)).removeprefix(".reconcile/parts/"): path.stat().st_size
        for path in box.directory.rglob("*")
        if path.is_file()
    }
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert box.is_whole()
    assert isinstance(box.check(), InSync)
    # Nothing that was on disk came again.
    assert [(sent.path, sent.begin) for sent in hub.sent] == [(s.path, there.get(s.path, 0)) for s in hub.sent]
    assert all(there.get(sent.path, 0) < SHARD for sent in hub.sent)
    order = box.ground.path("/opt/reconcile/weights") / f"{box.here.key}.order"
    assert not order.exists()


@pytest.mark.parametrize("program", ["worker.py", "weights.py"])
def test_one_of_its_processes_is_killed(box: Box, hub: Hub, program: str) -> None:
    hub.pace = 0.005
    job = box.ground.begin(box.step())
    wait(lambda: box.directory.exists() and box.bytes_there() >= SHARD // 2)
    pids = subprocess.run(
        ["pgrep", "-f", f"{box.ground.root}.*[.]{program} (work|fetch)"], capture_output=True, text=True
    )
    for pid in pids.stdout.split():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"python" in command[0] and os.fsdecode(command[2]).endswith(program):
            os.kill(int(pid), 9)
    hub.pace = 0.0
    rc = job.wait(300)
    assert rc == (0 if program == "worker.py" else 137), box.ground.said
    if rc:
        kill_all = box.ground.root
        wait(lambda: not _at_work(kill_all))
        assert box.ground.run(box.step()) == 0, box.ground.said
    assert box.is_whole()


def _at_work(root: Path) -> bool:
    from tests.layers.server_weights.box import at_work

    return bool(at_work(root))


def test_what_somebody_put_there_by_hand_is_taken(box: Box, hub: Hub) -> None:
    box.directory.mkdir(parents=True)
    for name, data in hub.repos[REPO].files.items():
        (box.directory / name).parent.mkdir(exist_ok=True)
        (box.directory / name).write_bytes(data)
    (box.directory / SHARDS[1]).write_bytes(hub.repos[REPO].files[SHARDS[1]][:-1] + b"?")
    (box.directory / SHARDS[2]).write_bytes(b"cut")
    (box.directory / "notes.txt").write_text("mine")
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert f"{SHARDS[1]} was there, and its content is wrong" in box.ground.said
    assert hub.bytes_of(SHARDS[0]) == 0
    assert hub.bytes_of(SHARDS[1]) == hub.bytes_of(SHARDS[2]) == SHARD
    assert (box.directory / "notes.txt").read_text() == "mine"
    (box.directory / "notes.txt").unlink()
    assert box.is_whole()
    assert isinstance(box.check(), InSync)


def test_a_shard_that_is_damaged_later_is_fetched_alone(box: Box, hub: Hub) -> None:
    assert box.ground.run(box.step()) == 0, box.ground.said
    shard = box.directory / SHARDS[1]
    # A disk that flips a bit changes no time; only a comparison sees it.
    before = shard.stat()
    data = bytearray(shard.read_bytes())
    data[5] ^= 1
    shard.write_bytes(bytes(data))
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert isinstance(box.check(), InSync)
    month = 31 * 86400
    compared = box.ground.path("/opt/reconcile/weights") / f"{box.here.key}.compared"
    os.utime(compared, (compared.stat().st_mtime - month,) * 2)
    drift = box.drift()
    assert drift.reason == Reason.RECHECK_DUE
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert f"not right: {SHARDS[1]}" in box.ground.said
    drift = box.drift()
    assert drift.reason == Reason.DAMAGED
    assert SHARDS[1] in drift.message
    hub.sent.clear()
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert {sent.path for sent in hub.sent} == {SHARDS[1]}
    assert box.is_whole()
    assert isinstance(box.check(), InSync)


def test_sizes_and_times_are_seen_at_once(box: Box, hub: Hub) -> None:
    assert box.ground.run(box.step()) == 0, box.ground.said
    shard = box.directory / SHARDS[0]
    with shard.open("ab") as file:
        file.truncate(1000)
    assert box.drift().reason == Reason.OTHER_SIZE
    shard.unlink()
    assert box.drift().reason == Reason.NOT_THERE
    (box.directory / SHARDS[1]).touch()
    shard.write_bytes(hub.repos[REPO].files[SHARDS[0]])
    assert box.drift().reason == Reason.NOT_VERIFIED
    hub.sent.clear()
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert hub.sent == []
    assert isinstance(box.check(), InSync)


def test_the_token_goes_to_the_hub_alone_and_is_kept_nowhere(box: Box, hub: Hub) -> None:
    hub.repos[REPO].token = box.token = "hf_geheim"
    step = box.step()
    assert "hf_geheim" not in repr(step)
    assert box.ground.run(step) == 0, box.ground.said
    assert hub.tokens_shown_to_cdn == 0
    assert box.is_whole()
    assert "hf_geheim" not in box.ground.said
    for path in (*box.ground.path("/opt/reconcile").rglob("*"), *box.directory.rglob("*")):
        assert not path.is_file() or b"hf_geheim" not in path.read_bytes()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gated": True}, "is gated: accept its terms"),
        ({"token": "another"}, "does not take the token"),
        ({"commit": "f" * 40}, "does not have"),
    ],
)
def test_what_no_way_would_bring_ends_at_once_and_says_why(
    box: Box, hub: Hub, change: dict[str, object], says: str
) -> None:
    box.token = "hf_mine"
    step = box.step()
    for name, value in change.items():
        setattr(hub.repos[REPO], name, value)
    assert box.ground.run(step, timeout=60) == 1
    assert says in box.ground.said
    assert sent_of_shards(hub) == 0


def test_a_repository_that_is_gone(box: Box, hub: Hub) -> None:
    step = box.step()
    gone = hub.repos.pop(REPO)
    assert box.ground.run(step, timeout=60) == 1
    assert "has no org/tiny, or does not show it" in box.ground.said
    hub.repos[REPO] = gone


def test_two_at_once_in_one_directory_fetch_once(tmp_path: Path, hub: Hub) -> None:
    models = tmp_path / "shared"
    boxes = [Box(Ground(tmp_path / name), hub, models=models) for name in ("one", "two")]
    for box in boxes:
        box.ground.root.mkdir()
    hub.pace = 0.002
    jobs = [box.ground.begin(box.step()) for box in boxes]
    for box, job in zip(boxes, jobs, strict=True):
        assert job.wait(300) == 0, box.ground.said
        assert isinstance(box.check(), InSync)
    assert boxes[0].is_whole()
    assert sent_of_shards(hub) == TOTAL


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_disk_that_is_too_small(tmp_path: Path, hub: Hub) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", small], check=True)
    try:
        box = Box(Ground(tmp_path), hub, models=small)
        assert box.ground.run(box.step()) == 1
        assert "no space left" in box.ground.said
        assert sent_of_shards(hub) == 0
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_hub_that_does_not_answer_takes_nothing_away(box: Box, hub: Hub) -> None:
    assert box.ground.run(box.step()) == 0, box.ground.said
    silent = HubFacts({(REPO, COMMIT): NotDescribed(Trouble.OFFLINE, "the Hub does not answer", "try again")})
    view = box.look(hub=silent)
    server = view.specs.servers["served"]
    assert server.policy.mode is Mode.ENFORCE
    found = server_weights.check(view, server)
    assert isinstance(found, InSync)
    assert "the Hub does not answer" in found.note


def test_leftovers_are_seen_and_removed(box: Box, hub: Hub) -> None:
    assert box.ground.run(box.step()) == 0, box.ground.said
    left = box.directory / ".reconcile/hub/files/x.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"12345")
    assert box.drift().reason == Reason.LEFTOVERS
    hub.sent.clear()
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert hub.sent == []
    assert isinstance(box.check(), InSync)
    assert not left.exists()


def test_a_file_with_a_way_out_of_the_directory_is_refused(box: Box, hub: Hub) -> None:
    hub.repos[REPO].files["/outside.txt"] = b"x"
    assert box.ground.run(box.step()) == 1
    assert "cannot take a file called '/outside.txt'" in box.ground.said


def test_through_a_link_on_the_way_it_is_found_as_well(box: Box, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "models").symlink_to("disk")
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert isinstance(box.check(), InSync)
    marker = json.loads((box.ground.path("/opt/reconcile/weights") / f"{box.here.key}.json").read_text())
    assert marker["real"].startswith(f"{tmp_path}/disk/")
