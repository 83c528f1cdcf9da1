"""The simulation answers byte for byte what the real fragments print, run by a real shell on the same truth."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.core import probe
from controller.facts.words import Section
from controller.layers.access import sim as access
from controller.layers.binding import sim as binding
from controller.layers.boot import sim as boot
from controller.layers.devices import sim as devices
from controller.layers.gpu_health import sim as gpu_health
from controller.layers.mounts import sim as mounts
from controller.layers.order import ORDER
from controller.layers.placement import sim as placement
from controller.layers.power import sim as power
from controller.layers.server_placement import sim as server_placement
from controller.layers.server_process import sim as server_process
from controller.layers.server_unit import sim as server_unit
from controller.layers.shared import inside_physics, pve_physics
from controller.layers.shared.truth import End, File, Fleet, Host, Lease, Process, Start, Unit, Work
from controller.world import units as real_units
from controller.world.sim import units
from tests.sim import tree
from tests.sim.fleets import box, demo

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="device nodes can be made by root only")

GUESTS = (129, 130)
SIMULATED: dict[str, Callable[[Fleet, Host, tuple[int, ...]], Section]] = {
    "host.access": access.answer,
    "host.gpu-health": gpu_health.answer,
    "host.gpu-binding": binding.answer,
    "host.boot": boot.answer,
    "container.devices": devices.answer,
    "container.power": power.answer,
    "container.placement": placement.answer,
    "container.mounts": mounts.answer,
    "server.placement": server_placement.answer,
    "server.unit": server_unit.answer,
    "server.process": server_process.answer,
}


def untouched() -> Fleet:
    return demo()


def edited() -> Fleet:
    """The config of the running CT was edited, somebody else's CT runs with caps, another node is off."""
    made = demo()
    host = made.hosts["kpro5"]
    made.now += 100.25
    config = pve_physics.read(made, host, "/etc/pve/lxc/129.conf")
    assert config is not None
    lines = "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file"
    host.generation += 1
    work = Work("edit-1", "container.devices", "edit-config", "Container/ct129", ["129", _digest(config.text), lines])
    work.stdin = config.text.replace("510", "236").removesuffix("\n")
    assert devices.act(made, host, work).rc == 0
    caps = "lxc.mount.entry: /dev/nvidia-caps/nvidia-cap1 dev/nvidia-caps/nvidia-cap1 none bind,optional,create=file\n"
    assert pve_physics.write(made, host, "/etc/pve/lxc/130.conf", f"{caps}# ä: \udcff\r\n\nno newline") == ""
    assert pve_physics.pct_start(made, host, 130).rc == 0
    pve_physics.power_off(made, made.hosts["kpro4"])
    return made


def left_behind() -> Fleet:
    """A CT of a node that is off, with mounts of all sorts, and somebody who runs on its disk."""
    made = demo()
    host, other = made.hosts["kpro5"], made.hosts["kpro4"]
    conf = (
        "arch: amd64\nmp0: /srv/models,mp=/models,shared=1\nmp1: volume=ceph-rbd:vm-130-disk-1,mp=/data\n"
        "mp2: ceph-rbd:vm-129-disk-0,mp=/twice\nmp3: mp=/tank,volume=/tank/a\nrootfs: ceph-rbd:vm-130-disk-0,size=8G\n"
        "lxc.mount.entry: /srv/list list none bind,create=file\nlxc.mount.entry = /no/where no none bind,optional\n"
        "lxc.mount.entry: tmpfs tmp tmpfs rw\nlxc.mount.entry: /srv/a\\040b ab none bind\n"
        "[1snap]\nlxc.mount.entry: /srv x none bind\n[before]\nmp9: /snap,mp=/snap\n"
    )
    host.directories += ["/srv/models", "/srv/a b"]
    host.files["/srv/list"] = File("x\n")
    assert pve_physics.write(made, other, "/etc/pve/lxc/130.conf", conf) == ""
    pve_physics.power_off(made, other)
    return made


def bare() -> Fleet:
    """No driver, nothing in the cluster, an override, no IOMMU."""
    made, host = box('{pci: "4f:00.0", model: RTX A6000, override: vfio-pci, audio: false}')
    host.functions["0000:4f:00.0"].iommu_group = None
    host.cgroup2 = False
    return made


def at_boot() -> Fleet:
    """Something binds the cards at boot, and modules are loaded by name."""
    made = demo()
    unit = "/etc/systemd/system/reconcile-gpus.service"
    enabled = "/etc/systemd/system/sysinit.target.wants/reconcile-gpus.service"
    texts = {unit: "[Unit]\n", enabled: "", "/etc/reconcile/gpus": "load nvidia", "/etc/modules": "# none\nvfio\n"}
    made.hosts["kpro5"].files.update({path: File(text, mtime=1767500000) for path, text in texts.items()})
    return made


