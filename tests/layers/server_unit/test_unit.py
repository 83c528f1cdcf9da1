"""What a unit is to mean, how it differs from that, and writing it in the simulated fleet."""

from __future__ import annotations

import json

import pytest

from controller.core.words import Block, InSync, Step, Unseen
from controller.layers.server_unit.reasons import Reason
from controller.spec.model import Unreadable
from tests.layers.servers import COMMIT, Rig, document

HERE = "/opt/reconcile/server/qwen"
UNIT = "/etc/systemd/system/reconcile-qwen.service"
SECRET = {"serve": "{port: 30000, api_key: {secret: key}, env: {EXTRA: {secret: key}}}"}


def test_from_nothing_it_is_written_started_and_then_left_alone() -> None:
    rig = Rig()
    foretold = [each.step.action for each in rig.plan().steps]
    assert foretold == ["install-unit", "start-server"]
    assert rig.actions() == foretold
    assert rig.actions() == []
    arguments = json.loads(rig.image(129).files[f"{HERE}/args.json"].text)
    (process,) = rig.processes(129)
    assert process.argv == arguments["argv"]
    assert process.gpus == [f.gpu.uuid for _, f in sorted(rig.kpro5.functions.items()) if f.gpu is not None]
    assert arguments["model_dir"] == f"/models/Qwen--Qwen3.6-27B/{COMMIT}"
    assert "--tp-size" in process.argv or "--tensor-parallel-size" in process.argv


def test_on_a_plain_host() -> None:
    rig = Rig(document("embedder", "host: box1"))
    assert rig.actions() == ["install-unit", "start-server"]
    assert [process.unit for process in rig.processes(None)] == ["reconcile-embedder.service"]
    assert rig.actions() == []


def test_two_servers_in_one_container_with_a_card_each() -> None:
    one = document("one", gpus="[0]")
    two = document("two", gpus="[1]", serve="{port: 30001}")
    rig = Rig(one, two)
    assert rig.actions() == ["install-unit", "start-server"] * 2
    cards = [f.gpu.uuid for _, f in sorted(rig.kpro5.functions.items()) if f.gpu is not None]
    assert {process.unit: process.gpus for process in rig.processes(129)} == {
        "reconcile-one.service": [cards[0]],
        "reconcile-two.service": [cards[1]],
    }


def test_an_edited_line_is_written_and_then_started_anew() -> None:
    rig = Rig()
    rig.actions()
    began = rig.processes(129)[0].started
    rig.want(document(serve="{port: 30000, flags: {context-length: 131072}}"))
    assert rig.drift("server.unit").reason == Reason.OTHER_MEANING
    assert "131072" in rig.drift("server.unit").evidence["argv"]
    rig.perform(rig.step("server.unit"))
    assert rig.processes(129)[0].started == began  # what runs goes on as it is
    assert rig.actions() == ["restart-server"]
    assert rig.processes(129)[0].started > began


def test_a_field_that_changes_nothing_of_what_runs_changes_nothing() -> None:
    rig = Rig()
    rig.actions()
    rig.want(document(checks="{min_context: 1000}", engine="{name: sglang, version: 0.5.11, wheels: [/srv/wheels]}"))
    assert rig.actions() == []


def test_a_longer_startup_budget_is_written_and_starts_nothing() -> None:
    rig = Rig()
    rig.actions()
    before = rig.image(129).files[UNIT].text
    rig.want(document(checks="{startup_budget: 1h}"))
    assert rig.actions() == ["install-unit"]
    assert rig.image(129).files[UNIT].text != before
    assert rig.actions() == []


def test_another_way_to_write_the_same_changes_nothing() -> None:
    rig = Rig(document(serve="{port: 30000, flags: {context-length: 1000}}"))
    rig.actions()
    rig.want(document(serve="{port: 30000, flags: {context-len: 1000}}"))
    assert rig.actions() == []
    found = rig.verdict("server.unit")
    assert isinstance(found, InSync)
    assert "context-length" in found.note  # an abbreviation, which a later version may refuse


