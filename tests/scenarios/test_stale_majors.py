"""A container's config passes four cards with the majors of another boot; two are wanted. Played in both worlds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import hosts
from tests.lab.fixtures import need_lab
from tests.lab.lab import Lab
from tests.scenarios.stage import THIRD, LabStage, SimStage, Stage

STALE = 507  # nvidia-uvm's major of another boot; neither world has it now

CONF = """\
# Language models. Ask Ada before touching the GPUs.
# moved here: 100%25 by hand
arch: amd64
cores: 2
features: nesting=1
hostname: llm-gpu
memory: 4096
net0: name=eth0,bridge=vmbr0,firewall=1,hwaddr=BC:24:11:00:01:29,type=veth
ostype: debian
rootfs: ceph-rbd:vm-129-disk-0,size=200G
swap: 0
# --- GPU passthrough ---
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.cgroup2.devices.allow: c {stale}:* rwm
lxc.cgroup2.devices.allow: c 10:200 rwm
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
lxc.mount.entry: /dev/nvidia1 dev/nvidia1 none bind,optional,create=file
lxc.mount.entry: /dev/nvidia2 dev/nvidia2 none bind,optional,create=file
lxc.mount.entry: /dev/nvidia3 dev/nvidia3 none bind,optional,create=file
lxc.mount.entry: /dev/nvidiactl dev/nvidiactl none bind,optional,create=file
lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file

