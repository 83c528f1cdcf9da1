"""host.driver: the module of the wanted version and flavour is loaded, and would be after the next boot."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from controller.core.package import script, text
from controller.core.view import View
from controller.core.words import Block, Disruption, Drift, Effect, InSync, Layer, NotKnown, Skipped, Step, Verdict
from controller.facts.words import FleetFacts, HostFacts, Known, Later
from controller.layers.access.facts import AccessFacts
from controller.layers.binding.facts import BindingFacts, User
from controller.layers.devices.facts import Guest, GuestFacts
from controller.layers.driver.facts import DriverFacts, Installed, parse
from controller.layers.driver.reasons import Reason
from controller.layers.gpu_health.facts import Gpu, GpuFacts, Module
from controller.layers.kernel.facts import KernelFacts
from controller.layers.placement.facts import PlacementFacts
from controller.layers.power.facts import PowerFacts
from controller.layers.shared import jobs
from controller.layers.shared.driver_fetch import fetch
from controller.layers.shared.driver_wanted import Want, is_loaded, missing, obstacle, wanted
from controller.layers.shared.lxc_devices import passed
from controller.layers.shared.pve_conf import parse as parse_conf
from controller.spec.model import Container, Driver, DriverSource, GpuOwner, Host, Lifecycle, Platform
from controller.spec.policy import Permission
from controller.spec.ref import Ref

NAME = "host.driver"
_PACKAGE = "controller.layers.driver"
_MAJOR = 195  # of nvidia and nvidiactl: nv-chardev-numbers.h


def check(view: View, host: Host) -> Verdict:
    """Whether the wanted driver is in use now, and would be after the next boot."""
    wish = host.nvidia.driver if host.nvidia else None
    if wish is None:
        return Skipped("no driver in the spec")
    if host.lifecycle is not Lifecycle.ACTIVE:
        return Skipped(str(host.lifecycle))
    kernel = view.fact(host.name, "host.kernel", KernelFacts)
    driver = view.fact(host.name, NAME, DriverFacts)
    gpus = view.fact(host.name, "host.gpu-health", GpuFacts)
    want = wanted(host, wish, gpus)
    if driver.stopped:
        names = ", ".join(driver.stopped)
        message = f"{names} of {host.name} was stopped for the driver's sake and does not run again"
        return Drift(Reason.HOLDERS_STOPPED, message, _start_holders(host, driver))
    found = _difference(host, want, kernel, driver, gpus)
    if found is None:
        return InSync(_note(host, driver, gpus))
    reason, message = found
    if (stop := obstacle(host, wish, kernel, driver, gpus)) is not None:
        return _blocked(reason, message, Reason(stop[0].value), *stop[1:])
    if not is_loaded(want, gpus) and (blocked := _in_use(view, host, reason, message, gpus)) is not None:
        return blocked
    if reason is Reason.NOT_INSTALLED:
        return _install(view, host, wish, want, message, kernel, driver, gpus)
    if wish.source is DriverSource.PREINSTALLED:
        return _blocked(reason, message, Reason.NEEDS_A_PERSON, message, f"load driver {want.version} there")
    return _load(view, host, want, reason, message, kernel, driver, gpus)


def _difference(
    host: Host, want: Want, kernel: KernelFacts, driver: DriverFacts, gpus: GpuFacts
) -> tuple[Reason, str] | None:
    wish = f"driver {want.version} ({want.flavour})"
    if lacks := missing(want, kernel, driver):
        return Reason.NOT_INSTALLED, f"{wish} is not installed on {host.name}: {'; '.join(lacks)}"
    if gpus.module is None:
        return (Reason.NOT_LOADED, f"{wish} is installed on {host.name} and not loaded") if _has_own(host) else None
    if not is_loaded(want, gpus):
        loaded = f"{gpus.module.version} ({gpus.module.flavour})"
        return Reason.OTHER_LOADED, f"{host.name} has driver {loaded} loaded, and {want.version} installed"
    return None


def _has_own(host: Host) -> bool:
    """Whether the module has anything to drive: without a card it does not load (nv.c)."""
    return any(gpu.owner is not GpuOwner.VMS for gpu in host.gpus)


def _note(host: Host, driver: DriverFacts, gpus: GpuFacts) -> str:
    if gpus.module is None:
        return "not loaded: no card of the host is for the driver"
    if gpus.module.version not in driver.dkms:
        return "DKMS does not know it: it will not be built for a kernel to come"
    return ""


def _blocked(reason: Reason, message: str, why: Reason, said: str, needs: str) -> Drift:
    return Drift(reason, message, Block(why, said, needs))


# Onto the disk


def _install(
    view: View,
    host: Host,
    wish: Driver,
    want: Want,
    message: str,
    kernel: KernelFacts,
    driver: DriverFacts,
    gpus: GpuFacts,
) -> Drift:
    if wish.source is DriverSource.PREINSTALLED:
        needs = f"install driver {want.version} ({want.flavour}) for kernel {' and '.join(kernel.concerned)}"
        return _blocked(Reason.NOT_INSTALLED, message, Reason.NEEDS_A_PERSON, message, needs)
    if wish.source is DriverSource.RUNFILE:
        runfile = driver.runfile(want.version, wish.sha256)
        if runfile is None:
            arch = view.fact(host.name, "host.access", AccessFacts).arch
            step = fetch(host, wish, arch, Reason.NOT_INSTALLED)
        else:
            step = _install_driver(view, host, want, "runfile", runfile.name, runfile.sha256, kernel, gpus)
    else:
        step = _install_driver(view, host, want, "apt", "", "", kernel, gpus)
    return jobs.drift(view, Reason.NOT_INSTALLED, message, step)


def _install_driver(
    view: View, host: Host, want: Want, source: str, runfile: str, sha256: str, kernel: KernelFacts, gpus: GpuFacts
) -> Step:
    """Beside the running one: modules are built and nothing is loaded. What is loaded goes on with its own library."""
    kernels = kernel.concerned
    signer = kernel.enrolled_keys[0] if kernel.dkms_key_enrolled and kernel.enrolled_keys else ""

    def after(facts: DriverFacts) -> DriverFacts:
        others = tuple(module for module in facts.modules if module.kernel not in kernels)
        ours = tuple(Installed(each, want.version, want.flavour, signer) for each in kernels)
        return dataclasses.replace(
            facts, modules=(*others, *ours), libraries=(want.version,), dkms=(*facts.dkms, want.version)
        )

    over = f" over {gpus.module.version}" if gpus.module and gpus.module.version != want.version else ""
    return Step(
        action="install-driver",
        object=Ref("Host", host.name),
        layer=NAME,
        reason=Reason.NOT_INSTALLED,
        summary=f"install driver {want.version} ({want.flavour}){over} on {host.name}, for kernel {', '.join(kernels)}",
        hosts=(host.name,),
        script=script(_PACKAGE, "install.sh"),
        args=(source, want.version, want.flavour, runfile, sha256, *kernels),
        disrupts=tuple(_disruptions(view, host, gpus, ())),
        timeout=3600.0,
        job="driver-install",
        effect=lambda facts: _smi_answers(_effect(host.name, after)(facts), host.name, want),
    )


# Into the kernel


def _load(
    view: View,
    host: Host,
    want: Want,
    reason: Reason,
    message: str,
    kernel: KernelFacts,
    driver: DriverFacts,
    gpus: GpuFacts,
) -> Drift:
    if gpus.module is None and not any(_is_free(pci, gpus) for pci in _own(host)):
        return _blocked(
            reason,
            message,
            Reason.NO_FREE_GPU,
            f"every card of {host.name} that is for the driver is on another one: the module would not load",
            "free one of them from it (host.gpu-binding does, where that is permitted)",
        )
    return Drift(reason, message, _load_driver(view, host, want, reason, kernel, driver, gpus))


def _in_use(view: View, host: Host, reason: Reason, message: str, gpus: GpuFacts) -> Drift | None:
    """A block while somebody uses the loaded module who is not ours to stop, None else."""
    users = _users(view, host, gpus)
    ours = {container.id: container for container in view.containers_on(host.name)}
    foreign = [user for user in users if not _may_stop(user, host, ours)]
    if foreign:
        who = "; ".join(_named(user, host) for user in foreign[:5])
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        return _blocked(
            reason,
            message,
            Reason.MODULE_IN_USE,
            f"the loaded driver of {host.name} is in use by {who}{more}",
            "stop them, name a service under nvidia.holders of the host, or reboot the host when it suits: "
            "the new driver is then loaded at the boot",
        )
    return None


def _own(host: Host) -> list[str]:
    return [gpu.pci for gpu in host.gpus if gpu.owner is not GpuOwner.VMS]


def _is_free(pci: str, gpus: GpuFacts) -> bool:
    function = gpus.function(pci)
    return function is not None and function.is_gpu and not function.driver and function.override in ("", "nvidia")


def _users(view: View, host: Host, gpus: GpuFacts) -> tuple[User, ...]:
    """The processes that have one of the driver's nodes open, each once."""
    if gpus.module is None:
        return ()
    facts = view.fact(host.name, "host.gpu-binding", BindingFacts)
    if facts.unknown is not None:
        raise NotKnown(facts.unknown.reason, f"{host.name}: {facts.unknown.message}")
    return tuple({user.pid: user for user in facts.users if user.node.startswith("/dev/nvidia")}.values())


