"""The kernel's stand-in as a host sees it: sysfs, procfs, kmod, and NVIDIA's programs, with Debian's own tools."""

from __future__ import annotations

import os
import re
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator

import pytest

from tests.lab import hosts, kmodules
from tests.lab.fixtures import need_lab
from tests.lab.lab import EXAMPLE_PVE_FILES, Lab, wait_until
from tests.lab.test_lab_machine import archive

pytestmark = pytest.mark.lab

A6000, OTHER_A6000, RTX3090 = "0000:4f:00.0", "0000:ce:00.0", "0000:17:00.0"
DEVICES = "/sys/bus/pci/devices"
NewLab = Callable[..., Lab]


def sh(lab: Lab, command: str, status: int = 0) -> str:
    """Run a command on kpro5 and return all that it prints; its exit code has to be this."""
    done = lab.run("kpro5", f"{{ {command}\n}} 2>&1")
    assert done.returncode == status, f"{command}: exit {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def drivers(lab: Lab) -> dict[str, str | None]:
    """Return who has which card."""
    functions = lab.kernel("state", "kpro5")["functions"]
    return {address: it["driver"] for address, it in functions.items() if it["gpu"]}


def booted(lab: Lab) -> Lab:
    """Wait until kpro5 has done all that it does by itself at a boot."""
    command = "systemctl is-system-running"
    wait_until(lambda: lab.run("kpro5", command).stdout in ("running\n", "degraded\n"), 60, "kpro5 is still starting")
    return lab


@pytest.fixture(scope="module")
def still() -> Iterator[Lab]:
    """A lab with kpro5 and box1 that no test changes."""
    need_lab()
    described = hosts.default()
    with Lab(hosts={name: described[name] for name in ("kpro5", "box1")}) as started:
        yield booted(started)


@pytest.fixture
def kpro5(new_lab: NewLab) -> Lab:
    """A lab of kpro5 alone, driver and all, with CT 129."""
    return booted(new_lab(hosts={"kpro5": hosts.default()["kpro5"]}, pve_files=EXAMPLE_PVE_FILES))


@pytest.fixture
def story(new_lab: NewLab) -> Lab:
    """A lab of kpro5 alone as the story begins: no driver, all cards with vfio-pci."""
    return booted(new_lab(hosts={"kpro5": hosts.story()["kpro5"]}))


