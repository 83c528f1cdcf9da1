"""A server's unit gets into a container of a real host, and a real process comes of it and follows its spec."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from controller.core.next_steps import Next, next_steps
from controller.core.permissions import Grants
from controller.core.view import View
from controller.core.words import Block, Drift, InSync
from controller.layers.order import ORDER
from controller.layers.server_process.reasons import Reason
from controller.layers.shared import environments
from controller.run.once import Pass, Report
from controller.run.session import WallClock
from controller.run.state import identity
from controller.spec.load import load
from controller.spec.ref import Ref
from controller.world.fleet import SshWorld
from tests.lab import hosts
from tests.lab.fixtures import need_lab
from tests.lab.lab import Lab
from tests.layers.servers import MINE, Sight, document
from tests.sim.controllers import Told

pytestmark = pytest.mark.lab

ENGINE = Path(__file__).with_name("engine.py")
HARD = {"a b": "$HOME ${PATH} %n %% \\ \" ' ; \u00e9", "empty": "", "list": [1, "two"]}
CONF = """\
arch: amd64
cores: 2
features: nesting=1
hostname: llm-gpu
memory: 4096
ostype: debian
rootfs: ceph-rbd:vm-129-disk-0,size=200G
dev0: /dev/nvidia0
dev1: /dev/nvidia1
dev2: /dev/nvidiactl
dev3: /dev/nvidia-uvm
"""
FLEET = """\
kind: Fleet
policy: {mode: enforce, allow: [restart-server]}
secrets: {key: {from_env: TEST_KEY}}
---
kind: Container
name: ct129
id: 129
host: kpro5
gpus: {count: 2, memory: ">=44GiB"}
"""
CARDS = [
    {"pci": "4f:00.0", "model": "RTX A6000", "owner": "containers"},
    {"pci": "ce:00.0", "model": "RTX A6000", "owner": "containers"},
]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two hosts, a container that runs on one of them."""
    need_lab()
    wanted = {name: about for name, about in hosts.default().items() if name in ("kpro5", "box1")}
    with Lab(hosts=wanted, pve_files={"nodes/kpro5/lxc/129.conf": CONF.encode()}) as started:
        started.run("kpro5", "nvidia-smi -L && nvidia-modprobe -u -c=0 && pct start 129", check=True)
        yield started


