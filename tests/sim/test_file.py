"""Simulated fleets as files, kept between commands, and made of what was observed."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core import observe
from controller.facts.words import FleetFacts
from controller.layers.order import ORDER
from controller.layers.shared import pve_physics as pve
from controller.layers.shared.truth import File, Fleet, Impossible, Lease, Node, Unit, Work
from controller.spec.load import load
from controller.world.port import Look, Order
from controller.world.sim import SimFileError, SimWorld
from controller.world.sim import file as simfile
from controller.world.sim.faults import Fault, Moment, Name
from controller.world.sim.snapshot import snapshot, withhold
from tests.sim.controllers import Controller, specs
from tests.sim.fleets import DEMO, demo, fleet

STORY = Path(__file__).parents[2] / "specs" / "story"

CONF = "/etc/pve/lxc/129.conf"


# --- the format ---


def test_a_fleet_written_and_read_is_the_same() -> None:
    made = demo()
    assert simfile.load(simfile.dump(made), "again") == made
    assert simfile.from_plain(json.loads(json.dumps(simfile.to_plain(made)))) == made


@given(st.text() | st.binary().map(lambda b: b.decode("utf-8", "surrogateescape")))
def test_any_file_of_a_host_is_kept_byte_for_byte(text: str) -> None:
    made = Fleet()
    made.hosts["box"] = fleet("hosts: {box: {}}").hosts["box"]
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return  # a lone surrogate that stands for no byte is in no file
    made.hosts["box"].files["/x"] = File(text)
    assert simfile.load(simfile.dump(made), "again") == made
    assert simfile.from_plain(json.loads(json.dumps(simfile.to_plain(made)))) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts: {a: {clutser: c}}", "hosts.a: there is no clutser; did you mean cluster?"),
        ("hosts: {a: {boots: many}}", "hosts.a.boots: cannot use 'many', a whole number is wanted"),
        ("hosts: {a: {powered: perhaps}}", "hosts.a.powered: cannot use 'perhaps', true or false is wanted"),
        ("hosts: {a: [1]}", "hosts.a: cannot use ['1'], a mapping is wanted"),
        ("hosts: {a: {new_ids: 3}}", "hosts.a.new_ids: cannot use '3', a list is wanted"),
        ("hosts: {a: {cards: [{model: RTX A6000}]}}", "hosts.a.cards[0]: pci is missing"),
        ("hosts: {a: {cards: [{pci: '4f:00.0', model: Voodoo 2}]}}", "cannot tell what a Voodoo 2 is"),
        (
            "hosts: {a: {cards: [{pci: '4f:00.0', model: RTX A6000, driver: nvidia}]}}",
            "no loaded module would give {'0000:4f:00.0': 'nvidia'}",
        ),
        ("hosts: {a: {lxc: {129: {config: x}}}}", "hosts.a.lxc.129: a is in no cluster"),
        (
            "hosts: {a: {cluster: c, lxc: {129: {config: 'dev0: /dev/nvidia0', running: true}}}}",
            "hosts.a.lxc.129: cannot run: Device /dev/nvidia0 does not exist",
        ),
        (
            "hosts: {a: {cluster: c}}\nclusters: {c: {nodes: [a, b]}}",
            "cluster c has the node b, which is no host of it",
        ),
        ("hosts: {a: {powered: false, loaded: {nvidia: {}}}}", "a: is switched off and has a loaded module"),
        ("hosts: [", "test.sim.yaml:2:9: cannot read the YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(text: str, message: str) -> None:
    with pytest.raises(SimFileError) as error:
        fleet(text)
    assert message in str(error.value)
    assert str(error.value).startswith("test.sim.yaml")


def test_another_format_is_refused() -> None:
    with pytest.raises(SimFileError, match="simulated_fleet: 1 has to be there"):
        simfile.load("kind: Host\nname: x\n", "x.yaml")


def test_numbers_that_look_like_something_else_are_what_they_look_like() -> None:
    made = fleet("hosts: {a: {cluster: c, nvidia: {version: 550.10, loaded: false}, files: {/x: '10:00.0'}}}")
    assert made.hosts["a"].userspace == "550.10"
    assert made.hosts["a"].files["/x"].text == "10:00.0"


# --- what cannot be ---


def test_impossible_truths_are_all_named_at_once() -> None:
    made = demo()
    host = made.hosts["kpro5"]
    host.functions["0000:4f:00.0"].gpu.minor = 1
    host.functions["0000:17:00.0"].driver = None
    made.hosts["kpro4"].powered = False
    tree = made.clusters["demo"].trees[0]
    tree.files["nodes/kpro4/lxc/129.conf"] = File("two places")
    with pytest.raises(Impossible) as error:
        Controller(made).world.inject(Fault(Name.DISK_FULL, "kpro5"))
    for part in ("both have minor 1", "VM 205 runs with 0000:17:00.0", "switched off", "two configs of one guest"):
        assert part in str(error.value)


# --- kept between commands ---


@dataclass
class Me:
    id: str = "me"
    name: str = "me:1"


def opened(place: Path, file: Path = DEMO) -> SimWorld:
    return SimWorld.load(file, place / "state", Me())


def test_what_a_command_did_is_there_for_the_next(tmp_path: Path) -> None:
    world = opened(tmp_path)
    with world.change("kpro5") as host:
        host.files["/etc/motd"] = File("hello\udcff")
    pve.part(world.fleet, world.fleet.clusters["demo"], [["kpro4"], ["kpro5"]])
    world.close()
    later = opened(tmp_path)
    assert later.notes == ()
    assert replace(later.fleet, now=0.0) == replace(world.fleet, now=0.0)
    assert later.fleet.now > world.fleet.now
    kept = next((tmp_path / "state").glob("sim-*.json"))
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_a_step_that_is_at_work_has_ended_by_the_next_command(tmp_path: Path) -> None:
    world = opened(tmp_path)
    controller = Controller(world.fleet)
    step = controller.look().ready[0]
    world.inject(Fault(Name.CONNECTION_LOST, "kpro5", Moment.DURING))
    host = world.fleet.hosts["kpro5"]
    world.perform(Order(step, host.generation, host.boot_id))
    assert host.step.runs
    later = opened(tmp_path).fleet.hosts["kpro5"]  # the first command was killed: nobody closed its world
    assert (later.step.how, later.step.rc) == ("exit", 0)
    kept = next((tmp_path / "state").glob("sim-*.json")).read_text()
    assert not json.loads(kept)["fleet"]["hosts"]["kpro5"]["step"]["work"].get("stdin")


def test_a_changed_file_starts_anew_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "fleet.sim.yaml"
    file.write_text(DEMO.read_text())
    world = opened(tmp_path, file)
    with world.change("kpro5") as host:
        host.uid = 1000
    world.close()
    file.write_text(DEMO.read_text() + "# one more\n")
    again = opened(tmp_path, file)
    assert again.notes == (f"{file} has changed: the simulated fleet starts anew from it",)
    assert again.fleet.hosts["kpro5"].uid == 0


def test_a_state_that_cannot_be_read_starts_anew_and_says_so(tmp_path: Path) -> None:
    opened(tmp_path).close()
    next((tmp_path / "state").glob("sim-*.json")).write_text("{")
    again = opened(tmp_path)
    assert "cannot be read" in again.notes[0]
    assert again.fleet == demo()


def test_two_files_have_two_states(tmp_path: Path) -> None:
    other = tmp_path / "other.sim.yaml"
    other.write_text(DEMO.read_text())
    opened(tmp_path).close()
    opened(tmp_path, other).close()
    assert len(list((tmp_path / "state").glob("sim-*.json"))) == 2


def test_without_a_state_directory_nothing_is_kept() -> None:
    world = SimWorld.load(DEMO, None, Me())
    world.close()
    assert world.fleet.hosts


# --- snapshots ---


def facts_of(made: Fleet, guests: tuple[int, ...] = (129, 131)) -> FleetFacts:
    seen = SimWorld(made).observe([Look(name, 0, guests) for name in made.hosts])
    return {name: observe.read(observe.parsers(ORDER), one) for name, one in seen.items()}


def without_secrets(made: Fleet) -> Fleet:
    """The fleet as its snapshot may tell of it."""
    for cluster in made.clusters.values():
        for tree in cluster.trees:
            for path, file in tree.files.items():
                if path.endswith(".conf"):
                    file.text = withhold(file.text)
    for host in made.hosts.values():
        for path, file in host.files.items():
            if path.endswith("/config"):
                file.text = withhold(file.text)
        host.version += 1
    return made


def same(made: Fleet) -> FleetFacts:
    facts = facts_of(without_secrets(made))
    assert all(known.failure is None for known in facts.values())
    text = snapshot(facts, specs())
    assert facts_of(simfile.load(text, "snapshot")) == facts
    return facts


def test_a_snapshot_answers_as_the_fleet_did() -> None:
    same(demo())


def test_a_snapshot_of_a_fleet_that_was_worked_on() -> None:
    made = demo()
    Controller(made).once()
    made.now += 5.31
    host = made.hosts["kpro5"]
    pve.write(made, host, "/etc/pve/ha/resources.cfg", "vm: 205\n\tgroup x\n\nct: 131\n")
    pve.write(made, host, "/etc/pve/mapping/pci.cfg", "r\n\tmap id=10de:2204,node=kpro5,path=0000:17:00\n")
    pve.write(made, host, "/etc/pve/lxc/131.conf", "dev0: /dev/nvidia1\nlxc.environment: A=b")
    host.jobs["fetch"] = Unit(
        Work("fetch-1", "", "", "ModelServer/q"), 2, host.boot_id, 86000.0, reached=3, total=9, progressed=86010.5
    )
    host.jobs["old"] = Unit(Work("old-1", "", "", "ModelServer/q"), 1, "", 0.0, how="interrupted", output="a\nb\n")
    host.functions["0000:00:1f.3"] = replace(host.functions["0000:4f:00.1"], vendor="8086", driver=None)
    host.dev["/dev/nvidia7"] = Node(plain=True, mode=0)
    host.version += 1
    same(made)


def test_a_snapshot_of_a_fresh_boot_and_of_edits_since_the_start() -> None:
    made = demo()
    controller = Controller(made)
    step = controller.look().ready[0]
    host = made.hosts["kpro5"]
    controller.world.perform(Order(step, host.generation, host.boot_id))
    host.lease = Lease("somebody", "somebody (desk:3)", int(made.uptime(host)) + 41)
    host.version += 1
    same(made)
    controller.world.inject(Fault(Name.POWER_OFF, "kpro5"), Fault(Name.POWER_ON, "kpro5"))
    same(made)


def test_a_snapshot_has_what_serves() -> None:
    """Units, processes, environments and weights answer as they did, and what is to be secret is not in it."""
    made = simfile.load((STORY / "fleet.sim.yaml").read_text(), "story")
    files = {path.name: path.read_bytes() for path in STORY.glob("*.yaml") if not path.name.endswith(".sim.yaml")}
    wanted = load(files)
    report = Controller(made, wanted=wanted).once(timeout=9000)
    assert report.upcoming.in_sync
    facts = facts_of(without_secrets(made))
    again = facts_of(simfile.load(snapshot(facts, wanted), "snapshot"))
    for section in ("placement", "unit", "process", "environment", "weights"):
        assert again["kpro5"].section(f"server.{section}") == facts["kpro5"].section(f"server.{section}"), section


@pytest.mark.parametrize(
    "says",
    ["exit 9\nNVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "hung", "none"],
)
def test_a_snapshot_of_an_nvidia_smi_that_fails(says: str) -> None:
    made = demo()
    host = made.hosts["kpro5"]
    if says == "none":
        host.userspace = ""
    elif says == "hung":
        host.smi_hangs = True
    else:
        host.smi_says = says
    same(made)


def test_a_snapshot_of_a_parted_cluster() -> None:
    made = fleet("hosts: {kpro4: {cluster: c}, kpro5: {cluster: c}, kpro6: {cluster: c}}")
    pve.write(made, made.hosts["kpro4"], "/etc/pve/lxc/129.conf", "hostname: old\n")
    pve.part(made, made.clusters["c"], [["kpro4"], ["kpro5", "kpro6"]])
    pve.write(made, made.hosts["kpro5"], "/etc/pve/lxc/131.conf", "hostname: new\n")
    facts = same(made)
    assert facts["kpro4"] != facts["kpro5"]


def test_a_node_that_is_off_or_out_of_reach_is_so_in_the_snapshot() -> None:
    made = fleet("hosts: {kpro4: {cluster: c}, kpro5: {cluster: c}, kpro6: {cluster: c}}")
    pve.write(made, made.hosts["kpro6"], "/etc/pve/lxc/129.conf", "hostname: stranded\n")
    pve.power_off(made, made.hosts["kpro6"])
    made.unreachable.append("kpro4")
    facts = facts_of(made)
    again = simfile.load(snapshot(facts, specs()), "snapshot")
    assert not again.hosts["kpro6"].powered
    assert again.hosts["kpro4"].powered
    assert facts_of(again)["kpro5"] == facts["kpro5"]
    assert facts_of(again)["kpro4"].failure is not None


SECRETS = """\
# root password is hunter2
#token=hunter2
arch: amd64
description: hunter2%0Ahunter2
cipassword: hunter2
sshkeys: hunter2
args: -fw_cfg name=opt/x,string=1 -object secret=hunter2,id=x
lxc.environment: HF_TOKEN=hunter2
lxc.environment = HF_TOKEN=hunter2
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file

[snap]
#hunter2
hostname: x
"""


def test_no_secret_of_a_config_gets_into_a_snapshot() -> None:
    made = demo()
    pve.write(made, made.hosts["kpro5"], "/etc/pve/lxc/131.conf", SECRETS)
    assert pve.pct_start(made, made.hosts["kpro5"], 131).rc == 0
    made.hosts["kpro5"].jobs["x"] = Unit(
        Work("x-1", "", "", "Host/kpro5"), 1, made.hosts["kpro5"].boot_id, 1.0, output="using token: hunter2"
    )
    text = snapshot(facts_of(made), specs())
    assert "hunter2" not in text
    assert "Ada" not in text  # what people wrote into comments
    for kept in ("arch: amd64", "dev/nvidia0 none bind", "[snap]", "name=opt/x,string=1"):
        assert kept in text


def test_withholding_keeps_lines_and_can_be_done_again() -> None:
    once = withhold(SECRETS)
    assert once.count("\n") == SECRETS.count("\n")
    assert withhold(once) == once
