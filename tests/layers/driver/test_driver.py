"""host.driver: what is installed, what is judged from it, who has to agree, and what the installer's scripts do."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from controller.core.plan import plan
from controller.core.view import View
from controller.core.words import Block, Drift, InSync, NotKnown, Skipped, Step, Verdict, Wait
from controller.facts.units import How, Job, UnitFacts
from controller.facts.words import HostFacts, Known, Later, ParseError, Section, Unknown
from controller.layers import driver
from controller.layers.binding.facts import BindingFacts, User
from controller.layers.driver.facts import DriverFacts, Installed, Refusal, Runfile, parse
from controller.layers.gpu_health.facts import GpuFacts, Module
from controller.layers.kernel.facts import KernelFacts
from controller.layers.power.facts import PowerFacts, Running
from controller.spec.model import Container, Host, Specs
from controller.world import units as world_units
from tests.lab import packages
from tests.layers.fleet import FIRST, access_facts, container, gpu_facts, guest_facts, server
from tests.layers.fleet import host as host_of
from tests.layers.shell import ask, write

PVE, NEXT, VERSION, OLD = "6.8.12-9-pve", "6.8.12-11-pve", "580.126.09", "570.86.15"
KERNEL = KernelFacts(PVE, (PVE,), (PVE,), dkms=True, modprobe=(("/etc/modprobe.d/o.conf", "blacklist nouveau\n"),))
SHA = "ab" * 32
RUNFILE = Runfile(f"NVIDIA-Linux-x86_64-{VERSION}.run", SHA)
THERE = DriverFacts((Installed(PVE, VERSION, "proprietary"),), (VERSION,), (VERSION,), (RUNFILE,))
LOADED = gpu_facts()
UNLOADED = dataclasses.replace(
    LOADED,
    module=None,
    gpus=(),
    smi=(),
    functions=tuple(
        dataclasses.replace(f, driver="", override="nvidia") if f.driver == "nvidia" else f for f in LOADED.functions
    ),
)
OTHER = dataclasses.replace(LOADED, module=Module(OLD, "proprietary"))


def host(source: str = "runfile", holders: Sequence[str] = (), **more: str) -> Host:
    gpus = [gpu.model_dump(mode="json") for gpu in host_of().gpus]
    wish = {"version": VERSION, "source": source, "kernel_modules": "proprietary", **more}
    return host_of(nvidia={"driver": wish, "gpus": gpus, "holders": list(holders)})


def view_of(
    facts: DriverFacts,
    gpus: GpuFacts,
    spec: Host,
    *,
    units: UnitFacts | None = None,
    kernel: KernelFacts = KERNEL,
    users: Sequence[User] = (),
    running: Sequence[int] = (),
    containers: Sequence[Container] = (),
    configs: Sequence[tuple[int, str]] = (),
    unknown: Unknown | None = None,
) -> View:
    sections = {
        "world": Known(units or UnitFacts(1, "boot")),
        "host.access": Known(access_facts()),
        "host.kernel": Known(kernel),
        "host.driver": Known(facts),
        "host.gpu-health": Known(gpus),
        "host.gpu-binding": Known(BindingFacts(tuple(users), unknown)),
        "container.devices": Known(guest_facts(*configs)),
        "container.power": Known(PowerFacts(tuple(Running(i, 7, 9, None, None, ()) for i in running))),
    }
    specs = Specs(
        hosts={"kpro5": spec},
        containers={c.name: c for c in containers},
        servers={"qwen": server("qwen")} if containers else {},
    )
    return View(specs, {"kpro5": HostFacts("kpro5", sections)})


def judged(facts: DriverFacts, gpus: GpuFacts, spec: Host | None = None, **more: object) -> Verdict:
    spec = spec or host()
    return driver.check(view_of(facts, gpus, spec, **more), spec)  # type: ignore[arg-type]


def step_of(verdict: Verdict, action: str) -> Step:
    assert isinstance(verdict, Drift), verdict
    assert isinstance(verdict.remedy, Step), verdict.remedy
    assert verdict.remedy.action == action
    return verdict.remedy


def block_of(verdict: Verdict) -> Block:
    assert isinstance(verdict, Drift), verdict
    assert isinstance(verdict.remedy, Block), verdict.remedy
    return verdict.remedy


# What the fragment reads


def test_a_host_as_it_answers(tmp_path: Path) -> None:
    drivers = "/var/lib/reconcile/drivers"
    write(
        tmp_path,
        {
            f"/boot/vmlinuz-{PVE}": "",
            f"/var/lib/dkms/nvidia/{VERSION}/x": "",
            f"{drivers}/{RUNFILE.name}": "x",
            f"{drivers}/{RUNFILE.name}.sha256": f"{SHA}\n",
            f"{drivers}/unchecked.run": "x",
            "/var/lib/reconcile/driver-refused": f"{OLD} open {PVE} modprobe: ERROR: no such device\n",
            "/run/reconcile/driver-stopped": "service dcgm-exporter\n",
            "/sys/module/nvidia/refcnt": "1\n",
            f"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{VERSION}": "",
        },
    )
    (tmp_path / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{VERSION}")
    section = ask(driver.LAYER.probe, tmp_path)
    facts = parse(section)
    assert section.rc == 0, section.err
    assert facts.dkms == (VERSION,)
    assert facts.libraries == (VERSION,)
    assert facts.runfiles == (RUNFILE,)
    assert facts.refusal == Refusal(OLD, "open", PVE, "modprobe: ERROR: no such device")
    assert facts.stopped == ("service dcgm-exporter",)
    assert facts.loaded == ("nvidia",)


def test_module_files_by_kernel() -> None:
    out = f"module {PVE} license:        NVIDIA\nmodule {PVE} version:        {VERSION}\n"
    out += f"module {NEXT} version:  {OLD}\nmodule {NEXT} license:  Dual MIT/GPL\nmodule {NEXT} signer:  DKMS key\n"
    assert parse(Section(0, out)).modules == (
        Installed(PVE, VERSION, "proprietary"),
        Installed(NEXT, OLD, "open", "DKMS key"),
    )


@pytest.mark.parametrize("out", ["x\n", "refused a b\n"])
def test_garbage_is_no_fact(out: str) -> None:
    with pytest.raises(ParseError):
        parse(Section(0, out))


# What is judged


def test_a_host_without_a_driver_in_its_spec_is_only_observed() -> None:
    assert isinstance(judged(DriverFacts(), UNLOADED, host_of()), Skipped)
    assert isinstance(judged(DriverFacts(), OTHER, host_of()), Skipped)


def test_the_wanted_driver_loaded_and_installed_for_every_boot() -> None:
    assert judged(THERE, LOADED) == InSync()
    note = judged(dataclasses.replace(THERE, dkms=()), LOADED)
    assert isinstance(note, InSync)
    assert "DKMS" in note.note


@pytest.mark.parametrize(
    ("facts", "kernel", "action"),
    [
        (DriverFacts(), KERNEL, "fetch-driver"),
        (dataclasses.replace(DriverFacts(), runfiles=(RUNFILE,)), KERNEL, "install-driver"),
        # failure 6: the next kernel has no module
        (THERE, dataclasses.replace(KERNEL, installed=(PVE, NEXT), headers=(PVE, NEXT)), "install-driver"),
        # failure 5: the host's library is of another version than the module
        (dataclasses.replace(THERE, libraries=("575.57.08",)), KERNEL, "install-driver"),
        # the other flavour
        (dataclasses.replace(THERE, modules=(Installed(PVE, VERSION, "open"),)), KERNEL, "install-driver"),
    ],
)
def test_what_is_not_on_the_disk_is_fetched_and_installed(facts: DriverFacts, kernel: KernelFacts, action: str) -> None:
    verdict = judged(facts, UNLOADED, kernel=kernel)
    step = step_of(verdict, action)
    assert step.job is not None
    assert isinstance(verdict, Drift)
    assert verdict.reason == "driver-not-installed"
    assert step.disrupts == () if action == "fetch-driver" else str(step.disrupts[0]) == "change-driver:Host/kpro5"


def test_where_the_installer_comes_from() -> None:
    assert step_of(judged(DriverFacts(), UNLOADED), "fetch-driver").args == (
        RUNFILE.name,
        f"https://us.download.nvidia.com/XFree86/Linux-x86_64/{VERSION}/{RUNFILE.name}",
        "",
    )
    here = host(url="/root/driver.run", sha256=SHA)
    assert step_of(judged(DriverFacts(), UNLOADED, here), "fetch-driver").args == (
        RUNFILE.name,
        "/root/driver.run",
        SHA,
    )
    # one that was fetched with another digest does not count
    other = host(sha256="cd" * 32)
    step_of(judged(DriverFacts(runfiles=(RUNFILE,)), UNLOADED, other), "fetch-driver")


def test_apt_needs_no_download() -> None:
    assert step_of(judged(DriverFacts(), UNLOADED, host("apt")), "install-driver").args[0] == "apt"


@pytest.mark.parametrize(("facts", "gpus"), [(DriverFacts(), UNLOADED), (THERE, UNLOADED), (THERE, OTHER)])
def test_what_somebody_else_installs_is_only_checked(facts: DriverFacts, gpus: GpuFacts) -> None:
    assert block_of(judged(facts, gpus, host("preinstalled"))).reason == "preinstalled"
    assert judged(THERE, LOADED, host("preinstalled")) == InSync()


def test_it_is_loaded_where_a_card_is_free() -> None:
    verdict = judged(THERE, UNLOADED)
    step = step_of(verdict, "load-driver")
    assert [str(d) for d in step.disrupts] == ["change-driver:Host/kpro5"]
    assert step.job is None


def test_failure_9_every_card_on_vfio_pci_is_a_block_and_not_a_failing_modprobe() -> None:
    on_vfio = dataclasses.replace(
        UNLOADED, functions=tuple(dataclasses.replace(f, driver="vfio-pci", override="") for f in UNLOADED.functions)
    )
    assert block_of(judged(THERE, on_vfio)).reason == "no-free-gpu"


def test_a_card_that_no_spec_lists_and_that_the_module_would_take() -> None:
    more = gpu_facts({FIRST: "10de:2230", "0000:99:00.0": "10de:2204"}, {}, drivers={FIRST: "", "0000:99:00.0": ""})
    block = block_of(judged(THERE, dataclasses.replace(more, module=None)))
    assert block.reason == "unlisted-gpu"
    assert "0000:99:00.0" in block.message


def test_failure_26_one_that_did_not_load_is_not_tried_again() -> None:
    refused = dataclasses.replace(THERE, refusal=Refusal(VERSION, "proprietary", PVE, "could not insert: No GSP"))
    block = block_of(judged(refused, UNLOADED))
    assert block.reason == "did-not-load"
    assert "No GSP" in block.message
    other_kernel = dataclasses.replace(refused, refusal=Refusal(VERSION, "proprietary", NEXT, "x"))
    step_of(judged(other_kernel, UNLOADED), "load-driver")


# Who uses the loaded one


OURS = User(11, "/dev/nvidia0", "/lxc/129/ns/system.slice/qwen.service", "python3")
HOLDER = User(12, "/dev/nvidiactl", "/system.slice/nvidia-persistenced.service", "nvidia-persiste")


def test_our_containers_and_named_holders_are_stopped_meanwhile_with_their_permission() -> None:
    spec = host(holders=["nvidia-persistenced.service"])
    step = step_of(
        judged(THERE, OTHER, spec, users=[OURS, HOLDER], running=[129], containers=[container()]), "load-driver"
    )
    assert step.args[2:] == (OLD, "proprietary", "", "129", "nvidia-persistenced")
    assert [str(d) for d in step.disrupts] == [
        "change-driver:Host/kpro5",
        "change-driver:Container/ct129",
        "restart-container:Container/ct129",
        "restart-server:ModelServer/qwen",
    ]


@pytest.mark.parametrize(
    "user",
    [
        User(11, "/dev/nvidia0", "/lxc/131/ns", "python3"),
        User(11, "/dev/nvidiactl", "/user.slice/session-3.scope", "python3"),
        User(11, "/dev/nvidia-uvm", "/system.slice/dcgm.service", "dcgm"),
        HOLDER,  # in no spec as a holder
    ],
)
@pytest.mark.parametrize("facts", [THERE, DriverFacts(), dataclasses.replace(DriverFacts(), runfiles=(RUNFILE,))])
def test_any_other_user_is_named_and_nothing_is_done(user: User, facts: DriverFacts) -> None:
    block = block_of(judged(facts, OTHER, users=[OURS, user], running=[129], containers=[container()]))
    assert block.reason == "module-in-use"
    assert str(user.pid) in block.message or "131" in block.message


def test_users_that_are_not_known_make_the_layer_unseen() -> None:
    with pytest.raises(NotKnown):
        judged(THERE, OTHER, unknown=Unknown("users-not-known", "hung"))


def test_a_foreign_container_that_passes_cards_is_asked_on_the_command_line() -> None:
    config = "dev0: /dev/nvidia0\nhostname: other\n"
    step = step_of(judged(THERE, OTHER, configs=[(131, config)]), "load-driver")
    assert "change-driver:Guest/131@kpro5" in [str(d) for d in step.disrupts]
    # before any driver is loaded nobody can use it
    assert len(step_of(judged(THERE, UNLOADED, configs=[(131, config)]), "load-driver").disrupts) == 1


def test_holders_that_were_left_stopped_are_started() -> None:
    step = step_of(judged(dataclasses.replace(THERE, stopped=("service dcgm",)), LOADED), "start-holders")
    assert step.args == ("service dcgm",)


def test_a_job_at_work_is_waited_for() -> None:
    step = step_of(judged(DriverFacts(), UNLOADED), "fetch-driver")
    job = Job(step.id, "Host/kpro5", How.STALLED, name="driver-fetch")
    verdict = judged(DriverFacts(), UNLOADED, units=UnitFacts(1, "b", jobs=(job,)))
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Wait)
    assert "does not get on" in verdict.remedy.message


def test_the_whole_chain_is_planned_and_what_comes_of_the_load_is_provisional() -> None:
    view = view_of(DriverFacts(), UNLOADED, host(), kernel=dataclasses.replace(KERNEL, installed=(PVE, NEXT)))
    made = plan((driver.LAYER,), view.specs, view.facts)
    assert [planned.step.action for planned in made.steps] == ["fetch-driver", "install-driver", "load-driver"]
    facts = view.facts
    for planned in made.steps:
        facts = planned.step.effect(facts)
    gpus = facts["kpro5"].section("host.gpu-health")
    assert isinstance(gpus, Known)
    assert isinstance(gpus.value, GpuFacts)
    assert gpus.value.module == Module(VERSION, "proprietary")
    assert isinstance(gpus.value.major("nvidia-uvm"), Later)
    assert {gpu.pci for gpu in gpus.value.gpus} == {FIRST, "0000:ce:00.0"}


# fetch.sh, for real


def fetch(state: Path, source: str, sha256: str = "", name: str = "NVIDIA-x.run") -> subprocess.CompletedProcess[str]:
    step = state / "step"
    step.mkdir(parents=True, exist_ok=True)
    script = world_units.LIBRARY + step_of(judged(DriverFacts(), UNLOADED), "fetch-driver").script.text
    environment = {**os.environ, "RECONCILE_STATE": str(state), "RECONCILE_STEP_DIR": str(step)}
    return subprocess.run(
        ["sh", "-eu", "-c", script, "sh", name, source, sha256],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_an_installer_on_the_host_is_checked_and_kept(tmp_path: Path) -> None:
    content = packages.runfile(VERSION)
    source = tmp_path / "driver.run"
    source.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    done = fetch(tmp_path / "state", str(source), digest)
    assert done.returncode == 0, done.stderr
    kept = tmp_path / "state/drivers/NVIDIA-x.run"
    assert kept.read_bytes() == content
    assert (tmp_path / "state/drivers/NVIDIA-x.run.sha256").read_text() == f"{digest}\n"


@pytest.mark.parametrize("wanted", ["", "0" * 64])
def test_a_damaged_installer_is_never_kept(tmp_path: Path, wanted: str) -> None:
    source = tmp_path / "driver.run"
    source.write_bytes(packages.runfile(VERSION)[:-100])
    done = fetch(tmp_path / "state", str(source), wanted)
    assert done.returncode == 1
    assert "no whole installer" in done.stderr or "thrown away" in done.stderr
    assert not list((tmp_path / "state/drivers").iterdir())


def test_an_installer_that_is_not_there(tmp_path: Path) -> None:
    done = fetch(tmp_path / "state", str(tmp_path / "none.run"))
    assert done.returncode == 1
    assert "there is no" in done.stderr


def test_a_download_that_was_cut_off_is_gone_on_from(tmp_path: Path) -> None:
    content = packages.runfile(VERSION)
    served = tmp_path / "served"
    served.mkdir()
    (served / "d.run").write_bytes(content)
    drivers = tmp_path / "state/drivers"
    drivers.mkdir(parents=True)
    (drivers / "NVIDIA-x.run.part").write_bytes(content[:1000])
    done = fetch(tmp_path / "state", f"file://{served}/d.run", hashlib.sha256(content).hexdigest())
    assert done.returncode == 0, done.stderr
    assert (drivers / "NVIDIA-x.run").read_bytes() == content
    # and one whose last byte had come already
    (drivers / "NVIDIA-x.run").rename(drivers / "NVIDIA-x.run.part")
    done = fetch(tmp_path / "state", f"file://{served}/d.run", hashlib.sha256(content).hexdigest())
    assert done.returncode == 0, done.stderr


def test_a_download_that_fails_says_so_and_keeps_what_came(tmp_path: Path) -> None:
    drivers = tmp_path / "state/drivers"
    drivers.mkdir(parents=True)
    (drivers / "NVIDIA-x.run.part").write_bytes(b"#!/bin/sh\n")
    done = fetch(tmp_path / "state", f"file://{tmp_path}/none")
    assert done.returncode == 1
    assert "what came of it is kept" in done.stderr
    assert (drivers / "NVIDIA-x.run.part").exists()