_CONTAINER = re.compile(r"/lxc(?:\.payload)?[./](\d+)")  # Proxmox's control group of a CT
_SERVICE = re.compile(r"/([^/]+)\.service(?:/|$)")


def _container_of(user: User) -> int | None:
    match = _CONTAINER.match(user.group)
    return int(match[1]) if match else None


def _may_stop(user: User, host: Host, ours: dict[int, Container]) -> bool:
    vmid = _container_of(user)
    if vmid is not None:
        return vmid in ours
    service = _SERVICE.search(user.group)
    return service is not None and service[1] in _holders(host)


def _holders(host: Host) -> tuple[str, ...]:
    return tuple(name.removesuffix(".service") for name in host.nvidia.holders) if host.nvidia else ()


def _named(user: User, host: Host) -> str:
    return f"{user.who}{f', which is in no spec of {host.name}' if _container_of(user) is not None else ''}"


def _load_driver(
    view: View, host: Host, want: Want, reason: Reason, kernel: KernelFacts, driver: DriverFacts, gpus: GpuFacts
) -> Step:
    loaded = gpus.module
    stopped = _to_stop(view, host, gpus) if loaded is not None else ()
    services = [name for name in _holders(host) if loaded is not None]
    old = driver.runfile(loaded.version, None) if loaded is not None else None
    ref = Ref("Host", host.name)
    later = Later(f"load-driver-{host.name}")

    def effect(facts: FleetFacts) -> FleetFacts:
        return {**facts, host.name: _without(_loaded(facts[host.name], host, want, later), stopped)}

    return Step(
        action="load-driver",
        object=ref,
        layer=NAME,
        reason=reason,
        summary=f"load driver {want.version} on {host.name}"
        + (f" in place of {loaded.version}" if loaded is not None else "")
        + (f"; CT {', '.join(str(c.id) for c in stopped)} is stopped meanwhile" if stopped else ""),
        hosts=(host.name,),
        script=script(_PACKAGE, "load.sh"),
        args=(
            want.version,
            want.flavour,
            loaded.version if loaded is not None else "",
            loaded.flavour if loaded is not None else "",
            old.name if old is not None else "",
            " ".join(str(container.id) for container in stopped),
            " ".join(services),
        ),
        disrupts=tuple(_disruptions(view, host, gpus, stopped)),
        timeout=1800.0,
        effect=effect,
    )


