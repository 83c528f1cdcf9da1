"""An environment and weights get into a container of a real host: built and fetched in there, cut off, gone on with."""

from __future__ import annotations

import base64
import json
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from controller.core.next_steps import next_steps
from controller.core.permissions import Grants
from controller.core.view import View
from controller.core.words import Drift, InSync
from controller.engines import registry
from controller.facts.hub import SECTION, HubFacts
from controller.layers import server_environment, server_weights
from controller.layers.order import ORDER
from controller.layers.server_environment import uv
from controller.run.eyes import Eyes
from controller.run.once import Pass, Report
from controller.run.session import WallClock
from controller.run.state import identity
from controller.spec.load import load
from controller.spec.ref import Ref
from controller.world.fleet import SshWorld
from tests.hub.server import COMMIT, Hub, running
from tests.lab import hosts
from tests.lab.fixtures import need_lab
from tests.lab.lab import Lab
from tests.layers.server_environment.wheels import Toy, toys, uv_wheel
from tests.layers.server_weights.box import REPO, SHARD, SHARDS, model, wait
from tests.sim.controllers import Told

pytestmark = pytest.mark.lab

LAYERS = (server_environment.LAYER, server_weights.LAYER)
TOTAL = 3 * SHARD
CONF = """\
arch: amd64
cores: 2
hostname: llm
memory: 4096
ostype: debian
net0: name=eth0,bridge=vmbr0,hwaddr=BC:24:11:00:01:29,type=veth
rootfs: ceph-rbd:vm-129-disk-0,size=200G
"""


SECOND = f"""\
{{host}}
---
kind: ModelServer
name: second
host: box1
model: {{{{repo: {REPO}, revision: {COMMIT}, directory: /srv/models}}}}
engine: {{{{name: toy, version: '1.0', wheels: [/srv/wheels]}}}}
serve: {{{{port: 8000}}}}
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A host with a container that runs and reaches this machine."""
    need_lab()
    wanted = {name: about for name, about in hosts.default().items() if name in ("kpro5", "box1")}
    with Lab(hosts=wanted, pve_files={"nodes/kpro5/lxc/129.conf": CONF.encode()}) as started:
        started.run("kpro5", "pct start 129", check=True)
        network = started.controller_address.rpartition(".")[0]
        inside(started, f"ip address add {network}.229/24 dev eth0; ip link set eth0 up; ip link set lo up")
        yield started


def inside(lab: Lab, command: str, given: bytes = b"") -> str:
    """What a command says in the container."""
    said = lab.run(
        "kpro5", ["lxc-attach", "-n", "129", "--", "sh", "-c", command], stdin=given.decode("latin-1"), timeout=150
    )
    assert said.returncode == 0, said.stderr + said.stdout
    return str(said.stdout)


class Sight(Eyes):
    """Sees what the tests' own Hub has."""

    hub: Hub

    def look(self, hosts, max_age=0.0):  # type: ignore[no-untyped-def]
        facts = super().look(hosts, max_age)
        told = HubFacts({(REPO, COMMIT): self.hub.describe(REPO)})
        self._facts = {name: host.with_section(SECTION, told) for name, host in facts.items()}
        return self._facts


