"""The parts together: a container with GPUs on shared storage, through stale majors, lost power and a move."""

from __future__ import annotations

import pytest

from tests.lab.lab import EXAMPLE_PVE_FILES, Lab

CONF = "nodes/kpro5/lxc/129.conf"
IN_CT = "pct exec 129 -- sh -c"


@pytest.fixture
def ready(lab: Lab) -> Lab:
    """The session's lab with CT 129 on kpro5 as in the story, stopped: it passes four cards, and a stale major."""
    lab.heal()
    lab.pve_release()
    for host in lab.proxmox:
        lab.power_off(host)
    for host in lab.proxmox:
        lab.power_on(host)
    lab.pve_reset(EXAMPLE_PVE_FILES)
    if not (lab.state / "rbd/vm-129-disk-0").exists():
        lab.make_volume("vm-129-disk-0")
    return lab


def said(lab: Lab, host: str, command: str) -> str:
    done = lab.run(host, command)
    return done.stdout + done.stderr


def test_a_stale_major_is_refused_by_the_kernel_and_the_right_one_is_not(ready: Lab) -> None:
    assert said(ready, "kpro5", "pct start 129 && pct status 129") == "status: running\n"
    assert "No such device or address" in said(ready, "kpro5", f"{IN_CT} 'cat /dev/nvidia0'")
    assert "Operation not permitted" in said(ready, "kpro5", f"{IN_CT} 'cat /dev/nvidia-uvm'")
    kinds = said(ready, "kpro5", f"{IN_CT} 'stat -c %F /dev/nvidia1 /dev/nvidia2'")
    assert kinds == "character special file\nregular empty file\n"

    major = next(
        line.split()[0] for line in ready.read("kpro5", "/proc/devices").decode().splitlines() if "uvm" in line
    )
    corrected = ready.pve_read(CONF).replace(b"c 507:*", b"c %s:*" % major.encode())
    ready.pve_write(CONF, corrected)
    assert said(ready, "kpro5", "pct stop 129 && pct start 129") == ""
    assert "No such device or address" in said(ready, "kpro5", f"{IN_CT} 'cat /dev/nvidia-uvm'")


def test_power_loss_frees_the_disk_and_another_node_takes_the_container(ready: Lab) -> None:
    ready.run("kpro5", "pct start 129", check=True)
    assert f"watcher={ready.address('kpro5')}" in said(ready, "kpro6", "rbd status vm-129-disk-0")
    ready.run("kpro5", f"{IN_CT} 'echo here > /root/mark'", check=True)
    ready.power_off("kpro5")
    assert "watcher=" not in said(ready, "kpro6", "rbd status vm-129-disk-0")
    ready.run("kpro6", f"mv /etc/pve/{CONF} /etc/pve/lxc/129.conf", check=True)
    assert said(ready, "kpro6", "pct start 129 && pct exec 129 -- cat /root/mark") == "here\n"
    ready.power_on("kpro5")
    assert "does not exist" in said(ready, "kpro5", "pct start 129")


def test_what_hangs_in_the_driver_does_not_keep_a_host_on(ready: Lab) -> None:
    ready.write("kpro5", "/run/lab-faults/nvidia-smi-hang", "")
    ready.run("kpro5", "nvidia-smi > /dev/null 2>&1 &", check=True)
    ready.power_off("kpro5")
    assert not ready.is_on("kpro5")
    ready.power_on("kpro5")
    assert "RTX A6000" in said(ready, "kpro5", "nvidia-smi -L")


def test_a_plain_host_has_cards_and_no_cluster(ready: Lab) -> None:
    assert said(ready, "box1", "nvidia-smi -L").count("RTX 4090") == 2
    assert (
        said(ready, "box1", "command -v pct; ls /etc/pve")
        == "ls: cannot access '/etc/pve': No such file or directory\n"
    )
