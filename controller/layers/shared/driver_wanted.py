"""Which NVIDIA driver a host is to have, and what stands in the way of it: known before anything is done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controller.layers.driver.facts import DriverFacts
from controller.layers.gpu_health.facts import Function, GpuFacts
from controller.layers.kernel.facts import KernelFacts, version_of
from controller.spec.model import Driver, DriverSource, GpuOwner, Host, KernelModules


class Obstacle(StrEnum):
    """What stands in the way of a driver."""

    KERNEL_TOO_NEW = "kernel-too-new"
    """The driver is known not to build, or not to work, for a kernel of the host."""
    SECURE_BOOT = "secure-boot"
    """The firmware lets load signed modules only, and the driver's are not."""
    UNLISTED_GPU = "unlisted-gpu"
    """The module would take a card that the spec does not give away."""
    WRONG_FLAVOUR = "wrong-flavour"
    """The flavour that is asked for has no support for a card."""
    DID_NOT_LOAD = "did-not-load"
    """This driver was installed on this kernel, and did not load."""


@dataclass(frozen=True, slots=True)
class Want:
    """The driver that is wanted: its version, and ``open`` or ``proprietary``."""

    version: str
    flavour: str


# Device ids are given out by generation: README.md of NVIDIA/open-gpu-kernel-modules lists the cards that the open
# modules support, from Turing's 1e02 on; the cards of Blackwell, from 2901 on, have no other (580's README).
_TURING, _BLACKWELL = 0x1E00, 0x2900
_OPEN_BY_DEFAULT = 560


def wanted(host: Host, driver: Driver, gpus: GpuFacts) -> Want:
    """The version of the spec with its flavour; ``auto`` goes by the cards that the driver will have.

    From 560 on NVIDIA's installer takes the open modules where every card has a GSP (nvidia-installer kernel.c).
    """
    if driver.kernel_modules is not KernelModules.AUTO:
        return Want(driver.version, driver.kernel_modules.value)
    ids = [_number(function) for function in _own(host, gpus)]
    is_new = version_of(driver.version)[0] >= _OPEN_BY_DEFAULT
    is_open = any(n >= _BLACKWELL for n in ids) or (is_new and all(n >= _TURING for n in ids))
    return Want(driver.version, "open" if is_open else "proprietary")


def is_installed(want: Want, kernel: KernelFacts, driver: DriverFacts) -> bool:
    """Whether this and the next boot would load the wanted module, and the host's programs have its library."""
    return not missing(want, kernel, driver)


def missing(want: Want, kernel: KernelFacts, driver: DriverFacts) -> tuple[str, ...]:
    """What of the wanted driver is not on the host's disk."""
    lacks: list[str] = []
    for each in kernel.concerned:
        module = driver.module(each)
        if module is None:
            lacks.append(f"no module for kernel {each}")
        elif (module.version, module.flavour) != (want.version, want.flavour):
            lacks.append(f"kernel {each} would load {module.version} ({module.flavour})")
    if driver.libraries != (want.version,):
        lacks.append(f"the library is of {', '.join(driver.libraries)}" if driver.libraries else "no library")
    return tuple(lacks)


def is_loaded(want: Want, gpus: GpuFacts) -> bool:
    """Whether the module in the kernel is the wanted one."""
    return gpus.module is not None and (gpus.module.version, gpus.module.flavour) == (want.version, want.flavour)


def obstacle(
    host: Host, wish: Driver, kernel: KernelFacts, driver: DriverFacts, gpus: GpuFacts
) -> tuple[Obstacle, str, str] | None:
    """Why the wanted driver cannot come to be in use: reason, message, what would have to change; None when it can.

    Nothing stands in the way of a driver that is in use and stays so.
    """
    want = wanted(host, wish, gpus)
    if is_loaded(want, gpus) and is_installed(want, kernel, driver):
        return None
    return (
        _flavour(host, want, gpus)
        or _kernels(host, want, kernel)
        or _secure_boot(host, wish, want, kernel, driver)
        or _unlisted(host, want, gpus)
        or _refused(host, want, kernel, driver)
    )


def _own(host: Host, gpus: GpuFacts) -> list[Function]:
    """The cards that the driver will have: those of containers, or of the host itself."""
    listed = {gpu.pci for gpu in host.gpus if gpu.owner is not GpuOwner.VMS}
    return [function for function in gpus.functions if function.is_gpu and function.pci in listed]


