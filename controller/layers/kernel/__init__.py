"""host.kernel: headers for the running and the next-boot kernel, and nouveau kept off, in the initramfs too."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

from controller.core.package import script, text
from controller.core.view import View
from controller.core.words import Block, Disruption, Drift, Effect, InSync, Layer, NotKnown, Skipped, Step, Verdict
from controller.facts.words import FleetFacts, Known
from controller.layers.driver.facts import DriverFacts
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.kernel.facts import Initramfs, KernelFacts, keeps_off, parse
from controller.layers.kernel.reasons import Reason
from controller.layers.shared import jobs
from controller.layers.shared.driver_wanted import obstacle
from controller.spec.model import DriverSource, Host, Lifecycle
from controller.spec.policy import Permission
from controller.spec.ref import Ref

NAME = "host.kernel"
_PACKAGE = "controller.layers.kernel"
NOUVEAU_FILE = "/etc/modprobe.d/reconcile-nouveau.conf"
NOUVEAU_TEXT = """\
# Written by reconcile (host.kernel): nouveau does not take the cards that NVIDIA's driver is for.
blacklist nouveau
options nouveau modeset=0
"""


def check(view: View, host: Host) -> Verdict:
    """Whether the wanted driver can be built, and will not find nouveau in its place."""
    wish = host.nvidia.driver if host.nvidia else None
    if wish is None:
        return Skipped("no driver in the spec")
    if host.lifecycle is not Lifecycle.ACTIVE:
        return Skipped(str(host.lifecycle))
    kernel = view.fact(host.name, NAME, KernelFacts)
    driver = view.fact(host.name, "host.driver", DriverFacts)
    gpus = view.fact(host.name, "host.gpu-health", GpuFacts)
    drift = _drift(view, host, kernel, needs_headers=wish.source is not DriverSource.PREINSTALLED)
    found = obstacle(host, wish, kernel, driver, gpus)
    if found is None:
        return drift if drift is not None else InSync(_note(kernel))
    reason, message, needs = found
    block = Block(Reason(reason.value), message, needs)
    if drift is None:
        return Drift(block.reason, message, block)
    return Drift(drift.reason, f"{drift.message}, and {message}", block, drift.evidence)


def _note(kernel: KernelFacts) -> str:
    return f"the next boot is of kernel {kernel.next}" if kernel.next != kernel.running else ""


def _drift(view: View, host: Host, kernel: KernelFacts, *, needs_headers: bool) -> Drift | None:
    lacking = [each for each in kernel.concerned if each not in kernel.headers]
    if needs_headers and (lacking or not kernel.dkms):
        return _headers(view, host, kernel, lacking)
    if not keeps_off("nouveau", (text for _, text in kernel.modprobe)):
        message = f"nothing in modprobe.d keeps nouveau from the cards of {host.name}"
        return Drift(Reason.NOUVEAU_NOT_KEPT_OFF, message, _keep_nouveau_off(host, kernel))
    images = [image for each in kernel.concerned if (image := kernel.of(each)) is not None]
    for image in images:
        if image.unread is not None:
            raise NotKnown(image.unread.reason, f"{host.name}: {image.unread.message}")
    stale = [
        image.kernel for image in images if image.has_module("nouveau") and not keeps_off("nouveau", image.modprobe)
    ]
    if stale:
        message = f"the initramfs of kernel {', '.join(stale)} of {host.name} would load nouveau"
        step = _update_initramfs(host, kernel, stale)
        return jobs.drift(view, Reason.NOUVEAU_IN_INITRAMFS, message, step)
    return None


def _headers(view: View, host: Host, kernel: KernelFacts, lacking: Sequence[str]) -> Drift:
    what = [f"headers of kernel {each}" for each in lacking] + ([] if kernel.dkms else ["dkms"])
    message = f"{host.name} lacks {' and '.join(what)}"
    if kernel.packages is not None and kernel.lists_fresh:
        for each in lacking:
            names = header_packages(each)
            if not set(names) & set(kernel.packages):
                block = Block(
                    Reason.NO_HEADERS_PACKAGE,
                    f"no repository of {host.name} has {' or '.join(names[:2])}",
                    f"add the repository that kernel {each} came from, or pin a kernel whose headers there are "
                    "(`proxmox-boot-tool kernel pin`)",
                )
                return Drift(Reason.HEADERS_MISSING, message, block)
    step = _install_headers(host, kernel, lacking)
    return jobs.drift(view, Reason.HEADERS_MISSING, message, step)


def header_packages(kernel: str) -> tuple[str, ...]:
    """The names that a kernel's headers package may have: Proxmox since 8, Proxmox before, Debian and Ubuntu."""
    if kernel.endswith("-pve"):
        return f"proxmox-headers-{kernel}", f"pve-headers-{kernel}"
    return (f"linux-headers-{kernel}",)


