"""The simulated Proxmox VE does what the real one was seen to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller.layers.shared import kernel_physics as kernel
from controller.layers.shared import pve_physics as pve
from controller.layers.shared.truth import Fleet, Host, Node, Said
from tests.sim.fleets import box, demo, fleet, two_a6000

SAMPLES = Path(__file__).parents[3] / "shared" / "samples" / "proxmox"
THREE = "hosts: {a: {cluster: c}, b: {cluster: c}, d: {cluster: c}}"


def conf(made: Fleet, host: Host, text: str, vmid: int = 129, kind: str = "lxc") -> None:
    assert pve.write(made, host, f"/etc/pve/{kind}/{vmid}.conf", text) == ""


# --- starting a CT ---


def test_dev_lines_are_resolved_at_the_start() -> None:
    made, host = two_a6000()
    conf(made, host, "hostname: x\ndev0: /dev/nvidia1,mode=0666\ndev1: path=/dev/nvidia-uvm,deny-write=1\n")
    assert pve.pct_start(made, host, 129).rc == 0
    uvm = host.majors["nvidia-uvm"]
    container = host.containers[129]
    assert container.rules == ["allow c 195:1 rw", f"allow c {uvm}:0 r", f"deny c {uvm}:0 w"]
    assert container.dev["/dev/nvidia1"] == Node(195, 1, 0o666)
    assert container.dev["/dev/nvidia-uvm"].mode == 0o660
    assert f"lxc.cgroup2.devices.deny = c {uvm}:0 w\n" in host.files["/var/lib/lxc/129/config"].text


def test_a_missing_device_is_a_hard_failure() -> None:
    made, host = two_a6000()
    conf(made, host, "dev0: /dev/nvidia7\n")
    assert pve.pct_start(made, host, 129) == Said(255, err="Device /dev/nvidia7 does not exist\n")
    host.dev["/dev/nvidia7"] = Node(plain=True, mode=0)
    assert pve.pct_start(made, host, 129).err == "/dev/nvidia7 is not a device\n"
    assert host.containers == {}


def test_an_optional_mount_of_nothing_leaves_a_plain_file_of_mode_0() -> None:
    made, host = two_a6000()
    conf(made, host, "lxc.mount.entry: /dev/nvidia3 dev/nvidia3 none bind,optional,create=file\n")
    assert pve.pct_start(made, host, 129).rc == 0
    assert host.containers[129].dev["/dev/nvidia3"] == Node(plain=True, mode=0)
    assert pve.opens(host, 129, "/dev/nvidia3") == "not a device"


def test_a_mount_below_a_mounted_folder_makes_its_file_on_the_host() -> None:
    made, host = two_a6000()
    host.dev["/dev/dri/card0"] = Node(226, 0)
    conf(
        made,
        host,
        "lxc.mount.entry: /dev/dri dev/dri none bind,optional,create=dir\n"
        "lxc.mount.entry: /dev/dri/renderD128 dev/dri/renderD128 none bind,optional,create=file\n",
    )
    assert pve.pct_start(made, host, 129).rc == 0
    assert host.dev["/dev/dri/renderD128"] == Node(plain=True, mode=0)


def test_a_mount_that_is_not_optional_has_to_have_its_source() -> None:
    made, host = two_a6000()
    conf(made, host, "lxc.mount.entry: /srv/models models none bind,create=dir\n")
    assert "startup for container '129' failed" in pve.pct_start(made, host, 129).err
    host.directories.append("/srv/models")
    assert pve.pct_start(made, host, 129).rc == 0


def test_a_bind_mount_point_has_to_have_its_source() -> None:
    made, host = two_a6000()
    conf(made, host, "mp0: /srv/models,mp=/models\n")
    assert "lxc.hook.pre-start" in pve.pct_start(made, host, 129).err
    host.directories.append("/srv/models/qwen")
    assert pve.pct_start(made, host, 129).rc == 0


@pytest.mark.parametrize(
    ("rule", "starts"),
    [
        ("c 195:* rwm", True),
        ("c 195:* rwm # NVIDIA", True),  # what follows a full rwm is not read
        ("c 195:* rw # NVIDIA", False),
        ("a", True),
        ("c 195 rwm", False),
        ("/dev/nvidia0 rwm", True),
        ("/dev/nvidia9 rwm", False),
    ],
)
def test_a_device_rule_that_cannot_be_read_is_fatal(rule: str, starts: bool) -> None:
    made, host = two_a6000()
    conf(made, host, f"lxc.cgroup2.devices.allow: {rule}\n")
    said = pve.pct_start(made, host, 129)
    assert (said.rc == 0) is starts
    if not starts:
        assert "Failed to parse device rule" in said.err or "failed" in said.err


def test_editing_the_file_changes_nothing_of_a_running_ct() -> None:
    made, host = two_a6000()
    conf(made, host, "dev0: /dev/nvidia0\n")
    pve.pct_start(made, host, 129)
    before = pve.opens(host, 129, "/dev/nvidia0"), pve.opens(host, 129, "/dev/nvidia1")
    conf(made, host, "dev0: /dev/nvidia1\n")
    assert (pve.opens(host, 129, "/dev/nvidia0"), pve.opens(host, 129, "/dev/nvidia1")) == before
    assert before == ("", "No such file or directory")


def test_settings_in_a_snapshot_are_not_in_force() -> None:
    made, host = two_a6000()
    conf(made, host, "hostname: x\n\n[snap]\nhostname: x\ndev0: /dev/nvidia0\n")
    pve.pct_start(made, host, 129)
    assert host.containers[129].dev == {}


def test_stale_majors_are_allowed_and_reach_nothing() -> None:
    made = demo()
    host = made.hosts["kpro5"]
    assert host.majors["nvidia-uvm"] == 236
    assert pve.opens(host, 129, "/dev/nvidia0") == ""
    assert pve.opens(host, 129, "/dev/nvidia-uvm") == "Operation not permitted"
    assert pve.opens(host, 129, "/dev/nvidia2") == "not a device"


@pytest.mark.parametrize(
    ("text", "rc", "says"),
    [
        ("lock: migrate\n", 255, "CT is locked (migrate)"),
        ("template: 1\n", 255, "you can't start a CT if it's a template"),
        (None, 2, "Configuration file 'nodes/box/lxc/129.conf' does not exist"),
    ],
)
def test_what_pct_start_refuses(text: str | None, rc: int, says: str) -> None:
    made, host = two_a6000()
    if text is not None:
        conf(made, host, text)
    said = pve.pct_start(made, host, 129)
    assert (said.rc, said.err.strip()) == (rc, says)


def test_pct_of_what_runs_and_what_does_not() -> None:
    made, host = two_a6000()
    conf(made, host, "hostname: x\n")
    assert pve.pct_stop(made, host, 129).err == "CT 129 not running\n"
    pve.pct_start(made, host, 129)
    assert pve.pct_start(made, host, 129).err == "CT 129 already running\n"
    assert pve.pct_stop(made, host, 129).rc == 0
    assert host.containers == {}


def test_a_start_under_ha_succeeds_and_starts_nothing() -> None:
    made, host = two_a6000()
    conf(made, host, "hostname: x\n")
    pve.write(made, host, "/etc/pve/ha/resources.cfg", "ct: 129\n\tstate started\n")
    assert pve.pct_start(made, host, 129).rc == 0
    assert host.containers == {}


def test_a_storage_has_to_be_there() -> None:
    made = fleet(THREE)
    host = made.hosts["a"]
    conf(made, host, "rootfs: ceph-rbd:vm-129-disk-0,size=8G\n")
    pve.write(made, host, "/etc/pve/storage.cfg", "rbd: ceph-rbd\n\tpool rbd\n\tnodes b,d\n")
    assert pve.pct_start(made, host, 129).err == "storage 'ceph-rbd' is not available on node 'a'\n"
    pve.write(made, host, "/etc/pve/storage.cfg", "rbd: ceph-rbd\n\tpool rbd\n")
    assert pve.pct_start(made, host, 129).rc == 0


# --- VMs ---


def test_a_vm_takes_its_whole_iommu_group_even_from_nvidia() -> None:
    made, host = two_a6000()
    conf(made, host, "hostpci0: 0000:4f:00,pcie=1\n", 210, "qemu-server")
    assert pve.qm_start(made, host, 210).rc == 0
    assert {host.functions[f"0000:4f:00.{n}"].driver for n in (0, 1)} == {"vfio-pci"}
    assert host.functions["0000:4f:00.0"].gpu.minor is None
    pve.qm_stop(made, host, 210)
    assert host.functions["0000:4f:00.0"].driver == "vfio-pci"  # it is not given back


def test_after_a_vm_has_had_one_card_vfio_takes_the_other_of_that_model_too() -> None:
    made, host = two_a6000()
    conf(made, host, "hostpci0: 0000:4f:00,pcie=1\n", 210, "qemu-server")
    pve.qm_start(made, host, 210)
    kernel.unbind(made, host, "0000:ce:00.0")
    kernel.unload_module(made, host, "nvidia-uvm")
    kernel.unload_module(made, host, "nvidia")
    kernel.probe(made, host, "0000:ce:00.0")
    assert host.functions["0000:ce:00.0"].driver == "vfio-pci"


def test_an_address_in_upper_case_claims_nothing() -> None:
    made, host = two_a6000()
    conf(made, host, "hostpci0: 4F:00.0\n", 210, "qemu-server")
    assert pve.qm_start(made, host, 210).rc == 0
    assert host.functions["0000:4f:00.0"].driver == "nvidia"


def test_a_vm_start_hangs_on_a_card_in_use() -> None:
    made, host = two_a6000()
    host.functions["0000:4f:00.0"].gpu.used_by.append("ct:129")
    conf(made, host, "hostpci0: 0000:4f:00.0\n", 210, "qemu-server")
    with pytest.raises(kernel.Hang):
        pve.qm_start(made, host, 210)


# --- the cluster file system ---


def test_a_guest_has_one_config_in_the_cluster() -> None:
    made = fleet(THREE)
    a, b = made.hosts["a"], made.hosts["b"]
    conf(made, a, "hostname: x\n")
    assert pve.write(made, b, "/etc/pve/lxc/129.conf", "") == "File exists"
    assert pve.write(made, b, "/etc/pve/qemu-server/129.conf", "") == "File exists"
    assert pve.rename(made, b, "/etc/pve/nodes/a/lxc/129.conf", "/etc/pve/nodes/b/lxc/129.conf") == ""
    assert pve.own_guests(made, b, "lxc") == [129]
    assert pve.own_guests(made, a, "lxc") == []


def test_a_rename_silently_replaces_another_guests_config() -> None:
    made = fleet(THREE)
    a = made.hosts["a"]
    conf(made, a, "hostname: x\n", 129)
    conf(made, a, "hostname: y\n", 130)
    assert pve.rename(made, a, "/etc/pve/lxc/130.conf", "/etc/pve/lxc/129.conf") == ""
    assert pve.read(made, a, "/etc/pve/lxc/129.conf").text == "hostname: y\n"
    assert pve.read(made, a, "/etc/pve/lxc/130.conf") is None


def test_without_quorum_nothing_is_written_and_nothing_new_is_seen() -> None:
    made = fleet(THREE)
    a, b, d = (made.hosts[name] for name in "abd")
    conf(made, a, "hostname: old\n")
    pve.part(made, made.clusters["c"], [["a"], ["b", "d"]])
    assert pve.write(made, a, "/etc/pve/lxc/129.conf", "hostname: lost\n") == "Permission denied"
    assert pve.write(made, b, "/etc/pve/nodes/a/lxc/129.conf", "hostname: new\n") == ""
    assert pve.read(made, a, "/etc/pve/lxc/129.conf").text == "hostname: old\n"
    assert json.loads(pve.members(made, a))["cluster"]["quorate"] == 0
    assert json.loads(pve.members(made, d))["nodelist"]["a"]["online"] == 0
    pve.part(made, made.clusters["c"], [])
    assert pve.read(made, a, "/etc/pve/lxc/129.conf").text == "hostname: new\n"


def test_a_node_that_was_off_takes_the_copy_of_the_others() -> None:
    made = fleet(THREE)
    a, b = made.hosts["a"], made.hosts["b"]
    conf(made, a, "hostname: x\nonboot: 1\n")
    pve.power_off(made, a)
    assert pve.rename(made, b, "/etc/pve/nodes/a/lxc/129.conf", "/etc/pve/nodes/b/lxc/129.conf") == ""
    pve.power_on(made, a)
    assert pve.own_guests(made, a, "lxc") == []
    assert a.containers == {}  # it starts only what lies under its own node


def test_a_file_has_at_most_a_mebibyte() -> None:
    made, host = box()
    assert pve.write(made, host, "/etc/pve/lxc/129.conf", "#" * (1 << 20)) == ""
    assert pve.write(made, host, "/etc/pve/lxc/129.conf", "#" * ((1 << 20) + 1)) == "File too large"


def test_the_version_of_a_guest_goes_up_with_each_write() -> None:
    made, host = box()
    conf(made, host, "hostname: x\n")
    before = json.loads(pve.vmlist(made, host))["ids"]["129"]["version"]
    conf(made, host, "hostname: y\n")
    assert json.loads(pve.vmlist(made, host))["ids"]["129"]["version"] == before + 1


# --- boot ---


def test_a_boot_starts_what_is_to_start_and_a_failure_stops_nobody_else() -> None:
    made, host = two_a6000()
    conf(made, host, "onboot: 1\ndev0: /dev/nvidia0\n", 101)  # its node is not there before somebody makes it
    conf(made, host, "onboot: 1\n", 102)
    conf(made, host, "hostname: by-hand\n", 103)
    for vmid in (101, 102, 103):
        pve.pct_start(made, host, vmid)
    pve.power_off(made, host)
    made.now += 60
    pve.power_on(made, host)
    assert sorted(host.containers) == [102]


def test_a_boot_without_quorum_starts_nobody() -> None:
    made = fleet(THREE)
    a = made.hosts["a"]
    conf(made, a, "onboot: 1\n")
    for name in "abd":
        pve.power_off(made, made.hosts[name])
    pve.power_on(made, a)
    assert a.containers == {}


def test_generated_configs_survive_a_reboot_and_what_lies_under_run_does_not() -> None:
    made, host = two_a6000()
    conf(made, host, "hostname: x\n")
    pve.pct_start(made, host, 129)
    kernel.write(made, host, "/run/reconcile/edited/129", "1\n")
    pve.power_off(made, host)
    assert "/var/lib/lxc/129/config" in host.files
    assert "/run/reconcile/edited/129" not in host.files


# --- PVE's own parser agrees ---


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the samples do not lie beside this checkout")
def test_the_vectors_of_pves_own_parser() -> None:
    vectors = json.loads((SAMPLES / "pct_config_vectors.json").read_text())
    for name, vector in vectors.items():
        read = pve.read_config(vector["input"])
        other = ("digest", "pending", "snapshots", "description", "lxc")
        known = {key: str(value) for key, value in vector["conf"].items() if key not in other}
        read.keys.pop("description", None)
        if name != "bool_yes":  # it turns yes into 1, which nothing here asks for
            assert read.keys == known, name
