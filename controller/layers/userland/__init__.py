"""container.userland: nvidia-smi in the container works, and its libraries are exactly the host module's version."""

from __future__ import annotations

import dataclasses

from controller.core.package import text
from controller.core.view import View
from controller.core.words import Block, Disruption, Drift, InSync, Layer, NotKnown, Skipped, Step, Verdict
from controller.facts.words import FleetFacts, Known, Later
from controller.layers.access.facts import AccessFacts
from controller.layers.devices.facts import GuestFacts
from controller.layers.driver.facts import DriverFacts
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.power.facts import PowerFacts
from controller.layers.shared import guest_script, jobs
from controller.layers.shared.assignment import Assigned, assign
from controller.layers.shared.driver_fetch import fetch
from controller.layers.userland.facts import Userland, UserlandFacts, parse
from controller.layers.userland.reasons import Reason
from controller.spec.model import Container, Driver, DriverSource, Host, Lifecycle
from controller.spec.policy import Permission
from controller.spec.ref import Ref

NAME = "container.userland"
_PACKAGE = "controller.layers.userland"


def check(view: View, container: Container) -> Verdict:
    """Whether programs in the container get the libraries that the host's module accepts, and see its cards."""
    host = view.host(container.host)
    wish = host.nvidia.driver if host.nvidia else None
    if container.gpus is None or not container.gpus.number:
        return Skipped("it gets no cards")
    if wish is None or host.lifecycle is not Lifecycle.ACTIVE:
        return Skipped(f"no driver in the spec of {host.name}" if wish is None else f"{host.name}: {host.lifecycle}")
    running = view.fact(host.name, "container.power", PowerFacts).of(container.id)
    if running is None:
        return Skipped("it does not run")
    gpus = view.fact(host.name, "host.gpu-health", GpuFacts)
    if gpus.module is None:
        return Skipped(f"no driver is loaded on {host.name}")
    facts = view.fact(host.name, NAME, UserlandFacts)
    here = facts.of(container.id)
    if here is None and not isinstance(running.started, Later):
        raise NotKnown("in-between", f"CT {container.id} is just being started or stopped")
    version = gpus.module.version
    if here is None:
        message = f"{container.name} has to have the libraries of driver {version}"
        step = _install(view, host, wish, container, version, Reason.NOT_KNOWN_YET, is_certain=False)
        return Drift(Reason.NOT_KNOWN_YET, message, step)
    if here.libraries != (version,) or not here.program:
        return _other(view, host, wish, container, here, version)
    return _seen(view, host, container, here, gpus)


def _other(view: View, host: Host, wish: Driver, container: Container, here: Userland, version: str) -> Drift:
    if here.libraries and here.libraries != (version,):
        reason = Reason.OTHER_VERSION
        has = ", ".join(here.libraries)
        message = f"the libraries in {container.name} are of driver {has}, the module of {host.name} is {version}"
    else:
        reason = Reason.NO_LIBRARY
        message = f"{container.name} has no NVIDIA {'programs' if here.libraries else 'libraries'} inside"
    block = _problem(view, host, wish, container, here, version, message)
    if block is not None:
        return Drift(reason, message, block)
    if wish.source is DriverSource.RUNFILE and not _has_installer(view, host, version):
        arch = view.fact(host.name, "host.access", AccessFacts).arch
        return jobs.drift(view, reason, message, fetch(host, wish, arch, reason))
    step = _install(view, host, wish, container, version, reason)
    return jobs.drift(view, reason, message, step)


def _has_installer(view: View, host: Host, version: str) -> bool:
    return view.fact(host.name, "host.driver", DriverFacts).runfile(version, None) is not None


