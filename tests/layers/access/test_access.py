import json
from pathlib import Path

import pytest

from controller.core.view import View
from controller.core.words import Block, Drift, InSync, Verdict
from controller.facts.words import HostFacts, Known, ParseError, Section
from controller.layers import access
from controller.layers.access.facts import AccessFacts, Cluster, Member, parse
from controller.spec.model import Host, Specs
from tests.layers.shell import ask, write

MEMBERS = {
    "nodename": "kpro5",
    "version": 8,
    "cluster": {"name": "lab", "version": 3, "nodes": 2, "quorate": 1},
    "nodelist": {"kpro5": {"id": 2, "online": 1, "ip": "10.1.2.5"}, "kpro6": {"id": 3, "online": 0}},
}
VMLIST = {"version": 4, "ids": {"129": {"node": "kpro6", "type": "lxc", "version": 2}}}
TREE = {
    "/proc/sys/kernel/hostname": "kpro5\n",
    "/etc/pve/.members": json.dumps(MEMBERS, indent=1),
    "/etc/pve/.vmlist": json.dumps(VMLIST, indent=1),
    "/etc/pve/nodes/kpro5/.keep": "",
}


def test_a_proxmox_host_as_it_answers(tmp_path: Path) -> None:
    write(tmp_path, {**TREE, "/etc/pve/ha/resources.cfg": "ct: 129\n\tstate started\n\nvm: 100\n"})
    facts = parse(ask(access.LAYER.probe, tmp_path))
    assert facts.hostname == "kpro5"
    assert facts.cluster == Cluster(
        node="kpro5",
        name="lab",
        quorate=True,
        members=(Member("kpro5", True, "10.1.2.5"), Member("kpro6", False, "")),
        guests=((129, "kpro6", "lxc"),),
        ha=frozenset({129, 100}),
    )


def test_a_plain_linux_host_has_no_cluster(tmp_path: Path) -> None:
    write(tmp_path, {"/proc/sys/kernel/hostname": "box1\n"})
    assert parse(ask(access.LAYER.probe, tmp_path)).cluster is None


def test_a_node_that_is_in_no_cluster_is_quorate(tmp_path: Path) -> None:
    write(tmp_path, {**TREE, "/etc/pve/.members": json.dumps({"nodename": "kpro5", "version": 1})})
    cluster = parse(ask(access.LAYER.probe, tmp_path)).cluster
    assert cluster is not None
    assert cluster.quorate


@pytest.mark.parametrize("members", ["", "{", "[]", '{"cluster": {}}', '{"nodelist": {"a": {}}}', '{"cluster": 7}'])
def test_an_unreadable_cluster_file_system_is_no_fact(tmp_path: Path, members: str) -> None:
    write(tmp_path, {**TREE, "/etc/pve/.members": members})
    with pytest.raises(ParseError) as error:
        parse(ask(access.LAYER.probe, tmp_path))
    assert error.value.reason == "pve-unreadable"


@pytest.mark.parametrize("out", ["", "uid x\nLinux 6.8 x86_64\n", "Bonjour\n", "uid 0\n"])
def test_an_answer_in_another_language_is_no_fact(out: str) -> None:
    with pytest.raises(ParseError):
        parse(Section(0, out))


def judged(facts: AccessFacts, platform: str = "proxmox") -> Verdict:
    host = Host.model_validate({"kind": "Host", "name": "kpro5", "address": "10.1.2.5", "platform": platform})
    seen = {"kpro5": HostFacts("kpro5", {"host.access": Known(facts)})}
    return access.check(View(Specs(hosts={"kpro5": host}), seen), host)


def cluster(node: str = "kpro5", quorate: bool = True) -> Cluster:
    return Cluster(node, "lab", quorate, (), (), frozenset())


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (AccessFacts(1000, "kpro5", "6.8", "x86_64", (), cluster()), "not-root"),
        (AccessFacts(0, "kpro5", "6.8", "x86_64", ("flock",), cluster()), "tools-missing"),
        (AccessFacts(0, "kpro5", "6.8", "x86_64", (), None), "not-proxmox"),
        (AccessFacts(0, "kpro6", "6.8", "x86_64", (), cluster("kpro6")), "other-host"),
        (AccessFacts(0, "kpro5", "6.8", "x86_64", (), cluster(quorate=False)), "no-quorum"),
    ],
)
def test_each_thing_that_stands_in_the_way_has_its_reason(facts: AccessFacts, reason: str) -> None:
    verdict = judged(facts)
    assert isinstance(verdict, Drift)
    assert verdict.reason == reason
    assert isinstance(verdict.remedy, Block)


def test_a_host_that_can_be_worked_on_is_in_sync() -> None:
    assert judged(AccessFacts(0, "kpro5", "6.8", "x86_64", (), cluster())) == InSync()
    assert judged(AccessFacts(0, "box", "6.8", "x86_64", (), None), "linux") == InSync()