class Rig:
    """The lab's fleet, with an engine of the tests' own where an environment would be."""

    def __init__(self, lab: Lab, place: Path) -> None:
        self.lab = lab
        self.place = place
        self.secrets: dict[str, str] = {}
        self.health: Mapping[str, object] = {}
        self.want(document())
        self.world = SshWorld(self.specs, place, identity(place), ORDER)

    def want(self, *documents: str) -> None:
        """These servers are wanted now."""
        kpro5 = json.dumps(self.lab.host_spec("kpro5", nvidia={"gpus": CARDS}))
        box1 = json.dumps(self.lab.host_spec("box1"))
        text = f"{FLEET}---\n{kpro5}\n---\n{box1}\n{''.join(documents)}"
        self.specs = dataclasses.replace(load({"specs.yaml": text.encode()}), secrets=dict(self.secrets))
        self.ready = False

    def look(self) -> View:
        """Look, with an engine where the servers' environments should be."""
        eyes = Sight(self.world, ORDER, self.specs)
        eyes.health = {}
        eyes.look(self.specs.hosts)
        self.eyes = eyes
        view = View(self.specs, eyes.facts)
        if not self.ready:
            self.ready = True
            for server in self.specs.servers.values():
                folder = f"{environments.wanted(view, server).directory}/bin"
                python = f'#!/bin/sh\nexec /usr/bin/python3 {folder}/engine.py "$@"\n'
                self.inside(
                    server.container is not None, f"mkdir -p {folder}; cat >{folder}/engine.py", ENGINE.read_text()
                )
                self.inside(server.container is not None, f"cat >{folder}/python; chmod 755 {folder}/python", python)
        return view

    def inside(self, container: bool, command: str, given: str = "") -> str:
        """A command in the container or on the plain host."""
        host = "kpro5" if container else "box1"
        within = ["lxc-attach", "-n", "129", "--"] if container else []
        said = self.lab.run(host, [*within, "sh", "-c", command], stdin=given, timeout=150)
        assert said.returncode == 0, said.stderr + said.stdout
        return str(said.stdout)

    def next(self) -> Next:
        view = self.look()
        return next_steps(MINE, View(view.specs, view.facts))

    def drift(self) -> Drift:
        found = self.next().verdict(Ref("ModelServer", "qwen"), "server.process")
        assert isinstance(found, Drift), found
        return found

    def once(self) -> Report:
        self.look()
        grants = Grants(self.specs)
        return Pass(self.world, MINE, self.specs, grants, WallClock(), Told(), 300.0).run(self.eyes)

    def actions(self) -> list[str]:
        report = self.once()
        assert report.upcoming.in_sync, [j for j in report.upcoming.judged if isinstance(j.verdict, Drift)]
        assert all(each.result == "worked" for each in report.ended), [each.message for each in report.ended]
        return [each.step.action for each in report.ended]

    def process(self, container: bool = True, name: str = "qwen") -> tuple[int, list[str]]:
        """The main process of a server's unit, as the place counts, and its command line."""
        pid = int(self.inside(container, f"systemctl show -p MainPID --value reconcile-{name}.service"))
        line = self.inside(container, f"cat /proc/{pid}/cmdline" if pid else "true")
        return pid, line.split("\0")[:-1]

    def until(self, command: str, container: bool = True, seconds: float = 90) -> None:
        """Wait until a command in the place says yes."""
        self.inside(container, f"for _ in $(seq {int(seconds * 5)}); do {command} && exit; sleep 0.2; done; exit 1")


@pytest.fixture
def rig(lab: Lab, tmp_path: Path) -> Iterator[Rig]:
    """Nothing of ours is anywhere."""
    made = Rig(lab, tmp_path)
    for container in (True, False):
        made.inside(
            container,
            "until systemctl show -p Version >/dev/null 2>&1; do sleep 0.2; done\n"
            "cd /etc/systemd/system; for unit in reconcile-*.service; do\n"
            "[ -e $unit ] && systemctl disable -q --now $unit\n"
            "done; rm -rf reconcile-*.service* /opt/reconcile /run/reconcile-server; systemctl daemon-reload",
        )
    yield made
    made.world.close()


HARD_SERVE = json.dumps({"port": 30000, "flags": {"context-length": 4096, "json-model-override-args": HARD}})


def test_a_unit_and_its_process_follow_the_spec(rig: Rig) -> None:
    rig.want(document(serve=HARD_SERVE))
    assert rig.actions() == ["install-unit", "start-server"]
    pid, argv = rig.process()
    arguments = json.loads(rig.inside(True, "cat /opt/reconcile/server/qwen/args.json"))
    assert argv[2:] == arguments["argv"][1:]  # the first is a script: its interpreter stands before it
    assert json.loads(argv[argv.index("--json-model-override-args") + 1]) == HARD
    rig.until("python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:30000/health\")' 2>/dev/null")
    assert rig.actions() == []
    assert rig.process()[0] == pid
    listener = rig.look().fact("kpro5", "server.process", object).of(129).on(30000)  # type: ignore[attr-defined]
    assert listener.unit == "reconcile-qwen.service"

    rig.want(document(serve='{"port": 30000, "flags": {"context-length": 8192}}'))
    assert rig.actions() == ["install-unit", "restart-server"]
    later, argv = rig.process()
    assert later != pid
    assert "8192" in argv

    # It comes back after a kill, and with its container, by systemd's own doing.
    rig.inside(True, f"kill -9 {later}")
    assert rig.actions() == []
    assert rig.process()[0] not in (0, later)
    rig.lab.run("kpro5", "pct stop 129 && pct start 129", check=True)
    rig.until("systemctl is-active -q reconcile-qwen.service")
    assert rig.actions() == []

    rig.want(document(state="stopped"))
    assert rig.actions() == ["install-unit", "stop-server"]
    assert rig.process()[0] == 0
    rig.want(document(state="absent"))
    assert rig.actions() == ["remove-server"]
    assert rig.inside(True, "ls /opt/reconcile/server /etc/systemd/system | grep qwen || echo none").strip() == "none"
    assert rig.actions() == []


