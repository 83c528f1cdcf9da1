"""The loop's decisions, in simulated time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from datetime import timedelta

import pytest

from controller.core.permissions import Approval
from controller.core.suspension import Suspension
from controller.core.words import Gate
from controller.layers.shared.truth import Fleet
from controller.run.loop import BACKOFF, PERIOD
from controller.run.memory import Event, Kind
from controller.run.picture import WaitingFor
from controller.run.state import NoState
from controller.spec.load import read
from controller.spec.policy import Permission
from controller.spec.ref import Ref
from controller.world.sim.faults import Fault, Moment, Name
from tests.run.test_reboot import layers as wants_reboot
from tests.sim import loops
from tests.sim.controllers import SPECS
from tests.sim.fleets import demo
from tests.sim.fleets import fleet as fleet_of
from tests.sim.loops import Player

CT = Ref("Container", "ct129")


def demo_texts(**changed: str) -> dict[str, bytes]:
    texts = {f.name: f.read_bytes() for f in SPECS.glob("*.yaml") if not f.name.endswith(".sim.yaml")}
    return texts | {name.replace("_", "."): text.encode() for name, text in changed.items()}


@pytest.fixture
def fleet() -> Fleet:
    return demo()


@pytest.fixture
def player(fleet: Fleet, tmp_path) -> Player:
    return Player(fleet, tmp_path / "state", demo_texts())


def events(player: Player, kind: str = Kind.STEP_ENDED) -> list[tuple[str, str]]:
    return [(event.action, str(event.result)) for event in player.memory.events(kind=kind)]


def cannot_start(player: Player) -> None:
    """The container is stopped, and cannot be started any more."""
    player.fleet.hosts["kpro5"].start_failure = "no"
    player.world.inject(Fault(Name.CT_STOP, "kpro5", guest=129))


def play_failing(player: Player, seconds: float, until=lambda: False) -> bool:
    """As ``play``, with every start failing."""

    def met() -> bool:
        player.fleet.hosts["kpro5"].start_failure = "no"
        return until()

    return player.play(seconds, met)


def ready(player: Player):
    return lambda: player.condition("Container/ct129") == "True"


def test_it_puts_right_what_differs_and_then_only_looks(player):
    assert player.play(60, ready(player))
    assert events(player) == [("edit-config", "worked"), ("restart", "worked")]
    player.play(3600)
    assert events(player) == [("edit-config", "worked"), ("restart", "worked")]
    assert player.loop.picture().drifts == {}
    assert player.memory.history(CT)[0].outcome == "reached"


def test_every_host_is_looked_at_on_a_period_of_its_own(player, monkeypatch):
    looks = Counter()
    observe = player.world.observe
    monkeypatch.setattr(
        player.world, "observe", lambda asked: looks.update(look.host for look in asked) or observe(asked)
    )
    player.play(60, ready(player))
    looks.clear()
    player.play(100 * PERIOD)
    assert all(85 <= looks[host] <= 125 for host in player.loop.specs.hosts)


def test_what_the_world_changes_is_put_right_and_told_apart_from_what_the_spec_changed(player):
    player.play(60, ready(player))
    player.world.inject(Fault(Name.CT_STOP, "kpro5", guest=129))
    assert player.play(60, lambda: player.condition("Container/ct129") == "False")
    assert player.play(60, ready(player))
    last = player.memory.events(kind=Kind.STEP_ENDED)[-1]
    assert (last.action, last.cause) == ("start", "corrective")
    player.save(demo_texts(ct129_yaml=(SPECS / "ct129.yaml").read_text().replace("state: running", "state: stopped")))
    assert player.play(60, lambda: player.memory.events(kind=Kind.STEP_ENDED)[-1].action == "stop")
    last = player.memory.events(kind=Kind.STEP_ENDED)[-1]
    assert (last.action, last.cause) == ("stop", "intentional")


def test_a_step_that_fails_is_tried_again_later_and_later_also_after_a_restart(player):
    player.play(60, ready(player))
    cannot_start(player)
    assert play_failing(player, 120, lambda: ("start", "failed") in events(player))
    first = player.memory.backoffs()[CT, "container.power", "start"]
    assert first.tries == 1
    player.kill()
    player.start()
    assert player.memory.backoffs()[CT, "container.power", "start"] == first
    assert play_failing(player, 120, lambda: events(player).count(("start", "failed")) == 2)
    assert player.memory.backoffs()[CT, "container.power", "start"].tries == 2
    *_, earlier, _ = player.memory.events(kind=Kind.STEP_ENDED)
    assert player.memory.events(kind=Kind.STEP_STARTED)[-1].at >= earlier.at + BACKOFF[0]
    assert player.condition("Container/ct129", "Stalled") == "True"


def test_a_breaker_stops_what_disrupts_and_does_not_help_until_somebody_says_go_on(player):
    player.play(60, ready(player))
    cannot_start(player)
    play_failing(player, 3000)
    assert events(player).count(("start", "failed")) == 3
    assert [p.waiting_for for p in player.loop.picture().pending] == [WaitingFor.BLOCKED]
    [stalled] = [c for c in player.loop.picture().conditions[CT] if c.type == "Stalled"]
    assert (stalled.status, stalled.reason) == ("True", "breaker-open")
    assert "reconcile resume Container/ct129" in stalled.message
    assert len(player.memory.events(kind=Kind.BREAKER)) == 1
    player.kill()
    player.start()
    play_failing(player, 120)
    assert events(player).count(("start", "failed")) == 3, "a restart does not close it"
    resume(player)
    assert play_failing(player, 15, lambda: events(player).count(("start", "failed")) == 4), (
        "at once, not after backoff"
    )
    player.kill()
    player.start()
    assert player.memory.backoffs()[CT, "container.power", "start"].tries == 1
    player.fleet.hosts["kpro5"].start_failure = ""
    assert player.play(60, ready(player))


UNPERMITTED = (SPECS / "ct129.yaml").read_text().replace(", edit-container-config", "")


def approve(player: Player) -> None:
    """As the command does: what the container's config needs."""
    [step] = [s for s in player.loop.picture().upcoming.ready if s.action == "edit-config"]
    digest = player.loop.specs.digest_of(CT)
    what = (step.layer, step.action, step.reason, digest)
    player.memory.approve(
        Approval(
            "a1", Permission.EDIT_CONTAINER_CONFIG, CT, CT, *what, None, "", "me", player.moment.unix, step.summary
        )
    )
    player.loop.reconsider(player.moment)


