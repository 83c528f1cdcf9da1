"""host.kernel in the simulated fleet: kernels, headers, modprobe.d, initramfs, and how packages change them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from controller.core.words import Step
from controller.facts.words import Section
from controller.layers.shared import kernel_physics, probe_text
from controller.layers.shared.truth import File, Fleet, Host, Initramfs, Said, Work

_FOLDERS = ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""
    return Section(0, "".join((*_plain(host), *_packages(host), "==modprobe\n", _modprobe(host), *_images(host))))


def _plain(host: Host) -> Iterator[str]:
    yield f"running {host.kernel}\n"
    for name, key in (("next-boot-pin", "next-boot-pin"), ("proxmox-boot-pin", "pin")):
        file = host.files.get(f"/etc/kernel/{name}")
        yield f"{key} {file.text.strip() if file else ''}\n"
    yield from (f"installed {kernel}\n" for kernel in kernel_physics.installed_kernels(host))
    yield from (f"headers {kernel}\n" for kernel in sorted(host.headers))
    if "nouveau" in host.loaded:
        yield "loaded nouveau\n"
    if "/etc/kernel/proxmox-boot-uuids" in host.files:
        yield "boot-tool\n"
    if host.dkms is not None:
        yield "dkms\n"
    yield f"secure-boot {int(host.secure_boot)}\n"
    if host.secure_boot:
        if host.dkms_key in host.enrolled_keys:
            yield "dkms-key\n"
        yield from (f"enrolled {key}\n" for key in host.enrolled_keys)


def _lacking(host: Host) -> list[str]:
    return [kernel for kernel in kernel_physics.installed_kernels(host) if kernel not in host.headers]


def _packages(host: Host) -> Iterator[str]:
    lacking = _lacking(host)
    if not lacking and host.dkms is not None:
        return
    yield f"lists {'fresh' if host.lists_fresh else 'old'}\n==packages\nexit 0\n"
    asked = ["dkms"]
    for kernel in lacking:
        series = kernel.split("-")[0].rpartition(".")[0]
        asked += [f"proxmox-headers-{kernel}", f"pve-headers-{kernel}", f"linux-headers-{kernel}"]
        asked.append(f"proxmox-headers-{series}")
    for name in (*asked, "proxmox-default-headers", "pve-headers", "linux-headers-amd64", "linux-headers-arm64"):
        if host.lists_fresh and name in host.repository:
            yield f"{name}:\n  Installed: (none)\n  Candidate: 1.0\n  Version table:\n     1.0 500\n"


def _modprobe(host: Host) -> str:
    found: dict[str, File] = {}
    for folder in _FOLDERS:
        at = f"{folder}/modprobe.d/"
        found.update({p: f for p, f in sorted(host.files.items()) if p.startswith(at) and p.endswith(".conf")})
    return probe_text.files(found)


def _images(host: Host) -> Iterator[str]:
    for kernel in kernel_physics.installed_kernels(host):
        image = host.initramfs.get(kernel)
        if image is None:
            continue
        yield f"==initramfs {kernel}\nexit 0\n"
        yield from (f"module usr/lib/modules/{kernel}/kernel/{name}.ko\n" for name in sorted(image.modules))
        for path, text in sorted(image.modprobe.items()):
            yield from (f"line {path}:{line}\n" for line in text.removesuffix("\n").split("\n"))


def takes(step: Step) -> float:
    """Seconds that a step takes."""
    return {"install-headers": 40.0, "update-initramfs": 25.0}.get(step.action, 0.2)


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What the layer's scripts do to this host."""
    match work.action:
        case "install-headers":
            return _install_headers(fleet, host, work.args[1:])
        case "keep-nouveau-off":
            path, seen = work.args
            before = host.files.get(path)
            digest = hashlib.sha256(before.text.encode()).hexdigest() if before else "absent"
            if digest != seen:
                return Said(75, err=f"{path} has changed since it was read\n")
            failed = kernel_physics.write(fleet, host, path, work.stdin)
            return Said(1, err=f"cannot write beside {path}: {failed}\n") if failed else Said(0)
        case "update-initramfs":
            for kernel in work.args[1:]:
                rebuild(host, kernel)
            fleet.touch(host)
            return Said(0)
    raise ValueError(f"host.kernel has no action {work.action}")


def rebuild(host: Host, kernel: str) -> None:
    """``update-initramfs -u -k KERNEL``: modprobe.d as it is now goes in; which modules do is not changed by it."""
    confs = {p.lstrip("/"): f.text for p, f in host.files.items() if p.startswith("/etc/modprobe.d/")}
    before = host.initramfs.get(kernel, Initramfs())
    host.initramfs[kernel] = Initramfs(before.modules, confs)


def _install_headers(fleet: Fleet, host: Host, kernels: list[str]) -> Said:
    host.lists_fresh = True
    fleet.touch(host)
    wanted = {kernel: _package(host, kernel) for kernel in kernels}
    lacking = [f"headers of kernel {kernel}" for kernel, package in wanted.items() if not package]
    lacking += ["dkms"] if "dkms" not in host.repository and host.dkms is None else []
    if lacking:
        return Said(1, err=f"no repository has  {' '.join(lacking)}\n")
    if host.disk_full:
        return Said(1, err="E: You don't have enough free space in /var/cache/apt/archives/.\n")
    host.headers = sorted({*host.headers, *kernels})
    host.dkms = host.dkms if host.dkms is not None else {}
    return Said(0)


def _package(host: Host, kernel: str) -> str:
    names = (f"{kind}-headers-{kernel}" for kind in ("proxmox", "pve", "linux"))
    return next((name for name in names if name in host.repository), "")
