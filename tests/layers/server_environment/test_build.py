"""Environments, really built: by uv, from a folder of tiny wheels, with nothing fetched from anywhere."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
import signal
import subprocess
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest

from controller.core.view import View
from controller.core.words import Block, Drift, InSync, Step, Verdict
from controller.engines import registry
from controller.facts.units import UnitFacts
from controller.facts.words import HostFacts, Known
from controller.layers import server_environment
from controller.layers.access.facts import AccessFacts
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.power.facts import PowerFacts
from controller.layers.server_environment import Reason, uv
from controller.layers.server_environment.facts import Environments, EnvironmentsHere, parse
from controller.layers.server_output.facts import OutputFacts
from controller.layers.server_unit.facts import ServerUnits, UnitsHere
from controller.spec.load import load
from controller.spec.model import Specs
from tests.layers.inside import Ground
from tests.layers.server_environment.wheels import PYTHON, Toy, toys, uv_wheel
from tests.layers.shell import ask


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(registry, "engines", lambda: {"toy": Toy()})
    monkeypatch.setattr(uv, "VERSION", version("uv"))
    monkeypatch.setattr(uv, "WHEELS", {platform.machine(): uv_wheel(folder, version("uv"))})


def specs(folder: Path, engine: str, more: str = "") -> Specs:
    return load(
        {
            "specs.yaml": f"""\
kind: Host
name: box1
address: 192.0.2.1
platform: linux
---
kind: ModelServer
name: served
host: box1
model: {{repo: a/b, revision: {"0" * 40}, directory: /models}}
engine: {{name: toy, {engine}, wheels: ["{folder}"]}}
serve: {{port: 8000}}
{more}""".encode()
        }
    )


@dataclasses.dataclass
class Box:
    """A host that is looked at and acted on for real, as far as this layer goes."""

    ground: Ground
    specs: Specs

    def look(self) -> View:
        here = parse(ask(server_environment.LAYER.probe, self.ground.root))
        sections = {
            "host.access": AccessFacts(0, "box1", "6.8.12", platform.machine(), (), None),
            "host.gpu-health": GpuFacts((), None, (), (), (), ()),
            "container.power": PowerFacts(()),
            "world": UnitFacts(1, "0" * 36),
            "server.environment": here,
            "server.unit": ServerUnits(((None, UnitsHere()),)),
            "server.output": OutputFacts(((None, ()),)),
        }
        return View(self.specs, {"box1": HostFacts("box1", {name: Known(each) for name, each in sections.items()})})

    def check(self) -> Verdict:
        view = self.look()
        return server_environment.check(view, view.specs.servers["served"])

    def drift(self) -> Drift:
        found = self.check()
        assert isinstance(found, Drift), found
        return found

    def step(self) -> Step:
        found = self.drift().remedy
        assert isinstance(found, Step), found
        return found

    @property
    def here(self) -> EnvironmentsHere:
        found = self.look().fact("box1", "server.environment", Environments).of(None)
        assert found is not None
        return found

    def python(self, program: str) -> str:
        (environment,) = self.here.environments
        python = self.ground.path(environment.directory) / "bin/python"
        return subprocess.run([python, "-c", program], capture_output=True, check=True, text=True).stdout.strip()


@pytest.fixture
def box(tmp_path: Path, folder: Path) -> Box:
    (tmp_path / "usr").mkdir()
    return Box(Ground(tmp_path), specs(folder, "version: '1.0'"))


def test_built_from_a_folder_alone_and_then_left_alone(box: Box) -> None:
    assert box.drift().reason == Reason.NOT_BUILT
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert isinstance(box.check(), InSync)
    (found,) = box.here.environments
    assert (found.engine, found.version, found.arch) == ("toy", "1.0", platform.machine())
    assert found.python.startswith(PYTHON)
    assert found.size > 0
    assert found.torch is None
    assert box.here.unfinished == ()
    assert box.python("import part; print(part.VERSION)") == "1.0"
    leftovers = {path.name for path in box.ground.path("/opt/reconcile/env").iterdir()}
    assert leftovers == {found.digest, f"{found.digest}.json"}


def test_the_effect_says_what_the_script_does(box: Box) -> None:
    step = box.step()
    before = box.look()
    foretold = step.effect(before.facts)["box1"].section("server.environment")
    assert box.ground.run(step) == 0, box.ground.said
    assert isinstance(foretold, Known)
    assert isinstance(foretold.value, Environments)
    (expected,) = foretold.value.of(None).environments
    (found,) = box.here.environments
    for name in ("digest", "object", "engine", "version", "arch", "capabilities", "requirements", "torch", "whole"):
        assert getattr(found, name) == getattr(expected, name), name


def test_what_the_spec_requires_wins_over_what_packages_ask_for(box: Box, folder: Path) -> None:
    box.specs = specs(folder, "version: '1.0', requirements: ['part==1.5']")
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert box.python("import part; print(part.VERSION)") == "1.5"


def test_what_does_not_import_is_no_environment(box: Box, folder: Path) -> None:
    box.specs = specs(folder, "version: '3.0'")
    assert box.ground.run(box.step()) == 1
    assert "cannot import toy" in box.ground.said
    assert "absent_part" in box.ground.said
    assert box.here.environments == ()
    assert box.drift().reason == Reason.NOT_BUILT


def test_a_version_that_is_nowhere(box: Box, folder: Path) -> None:
    # Nobody listens there.
    box.specs = specs(folder, "version: '4.0', index_url: 'http://127.0.0.1:9/simple'")
    assert box.ground.run(box.step()) == 1
    assert box.here.environments == ()


def test_from_an_index_uv_itself_too(box: Box, folder: Path, tmp_path: Path) -> None:
    """A simple index (PEP 503), with relative links as many have."""
    pages = tmp_path / "index"
    for name in ("toy", "part", "uv"):
        (pages / "simple" / name).mkdir(parents=True)
        files = [each for each in folder.iterdir() if each.name.startswith(f"{name}-")]
        links = "".join(f'<a href="../../files/{each.name}#sha256={_sha256(each)}">{each.name}</a>' for each in files)
        (pages / "simple" / name / "index.html").write_text(f"<html><body>{links}</body></html>")
    (pages / "files").symlink_to(folder)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(pages))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/simple"
        found = specs(folder, f"version: '1.0', index_url: '{url}'")
        one = found.servers["served"]
        engine = one.engine.model_copy(update={"wheels": ()})
        box.specs = dataclasses.replace(found, servers={"served": one.model_copy(update={"engine": engine})})
        assert box.ground.run(box.step()) == 0, box.ground.said
        server.shutdown()
    assert isinstance(box.check(), InSync)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_prerelease_is_taken_where_the_spec_pins_it(box: Box, folder: Path) -> None:
    box.specs = specs(folder, "version: 5.0b1, prerelease: allow")
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert [each.version for each in box.here.environments] == ["5.0b1"]


def test_a_wheel_of_uv_with_another_digest_is_thrown_away(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    right = uv.WHEELS[platform.machine()]
    monkeypatch.setattr(uv, "WHEELS", {platform.machine(): dataclasses.replace(right, sha256="0" * 64)})
    assert box.ground.run(box.step()) == 1
    assert "thrown away" in box.ground.said
    assert not list(box.ground.path("/var/lib/reconcile/uv").rglob("*.whl*"))
    monkeypatch.setattr(uv, "WHEELS", {platform.machine(): right})
    assert box.ground.run(box.step()) == 0, box.ground.said


@pytest.mark.parametrize("part", ["opt/reconcile/uv/*/uv", "opt/reconcile/env/*/pyvenv.cfg", "*/*/*/*/toy/__init__.py"])
def test_killed_anywhere_it_is_built_all_the_same(box: Box, part: str) -> None:
    running = box.ground.begin(box.step())
    until = time.monotonic() + 300
    while running.poll() is None and time.monotonic() < until:
        if any(box.ground.root.glob(part)) or any(box.ground.root.rglob(part.rpartition("/")[2])):
            break
        time.sleep(0.002)
    # Everything of the unit's control group, as systemd would.
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    _gone(box.ground.root)
    if isinstance(box.check(), InSync):
        return
    assert box.here.environments == ()
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert isinstance(box.check(), InSync)


def _gone(root: Path) -> None:
    """Wait until nothing works in the tree any more: what ran in the place ends with the script that began it."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if not any(str(root) in _arguments(path) for path in Path("/proc").glob("[0-9]*/cmdline")):
            return
        time.sleep(0.05)
    raise AssertionError("something of the killed job is still at work")


