"""host.driver in the simulated fleet: installers, DKMS, module files, and a module put in the place of another."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from controller.core.words import Step
from controller.facts.words import Section
from controller.layers.shared import kernel_physics, pve_physics
from controller.layers.shared.truth import Fleet, Host, Module, Said, Work

_DRIVERS = "/var/lib/reconcile/drivers/"
_REFUSED = "/var/lib/reconcile/driver-refused"


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""
    return Section(0, "".join(f"{line}\n" for line in _lines(host)))


def _lines(host: Host) -> Iterator[str]:
    for kernel in kernel_physics.installed_kernels(host):
        module = host.modules.get(kernel, {}).get("nvidia")
        if module is not None:
            licence = "Dual MIT/GPL" if module.flavour == "open" else "NVIDIA"
            yield from (
                f"module {kernel} license:        {licence}",
                f"module {kernel} version:        {module.version}",
            )
            if module.signer:
                yield f"module {kernel} signer:         {module.signer}"
    yield from (f"dkms {version}" for version in sorted(host.dkms or {}))
    if host.userspace:
        yield f"library libnvidia-ml.so.{host.userspace}"
    for path in sorted(host.files):
        checked = host.files.get(f"{path}.sha256")
        if path.startswith(_DRIVERS) and path.endswith(".run") and checked is not None:
            yield f"runfile {checked.text.strip()} {path.removeprefix(_DRIVERS)}"
    refused = host.files.get(_REFUSED)
    if refused is not None:
        yield f"refused {refused.text.splitlines()[0]}"
    stopped = host.files.get("/run/reconcile/driver-stopped")
    if stopped is not None:
        yield from (f"stopped {line}" for line in stopped.text.splitlines())
    for name in ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm", "nvidia-peermem"):
        if name in host.loaded:
            yield f"loaded {name.replace('-', '_')}"


def takes(step: Step) -> float:
    """Seconds that a step takes."""
    return {"fetch-driver": 45.0, "install-driver": 120.0, "load-driver": 20.0}.get(step.action, 1.0)


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What the layer's scripts do to this host."""
    match work.action:
        case "fetch-driver":
            return _fetch(fleet, host, *work.args)
        case "install-driver":
            return _install(fleet, host, work.args)
        case "load-driver":
            return _Loading(fleet, host, work.args).do()
        case "start-holders":
            host.services = sorted({*host.services, *(each.removeprefix("service ") for each in work.args)})
            host.files.pop("/run/reconcile/driver-stopped", None)
            fleet.touch(host)
            return Said(0)
    raise ValueError(f"host.driver has no action {work.action}")


def _fetch(fleet: Fleet, host: Host, name: str, source: str, wanted: str) -> Said:
    if source.startswith("/"):
        file = host.files.get(source)
        text = file.text if file is not None else None
        missing = f"there is no {source} on this host\n"
    else:
        text = fleet.downloads.get(source)
        missing = f"cannot fetch {source}: exit 22; what came of it is kept\n"
    if text is None:
        return Said(1, err=missing)
    found = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
    if wanted and found != wanted:
        return Said(1, err=f"what came from {source} has the SHA-256 {found}, not {wanted}: it was thrown away\n")
    for path, content in ((f"{_DRIVERS}{name}", text), (f"{_DRIVERS}{name}.sha256", f"{found}\n")):
        failed = kernel_physics.write(fleet, host, path, content)
        if failed:
            return Said(1, err=f"cannot write {path}: {failed}\n")
    return Said(0)


def _install(fleet: Fleet, host: Host, args: list[str]) -> Said:
    source, version, flavour, name, sha256, *kernels = args
    for kernel in kernels:
        if kernel not in host.headers:
            return Said(75, err=f"kernel {kernel} has no headers\n")
    if host.disk_full:
        return Said(1, err="the installer failed: No space left on device\n")
    if source == "runfile":
        checked = host.files.get(f"{_DRIVERS}{name}.sha256")
        if checked is None or checked.text.strip() != sha256:
            return Said(75, err=f"{_DRIVERS}{name} is not there any more\n")
    elif f"nvidia-driver-cuda={version}" not in host.repository:
        return Said(
            1, err=f"no repository has {version} of one of: nvidia-kernel-dkms, and of one of: nvidia-driver-cuda\n"
        )
    # The installer takes the old driver away before it puts the new one in its place.
    host.dkms = {version: flavour}
    host.userspace = version
    for modules in host.modules.values():
        for each in [each for each in modules if each.startswith("nvidia")]:
            del modules[each]
    fleet.touch(host)
    for kernel in kernels:
        if _does_not_compile(kernel, version):
            return Said(1, err=f"DKMS cannot build {version} for kernel {kernel}: Bad return status for module build\n")
        module = Module(version, flavour, host.dkms_key)
        host.modules.setdefault(kernel, {}).update({"nvidia": module, "nvidia-uvm": module})
    return Said(0)


