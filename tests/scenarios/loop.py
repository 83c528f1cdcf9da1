"""A fleet in the lab that a running controller looks after, and that a real Prometheus watches."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab import packages
from tests.lab.lab import Lab, wait_until
from tests.monitoring.servers import MONITORING, Prometheus
from tests.scenarios import story
from tests.scenarios.stage import LabStage

PATIENCE = 240.0
CT = "Container/ct129"
CARD = "0000:ce:00.0"  # of kpro5, for containers
PERMITTED = ("move-container", "restart-container", "edit-container-config", "change-driver")
BROKEN = "kind: Container\nname: ct129\nhost: [\n"


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds, with patience for a machine that has other work."""
    wait_until(lambda: bool(condition()), PATIENCE, f"never so: {what}")


def rules(place: Path) -> Path:
    """The project's alerts, with the half hour after which drift is one made five seconds."""
    text = (MONITORING / "alerts.yaml").read_text()
    for shipped, shorter in (
        ("reconcile_drift_since_timestamp_seconds > 1800)\n", "reconcile_drift_since_timestamp_seconds > 5)\n"),
        ("reconcile_object_suspended == 1\n        for: 1m\n", "reconcile_object_suspended == 1\n        for: 1s\n"),
    ):
        assert text.count(shipped) == 1, shipped
        text = text.replace(shipped, shorter)
    copy = place / "alerts.yaml"
    copy.write_text(text)
    return copy


class Controller:
    """`reconcile run` as a process of its own, on a stage's specs; ``state`` names its state directory."""

    def __init__(self, stage: LabStage, state: str) -> None:
        self.stage = stage
        self.state = state
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """Its log, of all its lives."""
        return self.stage.place / f"{self.state}.log"

    @property
    def runs(self) -> bool:
        """Whether the process is there."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Begin a life."""
        command = self.stage.command("run", "--listen", self.address, state=self.state)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, env=self.stage.env())

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, timeout: float) -> int:
        """Wait for its end, and give its exit code."""
        assert self.process is not None
        return self.process.wait(timeout)

    def kill(self) -> None:
        """End it at once, as a machine that fails does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def status(self) -> dict[str, Any]:
        """What it says at /status; nothing while it does not answer."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{self.address}/status", timeout=30) as page:
            told: dict[str, Any] = json.load(page)
            return told
        return {}

    def object(self, ref: str) -> dict[str, Any]:
        """An object as it sees it, {} while it does not know it."""
        return next((one for one in self.status().get("objects", []) if one["object"] == ref), {})

    def is_ready(self, ref: str) -> bool:
        """Whether it says that an object is as its spec wants it."""
        found = {c["type"]: c["status"] for c in self.object(ref).get("conditions", [])}
        return found.get("Ready") == "True"

    def differs(self, ref: str, layer: str) -> bool:
        """Whether it sees a layer of an object differ."""
        return any(drift["layer"] == layer for drift in self.object(ref).get("drift", []))

    def says(self, *args: str) -> str:
        """What a command beside it prints; it has to end well."""
        ran = self.stage.reconcile(*args, state=self.state)
        assert ran.rc == 0, ran.out + ran.err
        return ran.out

    def events(self, kind: str = "", since: int = 0) -> list[dict[str, Any]]:
        """What it remembers to have happened, after the event of a number."""
        told = json.loads(self.says("events", "--since", "6h", "-o", "json"))["events"]
        return [event for event in told if event["number"] > since and kind in ("", event["kind"])]

    def last(self) -> int:
        """The number of the last event."""
        return max((event["number"] for event in self.events()), default=0)

    def steps(self, since: int = 0) -> list[tuple[str, str, str]]:
        """The steps that have ended: of what, which, and how."""
        return [(e["object"], e["action"], e["result"]) for e in self.events("step-ended", since)]


