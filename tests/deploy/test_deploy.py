"""The systemd unit and the compose file: what can be said of them without starting anything."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PR_SET_MDWE = 65
PATIENCE = 120.0


def yaml(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text())


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that is here, so that systemd can judge the rest."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    made = tmp_path / "reconcile.service"
    made.write_text((DEPLOY / "reconcile.service").read_text().replace("/opt/reconcile/bin/reconcile", "/bin/true"))
    return made


def test_systemd_understands_the_unit(unit: Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "reconcile.service" in line] == []
    assert done.returncode == 0


def test_the_unit_is_hardened(unit: Path) -> None:
    """Below 2 of 10: what is left is the network that it needs."""
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", "--no-pager", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd cannot judge a unit offline")
    assert done.returncode == 0, done.stdout[-500:]


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command of the unit, with memory that is never writable and executable, as the unit has it."""
    command = re.search(r"^ExecStart=\S+/reconcile (.*)$", (DEPLOY / "reconcile.service").read_text(), re.MULTILINE)
    assert command
    arguments = command[1].replace("127.0.0.1:9797", "127.0.0.1:0").split()
    specs = ROOT / "specs" / "demo"

    def deny_write_execute() -> None:
        ctypes.CDLL(None).prctl(PR_SET_MDWE, 1, 0, 0, 0)  # kernels before 6.3 do not know it

    process = subprocess.Popen(
        [sys.executable, "-m", "controller", *arguments, "--fleet", f"sim:{specs / 'fleet.sim.yaml'}"],
        env={**os.environ, "RECONCILE_SPECS": str(specs), "RECONCILE_STATE": str(tmp_path / "state")},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=(tmp_path / "log").open("wb"),
        preexec_fn=deny_write_execute,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_command_of_the_unit_serves_and_stops_when_it_is_asked_to(
    controller: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    log, until = tmp_path / "log", time.monotonic() + PATIENCE
    while (at := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())) is None:
        assert controller.poll() is None, log.read_text()
        assert time.monotonic() < until, "it serves no page"
        time.sleep(0.1)
    with urllib.request.urlopen(f"{at[0]}/healthz", timeout=PATIENCE) as answer:
        assert answer.status == 200
    controller.send_signal(signal.SIGTERM)
    assert controller.wait(PATIENCE) == 0, log.read_text()


def test_what_the_compose_file_mounts_is_there() -> None:
    compose = yaml(DEPLOY / "compose.yaml")
    mounted = [v.split(":") for service in compose["services"].values() for v in service["volumes"]]
    own = {"./specs", "./keys"}  # of whoever runs it
    for source, *_ in mounted:
        if source.startswith("."):
            assert source in own or (DEPLOY / source).is_file(), source
        else:
            assert source in compose["volumes"]


def test_the_compose_file_opens_nothing_to_others_and_gives_no_rights() -> None:
    for name, service in yaml(DEPLOY / "compose.yaml")["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        image = service["image"]
        assert ":" in image.rpartition("/")[2] or "build" in service, f"{name} has no fixed version"


def test_prometheus_in_the_compose_file_is_set_up_as_the_sample_is() -> None:
    ours, sample = yaml(DEPLOY / "prometheus.yaml"), yaml(ROOT / "monitoring" / "prometheus.yaml")
    services = yaml(DEPLOY / "compose.yaml")["services"]
    assert ours["global"] == sample["global"]
    assert ours["rule_files"] == sample["rule_files"]
    for job in (*ours["scrape_configs"], *ours["alerting"]["alertmanagers"]):
        for target in job["static_configs"][0]["targets"]:
            host, _, port = target.partition(":")
            assert any(published.endswith(f":{port}") for published in services[host]["ports"])


def test_grafana_finds_its_data_source_and_the_dashboard() -> None:
    services = yaml(DEPLOY / "compose.yaml")["services"]
    mounts = {v.split(":")[1]: v.split(":")[0] for v in services["grafana"]["volumes"]}
    folder = yaml(DEPLOY / "grafana" / "dashboards.yaml")["providers"][0]["options"]["path"]
    dashboard = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert str(Path(dashboard).parent) == folder
    assert mounts[dashboard] == "../monitoring/dashboard.json"
    source = yaml(DEPLOY / "grafana" / "datasource.yaml")["datasources"][0]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert any(published.endswith(f":{port}") for published in services[host]["ports"])
    assert source["isDefault"]