def test_secrets_lie_in_files_of_their_own_and_a_new_one_is_brought_in(rig: Rig) -> None:
    secret = 'it\'s "a" $HOME `s3cret` \\ %n'
    rig.secrets = {"key": secret}
    serve = (
        '{"port": 30000, "api_key": {"secret": "key"}, "env": {"EXTRA": {"secret": "key"}, "PLAIN": "a $b %n \\"c\\""}}'
    )
    rig.want(document(serve=serve))
    assert rig.actions() == ["install-unit", "start-server"]
    pid, argv = rig.process()
    assert "s3cret" not in " ".join(argv)
    environ = dict(line.split("=", 1) for line in rig.inside(True, f"cat /proc/{pid}/environ").split("\0") if line)
    assert environ["EXTRA"] == secret
    assert environ["PLAIN"] == 'a $b %n "c"'
    found = rig.inside(True, "grep -rl s3cret /opt/reconcile /etc/systemd/system | xargs stat -c '%a %n'").split("\n")
    assert sorted(line for line in found if line) == [
        "600 /opt/reconcile/server/qwen/config.yaml",
        "600 /opt/reconcile/server/qwen/secrets.env",
    ]
    assert rig.actions() == []
    left = rig.lab.run("kpro5", "grep -rl s3cret /var/lib/reconcile /run/reconcile").stdout
    assert left == ""
    rig.secrets = {"key": "another"}
    rig.want(document(serve=serve))
    assert rig.actions() == ["install-unit", "restart-server"]
    assert rig.actions() == []


def test_a_foreign_owner_of_the_port_is_named_and_left_alone(rig: Rig) -> None:
    rig.inside(True, "systemd-run -q --unit=llm python3 -m http.server 30000")
    rig.until("grep -q ' 0100007F:7530\\|:7530 .* 0A ' /proc/net/tcp")
    try:
        report = rig.once()
        assert [each.step.action for each in report.ended] == ["install-unit"]
        found = rig.drift()
        assert found.reason == Reason.FOREIGN_PORT
        assert "llm.service" in found.message
        assert "(python3)" in found.message
        rig.want(document(policy="{mode: enforce, allow: [adopt, restart-server]}"))
        assert rig.actions() == ["adopt-unit", "start-server"]
    finally:
        rig.inside(True, "systemctl stop llm 2>/dev/null; true")


def test_one_that_cannot_start_is_let_be(rig: Rig) -> None:
    rig.want(document(serve='{"port": 30000, "flags": {"log-level": "--fails"}}'))
    rig.once()
    deadline = time.monotonic() + 120
    while (found := rig.drift()).reason != Reason.CRASHED:
        assert time.monotonic() < deadline, found
        time.sleep(2)
    assert isinstance(found.remedy, Block)
    assert "exited 1" in found.message
    assert rig.once().ended == []
    assert "unrecognized" in rig.inside(True, "cat /opt/reconcile/server/qwen/crash.log")


def test_on_a_plain_host(rig: Rig) -> None:
    rig.want(document(place="host: box1", serve=HARD_SERVE))
    assert rig.actions() == ["install-unit", "start-server"]
    _, argv = rig.process(container=False)
    assert json.loads(argv[argv.index("--json-model-override-args") + 1]) == HARD
    assert rig.actions() == []
    rig.want(document(gpus="[]"))
    report = rig.once()  # from the host into the container: stopped there first
    assert [each.step.action for each in report.ended] == ["install-unit", "stop-server-there", "start-server"]
    assert isinstance(rig.next().verdict(Ref("ModelServer", "qwen"), "server.placement"), InSync)
    assert rig.process(container=False)[0] == 0