def _number(function: Function) -> int:
    return int(function.device.split(":")[1], 16)


def _flavour(host: Host, want: Want, gpus: GpuFacts) -> tuple[Obstacle, str, str] | None:
    for function in _own(host, gpus):
        name = f"{function.model or function.device} at {function.pci} of {host.name}"
        if want.flavour == "open" and _number(function) < _TURING:
            return (
                Obstacle.WRONG_FLAVOUR,
                f"the open modules do not support the {name}: it has no GSP",
                "write `kernel_modules: proprietary` or `auto`",
            )
        if want.flavour == "proprietary" and _number(function) >= _BLACKWELL:
            return (
                Obstacle.WRONG_FLAVOUR,
                f"only the open modules support the {name}",
                "write `kernel_modules: open` or `auto`",
            )
    return None


def _kernels(host: Host, want: Want, kernel: KernelFacts) -> tuple[Obstacle, str, str] | None:
    for each in kernel.concerned:
        if known := too_new(each, want.version):
            when = "runs" if each == kernel.running else "boots next"
            return (
                Obstacle.KERNEL_TOO_NEW,
                f"driver {want.version} does not work with kernel {each}, which {when} on {host.name} ({known})",
                f"ask for a newer driver, or pin an older kernel (`proxmox-boot-tool kernel pin`) and remove {each}",
            )
    return None


def too_new(kernel: str, version: str) -> str:
    """Where it is reported that a driver does not build for a kernel, "" when nothing is known against it.

    From kernels to the versions before which drivers fail: NVIDIA/open-gpu-kernel-modules#1143 (550 and 555 on 6.17),
    pop-os/pop#3811 (580.119.02 on 6.17.9 and later), void-packages#61087 (580.142 on 7.1, right in 580.159.04).
    """
    at, driver = version_of(kernel)[:3], version_of(version)
    table = (
        ((6, 17), (560,), "open-gpu-kernel-modules#1143"),
        ((6, 17, 9), (580, 119, 3), "pop-os/pop#3811"),
        ((7, 1), (580, 159, 4), "void-packages#61087"),
    )
    return next((where for since, fixed, where in table if at >= since and driver < fixed), "")


def _secure_boot(
    host: Host, wish: Driver, want: Want, kernel: KernelFacts, driver: DriverFacts
) -> tuple[Obstacle, str, str] | None:
    module = driver.module(kernel.running)
    is_there = module is not None and (module.version, module.flavour) == (want.version, want.flavour)
    is_signed = module is not None and is_there and module.signer in kernel.enrolled_keys
    is_somebodys = wish.source is DriverSource.PREINSTALLED and not is_there
    if not kernel.secure_boot or is_signed or is_somebodys or (kernel.dkms_key_enrolled and not is_there):
        return None
    return (
        Obstacle.SECURE_BOOT,
        f"secure boot is on on {host.name}: a module that is built there is refused (Key was rejected by service)",
        "enrol DKMS's key (`mokutil --import /var/lib/dkms/mok.pub`, then say yes at the console at the next boot), or "
        "turn secure boot off in the firmware",
    )


def _unlisted(host: Host, want: Want, gpus: GpuFacts) -> tuple[Obstacle, str, str] | None:
    listed = {gpu.pci for gpu in host.gpus}
    for function in gpus.functions:
        if (
            function.is_gpu
            and function.pci not in listed
            and not function.driver
            and function.override in ("", "nvidia")
            and gpus.module is None
        ):
            return (
                Obstacle.UNLISTED_GPU,
                f"the {function.model or 'NVIDIA card'} at {function.pci} of {host.name} is in no spec "
                "and on no driver: the nvidia module would take it",
                "list it under nvidia.gpus of the host with its owner, or set its driver_override",
            )
    return None


def _refused(host: Host, want: Want, kernel: KernelFacts, driver: DriverFacts) -> tuple[Obstacle, str, str] | None:
    said = driver.refusal
    if said is None or (said.version, said.flavour, said.kernel) != (want.version, want.flavour, kernel.running):
        return None
    return (
        Obstacle.DID_NOT_LOAD,
        f"driver {want.version} ({want.flavour}) did not load on {host.name}: {said.said}",
        "ask for another version or flavour (some cards fail with the open modules), or remove "
        "/var/lib/reconcile/driver-refused there when what was wrong is put right",
    )
