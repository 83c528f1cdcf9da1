import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.layers.devices.facts import Guest, GuestFacts
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.shared.assignment import Assigned, Assignment, NoGpu, Unassigned, assign
from controller.spec.model import Container, Host
from tests.layers import fleet
from tests.layers.fleet import A6000, FIRST, RTX3090, SECOND, VMS, gpu_facts, guest_facts

THIRD = VMS[0]


def all_for_containers(**models: str) -> Host:
    gpus = [
        {
            "pci": pci,
            "model": models.get(pci, "RTX A6000" if pci in (FIRST, SECOND) else "RTX 3090"),
            "owner": "containers",
        }
        for pci in (FIRST, SECOND, *VMS)
    ]
    return fleet.host(nvidia={"gpus": gpus})


def ct(vmid: int, **gpus: object) -> Container:
    return fleet.container(name=f"ct{vmid}", id=str(vmid), gpus=gpus.get("devices") or gpus)


def passing(*minors: int) -> str:
    return "".join(f"dev{n}: /dev/nvidia{minor}\n" for n, minor in enumerate(minors))


def assigned(
    *containers: Container, guests: GuestFacts | None = None, gpus: GpuFacts | None = None, host: Host | None = None
) -> dict[str, Assignment]:
    host = host or fleet.host()
    return assign(fleet.specs(host, *containers), host, gpus or gpu_facts(), guests or guest_facts())


def one(answer: dict[str, Assignment], name: str = "ct129") -> tuple[str, ...] | NoGpu:
    found = answer[name]
    return found.pcis if isinstance(found, Assigned) else found.reason


BY_NUMBER = {
    "two": ({"count": "2"}, (FIRST, SECOND)),
    "the lowest free address": ({"count": "1"}, (FIRST,)),
    "none": ({"count": "0"}, ()),
    "too many: three are for VMs": ({"count": "3"}, NoGpu.NOT_ENOUGH),
    "enough memory": ({"count": "2", "memory": ">=48GiB"}, (FIRST, SECOND)),
    "too much memory": ({"count": "1", "memory": ">=49GiB"}, NoGpu.NOT_ENOUGH),
    "a model": ({"count": "1", "model": "NVIDIA RTX A6000"}, (FIRST,)),
    "another model": ({"count": "1", "model": "RTX 3090"}, NoGpu.NOT_ENOUGH),
    "a capability": ({"count": "2", "compute_capability": "8.6"}, (FIRST, SECOND)),
    "a later capability": ({"count": "1", "compute_capability": ">=9.0"}, NoGpu.NOT_ENOUGH),
    "these ones, in their order": ({"devices": [SECOND, FIRST]}, (SECOND, FIRST)),
    "by UUID": ({"devices": [fleet.uuid(SECOND)]}, (SECOND,)),
    "an unknown UUID": ({"devices": ["GPU-ffffffff-0000-4000-8000-000000000000"]}, NoGpu.MISSING),
    "one that is for VMs": ({"devices": [THIRD]}, NoGpu.OWNED_BY_VMS),
    "one that is not listed": ({"devices": ["0000:99:00.0"]}, NoGpu.NOT_LISTED),
}


@pytest.mark.parametrize("name", BY_NUMBER)
def test_what_is_asked_for(name: str) -> None:
    wanted, found = BY_NUMBER[name]
    assert one(assigned(ct(129, **wanted))) == found


def test_the_same_answer_before_and_after_a_driver_has_the_cards() -> None:
    """An A6000 tells 47.99 GiB, its data sheet 48: the assignment may not change when the driver is loaded."""
    wanted = ct(129, count="2", memory=">=48GiB", compute_capability="8.6", model="RTX A6000")
    bare = gpu_facts(minors={}, nodes=[])
    assert one(assigned(wanted, gpus=bare)) == one(assigned(wanted)) == (FIRST, SECOND)


def test_a_board_that_nobody_knows_fits_nothing_that_is_asked_of_it() -> None:
    unknown = gpu_facts(cards={FIRST: "10de:ffff"}, minors={})
    host = fleet.host(nvidia={"gpus": [{"pci": FIRST, "model": "New", "owner": "containers"}]})
    assert one(assigned(ct(129, count="1", memory=">=1GiB"), gpus=unknown, host=host)) == NoGpu.NOT_ENOUGH
    assert one(assigned(ct(129, count="1"), gpus=unknown, host=host)) == (FIRST,)


def test_what_a_container_has_it_keeps() -> None:
    held = guest_facts((129, passing(1)))
    assert one(assigned(ct(129, count="1"), guests=held)) == (SECOND,)


def test_of_more_than_it_may_have_it_keeps_the_lowest() -> None:
    assert one(assigned(ct(129, count="1"), guests=guest_facts((129, passing(1, 0))))) == (FIRST,)


def test_a_new_container_does_not_take_what_another_has() -> None:
    answer = assigned(ct(100, count="1"), ct(129, count="1"), guests=guest_facts((129, passing(0))))
    assert (one(answer, "ct100"), one(answer)) == ((SECOND,), (FIRST,))


def test_who_names_a_card_comes_before_who_happens_to_have_it() -> None:
    answer = assigned(ct(129, count="1"), ct(200, devices=[FIRST]), guests=guest_facts((129, passing(0))))
    assert (one(answer), one(answer, "ct200")) == ((SECOND,), (FIRST,))


