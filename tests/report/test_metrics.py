"""What the metrics page tells of a picture, and what it does not tell any more."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from controller.core.next_steps import Next
from controller.core.words import InSync, Skipped, Unseen
from controller.facts.words import HostFacts, Known, Unknown
from controller.layers.gpu_health.facts import GpuFacts
from controller.report.metrics import registry
from controller.run.picture import BUCKETS, Board, Durations, Picture, StepKind
from controller.spec.model import Lifecycle
from tests.report.pictures import AT, CONTAINER, GONE, HOST, SERVER, board, picture, specs, to_be_rebooted

# interface.md's table, without what only layers of servers can tell
TABLE: Mapping[str, set[str]] = {
    "reconcile_build_info": {"version"},
    "reconcile_object_info": {
        "kind",
        "name",
        "host",
        "container",
        "engine",
        "engine_version",
        "model",
        "revision",
        "mode",
    },
    "reconcile_object_condition": {"kind", "name", "type", "status", "reason"},
    "reconcile_object_suspended": {"kind", "name"},
    "reconcile_download_bytes": {"host", "model"},
    "reconcile_download_size_bytes": {"host", "model"},
    "reconcile_download_stalled": {"host", "model"},
    "reconcile_check_success": {"name", "check"},
    "reconcile_check_last_run_timestamp_seconds": {"name", "check"},
    "reconcile_check_duration_seconds": {"name", "check"},
    "reconcile_check_failures_total": {"name", "check", "reason"},
    "reconcile_server_tokens_per_second": {"name"},
    "reconcile_server_draft_acceptance_ratio": {"name"},
    "reconcile_drift": {"kind", "name", "layer"},
    "reconcile_drift_since_timestamp_seconds": {"kind", "name", "layer"},
    "reconcile_steps_pending": {"kind", "name", "layer", "waiting_for"},
    "reconcile_steps_total": {"layer", "action", "cause", "result"},
    "reconcile_step_duration_seconds_bucket": {"layer", "action", "le"},
    "reconcile_step_duration_seconds_sum": {"layer", "action"},
    "reconcile_step_duration_seconds_count": {"layer", "action"},
    "reconcile_loop_last_pass_timestamp_seconds": set(),
    "reconcile_observe_duration_seconds": {"host"},
    "reconcile_host_up": {"host"},
    "reconcile_host_last_seen_timestamp_seconds": {"host"},
    "reconcile_host_reboot_required": {"host"},
    "reconcile_last_success_timestamp_seconds": {"kind", "name"},
    "reconcile_backoff_seconds": {"kind", "name"},
    "reconcile_spec_errors": set(),
    "reconcile_spec_last_load_timestamp_seconds": set(),
    "reconcile_spec_info": {"commit"},
    "reconcile_driver_version_info": {"host", "scope", "version"},
    "reconcile_gpu_info": {"host", "pci", "uuid", "model", "owner", "driver"},
    "reconcile_gpu_healthy": {"host", "pci", "uuid", "model"},
    "reconcile_gpu_memory_used_bytes": {"host", "pci", "uuid", "model"},
    "reconcile_gpu_memory_total_bytes": {"host", "pci", "uuid", "model"},
    "reconcile_gpu_assignment_info": {"host", "pci", "container", "server"},
}


def samples(shown: Board) -> Iterator[Sample]:
    """Everything on the page, read back from its text; each series is there once."""
    text = generate_latest(registry(shown)).decode()
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    keys = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in found]
    assert len(keys) == len(set(keys))
    return iter(found)


def value(shown: Board, name: str, /, **labels: str) -> float | None:
    """The one series of that name that has these labels among its own; None when there is none."""
    found = [s.value for s in samples(shown) if s.name == f"reconcile_{name}" and labels.items() <= s.labels.items()]
    assert len(found) < 2, found
    return found[0] if found else None


@pytest.fixture(scope="module")
def whole() -> Board:
    return board()


def test_every_metric_of_the_table_is_there_with_its_labels(whole: Board) -> None:
    found: dict[str, set[str]] = {}
    for sample in samples(whole):
        labels = found.setdefault(sample.name, set(sample.labels))
        assert labels == set(sample.labels)
    assert found == TABLE


def test_what_is_told(whole: Board) -> None:
    assert value(whole, "drift", name="ct129", layer="container.devices") == 1
    assert value(whole, "drift", name="kpro5", layer="host.gpu-binding") == 0
    assert value(whole, "drift_since_timestamp_seconds", name="ct129", layer="container.devices") == AT - 600
    assert value(whole, "host_up", host="kpro5") == 1
    assert value(whole, "host_up", host="kpro4") == 0
    assert value(whole, "object_suspended", name="kpro5") == 1
    assert value(whole, "object_suspended", name="kpro4") == 0
    assert value(whole, "backoff_seconds", name="ct129") == 80
    assert value(whole, "spec_errors") == 1
    assert value(whole, "steps_total", action="edit-config", result="worked") == 2
    assert value(whole, "steps_pending", waiting_for="window") == 1
    info = next(s for s in samples(whole) if s.name == "reconcile_object_info" and s.labels["name"] == "qwen")
    assert info.labels["host"] == "kpro5"
    assert (info.labels["engine"], info.labels["engine_version"]) == ("sglang", "0.5.11")
    assert value(whole, "spec_info", commit="0123456789abcdef0123456789abcdef01234567-dirty") == 1


def test_of_the_three_statuses_of_a_condition_one_is_1(whole: Board) -> None:
    of_type: dict[str, dict[str, float]] = {}
    for sample in samples(whole):
        if sample.name == "reconcile_object_condition" and sample.labels["name"] == "ct129":
            of_type.setdefault(sample.labels["type"], {})[sample.labels["status"]] = sample.value
    assert of_type == {
        "Ready": {"True": 0, "False": 1, "Unknown": 0},
        "Reconciling": {"True": 1, "False": 0, "Unknown": 0},
        "Stalled": {"True": 0, "False": 0, "Unknown": 1},
    }


def test_what_was_not_observed_has_no_series(whole: Board) -> None:
    assert value(whole, "host_reboot_required", host="kpro5") == 0
    assert value(whole, "host_reboot_required", host="kpro4") is None
    assert not [s for s in samples(whole) if s.name == "reconcile_drift" and s.labels["name"] == GONE.name]
    assert not [s for s in samples(whole) if s.name.startswith("reconcile_gpu") and s.labels["host"] == "kpro4"]


@pytest.mark.parametrize(("lifecycle", "told"), [("active", 0), ("maintenance", None), ("decommissioned", None)])
def test_a_host_that_is_meant_to_be_away_is_not_down(lifecycle: str, told: float | None) -> None:
    shown = picture()
    hosts = {
        **shown.specs.hosts,
        "kpro4": shown.specs.hosts["kpro4"].model_copy(update={"lifecycle": Lifecycle(lifecycle)}),
    }
    away = dataclasses.replace(shown, specs=dataclasses.replace(shown.specs, hosts=hosts))
    assert value(Board(away), "host_up", host="kpro4") == told


def test_the_series_of_an_object_go_with_it(whole: Board) -> None:
    names = {s.labels.get("name") for s in samples(whole)}
    assert {CONTAINER.name, SERVER.name} <= names
    shown = Board(picture(specs(without_container=True)))
    left = list(samples(shown))
    assert not [s for s in left if {CONTAINER.name, SERVER.name} & set(s.labels.values())]
    assert [s for s in left if s.labels.get("name") == HOST.name]


def test_a_controller_that_has_just_started_tells_of_itself_alone() -> None:
    names = {s.name for s in samples(Board())}
    assert names == {"reconcile_build_info", "reconcile_spec_errors"}


def test_cards_and_who_has_them(whole: Board) -> None:
    cards = {s.labels["pci"]: s.labels for s in samples(whole) if s.name == "reconcile_gpu_info"}
    assert [cards[pci]["owner"] for pci in sorted(cards)] == ["vms", "containers", "containers"]
    assert [cards[pci]["driver"] for pci in sorted(cards)] == ["vfio-pci", "nvidia", "nvidia"]
    has = {
        s.labels["pci"]: (s.labels["container"], s.labels["server"])
        for s in samples(whole)
        if s.name == "reconcile_gpu_assignment_info"
    }
    assert has == {"0000:4f:00.0": ("ct129", "qwen"), "0000:ce:00.0": ("ct129", "")}
    assert value(whole, "gpu_memory_total_bytes", pci="0000:4f:00.0") == 48 * 1024**3


def changed(facts: GpuFacts, shown: Picture) -> Board:
    host = shown.facts["kpro5"].with_section("host.gpu-health", facts)
    return Board(dataclasses.replace(shown, facts={**shown.facts, "kpro5": host}))


def gpu_facts(shown: Picture) -> GpuFacts:
    section = shown.facts["kpro5"].section("host.gpu-health")
    assert isinstance(section, Known)
    assert isinstance(section.value, GpuFacts)
    return section.value


def test_a_card_that_is_gone_is_not_healthy() -> None:
    shown = picture()
    facts = gpu_facts(shown)
    without = dataclasses.replace(
        facts,
        functions=tuple(f for f in facts.functions if f.pci != "0000:ce:00.0"),
        gpus=tuple(g for g in facts.gpus if g.pci != "0000:ce:00.0"),
        smi=tuple(s for s in facts.smi if s.pci != "0000:ce:00.0"),
    )
    told = changed(without, shown)
    assert value(told, "gpu_healthy", pci="0000:ce:00.0") == 0
    assert value(told, "gpu_healthy", pci="0000:4f:00.0") == 1
    assert value(told, "gpu_info", pci="0000:ce:00.0") is None
    assert value(told, "gpu_memory_used_bytes", pci="0000:ce:00.0") is None


def test_a_card_that_does_not_tell_its_memory_has_none() -> None:
    shown = picture()
    facts = gpu_facts(shown)
    told = changed(
        dataclasses.replace(facts, smi=tuple(dataclasses.replace(s, memory_total=0) for s in facts.smi)), shown
    )
    assert value(told, "gpu_memory_total_bytes", pci="0000:4f:00.0") is None
    assert value(told, "gpu_healthy", pci="0000:4f:00.0") == 1


def test_what_a_host_says_cannot_spoil_the_page() -> None:
    shown = picture()
    facts = gpu_facts(shown)
    odd = 'A6000\udcff"\n\\} 1\nreconcile_host_up{host="x"} 1'
    twice = tuple(dataclasses.replace(s, name=odd) for s in (*facts.smi, *facts.smi))
    told = changed(dataclasses.replace(facts, smi=twice), shown)
    assert value(told, "host_up", host="x") is None
    assert value(told, "gpu_healthy", pci="0000:4f:00.0") == 0  # it is not the model that the spec says


def test_one_host_that_is_not_understood_keeps_nothing_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    shown = picture()
    wrong = HostFacts("kpro4", {"host.gpu-health": Known("no such facts")})
    told = Board(dataclasses.replace(shown, facts={**shown.facts, "kpro4": wrong}))
    assert value(told, "gpu_healthy", pci="0000:4f:00.0") == 1
    assert "cannot tell the metrics of kpro4" in caplog.text


def test_versions_of_one_scope_do_not_rest_on_another() -> None:
    shown = picture()
    sections = {**shown.facts["kpro5"].sections, "host.driver": Unknown("garbage", "")}
    told = Board(dataclasses.replace(shown, facts={"kpro5": HostFacts("kpro5", sections)}))
    assert value(told, "driver_version_info", scope="module") == 1
    assert value(told, "driver_version_info", scope="host") is None


def test_a_host_that_has_to_be_rebooted_says_so() -> None:
    assert value(Board(to_be_rebooted(picture())), "host_reboot_required", host="kpro5") == 1


def test_no_drift_is_told_of_a_layer_that_was_not_judged() -> None:
    shown = picture()
    for verdict, told in ((InSync(), 0), (Skipped("no"), None), (Unseen("hung", "it hangs"), None)):
        judged = tuple(
            dataclasses.replace(j, verdict=verdict) for j in shown.upcoming.judged if j.layer == "container.devices"
        )
        one = Board(dataclasses.replace(shown, upcoming=Next(judged, (), (), (), ())))
        assert value(one, "drift", layer="container.devices") == told
        assert value(one, "drift_since_timestamp_seconds", layer="container.devices") is None


def test_durations_are_counted_as_prometheus_counts_them() -> None:
    rng = random.Random(7)
    taken = [rng.choice([*BUCKETS, rng.uniform(0, 5000)]) for _ in range(500)]
    shown = Board()
    for seconds in taken:
        shown.step_ended(StepKind("container.power", "start", "corrective", "worked"), seconds)
    for bound in BUCKETS:
        reached = value(shown, "step_duration_seconds_bucket", le=str(bound))
        assert reached == sum(seconds <= bound for seconds in taken)
    assert value(shown, "step_duration_seconds_count") == len(taken)
    assert value(shown, "step_duration_seconds_sum") == pytest.approx(sum(taken))
    assert Durations().sum == 0


def test_a_loop_that_stands_still_is_seen_by_a_clock_that_nobody_sets() -> None:
    now = 100.0
    shown = Board(clock=lambda: now)
    shown.moved(AT)
    now = 161.0
    assert shown.stands_still == 61.0
    shown.moved(AT - 86400)  # somebody has set the date back
    assert shown.stands_still == 0.0
    assert shown.last_pass == AT - 86400


def test_what_servers_know(whole: Board) -> None:
    found = {(s.name, *sorted(s.labels.items())): s.value for s in samples(whole)}
    of_qwen = ("name", "qwen")
    assert found["reconcile_check_success", ("check", "arithmetic"), of_qwen] == 1
    assert found["reconcile_check_success", ("check", "tool-call"), of_qwen] == 0
    assert found["reconcile_check_failures_total", ("check", "tool-call"), of_qwen, ("reason", "no-call")] == 3
    assert found["reconcile_server_tokens_per_second", of_qwen] == 55.5
    model = (("host", "kpro5"), ("model", "Qwen/Qwen3-8B"))
    assert found["reconcile_download_bytes", *model] == 150
    assert found["reconcile_download_size_bytes", *model] == 300
    assert found["reconcile_download_stalled", *model] == 1
