"""server.fit: what is foretold from specs, cards and what the Hub says, in a simulated fleet."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from controller.core import conditions
from controller.core.next_steps import next_steps
from controller.core.view import View
from controller.core.words import Block, Drift, InSync, Skipped, Unseen, Verdict
from controller.layers import server_fit
from controller.layers.order import ORDER
from controller.layers.server_fit.reasons import Reason
from controller.layers.server_weights.facts import AllWeights, Weights, WeightsHere
from controller.layers.shared.hub_truth import described
from controller.layers.shared.truth import Fleet, Model, WeightFile
from controller.report.fit import fit_report, fit_text
from controller.run.eyes import Eyes
from controller.spec.ref import Ref
from controller.world.sim import SimWorld
from controller.world.sim import file as simfile
from controller.world.sim.snapshot import snapshot
from tests.layers.servers import COMMIT, FLEET, document, specs
from tests.plugins import configs
from tests.plugins.servers import QWEN_27B
from tests.sim.fleets import fleet

REPO = "Qwen/Qwen3.6-27B"
STORY = (
    "{port: 30000, flags: {context-length: 262144, speculative-algorithm: NEXTN, speculative-num-steps: 3, "
    "speculative-eagle-topk: 1, speculative-num-draft-tokens: 4, mamba-scheduler-strategy: extra_buffer, "
    "max-running-requests: 6}}"
)


def hub_model(repo: str = REPO, config: dict[str, Any] | None = None, weights: int = QWEN_27B) -> Model:
    """A model as the Hub has it: a config, an index, and shards."""
    texts = {
        "config.json": json.dumps(configs.qwen_27b() if config is None else config),
        "model.safetensors.index.json": json.dumps({"metadata": {"total_size": weights}}),
    }
    return Model(repo, COMMIT, {"model-1.safetensors": WeightFile(weights, weights)}, texts)


def seen(*documents: str, of: Fleet | None = None, **models: Model) -> View:
    """What is known of the fleet, with a model on its Hub unless others are given."""
    truth = of or fleet(FLEET)
    for model in models.values() or [hub_model()]:
        truth.hub.setdefault(f"{model.repo}@{model.revision}", model)
    wanted = specs(*documents)
    eyes = Eyes(SimWorld(truth), ORDER, wanted)
    eyes.look(wanted.hosts)
    return View(wanted, eyes.facts)


def check(view: View, name: str = "qwen") -> Verdict:
    return server_fit.check(view, view.specs.servers[name])


def drift(view: View) -> Drift:
    found = check(view)
    assert isinstance(found, Drift), found
    return found


def block(view: View) -> Block:
    found = drift(view).remedy
    assert isinstance(found, Block), found
    return found


def test_the_storys_server_starts_with_less_than_its_context_and_nothing_waits_for_that() -> None:
    view = seen(document(serve=STORY))
    found = check(view)
    assert isinstance(found, InSync)
    assert "less than one request of 262,144" in found.note


def test_too_little_for_min_context_is_told_and_holds_up_nothing() -> None:
    view = seen(document(serve=STORY, checks="{min_context: 131072}"))
    found = drift(view)
    assert found.reason == Reason.CONTEXT_BELOW_MINIMUM
    assert not block(view).holds
    assert "131,072" in found.message
    assert found.evidence["weights"]
    after = next_steps(ORDER, view)
    placed = {j.layer: j for j in after.judged if j.object == Ref("ModelServer", "qwen")}
    assert placed["server.fit"].verdict == found
    held = [j.layer for j in placed.values() if j.held.startswith("server.fit")]
    assert held == []


def test_a_shortcoming_that_is_only_told_does_not_hide_what_is_at_work() -> None:
    ref = Ref("ModelServer", "qwen")
    view = seen(document(serve=STORY, checks="{min_context: 131072}"))
    ready = conditions.of_object(ref, next_steps(ORDER, view), {}, {})[0]
    assert ready.reason != Reason.CONTEXT_BELOW_MINIMUM
    alone = dataclasses.replace(
        next_steps(ORDER, view),
        judged=tuple(j for j in next_steps(ORDER, view).judged if j.layer == "server.fit"),
    )
    told = {each.type: each for each in conditions.of_object(ref, alone, {}, {})}
    assert (told[conditions.Type.READY].status, told[conditions.Type.READY].reason) == (
        "False",
        Reason.CONTEXT_BELOW_MINIMUM,
    )
    assert told[conditions.Type.STALLED].status == "True"


def test_vllm_that_would_refuse_is_blocked_with_a_way_out() -> None:
    serve = "{port: 30000, flags: {max-model-len: 262144, gpu-memory-utilization: 0.7}}"
    view = seen(document(engine="{name: vllm, version: 0.33.0}", serve=serve))
    assert drift(view).reason == Reason.CONTEXT_TOO_LONG
    assert block(view).holds
    assert "max-model-len" in block(view).needs
    assert "reconcile fit qwen" in block(view).needs


def test_a_model_that_is_too_big_is_blocked() -> None:
    view = seen(document(place="host: box1"))
    assert drift(view).reason == Reason.NO_CACHE_MEMORY


def test_heads_that_do_not_divide_are_blocked() -> None:
    config = {**configs.qwen3_32b(), "num_attention_heads": 3, "num_key_value_heads": 3}
    view = seen(document(), model=hub_model(config=config, weights=1 << 30))
    assert drift(view).reason == Reason.HEADS_NOT_DIVISIBLE


def test_what_is_known_bad_is_blocked_unless_the_spec_says_otherwise() -> None:
    view = seen(document(engine="{name: sglang, version: 0.5.9}"))
    found = drift(view)
    assert found.reason == Reason.KNOWN_BAD
    assert "sglang#19070" in found.evidence["source"]
    assert "0.5.10" in block(view).needs
    allowed = seen(document(engine="{name: sglang, version: 0.5.9, allow_known_bad: true}"))
    assert isinstance(check(allowed), InSync)


def test_a_model_by_another_name_is_known_bad_by_its_config() -> None:
    model = f"{{repo: me/tuned, revision: {COMMIT}, directory: /models}}"
    view = seen(document(engine="{name: sglang, version: 0.5.9}", model=model), model=hub_model("me/tuned"))
    assert drift(view).reason == Reason.KNOWN_BAD


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (f"{{repo: Qwen/Nothing, revision: {COMMIT}, directory: /models}}", Reason.MODEL_NOT_FOUND),
        (f"{{repo: {REPO}, revision: {'1' * 40}, directory: /models}}", Reason.REVISION_NOT_FOUND),
    ],
)
def test_a_model_that_is_not_there_is_blocked(model: str, reason: Reason) -> None:
    view = seen(document(model=model))
    assert drift(view).reason == reason
    assert block(view).needs


def test_a_hub_that_cannot_be_asked_is_unknown_and_holds_up_no_server_whose_weights_are_there() -> None:
    truth = fleet(FLEET)
    truth.hub_trouble = "no route to host"
    view = seen(document(), of=truth)
    found = check(view)
    assert isinstance(found, Unseen)
    assert found.reason == "hub-unreachable"
    here = WeightsHere((Weights("k", "ModelServer/qwen", REPO, COMMIT, f"/models/{COMMIT}"),))
    facts = view.facts["kpro5"].with_section("server.weights", AllWeights(((129, here),)))
    found = check(View(view.specs, {**view.facts, "kpro5": facts}))
    assert isinstance(found, InSync)
    assert "cannot be foretold" in found.note


def test_what_cannot_be_foretold_is_said_and_holds_up_nothing() -> None:
    config = {**configs.qwen3_32b(), "hybrid_override_pattern": "M-M"}
    found = check(seen(document(), model=hub_model(config=config)))
    assert isinstance(found, InSync)
    assert "hybrid_override_pattern" in found.note


def test_gpus_that_are_not_there() -> None:
    view = seen(document(gpus='["0000:99:00.0"]'))
    assert drift(view).reason == Reason.NO_GPU


def test_an_engine_that_nobody_knows() -> None:
    view = seen(document(engine="{name: sglnag, version: 0.5.11}"))
    assert drift(view).reason == Reason.UNKNOWN_ENGINE
    assert "sglang" in drift(view).message


def test_what_is_not_looked_after() -> None:
    assert isinstance(check(seen(document(state="absent"))), Skipped)
    assert isinstance(check(seen(document(engine="external", serve="{port: 30000}"))), Skipped)


def test_a_draft_model_is_asked_for_and_counts() -> None:
    draft = f"{{repo: {REPO}, revision: {COMMIT}, directory: /models, draft: {{repo: q/d, revision: {COMMIT}}}}}"
    engine = "{name: vllm, version: 0.33.0}"
    assert drift(seen(document(engine=engine, model=draft))).reason == Reason.MODEL_NOT_FOUND
    serve = "{port: 1, flags: {max-model-len: 8192, speculative-config: {num_speculative_tokens: 3}}}"
    both = {"main": hub_model(), "small": hub_model("q/d", configs.tiny(), 30 << 30)}
    view = seen(document(engine=engine, model=draft, serve=serve), **both)
    assert fit_report(view, view.specs.servers["qwen"]).weight_bytes == (QWEN_27B + (30 << 30)) // 2


# What reconcile fit prints


def test_the_report_is_a_sum_that_adds_up() -> None:
    view = seen(document(serve=STORY, checks="{min_context: 131072}"))
    report = fit_report(view, view.specs.servers["qwen"])
    assert report.outcome == "short"
    *parts, pool = [line.bytes for line in report.lines if line.bytes is not None]
    assert sum(parts) == pool
    assert (report.kv_bytes_per_token, report.state_bytes_per_request) == (32768, 76972032)
    assert report.pool_tokens == pool // 32768
    printed = fit_text(report)
    assert "32,768 bytes" in printed
    assert "too few for min_context: 131,072" in printed
    assert "RTX A6000" in printed


def test_the_report_says_why_there_is_no_sum() -> None:
    truth = fleet(FLEET)
    truth.hub_trouble = "no route to host"
    view = seen(document(), of=truth)
    report = fit_report(view, view.specs.servers["qwen"])
    assert report.outcome == "unknown"
    assert "no route to host" in report.message
    assert "no route to host" in fit_text(report)


def test_a_snapshot_has_the_models_that_the_hub_told_of() -> None:
    view = seen(document(serve=STORY))
    taken = simfile.load(snapshot(view.facts, view.specs), "taken.sim.yaml")
    wanted = view.specs.servers["qwen"]
    again = described(taken, REPO, COMMIT)
    assert again == view.facts["kpro5"].section("hub").value.of(REPO, COMMIT)  # type: ignore[union-attr,attr-defined]
    eyes = Eyes(SimWorld(taken), ORDER, view.specs)
    eyes.look(view.specs.hosts)
    assert fit_report(View(view.specs, eyes.facts), wanted) == fit_report(view, wanted)


def test_what_there_is_to_know_of_a_server_that_is_right_is_said() -> None:
    ref = Ref("ModelServer", "qwen")
    following = next_steps(ORDER, seen(document(serve=STORY)))
    alone = dataclasses.replace(following, judged=tuple(j for j in following.judged if j.layer == "server.fit"))
    ready = conditions.of_object(ref, alone, {}, {})[0]
    assert ready.status == "True"
    assert "less than one request of 262,144" in ready.message