def decided(player: Player) -> list[str]:
    return [event.action for event in player.memory.events(kind=Kind.APPROVAL)]


@pytest.fixture
def unpermitted(fleet: Fleet, tmp_path) -> Player:
    """It may restart the container, and not edit its config."""
    return Player(fleet, tmp_path / "state", demo_texts(ct129_yaml=UNPERMITTED))


def test_an_approval_is_used_by_its_step_and_does_not_lapse_meanwhile(unpermitted):
    player = unpermitted
    player.play(60, ready(player))
    assert events(player) == []
    approve(player)
    assert player.play(60, ready(player))
    assert ("edit-config", "worked") in events(player)
    player.play(60)
    assert decided(player) == ["use"]


@pytest.mark.parametrize("when", [Moment.DURING, Moment.AFTER])
def test_an_approval_is_used_by_a_step_that_ended_while_the_controller_was_away(unpermitted, when):
    player = unpermitted
    player.play(60, lambda: bool(player.loop.picture().pending))
    approve(player)
    player.world.inject(Fault(Name.KILLED, "kpro5", when=when, action="edit-config"))
    assert player.play(120, ready(player))
    player.play(60)
    assert decided(player) == ["use"]


def resume(player: Player) -> None:
    """As the command does."""
    at = player.moment.unix
    player.memory.event(Event(f"{CT}:resume:{at}", at, Kind.SUSPENSION, CT, action="resume", message="go on"))
    player.loop.reconsider(player.moment)


def test_a_spec_that_came_after_a_resume_counts_from_its_own_time(player):
    player.play(60, ready(player))
    cannot_start(player)
    resume(player)
    play_failing(player, 3000)
    assert len(player.memory.events(kind=Kind.BREAKER)) == 1
    text = player.texts["ct129.yaml"].decode()
    player.save(
        {**player.texts, "ct129.yaml": text.replace("restart-container,", "restart-container, prune,").encode()}
    )
    player.loop.reconsider(player.moment)
    assert play_failing(player, 15, lambda: events(player).count(("start", "failed")) == 4)