def test_what_a_release_makes_of_the_same_spec_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgraded controller that would write other arguments for the same spec starts nothing anew."""
    rig = Rig()
    rig.actions()
    from controller.engines import sglang

    real = sglang.Sglang.command

    def other(self, server, place, flags):  # type: ignore[no-untyped-def]
        made = real(self, server, place, flags)
        return type(made)((*made.argv, "--enable-metrics-of-tomorrow"), made.environment)

    monkeypatch.setattr(sglang.Sglang, "command", other)
    assert rig.actions() == []


@pytest.mark.parametrize("spoil", ["edit", "remove-unit", "remove-marker", "remove-note", "garbage"])
def test_what_somebody_did_to_it_is_put_right(spoil: str) -> None:
    rig = Rig()
    rig.actions()
    began = rig.processes(129)[0].started
    files = rig.image(129).files
    with rig.world.change("kpro5"):
        match spoil:
            case "edit":
                files[UNIT].text += "# mine\n"
            case "remove-unit":
                del files[UNIT]
            case "remove-marker":
                del files[f"{HERE}/marker.json"]
            case "remove-note":
                del files[f"{HERE}/note.sh"]
            case "garbage":
                files[f"{HERE}/marker.json"].text = "{"
    assert rig.drift("server.unit").reason == Reason.EDITED
    assert rig.actions() == ["install-unit"]
    assert rig.processes(129)[0].started == began


def test_secrets_are_written_where_nobody_else_reads_and_shown_nowhere() -> None:
    rig = Rig(document(**SECRET), secrets={"key": 's3cret $x "y" `z` \\'})
    step = rig.step("server.unit")
    shown = f"{step!r} {step.summary} {step.args} {step.diff} {step.script.text} {rig.drift('server.unit')!r}"
    assert "s3cret" not in shown
    assert b"s3cret" in step.stdin
    assert rig.actions() == ["install-unit", "start-server"]
    files = rig.image(129).files
    holding = {path for path, file in files.items() if "s3cret" in file.text}
    assert holding == {f"{HERE}/secrets.env", f"{HERE}/config.yaml"}
    assert all(files[path].mode == 0o600 for path in (*holding, f"{HERE}/salt"))
    assert "s3cret" not in " ".join(rig.processes(129)[0].argv)
    assert rig.actions() == []


def test_a_changed_secret_is_seen_by_its_digest_and_brought_in() -> None:
    rig = Rig(document(**SECRET), secrets={"key": "old"})
    rig.actions()
    salt = rig.image(129).files[f"{HERE}/salt"].text
    rig.secrets["key"] = "new"
    rig.want(document(**SECRET))
    assert rig.drift("server.unit").reason == Reason.OTHER_SECRETS
    assert rig.actions() == ["install-unit", "restart-server"]
    assert rig.image(129).files[f"{HERE}/salt"].text == salt
    assert rig.actions() == []


def test_a_secret_that_cannot_be_read_is_not_known() -> None:
    rig = Rig(document(**SECRET), secrets={"key": "old"})
    rig.actions()
    rig.secrets["key"] = Unreadable("cannot read the secret key: no such file")  # type: ignore[assignment]
    rig.want(document(**SECRET))
    found = rig.verdict("server.unit")
    assert isinstance(found, Unseen)
    assert found.reason == "secret-unreadable"
    assert rig.once().ended == []


def test_an_unknown_flag_is_refused_while_the_old_server_goes_on() -> None:
    rig = Rig()
    rig.actions()
    began = rig.processes(129)[0].started
    rig.want(document(serve="{port: 30000, flags: {context-length: 1000, mem-fraction-statik: 0.8}}"))
    found = rig.drift("server.unit")
    assert found.reason == Reason.UNKNOWN_FLAG
    assert isinstance(found.remedy, Block)
    assert "mem-fraction-static" in found.remedy.needs
    assert rig.once().ended == []
    assert rig.processes(129)[0].started == began


def test_a_unit_that_somebody_made_by_hand_is_taken_over_with_permission_only() -> None:
    rig = Rig()
    rig.look()
    rig.image(129).files[UNIT] = type(rig.kpro5.files["/etc/modules-load.d/nvidia.conf"])("[Service]\nExecStart=/x\n")
    rig.fleet.touch(rig.kpro5)
    step = rig.step("server.unit")
    assert step.reason == Reason.NOT_OURS
    assert [str(each) for each in step.disrupts] == ["adopt:ModelServer/qwen"]
    assert rig.once().ended == []


def test_the_last_good_one_in_place_of_a_failed_one_is_as_wanted() -> None:
    rig = Rig()
    rig.actions()
    files = rig.image(129).files
    good = {path: file.text for path, file in files.items() if path.startswith((HERE, UNIT))}
    rig.want(document(serve="{port: 30000, flags: {context-length: 1000}}"))
    rig.actions()
    failed = json.loads(files[f"{HERE}/marker.json"].text)["digest"]
    with rig.world.change("kpro5"):
        for path, text in good.items():
            files[path].text = text
        marker = json.loads(good[f"{HERE}/marker.json"])
        files[f"{HERE}/marker.json"].text = json.dumps({**marker, "instead_of": failed})
    assert isinstance(rig.verdict("server.unit"), InSync)
    rig.want(document(serve="{port: 30000, flags: {context-length: 2000}}"))
    assert isinstance(rig.drift("server.unit").remedy, Step)


def test_a_unit_of_a_newer_release_is_left_alone() -> None:
    rig = Rig()
    rig.actions()
    file = rig.image(129).files[f"{HERE}/marker.json"]
    with rig.world.change("kpro5"):
        file.text = json.dumps({**json.loads(file.text), "schema": 2, "asked": "other", "digest": "d"})
    found = rig.drift("server.unit")
    assert found.reason == Reason.NEWER_SCHEMA
    assert isinstance(found.remedy, Block)
