"""A server is in its place and nowhere else, and goes on in the old one until the new one is ready."""

from __future__ import annotations

from controller.core.words import Block, InSync
from controller.layers.server_health.facts import Health, HealthFacts, Level
from controller.layers.server_placement.reasons import Reason
from controller.layers.shared.truth import File
from tests.layers.servers import Rig, document

ELSEWHERE = "container: ct130"


def rig() -> Rig:
    """A fleet in which the server runs in CT 129."""
    made = Rig(document(gpus="[]"))
    assert made.actions() == ["install-unit", "start-server"]
    return made


def test_from_one_container_to_another_it_is_made_ready_before_it_stops() -> None:
    made = rig()
    made.want(document(place=ELSEWHERE, gpus="[]"))
    note = made.verdict("server.placement")
    assert isinstance(note, InSync)
    assert "goes on as qwen in CT 129" in note.note
    assert [each.step.action for each in made.plan().steps] == ["install-unit", "stop-server-there", "start-server"]
    assert made.actions() == ["install-unit", "stop-server-there", "start-server"]
    assert (made.processes(129), len(made.processes(130))) == ([], 1)
    assert made.image(129).enabled == []
    assert made.actions() == []


def test_and_back_again() -> None:
    made = rig()
    made.want(document(place=ELSEWHERE, gpus="[]"))
    made.actions()
    made.want(document(gpus="[]"))
    assert made.actions() == ["stop-server-there", "start-server"]  # its unit was left there


def test_start_first_serves_in_the_new_place_before_the_old_one_ends() -> None:
    made = rig()
    made.want(
        document(place=ELSEWHERE, gpus="[]", policy="{strategy: start-first, mode: enforce, allow: [restart-server]}")
    )
    report = made.once()
    assert [each.step.action for each in report.ended] == ["install-unit", "start-server"]
    assert (len(made.processes(129)), len(made.processes(130))) == (1, 1)
    note = made.verdict("server.placement")
    assert isinstance(note, InSync)
    assert "does not answer in CT 130" in note.note
    made.health = {"kpro5": HealthFacts(((130, (Health("qwen", Level.GENERATES),)),))}
    assert made.actions() == ["stop-server-there"]
    assert made.processes(129) == []


def test_absent_is_removed_and_what_others_may_use_stays() -> None:
    made = rig()
    made.want(document(gpus="[]", state="absent"))
    assert made.drift("server.placement").reason == Reason.ABSENT_WANTED
    assert made.actions() == ["remove-server"]
    assert not any("qwen" in path for path in made.image(129).files)
    assert made.processes(129) == []
    assert made.image(129).environments
    assert made.image(129).models
    assert made.actions() == []


def test_a_renamed_one_takes_the_place_of_its_former_self() -> None:
    made = rig()
    made.want(document("qwen2", gpus="[]", renamed_from="qwen"))
    assert made.actions() == ["install-unit", "remove-server", "start-server"]
    assert [process.unit for process in made.processes(129)] == ["reconcile-qwen2.service"]
    assert not any("/qwen/" in path for path in made.image(129).files)


def test_two_that_exchange_their_containers() -> None:
    one, two = document("one", gpus="[]"), document("two", ELSEWHERE, gpus="[]")
    made = Rig(one, two)
    made.actions()
    made.want(document("one", ELSEWHERE, gpus="[]"), document("two", gpus="[]"))
    done = made.actions()
    assert sorted(done) == sorted(["install-unit", "stop-server-there", "start-server"] * 2)
    assert [p.unit for p in made.processes(129)] == ["reconcile-two.service"]
    assert [p.unit for p in made.processes(130)] == ["reconcile-one.service"]


def test_without_permission_the_old_one_goes_on() -> None:
    made = rig()
    made.want(document(place=ELSEWHERE, gpus="[]", policy="{mode: enforce, allow: []}"))
    assert [each.step.action for each in made.once().ended] == ["install-unit"]
    assert (len(made.processes(129)), made.processes(130)) == (1, [])


def test_what_cannot_be_seen_is_said() -> None:
    made = rig()
    made.fleet.unreachable.append("box1")
    note = made.verdict("server.placement")
    assert isinstance(note, InSync)
    assert note.note == "whether it also is on box1 cannot be seen"


def test_the_folder_of_another_object_is_not_taken() -> None:
    made = Rig(document(gpus="[]"))
    made.look()
    marker = '{"schema": 1, "object": "ModelServer/other", "digest": "d", "unit": "u"}'
    with made.world.change("kpro5"):
        made.image(129).files["/opt/reconcile/server/qwen/marker.json"] = File(marker)
    found = made.drift("server.placement")
    assert found.reason == Reason.OTHER_OBJECTS
    assert isinstance(found.remedy, Block)
    assert made.once().ended == []