class TestLook:
    def test_lspci_knows_the_cards_and_their_drivers(self, still: Lab) -> None:
        text = sh(still, "lspci -nnk -s 4f:00 2>/dev/null")
        assert "NVIDIA Corporation GA102GL [RTX A6000] [10de:2230] (rev a1)" in text
        assert "Kernel driver in use: nvidia" in text
        assert (
            "4f:00.1 Audio device [0403]: NVIDIA Corporation GA102 High Definition Audio Controller [10de:1aef]" in text
        )

    def test_links_lead_where_they_should(self, still: Lab) -> None:
        where = f"{DEVICES}/{A6000}"
        text = sh(still, f"readlink -e {where}/driver {where}/iommu_group {where}/driver/module {where}/driver/{A6000}")
        assert text.split() == [
            "/sys/bus/pci/drivers/nvidia",
            "/sys/kernel/iommu_groups/31",
            "/sys/module/nvidia",
            f"{DEVICES}/{A6000}",
        ]
        assert sh(still, "ls /sys/kernel/iommu_groups/31/devices").split() == [A6000, "0000:4f:00.1"]

    def test_sysfs_files_have_their_own_form(self, still: Lab) -> None:
        names = "vendor device class subsystem_vendor driver_override current_link_width modalias"
        text = sh(still, f"cd {DEVICES}/{RTX3090}; for f in {names}; do cat $f; done")
        assert text.split("\n") == [
            "0x10de",
            "0x2204",
            "0x030000",
            "0x10de",
            "(null)",
            "16",
            "pci:v000010DEd00002204sv000010DEsd00001459bc03sc00i00",
            "",
        ]

    def test_modules_as_everybody_reads_them(self, still: Lab) -> None:
        assert re.search(r"^nvidia +104071168  1 nvidia_uvm$", sh(still, "lsmod"), re.M)
        assert sh(still, "cat /sys/module/nvidia/version /sys/module/nvidia/refcnt") == "580.126.09\n1\n"
        assert sh(still, "modinfo -F version nvidia; modinfo -F depends nvidia_drm") == "580.126.09\nnvidia-modeset\n"

    def test_majors_have_names(self, still: Lab) -> None:
        text = sh(still, "cat /proc/devices")
        assert {"195 nvidia", "195 nvidiactl", "509 nvidia-uvm", "234 nvidia-caps"} <= set(text.splitlines())
        assert text.index("Block devices:") > text.index("509 nvidia-uvm")

    def test_the_driver_says_who_it_is(self, still: Lab) -> None:
        text = sh(still, f"cat /proc/driver/nvidia/version /proc/driver/nvidia/gpus/{A6000}/information")
        assert text.startswith("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.126.09  ")
        assert "\nDevice Minor: \t 0\n" in text
        assert "\nModel: \t\t NVIDIA RTX A6000\n" in text
        assert sh(still, "ls /proc/driver/nvidia/gpus").split() == [A6000, OTHER_A6000]  # none that vfio-pci has

    def test_what_the_lab_needs_for_itself_is_not_listed(self, still: Lab) -> None:
        assert ".lab" not in sh(still, "ls -a /proc/driver/nvidia")

    def test_the_hosts_kernel_is_its_own(self, still: Lab) -> None:
        assert sh(still, "uname -r; cat /proc/sys/kernel/osrelease") == "6.8.12-9-pve\n" * 2
        assert "#1 SMP PREEMPT_DYNAMIC PMX" in sh(still, "uname -v")
        assert sh(still, "uname -srn") == "Linux kpro5 6.8.12-9-pve\n"
        assert sh(still, "uname -m") == f"{os.uname().machine}\n"
        assert still.run("box1", "uname -r").stdout == "6.1.0-38-amd64\n"

    def test_nobody_makes_or_removes_files(self, still: Lab) -> None:
        assert "Permission denied" in sh(still, f"touch {DEVICES}/x", 1)
        assert "Operation not permitted" in sh(still, f"rm -f {DEVICES}/{A6000}/vendor", 1)
        assert "Permission denied" in sh(still, f"su ops -c 'echo > {DEVICES}/{A6000}/driver_override'", 1)

    def test_the_log(self, still: Lab) -> None:
        text = sh(still, "dmesg")
        assert re.search(
            r"^\[ +\d+\.\d{6}\] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580\.126\.09  ", text, re.M
        )
        assert "major device number 509." in text
        assert re.search(r"^\[\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4}\] NVRM: ", sh(still, "dmesg -T"), re.M)

    def test_a_boot_leaves_nothing_failed(self, still: Lab) -> None:
        assert sh(still, "systemctl --failed --no-legend") == ""