def test_nothing_is_done_to_what_a_broken_file_defined_and_the_rest_goes_on(player):
    player.play(60, ready(player))
    player.save(demo_texts(ct129_yaml="kind: Container\nname: ct129\nid: x\n"))
    player.world.inject(Fault(Name.CT_STOP, "kpro5", guest=129))
    player.play(300)
    assert events(player)[-1] == ("restart", "worked")
    assert player.loop.picture().spec_errors
    [stalled] = [c for c in player.loop.picture().conditions[CT] if c.type == "Stalled"]
    assert (stalled.status, stalled.reason) == ("True", "spec-errors")
    player.kill()
    player.start()
    player.play(300)
    assert events(player)[-1] == ("restart", "worked"), "not after a restart either"
    player.save(demo_texts())
    assert player.play(60, ready(player))


def test_a_suspended_object_is_left_alone_until_it_is_resumed(player):
    player.play(60, ready(player))
    player.memory.suspend(Suspension(CT, None, "I am at it", "me", player.moment.unix))
    player.loop.reconsider(player.moment)
    player.world.inject(Fault(Name.CT_STOP, "kpro5", guest=129))
    player.play(300)
    assert player.condition("Container/ct129") == "False"
    assert player.condition("Container/ct129", "Suspended") == "True"
    player.memory.resume(CT)
    player.loop.reconsider(player.moment)
    assert player.play(60, ready(player))


def test_a_host_that_does_not_answer_holds_up_no_other(player):
    player.world.inject(Fault(Name.UNREACHABLE, "kpro4"))
    assert player.play(60, ready(player))
    assert player.condition("Host/kpro4") == "Unknown"


@pytest.mark.parametrize("action", ["edit-config", "restart"])
@pytest.mark.parametrize("when", [Moment.BEFORE, Moment.DURING, Moment.AFTER])
def test_killed_at_a_step_it_goes_on_and_no_event_is_lost_or_there_twice(player, action, when):
    player.world.inject(Fault(Name.KILLED, "kpro5", when=when, action=action))
    assert player.play(600, ready(player))
    started, ended = player.memory.events(kind=Kind.STEP_STARTED), player.memory.events(kind=Kind.STEP_ENDED)
    assert sorted(e.key.removesuffix(":started") for e in started) == sorted(
        e.key.removesuffix(":ended") for e in ended
    )
    assert {e.action for e in ended if e.result == "worked"} == {"edit-config", "restart"}


def test_conditions_keep_their_time_over_a_restart(player):
    player.play(60, ready(player))
    player.play(500)
    since = [c.since for c in player.loop.picture().conditions[CT]]
    player.kill()
    player.start()
    player.play(500)
    assert [c.since for c in player.loop.picture().conditions[CT]] == since


def test_two_controllers_one_acts_and_the_other_says_why_it_does_not(fleet, tmp_path):
    one = Player(fleet, tmp_path / "one", demo_texts(), "one")
    two = Player(fleet, tmp_path / "two", demo_texts(), "two")
    two.world.inject(Fault(Name.OTHER_CONTROLLER, "kpro5", text="one", seconds=30))
    assert two.play(60, lambda: ("edit-config", "refused") in events(two))
    [stalled] = [c for c in two.loop.picture().conditions[CT] if c.type == "Stalled"]
    assert "one" in stalled.message
    assert one.play(60, ready(one))
    two.play(600)
    done = [e for player in (one, two) for e in player.memory.events(kind=Kind.STEP_ENDED) if e.result == "worked"]
    assert sorted(e.action for e in done) == ["edit-config", "restart"]
    assert two.condition("Container/ct129") == "True"


TWO = """\
hosts:
  one: {cluster: one, address: 192.0.2.4, lxc: {101: {running: false, config: "arch: amd64\\n"}}}
  two: {cluster: two, address: 192.0.2.5, lxc: {102: {running: false, config: "arch: amd64\\n"}}}
"""
APART = b"""\
kind: Fleet
limits: {never_together: [[one, two]]}
---
{kind: Host, name: one, address: 192.0.2.4, platform: proxmox, policy: {mode: enforce}}
---
{kind: Host, name: two, address: 192.0.2.5, platform: proxmox, policy: {mode: enforce}}
---
{kind: Container, name: c1, id: 101, host: one, state: running, policy: {mode: enforce, allow: [restart-container]}}
---
{kind: Container, name: c2, id: 102, host: two, state: running, policy: {mode: enforce, allow: [restart-container]}}
"""


