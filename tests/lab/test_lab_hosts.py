"""The lab's hosts: that they can be reached as real ones, lose power, are parted, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import lab as labs
from tests.lab.lab import CHECKOUT, Lab


@pytest.fixture
def whole(lab: Lab) -> Lab:
    """The session's lab with all hosts on and the network whole."""
    lab.heal()
    for host in lab.hosts:
        lab.power_on(host)
    return lab


def ssh(lab: Lab, host: str, command: str, user: str = "root", *options: str) -> subprocess.CompletedProcess[str]:
    program, *rest = lab.ssh_command(host, user)
    return subprocess.run(
        [program, "-o", "ConnectTimeout=5", "-o", "BatchMode=yes", *options, *rest, command],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def reaches(lab: Lab, host: str, address: str) -> bool:
    return lab.run(host, f"ping -c1 -W1 {address}").returncode == 0


def test_every_host_answers_as_itself(whole: Lab) -> None:
    for host in whole.hosts:
        assert ssh(whole, host, "hostname").stdout == f"{host}\n"


def test_keys_of_hosts_differ_and_are_checked(whole: Lab) -> None:
    assert len({whole.fingerprint(host) for host in whole.hosts}) == len(whole.hosts)
    shown = whole.run("kpro5", "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub").stdout
    assert shown.split()[1] == whole.fingerprint("kpro5")
    wrong = ssh(whole, "kpro5", "true", "root", "-o", f"HostKeyAlias={whole.address('kpro6')}")
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in wrong.stderr


def test_no_password_and_no_other_key(whole: Lab, tmp_path: Path) -> None:
    other = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    command = [word if word != str(whole.client_key) else str(other) for word in whole.ssh_command("box1")]
    command[1:1] = ["-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-o", "IdentityAgent=none"]
    done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=30, check=False)
    assert "Permission denied (publickey)" in done.stderr


def test_a_user_who_may_sudo(whole: Lab) -> None:
    done = ssh(whole, "kpro5", "id -un; sudo -n id -un", "ops")
    assert done.stdout == "ops\nroot\n", done.stderr