[before-upgrade]
#a note%3A with a colon
arch: amd64
hostname: llm-gpu
memory: 2048
ostype: debian
rootfs: ceph-rbd:vm-129-disk-0,size=200G
snaptime: 1764500000
lxc.cgroup2.devices.allow: c 508:* rwm
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
""".replace("{stale}", str(STALE))
COMMENTS = [line for line in CONF.splitlines() if line.startswith("#")]
SNAPSHOT = CONF[CONF.index("\n[before-upgrade]") :]

CARDS = (
    ("17:00", "NVIDIA GeForce RTX 3090", 21),
    ("31:00", "NVIDIA GeForce RTX 3090", 27),
    ("4f:00", "NVIDIA RTX A6000", 31),
    ("ce:00", "NVIDIA RTX A6000", 52),
)
LISTED = (
    "17:00.0 RTX 3090 containers",
    "31:00.0 RTX 3090 containers",
    "4f:00.0 RTX A6000 containers",
    "ce:00.0 RTX A6000 containers",
)


def lab_hosts() -> dict[str, hosts.Description]:
    """kpro5 with four cards on the nvidia driver."""
    described = hosts.default()
    described["kpro5"]["cards"] = [hosts.card(slot, model, group, "nvidia") for slot, model, group in CARDS]
    return described


def sim_file() -> str:
    """The same for the simulated fleet."""
    cards = "".join(
        f'      - {{pci: "{slot}.0", model: "{model}", driver: nvidia, iommu_group: {group}}}\n'
        for slot, model, group in CARDS
    )
    config = "".join(f"          {line}\n" if line else "\n" for line in CONF.splitlines())
    return (
        "simulated_fleet: 1\nhosts:\n  kpro5:\n    cluster: lab\n"
        "    nvidia: {version: 580.126.09, flavour: proprietary, uvm_major: 509}\n"
        f"    cards:\n{cards}    persistenced: true\n"
        f"    lxc:\n      129:\n        running: true\n        config: |\n{config}"
        "clusters:\n  lab:\n    trees:\n      - files:\n          storage.cfg: |\n"
        "            rbd: ceph-rbd\n            \tcontent images,rootdir\n"
        "            \tkrbd 1\n            \tpool rbd\n"
    )


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    need_lab()
    with Lab(hosts=lab_hosts(), pve_files={"nodes/kpro5/lxc/129.conf": CONF.encode()}) as started:
        yield started


@pytest.fixture(params=["sim", pytest.param("lab", marks=pytest.mark.lab)])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    chosen: Stage
    if request.param == "sim":
        chosen = SimStage(tmp_path, sim_file())
    else:
        lab: Lab = request.getfixturevalue("lab")
        lab.run("kpro5", "nvidia-smi -L && nvidia-modprobe -u -c=0", check=True)
        lab.run("kpro5", "pct stop 129")
        lab.pve_write("nodes/kpro5/lxc/129.conf", CONF)
        lab.run("kpro5", "pct start 129", check=True)
        chosen = LabStage(tmp_path, lab)
    specification(chosen)
    return chosen


def specification(stage: Stage, allow: str = "[restart-container, edit-container-config]") -> None:
    stage.spec(
        f"{stage.host('kpro5')}nvidia: {stage.nvidia(*LISTED)}\n---\n"
        'kind: Container\nname: ct129\nid: 129\nhost: kpro5\ngpus: {count: 2, memory: ">=44GiB"}\n'
        f"policy: {{mode: enforce, allow: {allow}}}\n"
    )


def section(conf: str, name: str) -> str:
    return conf[conf.index(f"\n[{name}]") :]


def test_the_config_is_put_right_and_the_container_restarted_once(stage: Stage) -> None:
    before = stage.started(129)
    predicted = stage.reconcile("plan", "-o", "json")
    assert predicted.rc == 0, predicted.err
    assert [(s["layer"], s["action"]) for s in predicted.json["steps"]] == [
        ("container.devices", "edit-config"),
        ("container.power", "restart"),
    ]
    assert predicted.json["blocked"] == predicted.json["unknown"] == []
    assert stage.reconcile("plan", "--detailed-exitcode").rc == 2
    assert stage.conf(129).decode() == CONF
    assert stage.started(129) == before

    done = stage.reconcile("--once")
    assert done.rc == 0, done.out + done.err

    conf = stage.conf(129).decode()
    assert [line for line in conf.splitlines() if line.startswith("#")] == COMMENTS
    assert section(conf, "before-upgrade") == SNAPSHOT
    main = conf[: conf.index("\n[before-upgrade]")]
    assert f"c {STALE}:" not in main
    assert "lxc.cgroup2.devices.allow: c 10:200 rwm" in main
    assert sorted(re.findall(r"lxc.mount.entry: /dev/(nvidia\d)", main)) == ["nvidia2", "nvidia3"]
    assert stage.started(129) not in ("", before)

    assert [stage.opens(129, f"/dev/nvidia{n}") for n in (2, 3)] == ["allowed", "allowed"]
    assert stage.opens(129, "/dev/nvidiactl") == "allowed"
    assert stage.opens(129, "/dev/nvidia-uvm") == "allowed"
    assert [stage.opens(129, f"/dev/nvidia{n}") for n in (0, 1)] == ["absent", "absent"]
    stage.lend_third(129, "kpro5", 0)
    assert stage.opens(129, THIRD) == "refused"

    started = stage.started(129)
    again = stage.reconcile("--once")
    assert again.rc == 0
    assert "Nothing was done" in again.out
    assert stage.reconcile("plan", "--detailed-exitcode").rc == 0
    assert stage.conf(129).decode() == conf
    assert stage.started(129) == started


def test_without_permission_it_waits_and_says_for_what(stage: Stage) -> None:
    specification(stage, allow="[restart-container]")
    before = stage.started(129)
    done = stage.reconcile("--once")
    assert done.rc == 2
    assert "--allow edit-container-config:Container/ct129" in done.out
    assert stage.conf(129).decode() == CONF
    assert stage.started(129) == before

    given = stage.reconcile("--once", "--allow", "edit-container-config:Container/ct129")
    assert given.rc == 0, given.out


def test_yes_gives_what_the_plan_asks_for(stage: Stage) -> None:
    specification(stage, allow="[]")
    done = stage.reconcile("--once", "--yes")
    assert done.rc == 0, done.out + done.err


def test_report_mode_looks_and_touches_nothing(stage: Stage) -> None:
    stage.spec((stage.specs / "spec.yaml").read_text().replace("mode: enforce", "mode: report"))
    done = stage.reconcile("--once")
    assert done.rc == 2
    assert stage.conf(129).decode() == CONF


def test_an_edit_by_a_person_is_gone_on_from(stage: Stage) -> None:
    changed = CONF.replace("memory: 4096", "memory: 6144").replace("# --- GPU", "# eh: --- GPU")
    stage.write_conf(129, changed.encode())
    assert stage.reconcile("--once").rc == 0
    conf = stage.conf(129).decode()
    assert "memory: 6144" in conf
    assert "# eh: --- GPU" in conf


@pytest.mark.parametrize("command", ["status", "why"])
def test_status_and_why_say_what_is_wrong(stage: Stage, command: str) -> None:
    said = stage.reconcile(command, "ct129")
    assert "Container/ct129" in said.out
    assert re.search(r"wrong-cards|too-many-cards|stale-major", said.out), said.out