class TestNvidiaSmi:
    def test_list(self, still: Lab) -> None:
        assert re.fullmatch(r"(GPU \d: NVIDIA RTX A6000 \(UUID: GPU-[0-9a-f-]{36}\)\n){2}", sh(still, "nvidia-smi -L"))

    def test_query(self, still: Lab) -> None:
        fields = "index,pci.bus_id,name,driver_version,compute_cap,memory.total,memory.used,mig.mode.current"
        text = sh(still, f"nvidia-smi --query-gpu={fields} --format=csv,noheader,nounits")
        assert text.splitlines() == [
            f"{index}, 0000{address.upper()}, NVIDIA RTX A6000, 580.126.09, 8.6, 49140, 1, [N/A]"
            for index, address in enumerate((A6000, OTHER_A6000))
        ]
        text = sh(still, "nvidia-smi -i 1 --query-gpu=gpu_name,memory.total,power.draw,temperature.gpu --format=csv")
        assert text == (
            "name, memory.total [MiB], power.draw [W], temperature.gpu\nNVIDIA RTX A6000, 49140 MiB, 22.00 W, 34\n"
        )

    def test_xml(self, still: Lab) -> None:
        log = ElementTree.fromstring(sh(still, "nvidia-smi -q -x").partition("\n")[2])
        assert (log.findtext("driver_version"), log.findtext("attached_gpus")) == ("580.126.09", "2")
        card = log.findall("gpu")[1]
        assert card.get("id") == "00000000:CE:00.0"
        assert (card.findtext("minor_number"), card.findtext("fb_memory_usage/total")) == ("1", "49140 MiB")
        assert card.findtext("pci/pci_device_id") == "223010DE"

    def test_the_table_keeps_its_shape(self, still: Lab) -> None:
        lines = sh(still, "nvidia-smi").splitlines()[1:]
        assert {len(line) for line in lines if line} == {91}
        assert lines[1] == "| NVIDIA-SMI 580.126.09             Driver Version: 580.126.09     CUDA Version: 13.0     |"

    def test_version(self, still: Lab) -> None:
        assert sh(still, "nvidia-smi --version").splitlines() == [
            "NVIDIA-SMI version  : 580.126.09",
            "NVML version        : 580.126",
            "DRIVER version      : 580.126.09",
            "CUDA Version        : 13.0",
        ]

    # Texts and exit codes as a 580.159.04 gave them.
    @pytest.mark.parametrize(
        ("arguments", "status", "text"),
        [
            ("--query-gpu=index,nosuch --format=csv", 2, 'Field "nosuch" is not a valid field to query.\n\n'),
            ("--nosuch", 255, "ERROR: Option --nosuch is not recognized. Please run 'nvidia-smi -h'.\n\n"),
            ("-i 7", 6, "No devices were found\n"),
            ("-L -i 0", 2, "ERROR: Option -i is not valid for this command. Please run 'nvidia-smi -h' for help.\n\n"),
        ],
    )
    def test_complaints(self, still: Lab, arguments: str, status: int, text: str) -> None:
        assert sh(still, f"nvidia-smi {arguments}", status) == text

    def test_without_nodes_and_the_right_to_make_them(self, still: Lab) -> None:
        def look(nodes: str, arguments: str, status: int) -> str:
            make = f"mount -t tmpfs none /dev; mknod /dev/null c 1 3; {nodes} exec setpriv --bounding-set -mknod "
            return sh(still, f"unshare -m sh -c '{make} nvidia-smi {arguments}'", status)

        assert look("", "", 9) == (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
            "Make sure that the latest NVIDIA driver is installed and running.\n\n"
        )
        control = "mknod -m 666 /dev/nvidiactl c 195 255;"
        assert look(control, "", 6) == "No devices were found\n"
        assert look(control, "-L", 0) == "No devices found.\n"
        assert "GPU 0: NVIDIA RTX A6000" in look(f"{control} mknod -m 666 /dev/nvidia1 c 195 1;", "-L", 0)
        assert look(f"{control} mknod -m 666 /dev/nvidia0 c 195 1;", "-L", 0) == "No devices found.\n"

    def test_nodes_are_made_and_put_right(self, still: Lab) -> None:
        wrong = ": > /dev/nvidiactl; chmod 0 /dev/nvidiactl; mknod /dev/nvidia1 c 195 7;"
        text = sh(
            still,
            f"unshare -m sh -c 'mount -t tmpfs none /dev; mknod /dev/null c 1 3; {wrong} nvidia-smi -L >/dev/null; "
            'stat -c "%n %F %a %t:%T" /dev/nvidia* /dev/nvidia-caps/*\'',
        )
        assert text.splitlines() == [
            "/dev/nvidia-caps directory 755 0:0",
            "/dev/nvidia-uvm character special file 666 1fd:0",
            "/dev/nvidia0 character special file 666 c3:0",
            "/dev/nvidia1 character special file 666 c3:1",
            "/dev/nvidiactl character special file 666 c3:ff",
            "/dev/nvidia-caps/nvidia-cap1 character special file 400 ea:1",
            "/dev/nvidia-caps/nvidia-cap2 character special file 444 ea:2",
        ]

    def test_a_library_of_another_version(self, kpro5: Lab) -> None:
        kmodules.install_userland(kpro5.path("kpro5", "/"), "570.86.15")
        text = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.86\n"
        for arguments in ("", "-L", "--version", "-q -x"):
            assert sh(kpro5, f"nvidia-smi {arguments}", 18) == text
        assert "NVRM: has the version 570.86.15, but this kernel module has\n" in sh(kpro5, "dmesg")
        sh(kpro5, "rm /usr/lib/*-linux-gnu/libnvidia-ml.so.1")
        assert sh(kpro5, "nvidia-smi", 12).startswith(
            "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system."
        )

    def test_a_card_that_fell_off_the_bus(self, kpro5: Lab) -> None:
        kpro5.kernel("xid", "kpro5", pci=OTHER_A6000, xid=79, text="GPU has fallen off the bus.")
        text = sh(kpro5, "nvidia-smi --query-gpu=index --format=csv", 255)
        assert text == "Unable to determine the device handle for GPU 0000:CE:00.0: Unknown Error\n"
        assert "NVRM: Xid (PCI:0000:ce:00): 79, GPU has fallen off the bus.\n" in sh(kpro5, "dmesg")
        assert sh(kpro5, "setpci -s ce:00.0 VENDOR_ID") == "ffff\n"  # its configuration space is gone
        assert (
            sh(kpro5, f"cat {DEVICES}/{OTHER_A6000}/vendor {DEVICES}/{OTHER_A6000}/current_link_width")
            == "0x10de\n63\n"
        )

    def test_it_can_hang_past_every_signal_but_not_past_the_power(self, kpro5: Lab) -> None:
        kpro5.write("kpro5", "/run/lab-faults/nvidia-smi-hang", "")
        with subprocess.Popen([*kpro5.ssh_command("kpro5"), "exec nvidia-smi"]) as session:

            def processes() -> list[int]:
                found = sh(kpro5, "pgrep -f '^/usr/bin/python3 /usr/bin/nvidia-smi' || true").split()
                return [int(pid) for pid in found]

            wait_until(lambda: kpro5.kernel("state", "kpro5")["hung"], 10, "it does not hang")
            (pid,) = processes()
            sh(kpro5, f"kill -9 {pid}")
            time.sleep(0.3)  # that nothing comes of it can only be seen by looking later
            assert processes() == [pid]
            assert re.search(r"^State:\s+D", sh(kpro5, f"cat /proc/{pid}/status"), re.M)
            kpro5.power_off("kpro5")
            session.kill()
        kpro5.power_on("kpro5")
        booted(kpro5)
        assert "GPU 0" in sh(kpro5, "nvidia-smi -L")

    def test_it_can_talk_nonsense(self, kpro5: Lab) -> None:
        kpro5.write("kpro5", "/run/lab-faults/nvidia-smi-garbage", "")
        done = subprocess.run([*kpro5.ssh_command("kpro5"), "nvidia-smi -q -x"], capture_output=True, check=True)
        assert b"\xff\x00\x01" in done.stdout

    def test_without_the_driver_it_is_not_there(self, story: Lab) -> None:
        assert sh(story, "nvidia-smi", 127).endswith("nvidia-smi: not found\n")
        assert sh(story, "ls /proc/driver /dev | grep -c nvidia", 1) == "0\n"


