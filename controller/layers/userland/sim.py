"""container.userland in the simulated fleet: the libraries in a container's image, and nvidia-smi in it."""

from __future__ import annotations

from collections.abc import Iterator

from controller.core.words import Step
from controller.facts.words import Section
from controller.layers.shared import kernel_physics, pve_physics
from controller.layers.shared.truth import Fleet, Host, Said, Work


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""
    lines = (line for vmid in guests if vmid in host.containers for line in _container(fleet, host, vmid))
    return Section(0, "".join(f"{line}\n" for line in lines))


def _container(fleet: Fleet, host: Host, vmid: int) -> Iterator[str]:
    yield f"container {vmid}"
    version = fleet.userlands.get(_volume(host, vmid), "")
    if not version:
        return
    yield f"library {vmid} libnvidia-ml.so.{version}"
    module = host.loaded.get("nvidia")
    if module is None or module.version != version:
        yield f"program {vmid}"
        return
    yield f"smi {vmid}"
    yield from _smi(fleet, host, vmid)
    yield "."


def _smi(fleet: Fleet, host: Host, vmid: int) -> Iterator[str]:
    """nvidia-smi sees the cards whose nodes it can open."""
    if pve_physics.opens(host, vmid, "/dev/nvidiactl"):
        yield from ("exit 255", "Failed to initialize NVML: Unknown Error")
        return
    kernel_physics.initialise(fleet, host)
    seen = [
        f"{function.gpu.uuid}, 0000{address.upper()}"
        for address, function in sorted(host.functions.items())
        if function.gpu is not None
        and function.gpu.minor is not None
        and not pve_physics.opens(host, vmid, f"/dev/nvidia{function.gpu.minor}")
    ]
    yield from ("exit 0", *seen) if seen else ("exit 6", "No devices were found")


def _volume(host: Host, vmid: int) -> str:
    """Where the image of a container's root file system lies; one without storage is of this host alone."""
    return host.containers[vmid].image or f"{host.name}:{vmid}"


def takes(step: Step) -> float:
    """Seconds that a step takes."""
    return 60.0


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What ``install.sh`` does in a container."""
    number, version, source, name, _ = work.args
    vmid = int(number)
    module = host.loaded.get("nvidia")
    if module is None or module.version != version:
        return Said(75, err=f"the loaded driver is not {version} any more\n")
    if vmid not in host.containers:
        return Said(75, err=f"CT {vmid} does not run\n")
    if source == "runfile" and f"/var/lib/reconcile/drivers/{name}" not in host.files:
        return Said(75, err=f"/var/lib/reconcile/drivers/{name} is not there any more\n")
    fleet.userlands[_volume(host, vmid)] = version
    fleet.touch(host)
    return Said(0)
