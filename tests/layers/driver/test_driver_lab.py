"""Kernel, driver and userland on real hosts: the chain, an upgrade under a container, what stands in the way."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import hosts, kmodules, packages
from tests.lab.fixtures import need_lab
from tests.lab.lab import Lab, wait_until

pytestmark = pytest.mark.lab

VERSION, OLD = "580.126.09", "570.86.15"
PVE, NEXT, UNHEARD = "6.8.12-9-pve", "6.8.12-11-pve", "6.8.12-8-pve"
VMS = ("17:00.0", "31:00.0", "b1:00.0")
CONTAINERS = ("4f:00.0", "ce:00.0")
CONF = (
    "arch: amd64\ncores: 2\nfeatures: nesting=1\nhostname: llm\nmemory: 2048\nostype: debian\n"
    "rootfs: ceph-rbd:vm-129-disk-0,size=200G\nswap: 0\ndev0: /dev/nvidia0,mode=0666\ndev1: /dev/nvidia1,mode=0666\n"
    "dev2: /dev/nvidiactl,mode=0666\ndev3: /dev/nvidia-uvm,mode=0666\n"
)


class Fleet:
    """kpro5 of a lab, with a spec for it, and the command as a person runs it."""

    def __init__(self, lab: Lab, place: Path) -> None:
        self.lab, self.place = lab, place
        (place / "specs").mkdir()

    def sh(self, command: str, rc: int = 0) -> str:
        done = self.lab.run("kpro5", command)
        assert done.returncode == rc, done.stdout + done.stderr
        return done.stdout + done.stderr

    def offer(self, version: str, name: str = "driver.run") -> str:
        """Put an installer on the host, and return its digest."""
        content = packages.runfile(version)
        self.lab.write("kpro5", f"/root/{name}", content)
        return hashlib.sha256(content).hexdigest()

    def spec(
        self,
        version: str = VERSION,
        *,
        source: str = "runfile",
        cards: tuple[str, ...] = (*VMS, *CONTAINERS),
        container: bool = False,
        holders: tuple[str, ...] = (),
    ) -> None:
        driver = {"version": version, "source": source, "kernel_modules": "proprietary"}
        if source == "runfile":
            driver |= {"url": f"/root/{version}.run", "sha256": self.offer(version, f"{version}.run")}
        gpus = [
            {
                "pci": pci,
                "model": "RTX 3090" if pci in VMS else "RTX A6000",
                "owner": "vms" if pci in VMS else "containers",
            }
            for pci in cards
        ]
        policy = {"mode": "enforce", "allow": ["change-driver", "rebind-gpu"]}
        nvidia = {"driver": driver, "gpus": gpus, "holders": list(holders)}
        documents = [self.lab.host_spec("kpro5", nvidia=nvidia, policy=policy)]
        if container:
            allow = ["change-driver", "restart-container", "edit-container-config"]
            policy = {"mode": "enforce", "allow": allow}
            documents.append(
                {
                    "kind": "Container",
                    "name": "ct129",
                    "id": 129,
                    "host": "kpro5",
                    "gpus": {"count": 2},
                    "policy": policy,
                }
            )
        (self.place / "specs/spec.yaml").write_text("\n---\n".join(map(json.dumps, documents)))

    def reconcile(self, *args: str, rc: int = 0) -> str:
        options = ["--specs", str(self.place / "specs"), "--state", str(self.place / "state"), "--fleet", "ssh"]
        done = subprocess.run(
            [sys.executable, "-m", "controller", *args, *options],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.place)},
        )
        assert done.returncode == rc, done.stdout + done.stderr
        return " ".join(done.stdout.split())  # lines are broken where they are long

    def plan(self) -> Any:
        return json.loads(self.reconcile("plan", "-o", "json"))

    def drivers(self) -> dict[str, str]:
        functions = self.lab.kernel("state", "kpro5")["functions"]
        return {pci: functions[f"0000:{pci}"]["driver"] for pci in (*VMS, *CONTAINERS)}

    def blocked_without_a_change(self, reason: str) -> str:
        """The block of that reason, after a pass that changed nothing on the host."""
        before, links = self.lab.snapshot_tree("kpro5"), self.lab.kernel("links", "kpro5")
        self.reconcile("--once", rc=2)
        after = {path: digest for path, digest in self.lab.snapshot_tree("kpro5").items() if not _ours(path)}
        assert after == {path: digest for path, digest in before.items() if not _ours(path)}
        assert self.lab.kernel("links", "kpro5") == links
        blocked = [each for each in self.plan()["blocked"] if each["reason"] == reason]
        assert blocked, self.plan()["blocked"]
        assert blocked[0]["needs"]
        return str(blocked[0]["message"])


def _ours(path: str) -> bool:
    """What steps and looks leave of themselves, and what Python leaves of the lab's own programs."""
    return path.startswith("/var/lib/reconcile") or "reconcile-" in path or "__pycache__" in path


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Fleet]:
    """kpro5 without a driver, every card on vfio-pci."""
    need_lab()
    described = {"kpro5": hosts.story()["kpro5"], "kpro4": hosts.story()["kpro4"]}
    with Lab(hosts=described, pve_files={"nodes/kpro5/lxc/129.conf": CONF.encode()}) as lab:
        yield Fleet(lab, tmp_path)


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Fleet]:
    """kpro5 with an older driver, made by our own chain, and CT 129 running on it."""
    need_lab()
    described = {"kpro5": hosts.story()["kpro5"], "kpro4": hosts.story()["kpro4"]}
    with Lab(hosts=described, pve_files={"nodes/kpro5/lxc/129.conf": CONF.encode()}) as lab:
        fleet = Fleet(lab, tmp_path)
        fleet.spec(OLD, container=True)
        fleet.reconcile("--once")
        yield fleet


