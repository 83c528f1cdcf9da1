"""A picture with something in every series: the demo's fleet as it was looked at, and what the loop adds to it."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path

from controller.core import observe
from controller.core.next_steps import next_steps
from controller.core.suspension import Suspension
from controller.core.view import View
from controller.core.words import Block, Drift
from controller.facts.units import How, Job
from controller.facts.words import HostFacts
from controller.layers.order import ORDER
from controller.layers.server_output.facts import Check, Figures, Judged, Output, OutputFacts, Result
from controller.layers.server_weights.facts import AllWeights, Found, ManifestFile, Weights, WeightsHere
from controller.layers.shared.reboot import NoReboot
from controller.run.eyes import Eyes
from controller.run.memory import Drifting, Kept
from controller.run.picture import Board, Looked, Pending, Picture, StepKind, WaitingFor
from controller.spec.errors import Code, SpecError
from controller.spec.load import load
from controller.spec.model import Place, Specs
from controller.spec.ref import Ref
from controller.world.sim import SimWorld
from tests.sim.fleets import demo

DEMO = Path(__file__).parents[2] / "specs" / "demo"
AT = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
HOST, GONE = Ref("Host", "kpro5"), Ref("Host", "kpro4")
CONTAINER, SERVER = Ref("Container", "ct129"), Ref("ModelServer", "qwen")
SECRET = "hf_thisIsNoRealTokenButLooksLikeOne0"

SERVED = """
kind: ModelServer
name: qwen
container: ct129
gpus: [0]
model:
  repo: Qwen/Qwen3-8B
  revision: 0123456789abcdef0123456789abcdef01234567
  directory: /models
engine: {name: sglang, version: 0.5.11}
serve: {port: 30000}
"""


def specs(*, without_container: bool = False) -> Specs:
    """The demo's specs, and a server in its container."""
    texts: dict[str, bytes | OSError] = {"hosts.yaml": (DEMO / "hosts.yaml").read_bytes()}
    if not without_container:
        texts |= {"ct129.yaml": (DEMO / "ct129.yaml").read_bytes(), "qwen.yaml": SERVED.encode()}
    return load(texts)


def picture(wanted: Specs | None = None) -> Picture:
    """The demo's fleet: one host has answered, the other is off; the container passes cards that it should not."""
    wanted = specs() if wanted is None else wanted
    fleet = demo()
    fleet.hosts["kpro4"].powered = False
    eyes = Eyes(SimWorld(fleet), ORDER, wanted)
    facts = {name: _with_servers(one) if name == "kpro5" else one for name, one in eyes.look(wanted.hosts).items()}
    upcoming = next_steps(ORDER, View(wanted, facts))
    drifted = [j for j in upcoming.judged if isinstance(j.verdict, Drift)]
    ready = Kept("Ready", "False", "devices-differ", "container.devices: too many", "d" * 64, AT - 600)
    return Picture(
        specs=wanted,
        spec_errors=(SpecError(Place("specs/broken.yaml", 3), Code.SYNTAX, "cannot read this as YAML"),),
        loaded=AT - 3600,
        commit="0123456789abcdef0123456789abcdef01234567",
        dirty=True,
        facts=facts,
        hosts={"kpro5": Looked(True, AT - 5, 0.02), "kpro4": Looked(False, AT - 900, 3.0)},
        observed=True,
        upcoming=upcoming,
        conditions={
            obj.ref: (
                ready,
                dataclasses.replace(ready, type="Reconciling", status="True"),
                dataclasses.replace(ready, type="Stalled", status="True" if obj.ref == HOST else "Unknown"),
            )
            for obj in wanted
        },
        drifts={(j.object, j.layer): Drifting(j.verdict.reason, AT - 600, "corrective") for j in drifted},
        pending=tuple(Pending(CONTAINER, "container.devices", each, f"waits for {each}") for each in WaitingFor)
        if CONTAINER in wanted
        else (),
        suspensions={HOST: Suspension(HOST, AT + 3600, "a fan is replaced", "ada", AT - 60)},
        backoff={CONTAINER: 80.0},
        last_success={obj.ref: AT - 86400 for obj in wanted},
        notes=("an earlier memory was kept aside",),
    )


def _with_servers(facts: HostFacts) -> HostFacts:
    """And a server in the container: it was asked, and its model is still on its way."""
    checks = (Check("arithmetic", Result.PASSED, "4", 0.4), Check("tool-call", Result.FAILED, "no", 1.2, "no-call"))
    figures = Figures(tokens_per_second=55.5, draft_acceptance=0.6)
    output = Output("u", "e", "p", "a", checks, figures, AT - 30, (("tool-call", "no-call", 3),))
    files = (ManifestFile("a.safetensors", 100), ManifestFile("b.safetensors", 200))
    model = Weights(
        "k" * 16, str(SERVER), "Qwen/Qwen3-8B", "0" * 40, "/models/q", files, (("a.safetensors", Found(100, 1)),), 50
    )
    units = observe.units(facts)
    assert units is not None
    job = Job("fetch-weights-qwen-1", str(SERVER), How.STALLED, name=f"weights-{'k' * 16}-129")
    return (
        facts.with_section("server.output", OutputFacts(((129, (Judged("qwen", output),)),)))
        .with_section("server.weights", AllWeights(((129, WeightsHere((model,))),)))
        .with_section(observe.WORLD, dataclasses.replace(units, jobs=(job,)))
    )


def to_be_rebooted(shown: Picture) -> Picture:
    """The same, and the host that answers has to be rebooted, and must not be."""
    block = Block(NoReboot.QUORUM, "its cluster would lose its quorum", "wait for the others")
    judged = tuple(
        dataclasses.replace(j, verdict=Drift("reboot-needed", "the new kernel is to run", block))
        if (j.object, j.layer) == (HOST, "host.access")
        else j
        for j in shown.upcoming.judged
    )
    return dataclasses.replace(shown, upcoming=dataclasses.replace(shown.upcoming, judged=judged))


def board(shown: Picture | None = None) -> Board:
    """A board with that picture on it, on which steps have ended."""
    made = Board(picture() if shown is None else shown)
    made.moved(AT)
    edit = StepKind("container.devices", "edit-config", "corrective", "worked")
    made.step_ended(edit, 0.4)
    made.step_ended(edit, 4000.0)
    made.step_ended(StepKind("container.power", "restart-container", "intentional", "failed"), 12.0)
    return made
