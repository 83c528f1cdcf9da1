"""The simulated kernel does what facts say that Linux and NVIDIA's driver do."""

from __future__ import annotations

import pytest

from controller.layers.shared import kernel_physics as kernel
from controller.layers.shared.truth import Module, Node
from tests.sim.fleets import box, two_a6000

CARD_A, CARD_B = "0000:4f:00.0", "0000:ce:00.0"


def test_loading_nvidia_takes_every_driverless_card() -> None:
    made, host = box('{pci: "4f:00.0", model: RTX A6000}, {pci: "17:00.0", model: RTX 3090}')
    host.modules[host.kernel] = {"nvidia": Module("580.126.09", "proprietary")}
    assert kernel.load_module(made, host, "nvidia") == ""
    assert {host.functions["0000:17:00.0"].driver, host.functions[CARD_A].driver} == {"nvidia"}


def test_an_override_keeps_nvidia_off_a_card() -> None:
    made, host = box('{pci: "4f:00.0", model: RTX A6000}, {pci: "17:00.0", model: RTX 3090, override: vfio-pci}')
    host.modules[host.kernel] = {"nvidia": Module("580.126.09", "proprietary")}
    kernel.load_module(made, host, "nvidia")
    assert host.functions["0000:17:00.0"].driver is None
    assert host.functions[CARD_A].driver == "nvidia"


def test_nvidia_does_not_load_when_vfio_has_every_card() -> None:
    made, host = box('{pci: "4f:00.0", model: RTX A6000, driver: vfio-pci}')
    host.modules[host.kernel] = {"nvidia": Module("580.126.09", "proprietary")}
    assert "No such device" in kernel.load_module(made, host, "nvidia")
    assert "nvidia" not in host.loaded
    assert host.majors == {}


def test_a_module_that_is_not_built_for_this_kernel_is_not_found() -> None:
    made, host = two_a6000()
    kernel.power_off(made, host)
    host.next_kernel = "6.8.12-11-pve"
    kernel.boot(made, host)
    assert "nvidia" not in host.loaded
    assert "not found in directory /lib/modules/6.8.12-11-pve" in kernel.load_module(made, host, "nvidia")


def test_minors_are_the_first_free_ones_in_the_order_of_probing() -> None:
    made, host = two_a6000()
    assert host.functions[CARD_A].gpu.minor == 0
    kernel.unbind(made, host, CARD_A)
    kernel.unbind(made, host, CARD_B)
    kernel.probe(made, host, CARD_B)
    kernel.probe(made, host, CARD_A)
    assert (host.functions[CARD_A].gpu.minor, host.functions[CARD_B].gpu.minor) == (1, 0)


def test_a_reboot_gives_other_majors_and_forgets_overrides_and_nodes() -> None:
    made, host = two_a6000()
    before = host.majors["nvidia-uvm"]
    host.functions[CARD_A].override = "nvidia"
    boot_id = host.boot_id
    kernel.power_off(made, host)
    made.now += 60
    kernel.boot(made, host)
    assert host.functions[CARD_A].override is None
    assert not [path for path in host.dev if "nvidia" in path]
    assert host.boot_id != boot_id
    assert "nvidia-uvm" not in host.loaded  # nothing asked for it yet
    kernel.make_gpu_nodes(made, host, uvm=True)
    assert host.majors["nvidia-uvm"] != before
    assert host.dev["/dev/nvidia-uvm"] == Node(host.majors["nvidia-uvm"], 0)


def test_modules_load_d_brings_uvm_at_boot_and_persistenced_the_nodes() -> None:
    made, host = two_a6000()
    kernel.write(made, host, "/etc/modules-load.d/nvidia.conf", "# ours\nnvidia_uvm\n")
    host.persistenced = True
    kernel.power_off(made, host)
    kernel.boot(made, host)
    assert "nvidia-uvm" in host.loaded
    assert {"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"} <= set(host.dev)


def test_nodes_of_the_wrong_kind_are_made_anew_but_uvm_only_when_asked_for() -> None:
    made, host = two_a6000()
    host.dev["/dev/nvidia0"] = Node(plain=True, mode=0)
    del host.dev["/dev/nvidia-uvm"]
    kernel.make_gpu_nodes(made, host, uvm=False)
    assert host.dev["/dev/nvidia0"] == Node(195, 0)
    assert "/dev/nvidia-uvm" not in host.dev


def test_unbinding_a_card_in_use_never_comes_back() -> None:
    made, host = two_a6000()
    host.functions[CARD_A].gpu.used_by.append("ct:129")
    with pytest.raises(kernel.Hang, match="non-zero usage count"):
        kernel.unbind(made, host, CARD_A)
    assert kernel.unload_module(made, host, "nvidia-uvm") == ""
    assert "in use" in kernel.unload_module(made, host, "nvidia")
    assert host.functions[CARD_A].driver == "nvidia"


def test_a_lost_card_is_not_probed_again() -> None:
    made, host = two_a6000()
    kernel.lose_card(made, host, CARD_A)
    kernel.unbind(made, host, CARD_A)
    kernel.probe(made, host, CARD_A)
    assert host.functions[CARD_A].driver is None


def test_the_last_of_several_vfio_lines_counts() -> None:
    made, host = box('{pci: "4f:00.0", model: RTX A6000}, {pci: "17:00.0", model: RTX 3090}')
    kernel.write(
        made,
        host,
        "/etc/modprobe.d/vfio.conf",
        "options vfio-pci ids=10de:2230\noptions vfio-pci ids=10de:2204,10de:1aef\n",
    )
    kernel.load_module(made, host, "vfio-pci")
    assert host.functions["0000:17:00.0"].driver == "vfio-pci"
    assert host.functions[CARD_A].driver is None


def test_ids_of_a_model_take_the_audio_function_of_another_with_them() -> None:
    made, host = box('{pci: "4f:00.0", model: RTX A6000, audio_driver: null}')
    kernel.write(made, host, "/etc/modprobe.d/vfio.conf", "options vfio-pci ids=10de:2204,10de:1aef\n")
    kernel.load_module(made, host, "vfio-pci")
    assert host.functions["0000:4f:00.1"].driver == "vfio-pci"
    assert host.functions[CARD_A].driver is None


def test_a_full_disk_takes_no_file() -> None:
    made, host = two_a6000()
    host.disk_full = True
    assert kernel.write(made, host, "/etc/motd", "x") == "No space left on device"
    assert "/etc/motd" not in host.files