class TestBinding:
    def test_writes_are_refused_as_the_kernel_does(self, still: Lab) -> None:
        bash = "bash -c 'echo {} > /sys/bus/pci/{}'"
        for text, file in (
            (RTX3090, "drivers/nvidia/unbind"),
            ("17:00.0", "drivers/vfio-pci/unbind"),
            (A6000, "drivers/vfio-pci/bind"),
            ("0000:99:00.0", "drivers_probe"),
        ):
            assert sh(still, bash.format(text, file), 1).endswith("write error: No such device\n")
        assert sh(still, bash.format(A6000, "drivers/nvidia/bind"), 1).endswith(
            "write error: Device or resource busy\n"
        )
        assert sh(still, bash.format("10de", "drivers/vfio-pci/new_id"), 1).endswith("write error: Invalid argument\n")

    def test_one_card_changes_hands_and_no_other(self, kpro5: Lab) -> None:
        before = kpro5.kernel("links", "kpro5")
        sh(
            kpro5,
            f"cd {DEVICES}/{A6000}; echo vfio-pci > driver_override; echo {A6000} > driver/unbind; "
            f"echo {A6000} > /sys/bus/pci/drivers_probe; readlink driver; echo > driver_override; cat driver_override",
        )
        assert drivers(kpro5)[A6000] == "vfio-pci"
        assert sh(kpro5, f"readlink {DEVICES}/{A6000}/driver; cat {DEVICES}/{A6000}/driver_override") == (
            "../../../../bus/pci/drivers/vfio-pci\n(null)\n"
        )
        changes = kpro5.kernel("links", "kpro5")[len(before) :]
        assert [(each["address"], each["before"], each["after"]) for each in changes] == [
            (A6000, "nvidia", None),
            (A6000, None, "vfio-pci"),
        ]
        assert sh(kpro5, "ls /proc/driver/nvidia/gpus") == f"{OTHER_A6000}\n"
        assert sh(kpro5, "nvidia-smi --query-gpu=index,pci.bus_id --format=csv,noheader") == "0, 00000000:CE:00.0\n"

    def test_who_uses_a_card_is_waited_for(self, kpro5: Lab) -> None:
        sh(kpro5, "systemd-run --quiet --unit=user gpu-process /dev/nvidia0 /dev/nvidiactl")
        wait_until(lambda: len(kpro5.kernel("state", "kpro5")["opens"]) == 2, 10, "nobody opens the card")
        pid = sh(kpro5, "systemctl show -P MainPID user").strip()
        assert sh(kpro5, f"ls -l /proc/{pid}/fd | grep -o '/dev/nvidia.*' | sort").split() == [
            "/dev/nvidia0",
            "/dev/nvidiactl",
        ]
        assert sh(kpro5, "nvidia-smi --query-compute-apps=pid --format=csv,noheader") == f"{pid}\n"
        sh(kpro5, "rmmod nvidia_uvm")
        assert sh(kpro5, "rmmod nvidia", 1) == "rmmod: ERROR: Module nvidia is in use\n"

        unbind = f"systemd-run --quiet --unit=unbind sh -c 'echo {A6000} > /sys/bus/pci/drivers/nvidia/unbind'"
        sh(kpro5, unbind)
        wait_until(lambda: kpro5.kernel("state", "kpro5")["functions"][A6000]["removing"], 10, "nothing is removed")
        assert sh(kpro5, f"test -e {DEVICES}/{A6000}/driver", 1) == ""
        assert "Attempting to remove device 0000:4f:00.0 with non-zero usage count!" in sh(kpro5, "dmesg")
        assert sh(kpro5, "systemctl is-active unbind") == "active\n"
        sh(kpro5, "systemctl stop user")
        wait_until(lambda: drivers(kpro5)[A6000] is None, 10, "the card is not freed")
        wait_until(lambda: kpro5.run("kpro5", "systemctl is-active unbind").returncode != 0, 10, "the write goes on")

    def test_a_virtual_machine_holds_its_card(self, kpro5: Lab) -> None:
        hold = f"exec 3<>/run/lab-kernel/open/vfio-{RTX3090}; exec sleep 60"
        sh(kpro5, f"systemd-run --quiet --unit=vm sh -c '{hold}'")
        wait_until(lambda: len(kpro5.kernel("state", "kpro5")["opens"]) == 1, 10, "nobody opens the card")
        assert sh(kpro5, "rmmod vfio_pci", 1) == "rmmod: ERROR: Module vfio_pci is in use\n"


