import pytest

from controller.layers.devices.facts import Guest, GuestFacts
from controller.layers.shared.claims import claimant, claims

MAPPINGS = """rtx3090
	description RTX 3090s
	map id=10de:2204,iommugroup=30,node=kpro5,path=0000:17:00,subsystem-id=10de:1467
	map id=10de:2204,iommugroup=31,node=kpro5,path=0000:31:00.0;0000:31:00.1
	map id=10de:2204,iommugroup=9,node=kpro6,path=0000:b1:00

other
	map id=10de:2230,node=kpro5,path=0000:4f:00
"""


def facts(text: str, node: str = "kpro5", **more: object) -> GuestFacts:
    return GuestFacts("kpro5", True, (Guest("qemu", 210, node, text),), MAPPINGS, **more)  # type: ignore[arg-type]


CLAIMS = {
    "a whole device": ("hostpci0: 0000:4f:00,pcie=1\n", "0000:4f:00.0", "VM 210 (hostpci0)"),
    "its audio, too": ("hostpci0: 4f:00,pcie=1\n", "0000:4f:00.1", "VM 210 (hostpci0)"),
    "one function": ("hostpci1: 4f:00.0,pcie=1,x-vga=1\n", "0000:4f:00.0", "VM 210 (hostpci1)"),
    "another function": ("hostpci1: 4f:00.1\n", "0000:4f:00.0", ""),
    "another device": ("hostpci1: 4f:01\n", "0000:4f:00.0", ""),
    "the second of several": ("hostpci1: 0000:02:00.0;0000:4f:00.0,pcie=1\n", "0000:4f:00.0", "VM 210 (hostpci1)"),
    "with its option's name": ("hostpci0: pcie=1,host=4f:00.0\n", "0000:4f:00.0", "VM 210 (hostpci0)"),
    "in upper case, which PVE drops": ("hostpci0: 4F:00.0\n", "0000:4f:00.0", "VM 210 (hostpci0)"),
    "another domain": ("hostpci0: 0001:4f:00.0\n", "0000:4f:00.0", ""),
    "any of a mapping": ("hostpci2: mapping=rtx3090,pcie=1\n", "0000:17:00.0", "VM 210 (hostpci2)"),
    "the other of a mapping": ("hostpci2: mapping=rtx3090\n", "0000:31:00.0", "VM 210 (hostpci2)"),
    "a mapping of another node": ("hostpci2: mapping=rtx3090\n", "0000:b1:00.0", ""),
    "a mapping that nobody uses": ("memory: 1\n", "0000:4f:00.0", ""),
    "in the arguments": ("args: -device vfio-pci,host=4f:00.0,id=x -cpu host\n", "0000:4f:00.0", "VM 210 (args)"),
    "in the arguments, by sysfs": (
        "args: -device 'vfio-pci,id=x,sysfsdev=/sys/bus/pci/devices/0000:4f:00.0'\n",
        "0000:4f:00.0",
        "VM 210 (args)",
    ),
    "a template": ("template: 1\nhostpci0: 4f:00\n", "0000:4f:00.0", "VM 210 (hostpci0)"),
    "pending": ("memory: 1\n\n[PENDING]\nhostpci0: 4f:00\n", "0000:4f:00.0", "VM 210 (hostpci0)"),
    "a snapshot claims nothing yet": ("memory: 1\n\n[before]\nhostpci0: 4f:00\n", "0000:4f:00.0", ""),
    "a snapshot after pending": ("[PENDING]\nmemory: 2\n[before]\nhostpci0: 4f:00\n", "0000:4f:00.0", ""),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_what_a_vm_claims(name: str) -> None:
    text, pci, by = CLAIMS[name]
    assert claimant((pci,), claims(facts(text))) == by


def test_a_vm_of_another_node_claims_nothing_here() -> None:
    assert claims(facts("hostpci0: 4f:00\n", node="kpro6")) == ()


def test_what_a_running_vm_holds_is_claimed() -> None:
    found = claims(facts("memory: 1\n", reservations=(("0000:4f:00.0", 210),)))
    assert claimant(("0000:4f:00.0",), found) == "VM 210 (running)"