class Fleet:
    """The story's fleet, its container on kpro6 at first, a controller at work, and the Prometheus that watches it."""

    def __init__(self, stage: LabStage, controller: Controller, prometheus: Prometheus) -> None:
        self.stage = stage
        self.lab: Lab = stage.lab
        self.controller = controller
        self.prometheus = prometheus

    def save(self, name: str, text: str) -> None:
        """Save a spec file as editors do: written beside, and renamed."""
        beside = self.stage.specs / f".{name}.new"
        beside.write_text(text)
        beside.rename(self.stage.specs / name)

    def sees(self, layer: str, value: int, ref: str = CT) -> None:
        """Wait until Prometheus has that value of a layer's drift."""
        series = self.drift(layer, ref)
        until(lambda: self.prometheus.value(series) == value, f"{series} is {value}")

    def drift(self, layer: str, ref: str = CT) -> str:
        """The series of a layer's drift."""
        kind, name = ref.split("/")
        return f'reconcile_drift{{kind="{kind}", name="{name}", layer="{layer}"}}'

    def fires(self, alert: str) -> None:
        """Wait until the Alertmanager has an alert."""
        until(lambda: alert in self.prometheus.alerts(), f"{alert} fires")

    def ends(self, alert: str) -> None:
        """Wait until the Alertmanager has it no more."""
        until(lambda: alert not in self.prometheus.alerts(), f"{alert} has ended")

    # What happens to it

    def stop_container(self) -> None:
        """As a person does, by hand."""
        self.lab.run("kpro5", "pct stop 129", check=True)
        assert not self.stage.started(129)

    def take_card(self) -> None:
        """Bind a card of containers to vfio-pci."""
        devices = f"/sys/bus/pci/devices/{CARD}"
        take = f"echo vfio-pci > {devices}/driver_override; echo {CARD} > {devices}/driver/unbind; "
        self.lab.run("kpro5", f"{take} echo {CARD} > /sys/bus/pci/drivers_probe")
        assert self.card_is_on() == "vfio-pci"

    def card_is_on(self) -> str:
        """The driver that the card is on."""
        return str(self.lab.kernel("state", "kpro5")["functions"][CARD]["driver"])

    def fault(self, name: str, text: str = "") -> None:
        """Let Proxmox's programs on kpro5 go wrong."""
        self.lab.write("kpro5", f"/run/lab-faults/{name}", text)

    def no_faults(self) -> None:
        """Let them go right again."""
        self.lab.run("kpro5", "rm -f /run/lab-faults/*")

    def calls(self, command: str) -> int:
        """How often pct was called so on kpro5."""
        log = self.lab.path("kpro5", "/run/lab-log/pct.log")
        return log.read_text().count(f'args=["{command}", "129"') if log.exists() else 0


def lay_specs(fleet: Fleet, **wanted: Any) -> None:
    """The story's spec files for this lab; ``wanted`` is as in ``container``."""
    texts = spec_texts(fleet.lab) | {"ct129.yaml": container(**wanted)}
    for name, text in texts.items():
        if not (fleet.stage.specs / name).exists() or (fleet.stage.specs / name).read_text() != text:
            fleet.save(name, text)


def container(host: str = "kpro5", count: int = 2, allow: tuple[str, ...] = PERMITTED) -> str:
    """The file of the container."""
    return (
        f"kind: Container\nname: ct129\nid: 129\nhost: {host}\nstate: running\n"
        f'gpus: {{count: {count}, memory: ">=44GiB"}}\nmounts:\n  - {{target: /shared, when_missing: drop}}\n'
        f"policy: {{mode: enforce, allow: [{', '.join(allow)}]}}\n"
    )


def spec_texts(lab: Lab) -> dict[str, str]:
    """All but the container: kpro5 is to have a driver, and kpro6 lists its cards."""
    hosts = []
    for document in story.documents():
        if document["kind"] == "Host":
            document |= lab.host_spec(document["name"])
            if document["name"] == "kpro5":
                document["nvidia"]["driver"]["sha256"] = hashlib.sha256(packages.runfile(story.VERSION)).hexdigest()
            if document["name"] == "kpro6":
                del document["lifecycle"]
                cards = story.world()["hosts"]["kpro6"]["cards"]
                gpus = [{"pci": card["pci"], "model": card["model"], "owner": "containers"} for card in cards]
                document["nvidia"] = {"gpus": gpus}
            hosts.append(json.dumps(document))
    return {"fleet.yaml": "kind: Fleet\npolicy: {mode: report}\n", "hosts.yaml": "\n---\n".join(hosts)}


def settle(fleet: Fleet) -> None:
    """Begin a test: all is as the good specs say, nothing goes wrong, what was tried before counts for nothing."""
    fleet.no_faults()
    lay_specs(fleet)
    if not fleet.controller.runs:
        fleet.controller.start()
    fleet.controller.says("suspend", CT)
    fleet.controller.says("resume", CT)
    fleet.controller.says("wait", CT, "--for", "Ready", "--timeout", str(int(PATIENCE)))
    until(lambda: all(fleet.controller.is_ready(ref) for ref in (CT, "Host/kpro5")), "the controller sees it so")
    assert fleet.stage.started(129).startswith("kpro5 ")


def free_of(log: Path, words: tuple[str, ...] = ("Traceback", "defect of reconcile")) -> None:
    """A controller's log tells of no mistake of its own."""
    text = log.read_text() if log.exists() else ""
    assert not [word for word in words if word in text], text[-3000:]
