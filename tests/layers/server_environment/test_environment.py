"""What the layer makes of what it sees, and what its steps do in the simulated fleet."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from controller.core.words import Block, Drift, InSync
from controller.engines import registry
from controller.facts.words import ParseError, Section
from controller.layers import server_environment
from controller.layers.server_environment import Reason, _runs
from controller.layers.server_environment.facts import (
    Environment,
    Environments,
    EnvironmentsHere,
    Proof,
    Proven,
    Toolkit,
    Torch,
    as_plain,
    cuda_home,
    parse,
)
from controller.layers.shared.truth import File
from tests.layers.places import Hosted
from tests.layers.server_weights.rig import TWO, Rig
from tests.layers.servers import document

ENVIRONMENT = Environment(
    digest="0123456789abcdef",
    object="ModelServer/qwen",
    engine="sglang",
    version="0.5.11",
    python="3.12.3",
    arch="x86_64",
    capabilities=("8.6",),
    requirements=("sglang==0.5.11",),
    torch=Torch("2.11.0+cu130", "13.0", ("sm_80", "sm_86")),
    flags=registry.engine("sglang").shipped_flags("0.5.11"),
    proofs=(Proven("GPU-1", Proof.PASSED, "NVIDIA RTX A6000 is right", "580.126.09", "boot"),),
    size=12 << 30,
    built=1764560000,
)


def test_an_environment_is_built_proven_and_then_left_alone() -> None:
    rig = Rig(document())
    rig.perform(rig.step("server.environment"))
    proof = rig.drift("server.environment")
    assert proof.reason == Reason.NOT_PROVEN
    rig.perform(rig.step("server.environment"))
    assert isinstance(rig.verdict("server.environment"), InSync)


def test_the_simulated_fleet_and_the_effect_say_the_same() -> None:
    rig = Rig(document())
    step = rig.step("server.environment")
    view = rig.look()
    foretold = step.effect(view.facts)["kpro5"].section("server.environment").value.of(129)  # type: ignore[union-attr, attr-defined]
    rig.perform(step)
    here = rig.look().fact("kpro5", "server.environment", Environments).of(129)
    assert here is not None
    (expected,), (found,) = foretold.environments, here.environments
    assert dataclasses.replace(expected, size=found.size, built=found.built, torch=found.torch) == found


def test_other_gpus_need_another_environment_and_say_why() -> None:
    rig = Rig(document())
    other = dataclasses.replace(ENVIRONMENT, capabilities=("12.0",), size=19 << 30)
    rig.image(129).files[f"{other.directory}.json"] = File(json.dumps(as_plain(other)))
    rig.fleet.touch(rig.kpro5)
    drift = rig.drift("server.environment")
    assert drift.reason == Reason.OTHER_GPUS
    assert "was built for 12.0, and qwen has 8.6" in drift.message
    assert drift.evidence["size"] == "19.0 GiB"
    assert rig.step("server.environment").action == "build-environment"


def test_kernels_that_fail_on_a_card_block_and_are_tried_again_after_a_boot() -> None:
    rig = Rig(document())
    rig.perform(rig.step("server.environment"))
    (environment,) = rig.image(129).environments.values()
    environment.capabilities = ["9.0"]
    rig.perform(rig.step("server.environment"))
    drift = rig.drift("server.environment")
    assert drift.reason == Reason.KERNELS_DO_NOT_FIT
    assert isinstance(drift.remedy, Block)
    assert "no kernel image is available" in drift.remedy.message
    environment.capabilities = ["8.6"]
    rig.kpro5.boot_id = "f" * 8 + "-ffff-ffff-ffff-" + "f" * 12
    rig.fleet.touch(rig.kpro5)
    assert rig.drift("server.environment").reason == Reason.NOT_PROVEN


def test_a_full_disk_fails_with_its_message() -> None:
    rig = Rig(document())
    rig.image(129).free = 1 << 30
    report = rig.once(600.0)
    assert any("No space left on device" in each.message for each in report.ended)
    drift = rig.drift("server.environment")
    assert drift.reason == Reason.NOT_BUILT
    assert "No space left" in drift.evidence["last try"]


def test_two_servers_with_the_same_environment_build_it_once() -> None:
    rig = Rig(*TWO)
    done = rig.actions()
    assert done.count("build-environment") == 1
    assert done.count("fetch-weights") == 1
    assert done.count("prove-environment") == 2


def test_an_upgrade_keeps_the_old_one_until_the_new_one_has_passed_and_then_removes_it() -> None:
    allow = "{mode: enforce, allow: [restart-server, delete-environment]}"
    rig = Rig(document(policy=allow))
    rig.actions()
    rig.want(document(policy=allow, engine="{name: sglang, version: 0.5.14}"))
    done = rig.actions()
    assert done[0] == "build-environment"
    assert done[-1] == "remove-environment"
    assert done.index("check-output") < done.index("remove-environment")
    assert [each.version for each in rig.image(129).environments.values()] == ["0.5.14"]
    assert rig.actions() == []


def test_nothing_is_removed_while_it_is_not_known_what_another_server_needs() -> None:
    allow = "{mode: enforce, allow: [restart-server, delete-environment]}"
    rig = Rig(document("one", policy=allow))
    rig.actions()
    unknown = document("two", engine="{name: not-yet, version: 1.0}", serve="{port: 30001}")
    rig.want(document("one", policy=allow, engine="{name: sglang, version: 0.5.14}"), unknown)
    done = [each.step.action for each in rig.once().ended]
    assert "build-environment" in done
    assert "remove-environment" not in done
    assert isinstance(rig.verdict("server.environment", "one"), InSync)


def test_without_that_permission_it_stays() -> None:
    rig = Rig(document())
    rig.actions()
    rig.want(document(engine="{name: sglang, version: 0.5.14}"))
    assert "remove-environment" not in rig.actions()
    assert len(rig.image(129).environments) == 2


def test_what_is_of_no_spec_is_told_with_its_size_and_stays() -> None:
    rig = Rig(document("old"))
    rig.actions()
    rig.want(document("old", engine="{name: sglang, version: 0.5.14}"))
    rig.want(document("new", engine="{name: sglang, version: 0.5.14}", serve="{port: 30001}"))
    rig.once()
    found = rig.verdict("server.environment", "new")
    assert isinstance(found, InSync)
    assert "is of no spec: 12.0 GiB" in found.note


def test_unknown_engines_and_architectures_block(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(document(engine="{name: sglanf, version: 0.5.11}"))
    drift = rig.drift("server.environment")
    assert drift.reason == Reason.UNKNOWN_ENGINE
    assert "sglang" in drift.message
    rig.want(document())
    monkeypatch.setattr(server_environment.uv, "WHEELS", {})
    assert rig.drift("server.environment").reason == Reason.NO_UV


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_86", (8, 6), True),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_86", (8, 9), True),
        ("sm_120", (8, 6), False),
        ("sm_90", (12, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("compute_80", (12, 1), True),
        ("compute_90", (8, 6), False),
        ("gfx942", (8, 6), True),
    ],
)
def test_what_runs_where(arch: str, capability: tuple[int, int], runs: bool) -> None:
    assert _runs(arch, capability) is runs


@pytest.mark.parametrize(
    ("toolkits", "cuda", "home"),
    [
        ((), "13.0", ""),
        (("12.8.1",), "13.0", ""),
        (("12.8.1", "13.0.2"), "13.0", "/usr/local/cuda-13.0.2"),
        (("13.1.0", "13.2.0"), "13.0", "/usr/local/cuda-13.1.0"),
        (("12.6.0", "12.8.0"), "12.7", "/usr/local/cuda-12.8.0"),
        (("13.0.0",), "", ""),
    ],
)
def test_the_toolkit_that_fits(toolkits: tuple[str, ...], cuda: str, home: str) -> None:
    here = EnvironmentsHere(toolkits=tuple(Toolkit(f"/usr/local/cuda-{each}", each) for each in toolkits))
    environment = dataclasses.replace(ENVIRONMENT, torch=Torch("2.11.0", cuda))
    assert cuda_home(here, environment) == home


def test_the_fragment_finds_environments_in_containers_and_on_the_host(tmp_path: Path) -> None:
    hosted = Hosted(tmp_path)
    marker = json.dumps(as_plain(ENVIRONMENT))
    env = "/opt/reconcile/env"
    hosted.write(
        {
            hosted.inside(f"{env}/0123456789abcdef.json"): marker,
            hosted.inside(f"{env}/0123456789abcdef/bin/x"): "",
            hosted.inside(f"{env}/fedcba9876543210/pyvenv.cfg"): "",
            hosted.inside(f"{env}/fedcba9876543210.build/build"): "",
            hosted.inside("/usr/local/cuda-13.0/version.json"): '{"cuda": {"version": "13.0.1"}}',
            f"{env}/0123456789abcdef.json": marker,
        }
    )
    hosted.path(hosted.inside(f"{env}/0123456789abcdef/bin/python")).symlink_to("/usr/bin/python3.12")
    found = parse(hosted.ask(server_environment.LAYER.probe))
    assert found.of(129) == EnvironmentsHere(
        (ENVIRONMENT,), ("fedcba9876543210",), (Toolkit("/usr/local/cuda-13.0", "13.0.1"),)
    )
    assert found.of(None) == EnvironmentsHere((dataclasses.replace(ENVIRONMENT, whole=False),))


def test_a_container_cannot_show_files_of_the_host(tmp_path: Path) -> None:
    hosted = Hosted(tmp_path)
    hosted.write({"/secret/0123456789abcdef.json": json.dumps(as_plain(ENVIRONMENT))})
    hosted.path(hosted.inside("/opt/reconcile")).mkdir(parents=True)
    hosted.path(hosted.inside("/opt/reconcile/env")).symlink_to(tmp_path / "secret")
    assert parse(hosted.ask(server_environment.LAYER.probe)).of(129) == EnvironmentsHere()


@pytest.mark.parametrize("marker", ["", "[]", "{}", '{"schema": 1}', '{"schema": 1, "object": 3, "engine": null}'])
def test_a_marker_that_cannot_be_read_is_no_fact(marker: str) -> None:
    rig = Rig(document())
    rig.image(129).files["/opt/reconcile/env/0123456789abcdef.json"] = File(marker)
    rig.fleet.touch(rig.kpro5)
    with pytest.raises(ParseError):
        parse(Section(0, rig.look().facts["kpro5"].raw["server.environment"].out))
    assert not isinstance(rig.verdict("server.environment"), Drift | InSync)