def _to_stop(view: View, host: Host, gpus: GpuFacts) -> tuple[Container, ...]:
    """Our containers that use the module, or may begin to: all that run and get cards."""
    users = {_container_of(user) for user in _users(view, host, gpus)}
    if host.platform is Platform.PROXMOX:
        running = {each.id for each in view.fact(host.name, "container.power", PowerFacts).running}
        users |= {c.id for c in view.containers_on(host.name) if c.id in running and c.gpus and c.gpus.number}
    return tuple(container for container in view.containers_on(host.name) if container.id in users)


def _disruptions(view: View, host: Host, gpus: GpuFacts, stopped: Sequence[Container]) -> Iterator[Disruption]:
    """The host, and all that uses a card of it: what is stopped, what has to get another library, foreign CTs too."""
    yield Disruption(Ref("Host", host.name), Permission.CHANGE_DRIVER)
    if gpus.module is None:
        return
    for container in view.containers_on(host.name):
        if container in stopped or (container.gpus is not None and container.gpus.number):
            yield Disruption(Ref("Container", container.name), Permission.CHANGE_DRIVER)
        if container in stopped:
            yield Disruption(Ref("Container", container.name), Permission.RESTART_CONTAINER)
            for server in view.specs.servers.values():
                if server.container == container.name:
                    yield Disruption(Ref("ModelServer", server.name), Permission.RESTART_SERVER)
    if host.platform is Platform.PROXMOX:
        guests = view.fact(host.name, "container.devices", GuestFacts)
        ours = {container.id for container in view.containers_on(host.name)}
        for guest in guests.here("lxc"):
            if guest.id not in ours and _passes_cards(guest):
                yield Disruption(Ref("Guest", f"{guest.id}@{host.name}"), Permission.CHANGE_DRIVER)