def _arguments(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_another_version_is_built_beside_and_the_old_one_stays_while_a_unit_names_it(box: Box, folder: Path) -> None:
    allow = "policy: {mode: enforce, allow: [delete-environment]}"
    box.specs = specs(folder, "version: '1.0'", allow)
    assert box.ground.run(box.step()) == 0, box.ground.said
    (old,) = box.here.environments
    unit = box.ground.path("/etc/systemd/system/reconcile-served.service")
    unit.parent.mkdir(parents=True)
    unit.write_text(f"ExecStart={box.ground.path(old.directory)}/bin/toy\n")
    box.specs = specs(folder, "version: '2.0'", allow)
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert {each.version for each in box.here.environments} == {"1.0", "2.0"}
    removal = box.step()
    assert removal.action == "remove-environment"
    assert [str(each) for each in removal.disrupts] == ["delete-environment:ModelServer/served"]
    assert box.ground.run(removal) == 75
    assert "in use" in box.ground.said
    unit.unlink()
    sleeper = subprocess.Popen([box.ground.path(old.directory) / "bin/python", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert box.ground.run(removal) == 75
    finally:
        sleeper.kill()
        sleeper.wait()
    assert box.ground.run(removal) == 0, box.ground.said
    assert [each.version for each in box.here.environments] == ["2.0"]
    assert isinstance(box.check(), InSync)


def test_a_venv_that_lost_its_interpreter_is_built_again(box: Box) -> None:
    assert box.ground.run(box.step()) == 0, box.ground.said
    (found,) = box.here.environments
    (box.ground.path(found.directory) / "bin/python").unlink()
    assert box.drift().reason == Reason.NOT_WHOLE
    assert box.ground.run(box.step()) == 0, box.ground.said
    assert isinstance(box.check(), InSync)


def test_a_marker_of_a_newer_release_is_left_alone(box: Box) -> None:
    assert box.ground.run(box.step()) == 0, box.ground.said
    (marker,) = box.ground.path("/opt/reconcile/env").glob("*.json")
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "schema": 99, "flags": "of another form"}))
    drift = box.drift()
    assert drift.reason == Reason.NEWER_SCHEMA
    assert isinstance(drift.remedy, Block)