def test_through_another_host(whole: Lab) -> None:
    program, *rest = whole.ssh_command("box2")
    jump = " ".join([*whole.ssh_command("kpro4"), "-W", "%h:%p"])
    done = subprocess.run(
        [program, "-o", f"ProxyCommand={jump}", *rest, "echo $SSH_CONNECTION"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout.startswith(whole.address("kpro4")), done.stderr


def test_systemd_runs_units(whole: Lab) -> None:
    whole.run("kpro5", "systemctl is-system-running --wait", check=True)
    start = "systemd-run --quiet --unit=one --collect sleep 60"
    assert whole.run("kpro5", start).returncode == 0
    again = whole.run("kpro5", start)
    assert (again.returncode, "already loaded" in again.stderr) == (1, True)
    whole.run("kpro5", "systemctl stop one", check=True)


def test_nodes_of_the_cluster_are_root_on_each_other(whole: Lab) -> None:
    assert whole.run("kpro5", "ssh -o BatchMode=yes kpro6 hostname").stdout == "kpro6\n"


def test_power_off_and_on_is_a_boot(whole: Lab) -> None:
    whole.write("kpro5", "/root/kept", "on disk")
    whole.write("kpro5", "/run/gone", "in memory")
    boot = whole.read("kpro5", "/proc/sys/kernel/random/boot_id")
    whole.power_off("kpro5")
    assert not whole.is_on("kpro5")
    assert ssh(whole, "kpro5", "true", "root", "-o", "ConnectTimeout=1").returncode == 255
    assert whole.read("kpro5", "/root/kept") == b"on disk"
    whole.power_on("kpro5")
    assert whole.read("kpro5", "/root/kept") == b"on disk"
    assert not whole.path("kpro5", "/run/gone").exists()
    assert whole.read("kpro5", "/proc/sys/kernel/random/boot_id") != boot
    assert float(whole.run("kpro5", "cat /proc/uptime").stdout.split()[0]) < 60


def test_a_host_that_reboots_itself(whole: Lab) -> None:
    boot = whole.read("kpro4", "/proc/sys/kernel/random/boot_id")
    whole.run("kpro4", "systemctl reboot")

    def is_new() -> bool:
        done = whole.run("kpro4", "cat /proc/sys/kernel/random/boot_id")
        return done.returncode == 0 and done.stdout.encode() != boot

    labs.wait_until(is_new, 30, "kpro4 does not come back")
    whole.wait_for_ssh("kpro4")


def test_the_kernel_says_what_the_host_has_installed(whole: Lab) -> None:
    assert whole.run("kpro5", "cat /proc/sys/kernel/osrelease; uname -r").stdout == "6.8.12-9-pve\n6.8.12-9-pve\n"


def test_partition_and_heal(whole: Lab) -> None:
    whole.partition([["kpro4", "kpro5"], ["kpro6"]])
    assert not reaches(whole, "kpro5", whole.address("kpro6"))
    assert reaches(whole, "kpro5", whole.address("kpro4"))
    assert reaches(whole, "kpro6", whole.controller_address)
    whole.heal()
    assert reaches(whole, "kpro5", whole.address("kpro6"))


def test_cut_off_from_this_machine_alone(whole: Lab) -> None:
    whole.cut("kpro5")
    assert not reaches(whole, "kpro5", whole.controller_address)
    assert reaches(whole, "kpro5", whole.address("kpro6"))
    whole.heal()
    assert reaches(whole, "kpro5", whole.controller_address)


def test_a_partition_may_take_this_machine_in(whole: Lab) -> None:
    whole.partition([["controller", "kpro4"]])
    assert reaches(whole, "kpro4", whole.controller_address)
    assert not reaches(whole, "kpro5", whole.controller_address)
    assert reaches(whole, "kpro5", whole.address("kpro6"))
    assert not reaches(whole, "kpro5", whole.address("kpro4"))


def test_a_snapshot_shows_a_change_and_nothing_else(whole: Lab) -> None:
    before = whole.snapshot_tree("kpro5")
    ssh(whole, "kpro5", "true")
    ssh(whole, "kpro5", "sudo true; cat /etc/passwd > /dev/null; ls -R /etc > /dev/null", "ops")
    assert whole.snapshot_tree("kpro5") == before
    whole.run(
        "kpro5", "chmod 0600 /etc/hosts; echo x > /etc/new; rm /etc/issue; mknod /dev/nvidia7 c 195 7", check=True
    )
    after = whole.snapshot_tree("kpro5")
    assert {path for path in {*before, *after} if before.get(path) != after.get(path)} == {
        "/etc/hosts",
        "/etc/new",
        "/etc/issue",
        "/dev/nvidia7",
    }
    whole.run("kpro5", "chmod 0644 /etc/hosts; rm /etc/new /dev/nvidia7", check=True)


def test_a_container_in_a_host_obeys_its_device_rules(whole: Lab) -> None:
    whole.make_volume("vm-900-disk-0")
    config = (
        "lxc.include = /usr/share/lxc/config/common.conf\n"
        "lxc.include = /usr/share/lxc/config/nesting.conf\n"
        "lxc.uts.name = plain\n"
        "lxc.rootfs.path = /mnt/lab-rbd/vm-900-disk-0\n"
        "lxc.apparmor.profile = unconfined\n"
        "lxc.net.0.type = none\n"
        "lxc.cgroup2.devices.allow = c 195:* rwm\n"
        "lxc.mount.entry = /dev/lab-allowed dev/lab-allowed none bind,create=file\n"
        "lxc.mount.entry = /dev/lab-refused dev/lab-refused none bind,create=file\n"
    )
    whole.write("kpro4", "/var/lib/lxc/plain/config", config)
    whole.run("kpro4", "mknod /dev/lab-allowed c 195 200; mknod /dev/lab-refused c 509 200", check=True)
    whole.run("kpro4", "lxc-start -n plain && lxc-wait -n plain -s RUNNING -t 10", check=True)
    allowed = whole.run("kpro4", "lxc-attach -n plain -- cat /dev/lab-allowed")
    refused = whole.run("kpro4", "lxc-attach -n plain -- cat /dev/lab-refused")
    assert "No such device or address" in allowed.stderr
    assert "Operation not permitted" in refused.stderr
    whole.run("kpro4", "lxc-stop -k -n plain; rm /dev/lab-allowed /dev/lab-refused", check=True)


def traces(name: str) -> list[str]:
    """Everything on this machine that bears a lab's name."""
    words = Path("/proc/self/mountinfo").read_text().splitlines()
    words += subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout.splitlines()
    words += subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout.splitlines()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words.append(process.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    words += [str(path) for path in labs.ROOT.glob("*")]
    words += [str(path) for path in Path("/sys/fs/cgroup").glob("*/reconcile-lab/*")]
    return [word for word in words if name in word]


def test_two_labs_at_once_and_nothing_left(lab: Lab, new_lab: Callable[..., Lab]) -> None:
    other = new_lab()
    assert other.subnet != lab.subnet
    assert ssh(other, "kpro5", "hostname").stdout == "kpro5\n"
    assert ssh(lab, "kpro5", "hostname").stdout == "kpro5\n"
    assert other.fingerprint("kpro5") != lab.fingerprint("kpro5")
    other.partition([["kpro4", "kpro5"], ["kpro6"]])
    assert traces(other.name)
    other.stop()
    assert traces(other.name) == []
    assert ssh(lab, "kpro5", "hostname").stdout == "kpro5\n"


def test_a_lab_whose_maker_was_killed_is_swept(lab: Lab) -> None:
    name = f"dead{os.getpid() % 100000}"
    script = (
        f"import sys; from tests.lab.lab import Lab; lab = Lab({name!r}); lab.start(); "
        "lab.pve_hang('kpro5', 'storage.cfg'); "
        "lab.run('kpro5', 'cat /etc/pve/storage.cfg > /dev/null 2>&1 &'); print('up', flush=True); sys.stdin.read()"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", script], cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert maker.stdout
    assert maker.stdout.readline() == "up\n"
    assert name not in labs.sweep()
    assert ssh(Lab.attach(name), "kpro5", "hostname").stdout == "kpro5\n"
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    labs.sweep()
    assert traces(name) == []


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, lab: Lab) -> None:
    name = f"bad{os.getpid() % 100000}"

    def fail(*_: object) -> None:
        raise labs.LabError("no luck")

    monkeypatch.setattr(Lab, "wait_for_ssh", fail)
    with pytest.raises(labs.LabError, match="no luck"):
        Lab(name).start()
    assert traces(name) == []


def test_a_name_that_cannot_be_one() -> None:
    with pytest.raises(labs.LabError, match="cannot name a lab 'Up-2-Date'"):
        Lab("Up-2-Date")