def _passes_cards(guest: Guest) -> bool:
    return bool(passed(parse_conf(guest.text).main).cards)


def _start_holders(host: Host, driver: DriverFacts) -> Step:
    def after(facts: DriverFacts) -> DriverFacts:
        return dataclasses.replace(facts, stopped=())

    return Step(
        action="start-holders",
        object=Ref("Host", host.name),
        layer=NAME,
        reason=Reason.HOLDERS_STOPPED,
        summary=f"start {', '.join(driver.stopped)} on {host.name} again",
        hosts=(host.name,),
        script=script(_PACKAGE, "start-holders.sh"),
        args=driver.stopped,
        disrupts=(Disruption(Ref("Host", host.name), Permission.CHANGE_DRIVER),),
        effect=_effect(host.name, after),
    )


# What a plan expects


def _loaded(facts: HostFacts, host: Host, want: Want, later: Later) -> HostFacts:
    """The host after the module was loaded: it has every card that was free; minors and majors are known then."""
    found, before = facts.section("host.gpu-health"), facts.section(NAME)
    if isinstance(found, Known) and isinstance(found.value, GpuFacts):
        seen = found.value
        taken = [f.pci for f in seen.functions if f.driver == "nvidia" or _is_free(f.pci, seen)]
        majors = {name: number for name, number in seen.majors if not name.startswith("nvidia")}
        after = dataclasses.replace(
            seen,
            functions=tuple(dataclasses.replace(f, driver="nvidia") if f.pci in taken else f for f in seen.functions),
            module=Module(want.version, want.flavour),
            gpus=tuple(Gpu(f.pci, later, "", f.model) for f in seen.functions if f.pci in taken),
            majors=(*majors.items(), ("nvidia", _MAJOR), ("nvidiactl", _MAJOR), ("nvidia-uvm", later)),
            smi_failure=None,
        )
        facts = facts.with_section("host.gpu-health", after)
    if isinstance(before, Known) and isinstance(before.value, DriverFacts):
        facts = facts.with_section(NAME, dataclasses.replace(before.value, loaded=("nvidia", "nvidia_uvm")))
    return facts


def _without(facts: HostFacts, stopped: Sequence[Container]) -> HostFacts:
    """The host after these containers were stopped; container.power starts them again."""
    ids = {container.id for container in stopped}
    power, placement, binding = (
        facts.section(name) for name in ("container.power", "container.placement", "host.gpu-binding")
    )
    if isinstance(power, Known) and isinstance(power.value, PowerFacts):
        running = tuple(each for each in power.value.running if each.id not in ids)
        facts = facts.with_section("container.power", dataclasses.replace(power.value, running=running))
    if isinstance(placement, Known) and isinstance(placement.value, PlacementFacts):
        there = placement.value.running - {("lxc", vmid) for vmid in ids}
        facts = facts.with_section("container.placement", dataclasses.replace(placement.value, running=there))
    if isinstance(binding, Known) and isinstance(binding.value, BindingFacts):
        users = tuple(user for user in binding.value.users if _container_of(user) not in ids)
        facts = facts.with_section("host.gpu-binding", dataclasses.replace(binding.value, users=users))
    return facts


def _smi_answers(facts: FleetFacts, host: str, want: Want) -> FleetFacts:
    """nvidia-smi is there then; it has no trouble with a library of another version if this one's module is loaded."""
    found = facts[host].section("host.gpu-health")
    if not isinstance(found, Known) or not isinstance(found.value, GpuFacts) or not is_loaded(want, found.value):
        return facts
    cured = dataclasses.replace(found.value, smi_failure=None)
    return {**facts, host: facts[host].with_section("host.gpu-health", cured)}


def _effect(host: str, after: object) -> Effect:
    def effect(facts: FleetFacts) -> FleetFacts:
        found = facts[host].section(NAME)
        if not isinstance(found, Known) or not isinstance(found.value, DriverFacts) or not callable(after):
            return facts
        return {**facts, host: facts[host].with_section(NAME, after(found.value))}

    return effect


LAYER = Layer(
    name=NAME,
    kind="Host",
    reasons=Reason,
    check=check,
    probe=text(_PACKAGE, "probe.sh"),
    parse=parse,
)