def test_what_was_seen_before_a_step_was_lost_does_not_say_that_it_is_over(tmp_path, monkeypatch):
    fleet = fleet_of(TWO)
    player = Player(fleet, tmp_path / "state", {"s.yaml": APART})
    player.world.inject(Fault(Name.CONNECTION_LOST, "one", action="start"))
    perform, beside = player.world.perform, []

    def watched(order):
        units = [fleet.hosts[name].step for name in {"one", "two"} - set(order.step.hosts)]
        beside.extend(unit.work.step for unit in units if unit is not None and unit.runs)
        return perform(order)

    monkeypatch.setattr(player.world, "perform", watched)
    assert player.play(120, lambda: all(player.condition(f"Container/{c}") == "True" for c in ("c1", "c2")))
    assert ("start", "lost") in events(player)
    assert beside == [], "one and two are never worked on together"


def test_what_was_seen_before_a_reboot_does_not_say_that_it_is_over(tmp_path, monkeypatch):
    fleet = fleet_of(TWO.replace("running: false", "running: true"))
    *order, wants = wants_reboot(fleet.hosts["one"].boot_id, name="one")
    monkeypatch.setattr(loops, "ORDER", (*order, dataclasses.replace(wants, gates=Gate.NOTHING)))
    running = b"".join(APART.partition(b"---")[2:]).replace(b"restart-container", b"restart-container, reboot-host")
    running = running.replace(b"mode: enforce}", b"mode: enforce, allow: [reboot-host]}")
    player = Player(fleet, tmp_path / "state", {"s.yaml": running})
    perform, during = player.world.perform, []

    def watched(order):
        said = perform(order)
        if order.step.action == "reboot-host":
            player.world.inject(Fault(Name.GARBAGE, "one"))
            player.save({"s.yaml": running.replace(b"host: two, state: running", b"host: two, state: stopped")})
        elif fleet.hosts["one"].goes_down is not None or fleet.hosts["one"].powers_on is not None:
            during.append(order.step.action)
        return said

    monkeypatch.setattr(player.world, "perform", watched)
    assert player.play(900, lambda: "stop" in player.performed or "shutdown" in player.performed)
    assert "reboot-host" in player.performed
    assert during == [], "a host that reboots is at work: one disruption at a time"


def test_a_clock_that_was_ahead_for_a_while_does_not_keep_the_breaker_from_opening(player):
    player.play(60, ready(player))
    ahead = dataclasses.replace(player.moment, date=player.moment.date + timedelta(days=30))
    text = player.texts["ct129.yaml"].decode().replace("restart-container,", "restart-container, prune,")
    texts = {**player.texts, "ct129.yaml": text.encode()}
    player.loop.take_specs(read(texts), ahead)
    cannot_start(player)
    play_failing(player, 3000)
    assert len(player.memory.events(kind=Kind.BREAKER)) == 1
    assert events(player).count(("start", "failed")) == 3


def test_conditions_that_could_not_be_kept_are_kept_when_it_can_be(player, monkeypatch):
    player.play(60, ready(player))
    player.memory.suspend(Suspension(CT, None, "I am at it", "me", player.moment.unix))
    player.loop.reconsider(player.moment)
    player.play(60)
    keep, full = player.memory._db.write, True

    def write(what):
        if full:
            raise NoState(player.state, OSError(28, "No space left on device"))
        return keep(what)

    monkeypatch.setattr(player.memory._db, "write", write)
    player.world.inject(Fault(Name.CT_STOP, "kpro5", guest=129))
    player.play(60)
    assert player.condition("Container/ct129") == "True", "what was remembered last"
    full = False
    assert player.play(60, lambda: player.condition("Container/ct129") == "False")


def test_a_memory_that_is_lost_while_the_loop_runs_does_not_resume_what_is_suspended(player):
    player.play(60, ready(player))
    player.memory.suspend(Suspension(CT, None, "I am at it", "me", player.moment.unix))
    player.loop.reconsider(player.moment)
    for file in player.state.glob("memory.db*"):
        file.unlink()
    player.world.inject(Fault(Name.CT_STOP, "kpro5", guest=129))
    player.play(300)
    assert events(player) == [], "of the new file"
    assert player.condition("Container/ct129") == "False"
    assert player.condition("Container/ct129", "Suspended") == "True"
    player.memory.resume(CT)
    player.loop.reconsider(player.moment)
    assert player.play(60, ready(player))