def test_two_who_name_the_same_card() -> None:
    answer = assigned(ct(100, devices=[FIRST]), ct(129, devices=[FIRST]))
    assert (one(answer, "ct100"), one(answer)) == ((FIRST,), NoGpu.IN_USE)


def test_shared_cards() -> None:
    both = (ct(100, count="2", shared="true"), ct(129, count="2", shared="true"))
    answer = assigned(*both)
    assert one(answer, "ct100") == one(answer) == (FIRST, SECOND)
    answer = assigned(ct(100, count="2", shared="true"), ct(129, count="2"))
    assert one(answer) == NoGpu.NOT_ENOUGH


def test_a_card_of_a_container_in_no_spec_is_not_free_but_can_be_named() -> None:
    held = guest_facts((300, passing(0)))
    assert one(assigned(ct(129, count="1"), guests=held)) == (SECOND,)
    answer = assigned(ct(129, count="2"), guests=held)
    assert one(answer) == NoGpu.NOT_ENOUGH
    found = answer["ct129"]
    assert isinstance(found, Unassigned)
    assert "CT 300" in found.message
    assert one(assigned(ct(129, devices=[FIRST]), guests=held)) == (FIRST,)


def test_a_config_on_another_node_holds_nothing_here() -> None:
    held = guest_facts((300, passing(0)), node="kpro6")
    assert one(assigned(ct(129, count="1"), guests=held)) == (FIRST,)


def test_a_card_that_a_vm_claims_is_refused_even_if_the_spec_gives_it_away() -> None:
    claimed = dataclasses.replace(guest_facts(), guests=(Guest("qemu", 210, "kpro5", "hostpci0: 4f:00\n"),))
    assert one(assigned(ct(129, count="1"), guests=claimed)) == (SECOND,)
    assert one(assigned(ct(129, devices=[FIRST]), guests=claimed)) == NoGpu.CLAIMED


def test_a_card_that_shares_its_iommu_group_with_what_a_vm_claims_is_refused() -> None:
    gpus = gpu_facts()
    shared = tuple(
        dataclasses.replace(f, mates=(FIRST, "0000:50:00.0")) if f.pci == FIRST else f for f in gpus.functions
    )
    claimed = dataclasses.replace(guest_facts(), guests=(Guest("qemu", 210, "kpro5", "hostpci0: 50:00.0\n"),))
    answer = assigned(ct(129, devices=[FIRST]), guests=claimed, gpus=dataclasses.replace(gpus, functions=shared))
    assert one(answer) == NoGpu.CLAIMED


def test_a_card_of_another_model_than_the_spec_says_is_never_given() -> None:
    gpus = gpu_facts(cards={FIRST: RTX3090, SECOND: A6000})
    assert one(assigned(ct(129, devices=[FIRST]), gpus=gpus)) == NoGpu.OTHER_MODEL


def test_a_card_that_is_gone_is_not_replaced_by_another() -> None:
    gpus = gpu_facts(cards={SECOND: A6000, **dict.fromkeys(VMS, RTX3090)}, minors={SECOND: 1, VMS[0]: 0})
    host = all_for_containers()
    has_one_left = guest_facts((129, passing(0, 1)))
    assert (
        one(assigned(ct(129, count="2", model="RTX A6000"), gpus=gpus, host=host, guests=has_one_left)) == NoGpu.MISSING
    )
    # who has all that it needs keeps it
    assert one(assigned(ct(129, count="1"), gpus=gpus, host=host, guests=guest_facts((129, passing(1))))) == (SECOND,)


wishes = st.fixed_dictionaries(
    {"count": st.integers(0, 3).map(str)},
    optional={"memory": st.sampled_from([">=20GiB", ">=44GiB"]), "shared": st.just("true")},
)
everyone = st.dictionaries(st.integers(100, 106), wishes, max_size=5)
held = st.dictionaries(st.integers(100, 108), st.lists(st.integers(0, 5), max_size=3, unique=True), max_size=5)


@given(everyone, held, st.randoms())
def test_an_assignment_is_sound_and_stays(wanted: dict, has: dict, chance) -> None:
    host = all_for_containers()
    gpus = gpu_facts(minors={pci: n for n, pci in enumerate((FIRST, SECOND, *VMS))})
    containers = [ct(vmid, **wish) for vmid, wish in wanted.items()]
    chance.shuffle(containers)
    guests = guest_facts(*((vmid, passing(*minors)) for vmid, minors in has.items()))
    answer = assigned(*containers, guests=guests, gpus=gpus, host=host)
    assert answer == assigned(*reversed(containers), guests=guests, gpus=gpus, host=host)
    holders: dict[str, list[Container]] = {}
    for container in containers:
        found = answer[container.name]
        if isinstance(found, Assigned):
            assert len(found.pcis) == len(set(found.pcis)) == container.gpus.number
            for pci in found.pcis:
                holders.setdefault(pci, []).append(container)
    assert all(len(who) == 1 or all(c.gpus.shared for c in who) for who in holders.values())
    # once the configs pass what was assigned, nothing changes any more
    minor = {gpu.pci: gpu.minor for gpu in gpus.gpus}
    now = dict(has)
    for container in containers:
        found = answer[container.name]
        if isinstance(found, Assigned):
            now[container.id] = [minor[pci] for pci in found.pcis]
    after = guest_facts(*((vmid, passing(*minors)) for vmid, minors in now.items()))
    settled = assigned(*containers, guests=after, gpus=gpus, host=host)
    for container in containers:
        if isinstance(answer[container.name], Assigned):
            assert settled[container.name] == answer[container.name]
