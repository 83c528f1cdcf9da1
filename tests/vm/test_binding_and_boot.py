"""Binding and boot on a real kernel with an IOMMU, through real reboots: two identical cards with different owners.

A network driver plays nvidia's part: what the scripts know of cards and drivers comes to them as values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from controller.core.package import script
from controller.layers import binding, boot
from controller.layers.boot import facts
from tests.vm import image
from tests.vm.machine import FIRST, SECOND, Machine, missing, started

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1800)]

DATA = f"load e1000e\ncard {FIRST} 8086:10d3 e1000e - -\ncard {SECOND} 8086:10d3 vfio-pci - -\n"
SET_UP = script("controller.layers.boot", "set-up.sh")
FILES = (facts.UNIT, facts.SCRIPT, facts.DATA)


@pytest.fixture(scope="module", params=["plain", "ids"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A machine that gives both cards to e1000e at boot (plain), or both to vfio-pci, from the initramfs on (ids)."""
    if os.environ.get("RECONCILE_REQUIRE_VM") != "1":
        pytest.skip("the virtual machine's tests take ten minutes: `make test-vm` runs them")
    if reason := missing():
        pytest.fail(reason)
    ids = request.param == "ids"
    with started(image.get(), ids=ids) as running:
        if ids:
            running.run(
                "printf 'options vfio-pci ids=8086:10d3\\nsoftdep e1000e pre: vfio-pci\\n' >/etc/modprobe.d/vfio.conf"
            )
        running.ids = ids
        yield running


def bind(machine: Machine, address: str, driver: str, what: str = "bind") -> tuple[int, str]:
    done = machine.script(binding.BIND, what, address, driver, machine.driver(address), "none")
    return done.returncode, done.stderr.decode()


def set_up(machine: Machine) -> None:
    texts = [facts.marked(text, "Host/vm", boot.SCHEMA) for text in (boot.BOOT_UNIT, boot.BOOT_SCRIPT, DATA)]
    args = [word for text in texts for word in ("absent", str(len(text.encode())))]
    done = machine.script(SET_UP, *args, stdin="".join(texts).encode())
    assert done.returncode == 0, done.stderr


def taken(machine: Machine, address: str) -> list[str]:
    """What took a card since this boot, by the kernel's log."""
    return re.findall(rf"\b(e1000e|vfio-pci) {re.escape(address)}", machine.run("dmesg"))


def test_first_each_card_is_bound_by_its_address_and_its_twin_stays(machine: Machine) -> None:
    both = "vfio-pci" if machine.ids else "e1000e"
    assert (machine.driver(FIRST), machine.driver(SECOND)) == (both, both)
    address, driver, twin = (FIRST, "e1000e", SECOND) if machine.ids else (SECOND, "vfio-pci", FIRST)

    assert bind(machine, address, driver, "guard") == (0, "")
    assert (machine.driver(address), machine.override(address)) == (both, driver)
    assert bind(machine, address, driver) == (0, "")
    assert (machine.driver(address), machine.driver(twin)) == (driver, both)
    assert machine.override(twin) == "(null)"
    assert bind(machine, address, driver) == (0, "")  # again: nothing to do


def test_second_a_card_whose_group_is_open_is_not_unbound(machine: Machine) -> None:
    group = machine.run(f"basename $(readlink /sys/bus/pci/devices/{SECOND}/iommu_group)").strip()
    machine.run(f"setsid sh -c 'exec 3<>/dev/vfio/{group}; exec sleep 600' >/dev/null 2>&1 </dev/null &")
    machine.run(f"until find /proc/[0-9]*/fd -lname /dev/vfio/{group} 2>/dev/null | grep -q .; do sleep 0.1; done")
    rc, said = bind(machine, SECOND, "e1000e")
    assert rc == 1
    assert re.search(r"in use by \d+ \(sleep\)", said), said
    assert machine.driver(SECOND) == "vfio-pci"
    machine.run("pkill -x sleep")


def test_third_a_step_that_was_cut_off_is_gone_on_from(machine: Machine) -> None:
    for cut in (
        f"echo vfio-pci >/sys/bus/pci/devices/{FIRST}/driver_override",
        f"echo {FIRST} >/sys/bus/pci/devices/{FIRST}/driver/unbind",
    ):
        assert bind(machine, FIRST, "e1000e")[0] == 0
        machine.run(f"echo vfio-pci >/sys/bus/pci/devices/{FIRST}/driver_override")
        machine.run(cut)
        assert bind(machine, FIRST, "vfio-pci") == (0, "")
        assert machine.driver(FIRST) == "vfio-pci"
    assert bind(machine, FIRST, "e1000e") == (0, "")


def test_then_after_a_reboot_each_is_where_it_belongs(machine: Machine) -> None:
    set_up(machine)
    set_up_again = machine.run(f"sha256sum {' '.join(FILES)}")
    machine.reboot()
    assert (machine.driver(FIRST), machine.driver(SECOND)) == ("e1000e", "vfio-pci")
    assert (machine.override(FIRST), machine.override(SECOND)) == ("e1000e", "vfio-pci")
    assert machine.run("systemctl is-active reconcile-gpus.service").strip() == "active"
    assert machine.run("systemctl --failed --plain --no-legend").strip() == ""
    assert machine.run(f"sha256sum {' '.join(FILES)}") == set_up_again
    # Before anything else loads a driver: no driver but its own ever had the card of virtual machines.
    assert "e1000e" not in taken(machine, SECOND)
    order = "systemctl show -P ActiveEnterTimestampMonotonic reconcile-gpus.service systemd-udev-trigger.service"
    ours, udev = (int(line) for line in machine.run(order).split())
    assert ours < udev


def test_last_driverctl_lets_another_driver_have_the_card_first(machine: Machine) -> None:
    """Why the unit is our own (docs/decisions/0006): driverctl acts when udev has let a driver take the card."""
    machine.run("systemctl disable -q reconcile-gpus.service")
    machine.run(
        f"mkdir -p /etc/driverctl.d; cd /etc/driverctl.d; echo e1000e >pci-{FIRST}; echo vfio-pci >pci-{SECOND}"
    )
    machine.reboot()
    assert (machine.driver(FIRST), machine.driver(SECOND)) == ("e1000e", "vfio-pci")
    if not machine.ids:
        assert "e1000e" in taken(machine, SECOND)