class TestModules:
    def test_messages(self, story: Lab) -> None:
        for command, text in (
            ("modprobe nvidia", "modprobe: FATAL: Module nvidia not found in directory /lib/modules/6.8.12-9-pve\n"),
            ("modprobe -r nvidia", "modprobe: FATAL: Module nvidia not found.\n"),
            ("rmmod nvidia", "rmmod: ERROR: Module nvidia is not currently loaded\n"),
            ("rmmod vfio_pci_core", "rmmod: ERROR: Module vfio_pci_core is in use by: vfio_pci\n"),
            ("modprobe -r vfio_pci_core", "modprobe: FATAL: Module vfio_pci_core is in use.\n"),
        ):
            assert sh(story, command, 1) == text
        kmodules.install_driver(story.path("kpro5", "/"), "6.8.12-9-pve", "580.126.09", "proprietary")
        text = "modprobe: ERROR: could not insert 'nvidia': No such device\n"
        assert sh(story, "modprobe nvidia", 1) == text  # every card is with vfio-pci
        assert sh(story, "modprobe nvidia-drm", 1) == text.replace("nvidia", "nvidia_drm")
        assert sh(story, "nvidia-smi", 9).startswith("NVIDIA-SMI has failed because it couldn't communicate")
        assert "NVRM: No NVIDIA devices probed.\n" in sh(story, "dmesg")

    def test_the_hosts_own_modprobe_d_is_kept(self, story: Lab) -> None:
        kmodules.install_driver(story.path("kpro5", "/"), "6.8.12-9-pve", "580.126.09", "open")
        story.write(
            "kpro5", "/etc/modprobe.d/nvidia.conf", "options nvidia NVreg_DeviceFileMode=0660 NVreg_DeviceFileGID=44\n"
        )
        story.write("kpro5", "/etc/modprobe.d/off.conf", "blacklist nouveau\n")
        sh(story, f"rmmod nouveau; echo {A6000} > /sys/bus/pci/drivers/vfio-pci/unbind")
        alias = sh(story, f"cat {DEVICES}/{A6000}/modalias").strip()
        assert "nouveau" not in sh(story, f"modprobe -b -v {alias}")
        assert drivers(story)[A6000] == "nvidia"
        sh(story, "nvidia-modprobe -c 0 -c=255 -u -c0; nvidia-modprobe -c0")
        assert sh(story, "stat -c '%a %g' /dev/nvidia0") == "660 44\n"
        assert sh(story, "modprobe -r nvidia_uvm; lsmod | grep -c nvidia", 1) == "0\n"  # it takes nvidia with it

    def test_nodes_of_nvidia_modprobe(self, kpro5: Lab) -> None:
        sh(kpro5, "rm -r /dev/nvidia*; nvidia-modprobe -u -c=0")
        assert sh(kpro5, "ls /dev | grep nvidia").split() == ["nvidia-uvm", "nvidia-uvm-tools"]
        sh(kpro5, ": > /dev/nvidia0; mknod /dev/nvidiactl c 195 3; nvidia-modprobe -c0 -c 255 -m")
        assert sh(kpro5, "stat -c '%n %a %t:%T' /dev/nvidia0 /dev/nvidiactl /dev/nvidia-modeset").splitlines() == [
            "/dev/nvidia0 666 c3:0",
            "/dev/nvidiactl 666 c3:ff",
            "/dev/nvidia-modeset 666 c3:fe",
        ]
        assert "nvidia_modeset" in sh(kpro5, "lsmod")
        assert "195 nvidia-modeset" in sh(kpro5, "cat /proc/devices")

    def test_a_loaded_driver_takes_what_nobody_has(self, story: Lab) -> None:
        """The trap: a look with nvidia-smi loads the driver, and it takes a virtual machine's card as well."""
        kmodules.install_driver(story.path("kpro5", "/"), "6.8.12-9-pve", "580.126.09", "proprietary")
        sh(
            story,
            f"modprobe -r nouveau; for a in {A6000} {RTX3090}; do echo $a > /sys/bus/pci/drivers/vfio-pci/unbind; done",
        )
        assert sh(story, "nvidia-smi -L").count("GPU ") == 2
        assert drivers(story)[RTX3090] == "nvidia"


