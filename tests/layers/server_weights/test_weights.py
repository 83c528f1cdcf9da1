"""What the layer makes of what it sees, and what its steps do in the simulated fleet."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from controller.core.words import Block, InSync, Unseen, Wait
from controller.facts.hub import RepoFile
from controller.facts.words import ParseError, Section
from controller.layers import server_weights
from controller.layers.server_weights import Reason
from controller.layers.server_weights.facts import AllWeights, Disk, Found, State, Weights, WeightsHere, parse
from controller.layers.shared.truth import Model, WeightFile
from controller.layers.shared.weights import key_of, needed
from controller.world.port import Order
from tests.layers.places import Hosted
from tests.layers.server_weights.rig import GB, TWO, Rig
from tests.layers.servers import COMMIT, document

DIRECTORY = f"/models/Qwen--Qwen3.6-27B/{COMMIT}"
SHARD = "model-00003-of-00011.safetensors"


def after_environment(*documents: str) -> Rig:
    """A fleet in which the weights are next."""
    rig = Rig(*(documents or (document(),)))
    while rig.next().ready and rig.next().ready[0].layer == "server.environment":
        rig.perform(rig.next().ready[0])
    return rig


def test_the_simulated_fleet_and_the_effect_say_the_same() -> None:
    rig = after_environment()
    step = rig.step("server.weights")
    foretold = step.effect(rig.look().facts)["kpro5"].section("server.weights").value.of(129)  # type: ignore[union-attr, attr-defined]
    rig.perform(step)
    here = rig.look().fact("kpro5", "server.weights", AllWeights).of(129)
    assert here is not None
    (expected,), (found,) = foretold.weights, here.weights
    for name in ("key", "object", "repo", "revision", "directory", "aside", "due"):
        assert getattr(found, name) == getattr(expected, name), name
    assert [(f.path, f.size, f.sha256, f.blob) for f in found.files] == [
        (f.path, f.size, f.sha256, f.blob) for f in expected.files
    ]
    assert [(path, each.size) for path, each in found.found or ()] == [
        (path, each.size) for path, each in expected.found
    ]


def test_while_it_is_fetched_it_is_waited_for() -> None:
    rig = after_environment()
    step = rig.step("server.weights")
    host = rig.kpro5
    rig.world.perform(Order(step, host.generation, host.boot_id))
    remedy = rig.drift("server.weights").remedy
    assert isinstance(remedy, Wait)
    assert "fetch-weights" in remedy.message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sound": False, "mtime": 1}, Reason.NOT_VERIFIED),
        ({"size": 17}, Reason.OTHER_SIZE),
        (None, Reason.NOT_THERE),
    ],
)
def test_one_shard_is_not_right(change: dict[str, int] | None, reason: Reason) -> None:
    rig = Rig()
    rig.actions()
    files = rig.image(129).models[DIRECTORY].files
    if change is None:
        del files[SHARD]
    else:
        files[SHARD] = dataclasses.replace(files[SHARD], **change)  # type: ignore[arg-type]
    rig.fleet.touch(rig.kpro5)
    drift = rig.drift("server.weights")
    assert drift.reason == reason
    assert SHARD in drift.evidence
    assert rig.actions() == ["fetch-weights"]
    assert rig.image(129).models[DIRECTORY].files[SHARD].sound


def test_what_lies_there_by_hand_is_compared_and_taken() -> None:
    rig = Rig()
    source = rig.fleet.hub[f"Qwen/Qwen3.6-27B@{COMMIT}"]
    files = {**source.files, "config.json": WeightFile(1, 1)}
    rig.image(129).models[DIRECTORY] = Model(source.repo, source.revision, files)
    free = rig.image(129).free
    rig.actions()
    assert free - rig.image(129).free < 13 << 30  # the environment, and next to nothing else


def test_no_room_is_seen_before_anything_is_fetched() -> None:
    rig = after_environment()
    rig.image(129).free = 30 * GB
    rig.fleet.touch(rig.kpro5)
    remedy = rig.drift("server.weights").remedy
    assert isinstance(remedy, Block)
    assert remedy.reason == Reason.NO_SPACE
    assert "51.2 GiB are to be fetched" in remedy.message


def test_room_is_needed_for_what_else_is_to_be_fetched_to_that_disk() -> None:
    rig = after_environment()
    rig.fleet.hub[f"a/b@{COMMIT}"] = Model("a/b", COMMIT, {"model.safetensors": WeightFile(30 * GB, 30 * GB)})
    other = document(
        "other", "container: ct129", model=f"{{repo: a/b, revision: {COMMIT}, directory: /models}}", serve="{port: 1}"
    )
    rig.want(document(gpus="[0]"), other.replace("serve:", "gpus: [1]\nserve:"))
    rig.image(129).free = 70 * GB
    rig.fleet.touch(rig.kpro5)
    remedy = rig.drift("server.weights").remedy
    assert isinstance(remedy, Block)
    assert "for 2 models" in remedy.message


def test_a_directory_is_fetched_once_for_two_servers() -> None:
    rig = Rig(*TWO)
    assert rig.actions().count("fetch-weights") == 1


def test_the_draft_model_is_fetched_too() -> None:
    rig = Rig()
    rig.fleet.hub[f"a/draft@{COMMIT}"] = Model("a/draft", COMMIT, {"model.safetensors": WeightFile(GB, GB)})
    draft = f"{{repo: a/draft, revision: {COMMIT}}}"
    model = f"{{repo: Qwen/Qwen3.6-27B, revision: {COMMIT}, directory: /models, draft: {draft}}}"
    rig.want(document(model=model))
    while "fetch-weights" not in (ready := [step.action for step in rig.next().ready]):
        assert ready, rig.next().judged
        rig.perform(rig.next().ready[0])
    rig.perform(rig.step("server.weights"))
    assert "a/draft" in rig.drift("server.weights").message
    rig.perform(rig.step("server.weights"))
    assert isinstance(rig.verdict("server.weights"), InSync)


def test_a_missing_model_blocks_and_a_silent_hub_is_unknown() -> None:
    rig = after_environment()
    rig.fleet.hub_trouble = "connection refused"
    assert isinstance(rig.verdict("server.weights"), Unseen)
    rig.fleet.hub_trouble = ""
    rig.fleet.hub.clear()
    drift = rig.drift("server.weights")
    assert drift.reason == Reason.NOT_FOUND
    assert isinstance(drift.remedy, Block)


def test_a_silent_hub_takes_nothing_from_what_is_whole() -> None:
    rig = Rig()
    rig.actions()
    rig.fleet.hub_trouble = "connection refused"
    found = rig.verdict("server.weights")
    assert isinstance(found, InSync)
    assert "connection refused" in found.note


def test_a_secret_that_cannot_be_read_is_not_empty() -> None:
    model = f"{{repo: Qwen/Qwen3.6-27B, revision: {COMMIT}, directory: /models, token: {{secret: key}}}}"
    rig = after_environment(document(model=model))
    assert isinstance(rig.verdict("server.weights"), Unseen)


def test_which_files_are_needed() -> None:
    def names(*paths: str) -> list[str]:
        return [file.path for file in needed(RepoFile(path, 1) for path in paths)]

    both = ("model.safetensors", "pytorch_model.bin", "config.json", "original/x.pth", "model.gguf", ".gitattributes")
    assert names(*both) == ["config.json", "model.safetensors"]
    assert names("pytorch_model.bin", "config.json") == ["config.json", "pytorch_model.bin"]
    assert names("consolidated.safetensors", "params.json") == ["consolidated.safetensors", "params.json"]
    assert names("consolidated-00001.safetensors", "model.safetensors") == ["model.safetensors"]


MARKER = {
    "schema": 1,
    "object": "ModelServer/qwen",
    "repo": "a/b",
    "revision": COMMIT,
    "directory": "/models/x",
    "files": [{"path": "a b.txt", "size": 3, "sha256": "", "blob": "1", "mtime": 5_000_000_001, "damaged": False}],
    "real": "/models/x",
}


def test_the_fragment_finds_what_lies_in_containers(tmp_path: Path) -> None:
    hosted = Hosted(tmp_path)
    key = key_of("/models/x")
    text = json.dumps(MARKER, indent=1) + "\n"
    hosted.write(
        {
            hosted.inside(f"/opt/reconcile/weights/{key}.json"): text,
            hosted.inside("/models/x/a b.txt"): "abc",
            hosted.inside("/models/x/.reconcile/parts/m.safetensors"): "12345",
            f"/proc/{4711}/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:5 / /proc rw - proc proc rw\n"
            "3 1 8:2 / /models rw,relatime shared:1 - xfs /dev/sdb rw\n",
        }
    )
    found = parse(hosted.ask(server_weights.LAYER.probe)).of(129)
    assert found is not None
    (weights,) = found.weights
    assert (weights.repo, weights.aside, weights.due) == ("a/b", 5, False)
    assert [(path, each.size) for path, each in weights.found or ()] == [("a b.txt", 3)]
    assert [disk.mount for disk in found.disks] == ["/", "/models"]
    models = found.disk_of("/models/x")
    assert models is not None
    assert models.mount == "/models"
    assert models.free > 0


def test_a_container_cannot_have_files_of_the_host_listed(tmp_path: Path) -> None:
    hosted = Hosted(tmp_path)
    key = key_of("/models/x")
    hosted.write({hosted.inside(f"/opt/reconcile/weights/{key}.json"): json.dumps(MARKER, indent=1) + "\n"})
    hosted.write({"/secret/x/passwords": "abc"})
    hosted.path(hosted.inside("/models")).symlink_to(tmp_path / "secret")
    found = parse(hosted.ask(server_weights.LAYER.probe)).of(129)
    assert found is not None
    assert found.weights[0].found == ()


def test_a_disk_that_hangs_is_unknown() -> None:
    text = json.dumps(MARKER, indent=1) + "\n"
    key = key_of("/models/x")
    path = f"/opt/reconcile/weights/{key}.json"
    out = f"place -\nhangs {key}\n==files\n{len(text)} 1 {path}\n--\n"
    out += "".join(f"{path}:{line}\n" for line in text.splitlines())
    found = parse(Section(0, out)).of(None)
    assert found is not None
    assert found.weights[0].found is None


@pytest.mark.parametrize("line", ["file x", "disk a b c", "due", "file k 1 x y", "?"])
def test_garbage_is_no_fact(line: str) -> None:
    with pytest.raises(ParseError):
        parse(Section(0, f"place -\n{line}\n==files\n"))


def test_states_of_a_file() -> None:
    weights = Weights("k", "o", "r", "c", "/d", found=(("f", Found(3, 7)),))
    assert weights.state("g", 3, "s", "") is State.MISSING
    assert weights.state("f", 4, "s", "") is State.OTHER_SIZE
    assert weights.state("f", 3, "s", "") is State.NOT_VERIFIED
    here = WeightsHere((), (Disk("1", "/", 5), Disk("2", "/mod", 6)))
    disk = here.disk_of("/models/x")
    assert disk is not None
    assert disk.mount == "/"