def test_made_ready_in_a_container_and_gone_on_with_after_a_kill(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheels").mkdir()
    folder = toys(tmp_path / "wheels")
    monkeypatch.setattr(registry, "engines", lambda: {"toy": Toy()})
    monkeypatch.setattr(uv, "VERSION", version("uv"))
    monkeypatch.setattr(uv, "WHEELS", {platform.machine(): uv_wheel(folder, version("uv"))})
    inside(lab, "mkdir -p /srv/wheels")
    for each in folder.iterdir():
        _push(lab, each, f"/srv/wheels/{each.name}")
    with running(lab.controller_address) as hub:
        hub.repos[REPO] = model()
        hub.pace = 0.02
        text = f"""\
kind: Fleet
policy: {{mode: enforce}}
---
{json.dumps(lab.host_spec("kpro5"))}
---
kind: Container
name: ct129
id: 129
host: kpro5
---
kind: ModelServer
name: served
container: ct129
model: {{repo: {REPO}, revision: {COMMIT}, directory: /models, stalled_after: 20s}}
engine: {{name: toy, version: '1.0', wheels: [/srv/wheels]}}
serve: {{port: 8000}}
"""
        specs = load({"specs.yaml": text.encode()})
        world = SshWorld(specs, tmp_path, identity(tmp_path), ORDER)
        eyes = Sight(world, ORDER, specs)
        eyes.hub = hub

        def once(seconds: float) -> Report:
            eyes.look(specs.hosts)
            return Pass(world, LAYERS, specs, Grants(specs), WallClock(), Told(), seconds).run(eyes)

        def verdict(layer: str):  # type: ignore[no-untyped-def]
            eyes.look(specs.hosts)
            return next_steps(LAYERS, View(specs, eyes.facts)).verdict(Ref("ModelServer", "served"), layer)

        once(1.0)  # begins the build, and waits no longer
        wait(lambda: isinstance(verdict("server.environment"), InSync), 300)
        once(1.0)  # begins the download
        there = f"du -sb /models/{REPO.replace('/', '--')} 2>/dev/null | cut -f1"
        wait(lambda: int(inside(lab, there).strip() or 0) > TOTAL // 3, 120)
        lab.run("kpro5", "systemctl kill -s KILL 'reconcile-job-weights-*.service'", check=True)
        wait(lambda: inside(lab, "pgrep -f [w]eights.py || :").strip() == "", 60)
        drift = verdict("server.weights")
        assert isinstance(drift, Drift)
        assert "the last try failed" in drift.message
        hub.pace = 0.0
        report = once(300.0)
        assert [each.step.action for each in report.ended] == ["fetch-weights"]
        assert report.upcoming.in_sync, [(j.layer, j.verdict) for j in report.upcoming.judged]
        # All of it once, and once more at most what was not on disk when it was killed.
        assert sum(hub.bytes_of(name) for name in SHARDS) <= 2 * TOTAL - TOTAL // 3
        said = inside(lab, f"cd /models/{REPO.replace('/', '--')}/{COMMIT} && sha256sum {' '.join(SHARDS)}")
        assert [line.split()[0] for line in said.splitlines()] == [
            file.sha256 for file in hub.describe(REPO).files if file.path in SHARDS
        ]
        assert once(300.0).ended == []
        world.close()
    # Another host has it from the container, and the Hub, which is gone now, is asked for nothing.
    lab.run("box1", "mkdir -p /srv/wheels", check=True)
    for each in folder.iterdir():
        lab.run("box1", f"base64 -d >/srv/wheels/{each.name}", stdin=_base64(each), check=True, timeout=300)
    both = load({"specs.yaml": f"{text}---\n{SECOND.format(host=json.dumps(lab.host_spec('box1')))}".encode()})
    world = SshWorld(both, tmp_path, identity(tmp_path), ORDER)
    eyes = Sight(world, ORDER, both)
    eyes.hub = hub
    eyes.look(both.hosts)
    report = Pass(world, LAYERS, both, Grants(both), WallClock(), Told(), 300.0).run(eyes)
    assert report.upcoming.in_sync, [(j.layer, j.verdict) for j in report.upcoming.judged]
    assert [(each.step.action, each.step.hosts[0]) for each in report.ended] == [
        ("build-environment", "box1"),
        ("ask-for-weights", "box1"),
        ("offer-weights", "kpro5"),
        ("fetch-weights", "box1"),
    ]
    world.close()


def _push(lab: Lab, file: Path, to: str) -> None:
    """Copy a file into the container, through its host."""
    lab.run("kpro5", ["sh", "-c", "base64 -d >/root/pushed"], stdin=_base64(file), check=True, timeout=300)
    lab.run("kpro5", f"pct push 129 /root/pushed {to} && rm /root/pushed", check=True, timeout=300)


def _base64(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()
