from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.fixtures import need_lab
from tests.lab.lab import Lab
from tests.scenarios import move
from tests.scenarios.stage import LabStage, SimStage, Stage
from tests.scenarios.stale import CONF, lab_hosts, sim_file, specification


@pytest.fixture(scope="session")
def stale_lab() -> Iterator[Lab]:
    """A lab with that fleet, for all scenarios of a session."""
    need_lab()
    with Lab(hosts=lab_hosts(), pve_files={"nodes/kpro5/lxc/129.conf": CONF.encode()}) as started:
        yield started


@pytest.fixture
def lab_stage(stale_lab: Lab, tmp_path: Path) -> LabStage:
    """The lab in the scenario's first state: the container runs with its old config, and nothing of ours is there."""
    stale_lab.heal()
    reset = (
        "nvidia-smi -L && nvidia-modprobe -u -c=0 && { pct stop 129; rm -rf /var/lib/reconcile /run/reconcile; "
        "rm -f /run/lab-faults/* /run/lab-log/*; }"
    )
    stale_lab.run("kpro5", reset)
    stale_lab.pve_write("nodes/kpro5/lxc/129.conf", CONF)
    stale_lab.run("kpro5", "pct start 129", check=True)
    stale_lab.run("kpro5", "rm -f /run/lab-log/*")
    stage = LabStage(tmp_path, stale_lab)
    specification(stage)
    return stage


@pytest.fixture
def sim_stage(tmp_path: Path) -> SimStage:
    """The simulated fleet in the same state."""
    stage = SimStage(tmp_path, sim_file())
    specification(stage)
    return stage


@pytest.fixture(scope="session")
def cluster_lab() -> Iterator[Lab]:
    """A lab with a cluster of three and a container on kpro6, for all scenarios of a session."""
    need_lab()
    files = {"nodes/kpro6/lxc/129.conf": move.CONF.encode()}
    with Lab(hosts=move.lab_hosts(), pve_files=files) as started:
        yield started


@pytest.fixture
def moving_lab_stage(cluster_lab: Lab, tmp_path: Path) -> LabStage:
    """The cluster in its first state: the container runs on kpro6, and nothing of ours is on any host."""
    cluster_lab.reset()
    cluster_lab.run("kpro6", f"mkdir -p {move.SHARED} && nvidia-smi -L && nvidia-modprobe -u -c=0", check=True)
    cluster_lab.run("kpro5", "nvidia-smi -L && nvidia-modprobe -u -c=0", check=True)
    cluster_lab.run("kpro6", "pct start 129", check=True)
    cluster_lab.run("kpro6", "rm -f /run/lab-log/*")
    stage = LabStage(tmp_path, cluster_lab)
    move.specification(stage)
    return stage


@pytest.fixture
def moving_sim_stage(tmp_path: Path) -> SimStage:
    """The simulated fleet in the same state."""
    stage = SimStage(tmp_path, move.sim_file())
    move.specification(stage)
    return stage


@pytest.fixture(params=["sim", pytest.param("lab", marks=pytest.mark.lab)])
def moving(request: pytest.FixtureRequest) -> Stage:
    """Each of the two worlds, with the cluster of three."""
    chosen: Stage = request.getfixturevalue(f"moving_{request.param}_stage")
    return chosen


@pytest.fixture(params=["sim", pytest.param("lab", marks=pytest.mark.lab)])
def stage(request: pytest.FixtureRequest) -> Stage:
    """Each of the two worlds."""
    chosen: Stage = request.getfixturevalue(f"{request.param}_stage")
    return chosen