def serving() -> Fleet:
    """Servers that run, that have ended, that others have touched, in a container and on the host itself."""
    made = demo()
    host = made.hosts["kpro5"]
    host.boot_id = host.boot_id or made.draw_id(host)
    began = made.now
    for vmid in (None, 129):
        image, session = inside_physics.image_of(made, host, vmid), inside_physics.session_of(host, vmid)
        for name in ("qwen", "other"):
            here = f"/opt/reconcile/server/{name}"
            texts = {"marker.json": '{"object": "ModelServer/x"}', "args.json": "{}\n", "note.sh": ":\n"}
            texts |= {"salt": "abc\n", "config.yaml": "api-key: x\n"} if name == "qwen" else {}
            image.files |= {f"{here}/{file}": File(text, mtime=1767500000) for file, text in texts.items()}
            unit = f"/etc/systemd/system/reconcile-{name}"
            image.files[f"{unit}.service"] = File("[Service]\n", mtime=1767500000)
            image.files[f"{unit}-watch.service"] = File("[Service]\n", mtime=1767500000)
        image.files["/etc/systemd/system/reconcile-other.service.d/a.conf"] = File("[Service]\n", mtime=1767500000)
        image.files["/etc/systemd/system/reconcile-hand.service"] = File("x\n", mtime=1767500000)
        image.enabled = ["reconcile-qwen.service", "reconcile-qwen-watch.service"]
        session.starts = {"qwen": Start("d" * 64, int(began), "e" * 64), "other": Start("f" * 64, int(began) - 900)}
        session.ends = {"other": [End(int(began) - 800, "exit-code", "exited", "1")]}
        session.down = ["reconcile-other.service"]
        pids = 500 if vmid is None else 600
        argv = ["/opt/reconcile/env/e/bin/python", "-m", "x", "two\nlines", ""]
        unit = "reconcile-qwen.service"
        session.processes = [
            Process(pids, began, argv, unit, port=30000, listens=True, gpus=["GPU-1", "GPU-2"]),
            Process(pids + 1, began, ["node"], "session-1.scope", "node", port=8080, listens=True),
        ]
    made.now = time.time()
    return made


def _digest(of: str) -> str:
    return hashlib.sha256(of.encode("utf-8", "surrogateescape")).hexdigest()


@pytest.mark.parametrize("section", SIMULATED)
@pytest.mark.parametrize("build", [untouched, edited, left_behind, bare, at_boot, serving])
def test_the_simulation_prints_what_the_fragment_prints(
    section: str, build: Callable[[], Fleet], tmp_path: Path
) -> None:
    made = build()
    for host in made.hosts.values():
        if host.powered:
            _compare(made, host, section, tmp_path / host.name)


def _compare(made: Fleet, host: Host, section: str, place: Path) -> None:
    root = place / "root"
    root.mkdir(parents=True)
    tree.lay(made, host, root)
    tree.tools(made, host, place / "bin")
    fragment = next(layer.probe for layer in ORDER if layer.name == section)
    printed = _run(fragment, root, place)
    simulated = SIMULATED[section](made, host, GUESTS)
    assert printed.err == simulated.err
    assert printed.rc == simulated.rc
    assert _without_smi(printed.out.replace(str(root), "")) == _without_smi(simulated.out)


def _without_smi(out: str) -> str:
    """All but the answer of nvidia-smi, which no machine without a GPU has, and the size of a real /dev/shm."""
    return "".join(line for line in out.partition("smi|")[0].splitlines(True) if not line.startswith("shm "))


def _run(fragment: str, root: Path, place: Path) -> Section:
    """One look as it is asked of a host, of this one fragment, with the paths led to the tree."""
    here = f"root={root} run_dir={root}/run/reconcile PATH={place}/bin:$PATH\n"
    asked = probe.script({"x": fragment}) + here + probe.look("token-1", 0, GUESTS)
    done = subprocess.run(["sh"], input=asked.encode(), stdout=subprocess.PIPE, check=True, timeout=60)
    return probe.read(done.stdout, "token-1")["x"]


def test_the_section_world_is_printed_as_world_sh_prints_it(tmp_path: Path) -> None:
    made = demo()
    host = made.hosts["kpro5"]
    made.now += 500.5
    host.generation = 7
    host.lease = Lease("abc", "here (box:12)", int(made.uptime(host)) + 20)
    began = made.uptime(host) - 100
    done = Unit(Work("restart-1", "", "", "Container/ct129"), 7, host.boot_id, began, rc=3, ended=began + 2, how="exit")
    host.step = done
    log = "line 1\nline 2"
    host.jobs["fetch"] = Unit(
        Work("fetch-1", "", "", "ModelServer/q"),
        5,
        host.boot_id,
        began,
        output=log,
        reached=5,
        total=9,
        progressed=began,
    )
    host.jobs["gone"] = Unit(Work("gone-1", "", "", "Host/kpro5"), 6, "another-boot", 1.0, how="interrupted", reached=1)
    for stalled in (False, True):
        made.now += 150 if stalled else 0
        host.lease = host.lease if not stalled else None
        place = tmp_path / str(stalled)
        root = place / "root"
        root.mkdir(parents=True)
        tree.lay(made, host, root)
        tree.tools(made, host, place / "bin")
        _lay_units(host, root)
        assert _run(real_units.PROBE, root, place).out == units.answer(made, host).out


def _lay_units(host: Host, root: Path) -> None:
    state, run, transient = root / "var/lib/reconcile", root / "run/reconcile", root / "run/systemd/transient"
    for folder in (state / "steps/7", state / "jobs/fetch", state / "jobs/gone", run, transient):
        folder.mkdir(parents=True, exist_ok=True)
    (state / "generation").write_text("7 7\n")
    if host.lease is not None:
        (run / "lease").write_text(f"{host.lease.holder} {host.lease.expires}\n{host.lease.name}\n")
    assert host.step is not None
    each = {"steps/7": host.step, **{f"jobs/{name}": job for name, job in host.jobs.items()}}
    for folder, unit in each.items():
        (state / folder / "meta").write_text(f"{unit.work.step} {unit.work.object} {unit.boot_id}\n")
        (state / folder / "began").write_text(f"{unit.began:.2f}\n")
        if unit.rc is not None:
            (state / folder / "rc").write_text(f"{unit.rc} exit {unit.ended:.2f}\n")
        if unit.reached is not None:
            (state / folder / "progress").write_text(f"{unit.reached} {unit.total} {unit.progressed:.2f}\n")
        if unit.output:
            (state / folder / "out").write_text(unit.output + "\n")
        if unit.runs:
            (transient / f"reconcile-job-{folder.split('/')[1]}.service").touch()