# Steps


def _install_headers(host: Host, kernel: KernelFacts, lacking: Sequence[str]) -> Step:
    def after(facts: KernelFacts) -> KernelFacts:
        return dataclasses.replace(facts, headers=tuple(sorted({*facts.headers, *lacking})), dkms=True)

    return _step(
        host,
        "install-headers",
        Reason.HEADERS_MISSING,
        f"install headers of kernel {', '.join(lacking)} on {host.name}" if lacking else f"install dkms on {host.name}",
        "install-headers.sh",
        ("fresh" if kernel.lists_fresh else "old", *lacking),
        after,
        job="kernel-headers",
        timeout=1800.0,
    )


def _keep_nouveau_off(host: Host, kernel: KernelFacts) -> Step:
    ours = next((text for path, text in kernel.modprobe if path.endswith(NOUVEAU_FILE)), None)
    digest = "absent" if ours is None else hashlib.sha256(ours.encode("utf-8", "surrogateescape")).hexdigest()

    def after(facts: KernelFacts) -> KernelFacts:
        others = tuple(each for each in facts.modprobe if not each[0].endswith(NOUVEAU_FILE))
        return dataclasses.replace(facts, modprobe=(*others, (NOUVEAU_FILE, NOUVEAU_TEXT)))

    return _step(
        host,
        "keep-nouveau-off",
        Reason.NOUVEAU_NOT_KEPT_OFF,
        f"keep nouveau off the cards of {host.name} (modprobe.d)",
        "keep-nouveau-off.sh",
        (NOUVEAU_FILE, digest),
        after,
        stdin=NOUVEAU_TEXT.encode(),
    )


def _update_initramfs(host: Host, kernel: KernelFacts, stale: Sequence[str]) -> Step:
    confs = tuple((path.lstrip("/"), text) for path, text in kernel.modprobe)
    of = hashlib.sha256(repr(confs).encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def after(facts: KernelFacts) -> KernelFacts:
        images = tuple(
            Initramfs(image.kernel, image.modules, confs) if image.kernel in stale else image
            for image in facts.initramfs
        )
        return dataclasses.replace(facts, initramfs=images)

    return _step(
        host,
        "update-initramfs",
        Reason.NOUVEAU_IN_INITRAMFS,
        f"build the initramfs of kernel {', '.join(stale)} anew on {host.name}",
        "update-initramfs.sh",
        (of, *stale),
        after,
        job="kernel-initramfs",
        timeout=1800.0,
    )


def _step(
    host: Host,
    action: str,
    reason: Reason,
    summary: str,
    file: str,
    args: tuple[str, ...],
    after: Callable[[KernelFacts], KernelFacts],
    *,
    job: str | None = None,
    timeout: float = 120.0,
    stdin: bytes = b"",
) -> Step:
    ref = Ref("Host", host.name)
    return Step(
        action=action,
        object=ref,
        layer=NAME,
        reason=reason,
        summary=summary,
        hosts=(host.name,),
        script=script(_PACKAGE, file),
        args=args,
        stdin=stdin,
        disrupts=(Disruption(ref, Permission.CHANGE_DRIVER),),
        timeout=timeout,
        job=job,
        effect=_effect(host.name, after),
    )


def _effect(host: str, after: Callable[[KernelFacts], KernelFacts]) -> Effect:
    def effect(facts: FleetFacts) -> FleetFacts:
        found = facts[host].section(NAME)
        if not isinstance(found, Known) or not isinstance(found.value, KernelFacts):
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
