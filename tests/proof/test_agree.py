"""For each action the effect that a plan expects and the simulation's physics agree, and the physics know no action.

That the lab's hosts show the same is what the scenarios are for (tests/scenarios), which run in both worlds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.proof.agree import Difference, differences, random_case

LAYERS = Path(__file__).parents[2] / "controller" / "layers"
CASES = (0, 1, 2, 3, 5, 11, 13, 14, 18, 21, 41, 60, 68, 73, 83)

NOT_FORETOLD = {
    # Numbers that the kernel gives; a plan knows them later
    ("load-driver", "container.devices.drivers"): "majors of nvidia-caps and its like",
    ("load-driver", "host.gpu-health.majors"): "majors of nvidia-caps and its like",
    ("load-driver", "host.gpu-health.nodes"): "nodes of nvidia-caps, which nothing here needs",
    ("load-driver", "host.gpu-health.nodes.major"): "majors of nvidia-caps and its like",
    ("make-nodes", "container.devices.drivers"): "nvidia-uvm is loaded for its nodes",
    ("make-nodes", "host.driver.loaded"): "nvidia-uvm is loaded for its nodes",
    ("make-nodes", "host.gpu-health.nodes"): "the order of nodes, and those of nvidia-uvm",
    ("make-nodes", "host.gpu-health.nodes.path"): "the order of nodes",
    ("make-nodes", "host.gpu-health.nodes.major"): "the order of nodes",
    ("make-nodes", "host.gpu-health.nodes.minor"): "the order of nodes",
    ("make-nodes", "host.gpu-health.nodes.mode"): "the order of nodes",
    ("start", "container.power.running.pid"): "a process id",
    ("restart", "container.power.running.pid"): "a process id",
    # What only the thing itself can tell
    ("start", "container.power.running.generated"): "the rules alone are foretold, not all of the LXC config",
    ("restart", "container.power.running.generated"): "the rules alone are foretold, not all of the LXC config",
    ("start", "container.power.running.nodes"): "what other entries bring into /dev",
    ("restart", "container.power.running.restarted_for"): "a note for the next look",
    ("start", "container.placement.running"): "who runs counts for reboots, which no plan foretells after a start",
    ("stop", "container.placement.running"): "as above",
    ("start", "container.userland.containers"): "what is in an image is seen when it runs",
    ("stop", "container.userland.containers"): "as above",
    ("move-container", "container.userland.containers"): "as above",
    ("load-driver", "container.userland.containers"): "a container that is stopped meanwhile",
    ("restart", "container.userland.containers.cards"): "what nvidia-smi inside then sees",
    ("install-userland", "container.userland.containers.cards"): "what nvidia-smi inside then sees",
    ("bind-gpu", "container.userland.containers.cards"): "what nvidia-smi inside then sees",
    ("bind-gpu", "container.userland.containers.failure"): "what nvidia-smi inside then sees",
    ("load-driver", "container.userland.containers.cards"): "what nvidia-smi inside then sees",
    ("load-driver", "host.gpu-health.smi"): "what nvidia-smi then says",
    ("install-driver", "host.gpu-health.smi"): "what nvidia-smi then says",
    ("bind-gpu", "host.gpu-health.smi"): "what nvidia-smi then says",
    ("install-driver", "host.gpu-health.smi_failure"): "its library is not the loaded module's until that is loaded",
    ("install-driver", "host.gpu-health.smi_failure.reason"): "as above",
    ("install-driver", "host.gpu-health.smi_failure.message"): "as above",
    # Order in a tuple
    ("bind-gpu", "host.gpu-health.gpus.pci"): "order",
    ("bind-gpu", "host.gpu-health.gpus.uuid"): "order",
    ("bind-gpu", "host.gpu-health.gpus.minor"): "order",
    ("keep-nouveau-off", "host.kernel.modprobe"): "order of the files",
    ("fetch-driver", "host.driver.runfiles"): "order, and a broken one that was there",
    ("fetch-driver", "host.driver.runfiles.name"): "order",
    ("fetch-driver", "host.driver.runfiles.sha256"): "order",
    ("install-driver", "host.driver.modules.kernel"): "order",
    ("install-driver", "host.driver.dkms"): "the same version twice",
    # Beside the point of the action
    ("install-headers", "host.kernel.packages"): "nothing is asked of the repositories any more",
    ("install-headers", "host.kernel.lists_fresh"): "as above",
    ("update-initramfs", "host.kernel.initramfs.files"): "the last line's end",
    ("take-over-container", "container.devices.guests"): "what other nodes see of the node that is gone",
    ("load-driver", "host.driver.loaded"): "nvidia-uvm is not there where only half a driver is",
    ("bind-gpu", "host.gpu-health.functions.driver"): "the other functions of a card for virtual machines",
    ("bind-gpu", "host.gpu-health.functions.override"): "as above",
}
"""By action and field: what an effect does not say, and why that does no harm. All else has to agree."""

ACTIONS = {
    *("host.kernel install-headers", "host.kernel keep-nouveau-off", "host.kernel update-initramfs"),
    *("host.driver fetch-driver", "host.driver install-driver", "host.driver load-driver"),
    *("host.gpu-binding bind-gpu", "host.boot set-up-boot", "host.boot make-nodes"),
    *("container.placement move-container", "container.placement take-over-container"),
    *("container.mounts edit-config", "container.devices edit-config", "container.userland install-userland"),
    *("container.power start", "container.power stop", "container.power restart"),
}


def test_expectation_and_physics_agree_for_each_action() -> None:
    found: list[tuple[int, Difference]] = []
    done: set[str] = set()
    for seed in CASES:
        differ, actions = differences(*random_case(seed))
        done |= set(actions)
        found += [(seed, each) for each in differ if (each.action, each.where) not in NOT_FORETOLD]
    assert found == []
    assert done >= ACTIONS


def _imports(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def test_the_physics_import_no_action() -> None:
    """They are written from what machines do: no check, no effect, no script, nothing but what a probe's text needs."""
    files = [*LAYERS.glob("*/sim.py"), *(LAYERS / "shared").glob("*physics.py"), LAYERS / "shared" / "truth.py"]
    assert len(files) >= 12
    allowed = {
        ("controller.core.words", "Step"),  # how long one takes
        ("controller.facts.words", "Section"),
        ("controller.layers.power.facts", "TICKS"),
        ("controller.engines", "registry"),  # which engines there are, plug-ins too
        ("controller.layers.server_placement.sim", "folders"),
        ("controller.layers.server_placement.sim", "units"),
    }
    own = {"truth", "hub_truth", "probe_text"}  # and the physics
    for file in files:
        for module, name in _imports(file):
            if not module.startswith("controller") or (module, name) in allowed:
                continue
            physics = module.removeprefix("controller.layers.shared").lstrip(".") or name
            assert module.startswith("controller.layers.shared"), f"{file}: {module}.{name}"
            assert physics in own or physics.endswith("_physics"), f"{file}: {module}.{name}"
