"""A real Prometheus and a real Alertmanager, run by hand on free ports of this machine alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from ruamel.yaml import YAML

MONITORING = Path(__file__).parents[2] / "monitoring"
PATIENCE = 120.0
PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager", "amtool")
T = TypeVar("T")


def read(path: Path) -> Any:
    """A YAML file as plain values."""
    return YAML(typ="safe").load(path.read_text())


def require() -> None:
    """Skip the test where Prometheus is not installed; fail it where everything has to be there."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if not missing:
        return
    message = f"{', '.join(missing)} not installed; as root: tests/monitoring/install-packages.sh"
    if os.environ.get("RECONCILE_REQUIRE_LAB") == "1":
        pytest.fail(message)
    pytest.skip(message)


def eventually(ask: Callable[[], T | None], what: str) -> T:
    """What ``ask`` answers, as soon as it is something."""
    until = time.monotonic() + PATIENCE
    while True:
        answer = ask()
        if answer:
            return answer
        assert time.monotonic() < until, f"still not after {PATIENCE:.0f} seconds: {what}"
        time.sleep(0.2)


def get(url: str, **query: str) -> Any:
    """The JSON at a URL; what the server says is wrong is the error."""
    try:
        with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=PATIENCE) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{query or url}: {error.read().decode()}") from None


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus, and the Alertmanager that it tells."""

    url: str
    alertmanager: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression gives now. Fails with Prometheus' own words when it is not understood."""
        answer = get(f"{self.url}/api/v1/query", query=expression)
        assert answer["status"] == "success"
        result = answer["data"]["result"]
        return result if answer["data"]["resultType"] == "vector" else [result]

    def value(self, expression: str) -> float | None:
        """The value of the one series that an expression gives, None when it gives none."""
        found = self.query(expression)
        assert len(found) < 2, found
        return float(found[0]["value"][1]) if found else None

    def rules(self) -> list[dict[str, Any]]:
        """The rules that it goes by, with their health."""
        groups = get(f"{self.url}/api/v1/rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def alerts(self) -> set[str]:
        """The names of the alerts that the Alertmanager has."""
        return {alert["labels"]["alertname"] for alert in get(f"{self.alertmanager}/api/v2/alerts")}


@contextlib.contextmanager
def running(place: Path, target: str, rules: Path = MONITORING / "alerts.yaml") -> Iterator[Prometheus]:
    """Both with the project's own configurations; what is scraped, how often, and the ports are this test's.

    ``rules`` may be a copy of the project's with shorter times.
    """
    ours, theirs = _free_port(), _free_port()
    config = read(MONITORING / "prometheus.yaml")
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(rules)]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{theirs}"]
    (place / "prometheus.yaml").write_text(json.dumps(config))  # which is YAML, too
    commands = (
        (
            "prometheus",
            f"--config.file={place}/prometheus.yaml",
            f"--storage.tsdb.path={place}/data",
            f"--web.listen-address=127.0.0.1:{ours}",
            "--log.level=warn",
        ),
        (
            "prometheus-alertmanager",
            f"--config.file={MONITORING}/alertmanager.yaml",
            f"--storage.path={place}/alertmanager",
            f"--web.listen-address=127.0.0.1:{theirs}",
            "--cluster.listen-address=",
            "--log.level=warn",
        ),
    )
    with contextlib.ExitStack() as stack:
        for command in commands:
            stack.enter_context(_process(command, place / f"{command[0]}.log"))
        found = Prometheus(f"http://127.0.0.1:{ours}", f"http://127.0.0.1:{theirs}")
        for url in (found.url, found.alertmanager):
            eventually(lambda url=url: _answers(f"{url}/-/ready"), f"{url} is ready; see {place}/*.log")
        yield found


@contextlib.contextmanager
def _process(command: tuple[str, ...], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
