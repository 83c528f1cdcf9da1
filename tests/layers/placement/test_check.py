"""From specs and facts to verdicts: what the scenarios do not play, and what a plan expects of a move."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from controller.core.view import View
from controller.core.words import Block, Drift, InSync, NotKnown, Skipped, Step, Verdict
from controller.facts.hub import Description, HubFacts, NotDescribed, Trouble
from controller.facts.words import HostFacts, Known, Unknown
from controller.layers import placement
from controller.layers.access.facts import AccessFacts, Cluster, Member
from controller.layers.devices.facts import Guest, GuestFacts
from controller.layers.mounts.facts import MountFacts
from controller.layers.placement.facts import Image, PlacementFacts, Storage
from controller.layers.power.facts import PowerFacts, Running
from controller.spec.model import Container, Host, Specs
from tests.layers.fleet import container, gpu_facts, host, server, specs
from tests.plugins import configs

TEXT = "arch: amd64\nrootfs: ceph:vm-129-disk-0,size=8G\n"
STORAGES = (Storage("local", "dir", False), Storage("ceph", "rbd", True))
GONE = Unknown("unreachable", "kpro6 does not answer")


def cluster(
    node: str, at: str | None = "kpro6", kind: str = "lxc", offline: str = "", name: str = "lab"
) -> AccessFacts:
    members = tuple(Member(n, n != offline, "") for n in ("kpro4", "kpro5", "kpro6"))
    guests = ((129, at, kind),) if at is not None else ()
    return AccessFacts(0, node, "6.8", "x86_64", (), Cluster(node, name, True, members, guests, frozenset()))


def facts(node: str, access: AccessFacts, guests: tuple[Guest, ...] = (), **more: object) -> HostFacts:
    sections: dict[str, object] = {
        "host.access": access,
        "host.gpu-health": gpu_facts(),
        "container.devices": GuestFacts(node, True, guests),
        "container.power": PowerFacts(()),
        "container.mounts": MountFacts(((129, ()),)),
        placement.NAME: PlacementFacts(frozenset(), STORAGES),
        **more,
    }
    return HostFacts(node, {name: Known(value) for name, value in sections.items()})


def wanted(kpro6: Host | None = None, who: Container | None = None, spec: bool = True) -> Specs:
    source = kpro6 or host(name="kpro6", address="10.1.2.6", nvidia=None)
    other = host(name="kpro4", address="10.1.2.4", nvidia=None)
    objects = [host(), other, *([source] if spec else []), who or container(), server("one"), server("two", "other")]
    return specs(*objects)


def world(of: Specs | None = None, **hosts: HostFacts) -> View:
    """CT 129 on kpro6, stopped; kpro5 is where it is wanted."""
    seen: Mapping[str, HostFacts] = {
        "kpro4": facts("kpro4", cluster("kpro4")),
        "kpro5": facts("kpro5", cluster("kpro5")),
        "kpro6": facts("kpro6", cluster("kpro6"), (Guest("lxc", 129, "kpro6", TEXT),)),
        **hosts,
    }
    return View(of or wanted(), seen)


def dead(images: tuple[Image, ...], fenced: bool = False, online: bool = False, text: str = TEXT) -> View:
    """kpro6 is decommissioned and does not answer."""
    kpro6 = host(name="kpro6", address="10.1.2.6", nvidia=None, lifecycle="decommissioned", fenced=str(fenced).lower())
    access = cluster("kpro5", offline="" if online else "kpro6")
    seen = PlacementFacts(frozenset(), STORAGES, images)
    kpro5 = facts("kpro5", access, (Guest("lxc", 129, "kpro6", text),), **{placement.NAME: seen})
    return world(wanted(kpro6), kpro5=kpro5, kpro6=HostFacts("kpro6", {}, GONE))


def judge(view: View) -> Verdict:
    return placement.check(view, view.specs.containers["ct129"])


def block(view: View) -> Block:
    verdict = judge(view)
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Block)
    assert verdict.remedy.reason in set(placement.LAYER.reasons)
    return verdict.remedy


def step(view: View) -> Step:
    verdict = judge(view)
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Step), verdict
    return verdict.remedy


NOBODY = (Image(129, "ceph", "vm-129-disk-0", ()),)


def test_the_move() -> None:
    view = world()
    move = step(view)
    guest = Guest("lxc", 129, "kpro6", TEXT)
    assert (move.action, move.hosts, move.args) == (
        "move-container",
        ("kpro6", "kpro5"),
        ("129", "kpro5", guest.sha256, "0"),
    )
    assert {str(d) for d in move.disrupts} == {"move-container:Container/ct129", "restart-server:ModelServer/one"}
    after = View(view.specs, move.effect(view.facts))
    assert judge(after) == InSync()
    assert after.fact("kpro4", "host.access", AccessFacts).cluster == cluster("kpro4", at="kpro5").cluster
    there = after.fact("kpro5", "container.devices", GuestFacts).container(129)
    assert there is not None
    assert there.text == TEXT
    assert after.fact("kpro6", "container.devices", GuestFacts).container(129) is None


def test_the_take_over() -> None:
    view = dead(NOBODY)
    take = step(view)
    guest = Guest("lxc", 129, "kpro6", TEXT)
    assert (take.action, take.hosts) == ("take-over-container", ("kpro5",))
    assert take.args == ("129", "kpro6", guest.sha256, "ceph:vm-129-disk-0")
    assert {str(d) for d in take.disrupts} == {"take-over-container:Container/ct129", "restart-server:ModelServer/one"}
    assert judge(View(view.specs, take.effect(view.facts))) == InSync()


def test_unknown_watchers_are_not_nobody() -> None:
    for images in ((), (Image(129, "ceph", "vm-129-disk-0", Unknown("ceph-hangs", "no answer")),)):
        for fenced in (False, True):
            with pytest.raises(NotKnown):
                judge(dead(images, fenced))


def test_a_watcher_blocks_whatever_a_person_says() -> None:
    images = (Image(129, "ceph", "vm-129-disk-0", ("10.1.2.6:0/7",)),)
    assert block(dead(images, fenced=True)).reason == "watched"


def test_a_source_that_its_cluster_calls_online_blocks() -> None:
    assert block(dead(NOBODY, online=True)).reason == "source-online"


@pytest.mark.parametrize("reason", ["host-key-changed", "refused", "timed-out", "garbage", "auth-failed"])
def test_what_answers_in_any_way_is_not_dead(reason: str) -> None:
    view = dead(NOBODY)
    odd = HostFacts("kpro6", {}, Unknown(reason, "something is there"))
    with pytest.raises(NotKnown) as unknown:
        judge(View(view.specs, {**view.facts, "kpro6": odd}))
    assert unknown.value.reason == "source-unreachable"


def test_a_source_that_was_not_looked_at_is_not_dead() -> None:
    view = dead(NOBODY)
    with pytest.raises(NotKnown) as unknown:
        judge(View(view.specs, {name: seen for name, seen in view.facts.items() if name != "kpro6"}))
    assert unknown.value.reason == "not-observed"


def test_a_machine_that_is_another_node_is_not_the_source() -> None:
    with pytest.raises(NotKnown) as unknown:
        judge(world(kpro6=facts("kpro6", cluster("kpro4"))))
    assert unknown.value.reason == "other-host"


def test_nowhere_elsewhere_and_taken() -> None:
    none = {name: facts(name, cluster(name, at=None)) for name in ("kpro4", "kpro5", "kpro6")}
    assert block(world(**none)).reason == "no-container"
    other = facts("kpro6", cluster("kpro6", name="other"))
    assert block(world(**{**none, "kpro6": other})).reason == "other-cluster"
    assert block(world(kpro5=facts("kpro5", cluster("kpro5", kind="qemu")))).reason == "id-taken"
    assert block(world(wanted(spec=False))).reason == "source-not-in-specs"


def test_it_runs_on_another_host_than_its_config_lies_on() -> None:
    here = {name: facts(name, cluster(name, at="kpro5")) for name in ("kpro4", "kpro5", "kpro6")}
    assert judge(world(**here)) == InSync()
    running = PowerFacts((Running(129, 7, 42, None, None, ()),))
    for power in (running, PowerFacts((), frozenset({129}))):
        other = facts("kpro6", cluster("kpro6", at="kpro5"), **{"container.power": power})
        assert block(world(**{**here, "kpro6": other})).reason == "runs-elsewhere"
    elsewhere = facts("kpro6", cluster("kpro6", at=None, name="other"), **{"container.power": running})
    assert judge(world(**{**here, "kpro6": elsewhere})) == InSync()


def test_a_minority_does_not_say_where_anything_is() -> None:
    access = cluster("kpro5", at="kpro5")
    assert access.cluster is not None
    lonely = dataclasses.replace(access, cluster=dataclasses.replace(access.cluster, quorate=False))
    with pytest.raises(NotKnown) as unknown:
        judge(world(kpro5=facts("kpro5", lonely)))
    assert unknown.value.reason == "no-quorum"


def test_a_host_out_of_service_is_not_judged() -> None:
    view = world()
    target = host(lifecycle="maintenance")
    changed = dataclasses.replace(view.specs, hosts={**view.specs.hosts, "kpro5": target})
    assert isinstance(judge(View(changed, view.facts)), Skipped)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("template: 1", "template"),
        ("lock: snapshot", "backup-running"),
        ("lock: fstrim", "locked"),
        ("mp0: local:129/vm-129-disk-1.raw,mp=/a", "local-disk"),
        ("unused0: local:129/vm-129-disk-1.raw", "local-disk"),
        ("mp0: nas:vm-129-disk-1,mp=/a", "storage-missing"),
        ("mp0: /srv/a,mp=/a", "local-bind-mount"),
        ("mp0: /dev/sdb1,mp=/a", "local-bind-mount"),
    ],
)
def test_what_keeps_it_where_it_is(line: str, reason: str) -> None:
    text = f"{TEXT}{line}\n"
    assert block(world(kpro6=facts("kpro6", cluster("kpro6"), (Guest("lxc", 129, "kpro6", text),)))).reason == reason


def test_all_that_is_wrong_is_told_at_once() -> None:
    text = f"{TEXT}lock: backup\nmp0: /srv/a,mp=/a\n"
    verdict = judge(world(kpro6=facts("kpro6", cluster("kpro6"), (Guest("lxc", 129, "kpro6", text),))))
    assert isinstance(verdict, Drift)
    assert "local-bind-mount" in verdict.evidence


def test_a_bind_mount_that_is_everywhere_moves() -> None:
    text = f"{TEXT}mp0: /srv/a,mp=/a,shared=1\n"
    step(world(kpro6=facts("kpro6", cluster("kpro6"), (Guest("lxc", 129, "kpro6", text),))))


# What it serves


def hub_says(size: int) -> HubFacts:
    """The model of the containers' servers with so many bytes of weights."""
    commit = "0" * 40
    return HubFacts({("a/b", commit): Description("a/b", commit, commit, (), configs.llama_70b(), size)})


def test_nothing_is_moved_to_where_its_model_would_not_start() -> None:
    here = facts("kpro5", cluster("kpro5"), hub=hub_says(141_000_000_000))
    found = block(world(kpro5=here))
    assert found.reason == placement.Reason.SERVER_DOES_NOT_FIT
    assert found.message.startswith("one would not start with the cards of kpro5")
    assert "reconcile fit one" in found.needs
    assert step(world(kpro5=facts("kpro5", cluster("kpro5"), hub=hub_says(20_000_000_000))))


def test_what_nobody_knows_of_a_model_keeps_nothing_from_being_moved() -> None:
    trouble = NotDescribed(Trouble.OFFLINE, "the Hub does not answer", "try again")
    silent = HubFacts({("a/b", "0" * 40): trouble})
    assert step(world(kpro5=facts("kpro5", cluster("kpro5"), hub=silent)))
    assert step(world())