class TestBoot:
    def test_what_the_files_say_holds_again(self, kpro5: Lab) -> None:
        before = drivers(kpro5)
        sh(kpro5, f"echo vfio-pci > {DEVICES}/{A6000}/driver_override; rmmod nvidia_uvm")
        kpro5.kernel("next-majors", "kpro5", majors={"nvidia-uvm": 511})
        kpro5.power_off("kpro5")
        assert set(drivers(kpro5).values()) == {None}
        kpro5.power_on("kpro5")
        booted(kpro5)
        assert drivers(kpro5) == before
        assert sh(kpro5, f"cat {DEVICES}/{A6000}/driver_override; stat -c %t /dev/nvidia-uvm") == "(null)\n1ff\n"

    def test_a_host_that_keeps_nothing_from_nouveau(self, story: Lab) -> None:
        sh(story, "rm /etc/modprobe.d/vfio.conf")
        story.power_off("kpro5")
        story.power_on("kpro5")
        booted(story)
        assert set(drivers(story).values()) == {"nouveau"}

    def test_the_initramfs_comes_first(self, story: Lab) -> None:
        """What was changed in /etc and not in the initramfs does not hold: the modules are loaded already."""
        root = story.path("kpro5", "/")
        files = {"etc/modprobe.d/vfio.conf": b"options vfio-pci ids=10de:2204\n", "conf/modules": b"vfio_pci\n"}
        tree = root / "lib/modules/6.8.12-9-pve"
        for path in tree.rglob("*"):
            if path.is_file():
                files[f"usr/lib/modules/6.8.12-9-pve/{path.relative_to(tree)}"] = path.read_bytes()
        story.write("kpro5", "/boot/initrd.img-6.8.12-9-pve", archive(files))
        sh(story, "rm /etc/modprobe.d/vfio.conf; echo 'options vfio-pci ids=10de:2230' > /etc/modprobe.d/late.conf")
        story.power_off("kpro5")
        story.power_on("kpro5")
        booted(story)
        cards = drivers(story)
        assert (cards[RTX3090], cards[A6000]) == ("vfio-pci", "nouveau")

    def test_another_kernel(self, story: Lab) -> None:
        root = story.path("kpro5", "/")
        kmodules.install_driver(root, "6.8.12-9-pve", "580.126.09", "proprietary")
        kmodules.install_kernel(root, "6.8.12-11-pve")
        story.power_off("kpro5")
        story.power_on("kpro5")
        booted(story)
        assert sh(story, "uname -r") == "6.8.12-11-pve\n"
        text = "modprobe: FATAL: Module nvidia not found in directory /lib/modules/6.8.12-11-pve\n"
        assert sh(story, "modprobe nvidia", 1) == text

    def test_secure_boot(self, story: Lab) -> None:
        kmodules.install_driver(story.path("kpro5", "/"), "6.8.12-9-pve", "580.126.09", "open")
        story.kernel("secure-boot", "kpro5", on=True)
        sh(story, f"echo {A6000} > /sys/bus/pci/drivers/vfio-pci/unbind")
        assert (
            sh(story, "modprobe nvidia", 1)
            == "modprobe: ERROR: could not insert 'nvidia': Key was rejected by service\n"
        )
        assert "Loading of unsigned module is rejected\n" in sh(story, "dmesg")


