"""container.userland: what is inside, what is judged from it, and who has to agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from controller.core.view import View
from controller.core.words import Block, Drift, InSync, NotKnown, Skipped, Step, Verdict
from controller.facts.units import UnitFacts
from controller.facts.words import HostFacts, Known, Later, ParseError, Section, Unknown
from controller.layers import userland
from controller.layers.driver.facts import DriverFacts, Runfile
from controller.layers.power.facts import PowerFacts, Running
from controller.layers.userland.facts import Userland, UserlandFacts, parse
from controller.spec.model import Container, Host, Specs
from tests.layers.fleet import FIRST, SECOND, access_facts, container, gpu_facts, guest_facts, server, uuid
from tests.layers.fleet import host as host_of

VERSION = "580.126.09"
RUNFILE = Runfile(f"NVIDIA-Linux-x86_64-{VERSION}.run", "ab" * 32)
CARDS = ((uuid(FIRST), FIRST), (uuid(SECOND), SECOND))
RIGHT = Userland(129, (VERSION,), True, (), CARDS)


def host(source: str = "runfile", version: str = VERSION) -> Host:
    gpus = [gpu.model_dump(mode="json") for gpu in host_of().gpus]
    return host_of(nvidia={"driver": {"version": version, "source": source}, "gpus": gpus})


def judged(
    *inside: Userland,
    spec: Host | None = None,
    running: Sequence[int] = (129,),
    started: int | Later = 9,
    runfiles: Sequence[Runfile] = (RUNFILE,),
    ct: Container | None = None,
) -> Verdict:
    spec, ct = spec or host(), ct or container()
    sections = {
        "world": Known(UnitFacts(1, "boot")),
        "host.access": Known(access_facts()),
        "host.driver": Known(DriverFacts(runfiles=tuple(runfiles))),
        "host.gpu-health": Known(gpu_facts()),
        "container.devices": Known(guest_facts((129, "dev0: /dev/nvidia0\ndev1: /dev/nvidia1\n"))),
        "container.power": Known(PowerFacts(tuple(Running(i, 7, started, None, None, ()) for i in running))),
        "container.userland": Known(UserlandFacts(tuple(inside))),
    }
    specs = Specs(hosts={"kpro5": spec}, containers={ct.name: ct}, servers={"qwen": server("qwen")})
    return userland.check(View(specs, {"kpro5": HostFacts("kpro5", sections)}), ct)


def drift_of(verdict: Verdict, reason: str) -> Step | Block:
    assert isinstance(verdict, Drift), verdict
    assert verdict.reason == reason
    assert isinstance(verdict.remedy, Step | Block)
    return verdict.remedy


def test_what_the_fragment_says() -> None:
    facts = parse(
        Section(
            0,
            f"container 129\nlibrary 129 libnvidia-ml.so.{VERSION}\nsmi 129\nexit 0\n"
            "GPU-a, 00000000:4F:00.0\nGPU-b, 00000000:CE:00.0\n.\nbetween 130\n"
            "container 131\nlibrary 131 libnvidia-ml.so.570.86.15\nprogram 131\npackage 131 libnvidia-compute-570\n"
            "container 132\n",
        )
    )
    assert facts.of(129) == Userland(129, (VERSION,), True, (), (("GPU-a", FIRST), ("GPU-b", SECOND)))
    assert facts.of(131) == Userland(131, ("570.86.15",), True, ("libnvidia-compute-570",))
    assert facts.of(132) == Userland(132)
    assert facts.between == {130}


@pytest.mark.parametrize("out", ["x\n", "container x\n", "smi 129\nexit 0\n"])
def test_garbage_is_no_fact(out: str) -> None:
    with pytest.raises(ParseError):
        parse(Section(0, out))


@pytest.mark.parametrize(("text", "reason"), [("hung 3\n", "nvidia-smi-hangs"), ("exit 255\nx\n", "nvidia-smi-failed")])
def test_why_nvidia_smi_gave_no_answer(text: str, reason: str) -> None:
    failure = parse(Section(0, f"smi 129\n{text}.\n")).containers[0].failure
    assert failure is not None
    assert failure.reason == reason


def test_as_it_should_be() -> None:
    assert judged(RIGHT) == InSync()


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        (Userland(129), "no-library"),  # failure 22
        (Userland(129, ("580.95.05",), True), "other-version"),  # failure 4: the same major is not enough
        (Userland(129, (VERSION, "570.86.15"), True), "other-version"),
        (dataclasses.replace(RIGHT, program=False, cards=None), "no-library"),
    ],
)
def test_libraries_are_installed_with_the_permission_of_the_container_and_its_servers(
    inside: Userland, reason: str
) -> None:
    step = drift_of(judged(inside), reason)
    assert isinstance(step, Step)
    assert step.args == ("129", VERSION, "runfile", RUNFILE.name, RUNFILE.sha256)
    assert step.job == "userland-129"
    assert [str(d) for d in step.disrupts] == ["change-driver:Container/ct129", "restart-server:ModelServer/qwen"]
    assert "--no-kernel-modules" in step.script.text  # failure 23
    after = step.effect({"kpro5": HostFacts("kpro5", {"container.userland": Known(UserlandFacts((inside,)))})})[
        "kpro5"
    ].section("container.userland")
    assert isinstance(after, Known)
    assert judged(*after.value.containers) == InSync()


def test_the_installer_is_fetched_where_the_host_had_its_driver_before_us() -> None:
    step = drift_of(judged(Userland(129), runfiles=()), "no-library")
    assert isinstance(step, Step)
    assert (step.action, step.layer, str(step.object)) == ("fetch-driver", "host.driver", "Host/kpro5")
    before = {"kpro5": HostFacts("kpro5", {"host.driver": Known(DriverFacts())})}
    after = step.effect(before)["kpro5"].section("host.driver")
    assert isinstance(after, Known)
    assert isinstance(after.value, DriverFacts)
    assert after.value.runfile(VERSION, None) is not None


@pytest.mark.parametrize(
    ("inside", "spec", "runfiles", "why"),
    [
        (Userland(129, ("570.86.15",), True, ("libnvidia-compute-570",)), host(), (RUNFILE,), "from-packages"),
        (Userland(129), host(version="570.86.15"), (), "no-installer"),
        (Userland(129), host("preinstalled"), (RUNFILE,), "preinstalled"),
        (
            dataclasses.replace(RIGHT, cards=None, failure=Unknown("nvidia-smi-failed", "Unknown Error")),
            host(),
            (RUNFILE,),
            "nvidia-smi-failed",
        ),
        (dataclasses.replace(RIGHT, cards=CARDS[:1]), host(), (RUNFILE,), "other-cards"),
        # failure 28: it sees more than it is to have
        (dataclasses.replace(RIGHT, cards=(*CARDS, ("GPU-x", "0000:17:00.0"))), host(), (RUNFILE,), "other-cards"),
    ],
)
def test_what_cannot_be_put_right_is_a_block(
    inside: Userland, spec: Host, runfiles: Sequence[Runfile], why: str
) -> None:
    verdict = judged(inside, spec=spec, runfiles=runfiles)
    assert isinstance(verdict, Drift)
    assert isinstance(verdict.remedy, Block)
    assert verdict.remedy.reason == why
    assert verdict.remedy.needs


def test_where_nothing_is_asked_of_it() -> None:
    assert isinstance(judged(Userland(129), spec=host_of()), Skipped)  # a driver that is only observed
    assert isinstance(judged(running=()), Skipped)
    assert isinstance(judged(Userland(129), ct=container(gpus=None)), Skipped)


def test_what_is_not_known_is_not_absent() -> None:
    with pytest.raises(NotKnown):
        judged()  # it runs, and nobody could look inside
    hangs = dataclasses.replace(RIGHT, cards=None, failure=Unknown("nvidia-smi-hangs", "hangs"))
    with pytest.raises(NotKnown):
        judged(hangs)


def test_of_a_container_that_a_plan_starts_it_is_provisional() -> None:
    step = drift_of(judged(started=Later("start-ct129")), "not-known-yet")
    assert isinstance(step, Step)
    assert step.provisional