def test_from_nothing_to_a_driver_and_no_vms_card_is_touched(story: Fleet) -> None:
    story.spec()
    assert [step["action"] for step in story.plan()["steps"]][:2] == ["install-headers", "keep-nouveau-off"]
    story.reconcile("--once")
    assert story.sh("nvidia-smi --query-gpu=pci.bus_id,driver_version --format=csv,noheader").splitlines() == [
        f"00000000:{pci.upper()}, {VERSION}" for pci in CONTAINERS
    ]
    assert story.drivers() == {**dict.fromkeys(VMS, "vfio-pci"), **dict.fromkeys(CONTAINERS, "nvidia")}
    assert _only_at_boot(story)
    assert "blacklist nouveau" in story.sh("cat /etc/modprobe.d/reconcile-nouveau.conf")
    assert "Nothing was done" in story.reconcile("--once")


def _only_at_boot(fleet: Fleet) -> bool:
    """Whether each change of a VM's card was vfio-pci's, as it was loaded at boot."""
    changes = fleet.lab.kernel("links", "kpro5")
    return all(c["after"] == "vfio-pci" for c in changes if c["address"][5:] in VMS)


def test_the_packages_of_a_repository_do_as_well(story: Fleet) -> None:
    story.spec(source="apt")
    story.reconcile("--once")
    assert story.sh("modinfo -F version nvidia").strip() == VERSION
    assert VERSION in story.sh("nvidia-smi --query-gpu=driver_version --format=csv,noheader")


def test_the_kernel_that_boots_next_gets_its_module_too(story: Fleet) -> None:
    """Failure 6."""
    kmodules.install_kernel(story.lab.path("kpro5", "/"), NEXT)
    story.spec()
    story.reconcile("--once")
    assert [story.sh(f"modinfo -k {kernel} -F version nvidia").strip() for kernel in (PVE, NEXT)] == [VERSION, VERSION]


def test_nouveau_is_kept_off_in_the_initramfs(story: Fleet) -> None:
    """Failure 8: what modprobe.d says counts in the initramfs as it is built, and no sooner."""
    story.sh(f"echo nouveau >>/etc/initramfs-tools/modules; update-initramfs -c -k {PVE}")
    story.spec()
    assert "update-initramfs" in [step["action"] for step in story.plan()["steps"]]
    story.reconcile("--once")
    held = story.sh(
        f"unmkinitramfs /boot/initrd.img-{PVE} /tmp/held; cat /tmp/held/etc/modprobe.d/reconcile-nouveau.conf"
    )
    assert "blacklist nouveau" in held
    assert story.plan()["steps"] == []


def test_headers_that_no_repository_has(story: Fleet) -> None:
    kmodules.install_kernel(story.lab.path("kpro5", "/"), UNHEARD)
    story.sh(f"mkdir -p /etc/kernel; echo {UNHEARD} >/etc/kernel/proxmox-boot-pin")
    story.spec()
    assert UNHEARD in story.blocked_without_a_change("no-headers-package")


def test_secure_boot(story: Fleet) -> None:
    """Failure 24; then a person enrols DKMS's key, and it goes on."""
    story.lab.kernel("secure-boot", "kpro5", on=True)
    story.spec()
    assert "secure boot" in story.blocked_without_a_change("secure-boot")
    story.sh("mkdir -p /var/lib/dkms; echo 'kpro5 owner key' >/var/lib/dkms/mok.pub")
    story.lab.kernel("secure-boot", "kpro5", on=True, keys=["kpro5 owner key"])
    story.reconcile("--once")
    assert "GPU 1" in story.sh("nvidia-smi -L")


def test_a_card_that_no_spec_lists(story: Fleet) -> None:
    story.sh("echo 0000:31:00.0 >/sys/bus/pci/drivers/vfio-pci/unbind")
    story.spec(cards=("17:00.0", "b1:00.0", *CONTAINERS))
    assert "0000:31:00.0" in story.blocked_without_a_change("unlisted-gpu")


