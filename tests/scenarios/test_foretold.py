"""What a plan foretells is what a run then does, step by step, from states in the midst of the story and past it."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable

import pytest

from controller.core.plan import plan
from controller.layers.order import ORDER
from controller.layers.shared import kernel_physics, pve_physics, server_physics
from controller.layers.shared.truth import Fleet, Host
from controller.run.ended import Result
from controller.spec.load import load
from controller.world.sim import file as simfile
from tests.scenarios import story
from tests.scenarios.test_story_cut_off import specs
from tests.sim.controllers import Controller


@functools.cache
def _told() -> Fleet:
    made = simfile.load(story.sim_file(), "story.sim.yaml")
    Controller(made, wanted=specs(served=True)).once(7200.0)
    return made


def modules_gone(fleet: Fleet, host: Host) -> None:
    """As after a kernel's modules were cleared away: what is loaded runs on."""
    for there in host.modules.values():
        for module in [name for name in there if name.startswith("nvidia")]:
            del there[module]


def older_driver(fleet: Fleet, host: Host) -> None:
    """As before an upgrade: another version is loaded, used by the container, and installed."""
    for module in host.loaded:
        if module.startswith("nvidia"):
            host.loaded[module].version = story.OLD
    modules_gone(fleet, host)


def other_libraries(fleet: Fleet, host: Host) -> None:
    """As after a person installed another driver's programs, on the host and in the container: nvidia-smi fails."""
    host.userspace = story.OLD
    fleet.userlands["ceph-rbd:vm-129-disk-0"] = story.OLD


def stopped_by_a_person(fleet: Fleet, host: Host) -> None:
    pve_physics.pct_stop(fleet, host, 129)


@pytest.mark.parametrize(
    ("happened", "actions"),
    [
        (modules_gone, ["install-driver"]),
        (older_driver, ["install-driver", "load-driver", "start", "check-output"]),
        (other_libraries, ["install-driver", "install-userland"]),
        (stopped_by_a_person, ["start", "check-output"]),
    ],
)
def test_a_plan_is_what_is_done(happened: Callable[[Fleet, Host], None], actions: list[str]) -> None:
    fleet = copy.deepcopy(_told())
    kpro5 = fleet.hosts["kpro5"]
    happened(fleet, kpro5)
    fleet.touch(kpro5)
    controller = Controller(fleet, wanted=specs(served=True))
    controller.look()
    foretold = [planned.step for planned in plan(ORDER, specs(served=True), controller.eyes.facts).steps]
    report = controller.once(7200.0)
    assert [ended.step.action for ended in report.ended] == actions
    assert {ended.result for ended in report.ended} == {Result.WORKED}
    sure = [step.action for step in foretold if not step.provisional or step.action in actions]
    assert sure == actions
    assert report.upcoming.in_sync


def test_who_gets_which_card_is_provisional_while_a_config_of_no_spec_passes_some() -> None:
    """The driver is not loaded yet: which card a hand-made container's /dev/nvidia1 will be, nobody knows."""
    fleet = simfile.load(story.sim_file(), "story.sim.yaml")
    text = "arch: amd64\nhostname: other\nrootfs: ceph-rbd:vm-130-disk-0,size=8G\ndev0: /dev/nvidia1\n"
    assert pve_physics.write(fleet, fleet.hosts["kpro5"], "/etc/pve/nodes/kpro5/lxc/130.conf", text) == ""
    controller = Controller(fleet, wanted=specs(served=True))
    controller.look()
    of_ct = [
        p.step
        for p in plan(ORDER, specs(served=True), controller.eyes.facts).steps
        if p.step.object.kind == "Container"
    ]
    assert [step.action for step in of_ct[:2]] == ["take-over-container", "edit-config"]
    assert all(step.provisional for step in of_ct)
    report = controller.once(7200.0)
    assert {ended.step.object.kind for ended in report.ended} == {"Host"}
    assert "passed to CT 130, which no spec wants here" in report.upcoming.blocked[0][1].message


def test_a_card_that_is_bound_anew_may_be_one_that_a_container_has_still() -> None:
    """ct129 is to have one card from now on; the other is off its driver, and gets its minor in the course of it."""
    fleet = copy.deepcopy(_told())
    kpro5 = fleet.hosts["kpro5"]
    server_physics.stop(fleet, kpro5, 129, "reconcile-qwen3.6-27b.service")
    kernel_physics.unbind(fleet, kpro5, "0000:ce:00.0")
    documents = story.documents()
    for document in documents:
        if document["kind"] == "Container":
            document["gpus"] = ["4f:00.0"]
    wanted = load({"story.yaml": "\n---\n".join(map(json.dumps, documents)).encode()})
    controller = Controller(fleet, wanted=wanted)
    controller.look()
    foretold = [p.step for p in plan(ORDER, wanted, controller.eyes.facts).steps if p.step.object.kind == "Container"]
    done = [ended.step for ended in controller.once().ended if ended.step.object.kind == "Container"]
    assert [step.action for step in foretold] == [step.action for step in done] == ["edit-config", "restart"]
    assert foretold[1].provisional


def test_a_restart_that_is_still_due_is_foretold_though_majors_are_known_later() -> None:
    """ct129's config was edited and it was not restarted; now nvidia-uvm has to be loaded again as well."""
    fleet = copy.deepcopy(_told())
    documents = story.documents()
    container = next(document for document in documents if document["kind"] == "Container")
    container["gpus"] = ["4f:00.0"]
    allowed = container["policy"]["allow"]
    for container["policy"]["allow"] in (["edit-container-config"], allowed):
        wanted = load({"story.yaml": "\n---\n".join(map(json.dumps, documents)).encode()})
        controller = Controller(fleet, wanted=wanted)
        controller.look()
        foretold = [planned.step.action for planned in plan(ORDER, wanted, controller.eyes.facts).steps]
        report = controller.once(7200.0)
        kernel_physics.unload_module(fleet, fleet.hosts["kpro5"], "nvidia-uvm")
    assert foretold == ["make-nodes", "edit-config", "restart"]
    assert [ended.step.action for ended in report.ended] == ["make-nodes", "restart"]