def _does_not_compile(kernel: str, version: str) -> bool:
    """What is reported of drivers and kernels: 550 and 555 fail on 6.17, 580.119.02 on 6.17.9, 580.142 on 7.1."""
    at, driver = ([int(n) for n in re.findall(r"\d+", text)] for text in (kernel, version))
    old = ((at[:2] >= [6, 17], [560]), (at[:3] >= [6, 17, 9], [580, 119, 3]), (at[:2] >= [7, 1], [580, 159, 4]))
    return any(applies and driver < fixed for applies, fixed in old)


class _Loading:
    """``load.sh`` at work."""

    def __init__(self, fleet: Fleet, host: Host, args: list[str]) -> None:
        self.fleet, self.host = fleet, host
        self.version, self.flavour, self.old, self.old_flavour, self.installer, containers, services = args
        self.containers = [int(vmid) for vmid in containers.split()]
        self.services = services.split()

    def do(self) -> Said:
        host = self.host
        loaded = host.loaded.get("nvidia")
        if (loaded.version if loaded else "") != self.old:
            return Said(75, err=f"driver {loaded.version if loaded else ''} is loaded now\n")
        module = host.modules.get(host.kernel, {}).get("nvidia")
        if module is None or module.version != self.version:
            return Said(75, err=f"the module on disk is not {self.version} any more\n")
        allowed = {*(f"ct:{vmid}" for vmid in self.containers), *(f"unit:{name}" for name in self.services)}
        users = {who for f in host.functions.values() if f.gpu is not None for who in f.gpu.used_by}
        if users - allowed:
            return Said(75, err=f"process {sorted(users - allowed)[0]} uses the driver now\n")
        was = self._numbers()
        stopped_services = [name for name in self.services if name in host.services]
        stopped = self._stop(stopped_services) if self.old else []
        said = self._replace()
        for name in stopped_services:
            host.services.append(name)
        for vmid in stopped:
            if self._numbers() == was:
                pve_physics.pct_start(self.fleet, host, vmid)
        self.fleet.touch(host)
        return said

    def _numbers(self) -> object:
        minors = {address: f.gpu.minor for address, f in self.host.functions.items() if f.gpu is not None}
        return minors, dict(self.host.majors)

    def _stop(self, services: list[str]) -> list[int]:
        for name in services:
            self.host.services.remove(name)
            for function in self.host.functions.values():
                if function.gpu is not None and f"unit:{name}" in function.gpu.used_by:
                    function.gpu.used_by.remove(f"unit:{name}")
        stopped = [vmid for vmid in self.containers if vmid in self.host.containers]
        for vmid in stopped:
            pve_physics.pct_stop(self.fleet, self.host, vmid)
        return stopped

    def _replace(self) -> Said:
        fleet, host = self.fleet, self.host
        for name in ("nvidia-drm", "nvidia-modeset", "nvidia-uvm", "nvidia"):
            failed = kernel_physics.unload_module(fleet, host, name) if name in host.loaded else ""
            if failed:
                kernel_physics.load_module(fleet, host, "nvidia-uvm")
                return Said(1, err=f"driver {self.old} cannot be unloaded: {failed}\n")
        failed = kernel_physics.load_module(fleet, host, "nvidia")
        if failed:
            line = f"{self.version} {self.flavour} {host.kernel} {failed}\n"
            kernel_physics.write(fleet, host, _REFUSED, line)
            back = f"; {self._go_back()}" if self.old else ""
            return Said(1, err=f"driver {self.version} did not load: {failed}{back}\n")
        host.files.pop(_REFUSED, None)
        self._finish()
        return Said(0)

    def _go_back(self) -> str:
        if not self.installer or f"{_DRIVERS}{self.installer}" not in self.host.files:
            return f"there is no installer of {self.old} here to go back to"
        sha256 = self.host.files[f"{_DRIVERS}{self.installer}.sha256"].text.strip()
        args = ["runfile", self.old, self.old_flavour, self.installer, sha256, self.host.kernel]
        if _install(self.fleet, self.host, args).rc or kernel_physics.load_module(self.fleet, self.host, "nvidia"):
            return f"going back to {self.old} failed as well: see /var/log/nvidia-installer.log"
        self._finish()
        return f"{self.old} is installed and loaded again"

    def _finish(self) -> None:
        kernel_physics.load_module(self.fleet, self.host, "nvidia-uvm")
        kernel_physics.make_gpu_nodes(self.fleet, self.host, uvm=True)