def test_a_kernel_too_new_for_the_driver(story: Fleet) -> None:
    """Failure 7."""
    kmodules.install_kernel(story.lab.path("kpro5", "/"), "6.17.2-1-pve")
    story.spec("550.135")
    assert "6.17.2-1-pve" in story.blocked_without_a_change("kernel-too-new")


def test_an_installer_with_another_digest_is_thrown_away(story: Fleet) -> None:
    story.spec()
    story.lab.write("kpro5", f"/root/{VERSION}.run", packages.runfile(VERSION) + b"\n")
    out = story.reconcile("--once", rc=2)
    assert "thrown away" in out
    assert story.sh("ls /var/lib/reconcile/drivers").strip() == ""


def test_an_installer_that_fails_is_told_of_with_its_own_words(story: Fleet) -> None:
    story.spec()
    story.lab.write("kpro5", "/run/lab-faults/nvidia-installer-fail", "Unable to create '/usr/lib': No space left")
    assert "No space left" in story.reconcile("--once", rc=2)
    story.lab.delete("kpro5", "/run/lab-faults/nvidia-installer-fail")
    story.reconcile("--once")
    assert "GPU 1" in story.sh("nvidia-smi -L")


# With a driver loaded and a container on it


def uses_the_gpu(fleet: Fleet) -> None:
    """A process in CT 129 has cards open."""
    fleet.sh(
        "systemd-run --quiet --collect --unit=lab-user pct exec 129 -- gpu-process /dev/nvidia0 /dev/nvidiactl "
        "/dev/nvidia-uvm"
    )
    wait_until(lambda: len(fleet.lab.kernel("state", "kpro5")["opens"]) >= 3, 20, "nobody opens the card")


def test_an_upgrade_takes_host_and_container_together(driven: Fleet) -> None:
    """Failures 4, 5 and 22: libraries are the module's, on the host and inside, before and after."""
    inside = "pct exec 129 -- sh -c 'readlink /usr/lib/*-linux-gnu/libnvidia-ml.so.1; nvidia-smi -L'"
    assert f"libnvidia-ml.so.{OLD}" in driven.sh(inside)
    assert driven.sh(inside).count("RTX A6000") == 2
    uses_the_gpu(driven)
    driven.sh("systemd-run --quiet --unit=dcgm-exporter gpu-process /dev/nvidiactl")
    wait_until(lambda: len(driven.lab.kernel("state", "kpro5")["opens"]) >= 4, 20, "nobody opens the control node")

    driven.spec(VERSION, container=True)
    assert "dcgm-exporter" in driven.blocked_without_a_change("module-in-use")

    driven.sh("systemctl stop dcgm-exporter")
    unit = "[Service]\nExecStart=/usr/bin/gpu-process /dev/nvidiactl\n[Install]\nWantedBy=multi-user.target\n"
    driven.lab.write("kpro5", "/etc/systemd/system/dcgm-exporter.service", unit)
    driven.sh("systemctl daemon-reload; systemctl start dcgm-exporter")
    driven.spec(VERSION, container=True, holders=("dcgm-exporter",))
    out = driven.reconcile("--once")
    assert "load-driver" in out
    assert driven.sh("cat /sys/module/nvidia/version").strip() == VERSION
    assert f"libnvidia-ml.so.{VERSION}" in driven.sh(inside)
    assert driven.sh(inside).count("RTX A6000") == 2
    assert driven.sh("systemctl is-active dcgm-exporter").strip() == "active"
    assert driven.drivers() == {**dict.fromkeys(VMS, "vfio-pci"), **dict.fromkeys(CONTAINERS, "nvidia")}
    assert "Nothing was done" in driven.reconcile("--once")


def test_a_container_in_no_spec_is_never_ripped_from_under(driven: Fleet) -> None:
    uses_the_gpu(driven)
    driven.spec(VERSION, container=False)
    assert "CT 129" in driven.blocked_without_a_change("module-in-use")
    assert driven.sh("pct status 129").strip() == "status: running"


def test_back_to_the_old_driver_when_the_new_one_does_not_load(driven: Fleet) -> None:
    """Failure 26."""
    driven.lab.kernel("refuse-drivers", "kpro5", versions=[VERSION])
    driven.spec(VERSION, container=True)
    out = driven.reconcile("--once", rc=2)
    assert f"{OLD} is installed and loaded again" in out
    assert driven.sh("cat /sys/module/nvidia/version").strip() == OLD
    assert driven.sh("modinfo -F version nvidia").strip() == OLD
    wait_until(lambda: "running" in driven.sh("pct status 129"), 20, "the container does not run again")
    assert driven.sh("pct exec 129 -- nvidia-smi -L").count("RTX A6000") == 2
    assert "RmInitAdapter" in driven.blocked_without_a_change("did-not-load")