class TestContainers:
    def test_a_container_sees_the_same_kernel_through_its_own_rules(self, kpro5: Lab) -> None:
        """CT 129 may open major 195, and its rule for the unified memory names a major of long ago."""
        kmodules.install_userland(kpro5.state / "rbd/vm-129-disk-0", "580.126.09")
        sh(kpro5, "pct start 129")
        inside = "pct exec 129 -- sh -c '{} 2>&1; true'"
        assert sh(kpro5, inside.format("cat /dev/nvidia0")) == "cat: /dev/nvidia0: No such device or address\n"
        assert sh(kpro5, inside.format("cat /dev/nvidia-uvm")) == "cat: /dev/nvidia-uvm: Operation not permitted\n"
        assert sh(kpro5, inside.format("nvidia-smi -L")).count("NVIDIA RTX A6000") == 2
        assert sh(kpro5, inside.format("uname -r")) == "6.8.12-9-pve\n"
        assert sh(kpro5, inside.format("grep uvm /proc/devices")) == "509 nvidia-uvm\n"
        sh(kpro5, "pct stop 129; sed -i '/devices.allow: c 195/d' /etc/pve/lxc/129.conf; pct start 129")
        assert sh(kpro5, inside.format("nvidia-smi; echo $?")) == "Failed to initialize NVML: Unknown Error\n255\n"

    def test_a_container_uses_the_hosts_driver(self, kpro5: Lab) -> None:
        sh(kpro5, "pct start 129; systemd-run --quiet --unit=user pct exec 129 -- gpu-process /dev/nvidia1")
        wait_until(lambda: len(kpro5.kernel("state", "kpro5")["opens"]) == 1, 10, "nobody opens the card")
        sh(kpro5, "rmmod nvidia_uvm")
        assert sh(kpro5, "rmmod nvidia", 1) == "rmmod: ERROR: Module nvidia is in use\n"
        sh(kpro5, "pct stop 129")
        wait_until(lambda: not kpro5.kernel("state", "kpro5")["opens"], 10, "the card is still open")
        sh(kpro5, "rmmod nvidia")