def _problem(
    view: View, host: Host, wish: Driver, container: Container, here: Userland, version: str, message: str
) -> Block | None:
    if wish.source is DriverSource.PREINSTALLED:
        return Block(Reason.NEEDS_A_PERSON, message, f"install the libraries of {version} in CT {container.id}")
    if wish.source is DriverSource.APT:
        return None
    if here.packages:
        return Block(
            Reason.FROM_PACKAGES,
            f"packages brought NVIDIA's libraries into {container.name}: {', '.join(here.packages)}",
            f"remove them inside (`pct exec {container.id} -- apt-get purge ...`), or write `source: apt` for the host",
        )
    if version != wish.version and not _has_installer(view, host, version):
        return Block(
            Reason.NO_INSTALLER,
            f"{host.name} has no installer of driver {version} to install from in {container.name}",
            f"put it there as /var/lib/reconcile/drivers/NVIDIA-Linux-x86_64-{version}.run, with its SHA-256 in a file "
            "of that name and .sha256",
        )
    return None


def _seen(view: View, host: Host, container: Container, here: Userland, gpus: GpuFacts) -> Verdict:
    if here.failure is not None and here.failure.reason == "nvidia-smi-hangs":
        raise NotKnown(here.failure.reason, here.failure.message)
    if here.failure is not None:
        needs = f"look at `pct exec {container.id} -- nvidia-smi` and at `dmesg` of {host.name}"
        return Drift(
            Reason.SMI_FAILED,
            here.failure.message,
            Block(Reason.SMI_FAILED, here.failure.message, needs),
        )
    guests = view.fact(host.name, "container.devices", GuestFacts)
    assignment = assign(view.specs, host, gpus, guests).get(container.name)
    if here.cards is None or not isinstance(assignment, Assigned):
        return InSync()
    seen = {pci for _, pci in here.cards}
    if seen != set(assignment.pcis):
        sees = ", ".join(sorted(seen)) or "none"
        message = f"nvidia-smi in {container.name} sees {sees}, and is to see {', '.join(sorted(assignment.pcis))}"
        needs = f"look at the nodes in CT {container.id} (`ls -l /dev/nvidia*`): something else brought them there"
        return Drift(Reason.OTHER_CARDS, message, Block(Reason.OTHER_CARDS, message, needs))
    return InSync()


def _install(
    view: View,
    host: Host,
    wish: Driver,
    container: Container,
    version: str,
    reason: Reason,
    *,
    is_certain: bool = True,
) -> Step:
    runfile = view.fact(host.name, "host.driver", DriverFacts).runfile(version, None)
    ref = Ref("Container", container.name)

    def effect(facts: FleetFacts) -> FleetFacts:
        found = facts[host.name].section(NAME)
        if not isinstance(found, Known) or not isinstance(found.value, UserlandFacts):
            return facts
        others = [each for each in found.value.containers if each.id != container.id]
        ours = Userland(container.id, (version,), program=True)
        after = dataclasses.replace(found.value, containers=tuple(sorted((*others, ours), key=lambda each: each.id)))
        return {**facts, host.name: facts[host.name].with_section(NAME, after)}

    return Step(
        action="install-userland",
        object=ref,
        layer=NAME,
        reason=reason,
        summary=f"install the libraries of driver {version} in CT {container.id} on {host.name}"
        + ("" if is_certain else ", unless they are there"),
        hosts=(host.name,),
        script=guest_script(_PACKAGE, "install.sh"),
        args=(
            str(container.id),
            version,
            "apt" if wish.source is DriverSource.APT else "runfile",
            runfile.name if runfile else "",
            runfile.sha256 if runfile else "",
        ),
        disrupts=(
            Disruption(ref, Permission.CHANGE_DRIVER),
            *(
                Disruption(Ref("ModelServer", server.name), Permission.RESTART_SERVER)
                for server in view.specs.servers.values()
                if server.container == container.name
            ),
        ),
        timeout=1800.0,
        job=f"userland-{container.id}",
        provisional=not is_certain,
        effect=effect,
    )


LAYER = Layer(
    name=NAME,
    kind="Container",
    reasons=Reason,
    check=check,
    probe=text(_PACKAGE, "probe.sh"),
    parse=parse,
    platforms=frozenset({"proxmox"}),
)
