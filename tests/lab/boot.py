"""What happens when a host gets power, until systemd starts: which kernel it is, and what its initramfs does.

The rest, ``modules-load.d`` and what udev loads, happens in the host itself (``standins/kernel``), in its own order.
"""

from __future__ import annotations

import contextlib
import lzma
import re
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

from tests.lab.machine import Caller, Machine

_HEADER_SIZE = 110  # cpio's "newc" format: a magic and 13 fields of 8 hexadecimal digits


def boot(machine: Machine, root: Path) -> None:
    """Start a host's kernel, and let its initramfs load what it has the rules and the modules for."""
    release = next_kernel(root) or machine.release
    machine.power_on(release)
    image = root / "boot" / f"initrd.img-{release}"
    if image.exists():
        _run_initramfs(machine, root, release, unpack(image.read_bytes()))


def next_kernel(root: Path) -> str | None:
    """Choose the kernel: the one pinned for this boot, the one pinned for good, or the newest in ``/boot``."""
    installed = {path.name.removeprefix("vmlinuz-") for path in (root / "boot").glob("vmlinuz-*")}
    for name in ("next-boot-pin", "proxmox-boot-pin"):
        pin = root / "etc/kernel" / name
        if pin.exists():
            release = pin.read_text().strip()
            if name == "next-boot-pin":
                pin.unlink()
            if release in installed:
                return release
    return max(installed, key=_version, default=None)


def _version(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]


def unpack(image: bytes) -> dict[str, bytes]:
    """Return the files of an initramfs: several archives one after the other, each of them packed or not.

    Raises ValueError for what is no initramfs.
    """
    files: dict[str, bytes] = {}
    while image := image.lstrip(b"\0"):
        if image.startswith((b"070701", b"070702")):
            entries = list(_entries(image))
            files |= {name.removeprefix("./").lstrip("/"): data for name, data, _ in entries}
            image = image[entries[-1][2] :]
        else:
            image = _unpacked(image)
    return files


def _entries(archive: bytes) -> Iterator[tuple[str, bytes, int]]:
    """Return the regular files of an archive, and where each ends; the last is the archive's trailer."""
    at = 0
    while True:
        fields = [int(archive[at + 6 + 8 * index : at + 14 + 8 * index], 16) for index in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = archive[at + _HEADER_SIZE : at + _HEADER_SIZE + name_size - 1].decode()
        start = at + (_HEADER_SIZE + name_size + 3) // 4 * 4 - at % 4
        at = start + (size + 3) // 4 * 4
        if name == "TRAILER!!!":
            yield name, b"", at
            return
        if mode & 0o170000 == 0o100000:
            yield name, archive[start : start + size], at


def _unpacked(data: bytes) -> bytes:
    if data.startswith(b"\x1f\x8b"):
        return zlib.decompress(data, wbits=31)
    if data.startswith(b"\xfd7zXZ"):
        return lzma.decompress(data)
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        return subprocess.run(["zstd", "-dcq"], input=data, capture_output=True, check=True).stdout
    raise ValueError("cannot read the initramfs: it is packed in an unknown way")


def _run_initramfs(machine: Machine, root: Path, release: str, files: dict[str, bytes]) -> None:
    """Load ``conf/modules``, then what fits the devices: by the rules and the modules in the initramfs alone."""
    place = root / "run/initramfs-of-the-lab"
    shutil.rmtree(place, ignore_errors=True)
    try:
        for name, data in files.items():
            if name.startswith(("etc/modprobe.d/", "lib/modprobe.d/", "lib/modules/", "usr/lib/")):
                target = place / name.removeprefix("usr/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
        lines = files.get("conf/modules", b"").decode().splitlines()
        for words in (line.partition("#")[0].split() for line in lines):
            if words:
                _load(machine, root, release, place, words)
        for function in list(machine.functions.values()):
            _load(machine, root, release, place, ["-b", function.modalias])
    finally:
        shutil.rmtree(place)


def _load(machine: Machine, root: Path, release: str, place: Path, words: list[str]) -> None:
    inside = f"/{place.relative_to(root)}"
    configuration = [
        word
        for folder in ("etc", "lib")
        if (place / folder / "modprobe.d").exists()
        for word in ("-C", f"{inside}/{folder}/modprobe.d")
    ] or ["-C", "/dev/null"]
    command = ["modprobe", "-q", "-d", inside, "-S", release, *configuration, "-D", *words]
    found = subprocess.run(
        ["chroot", str(root), "/bin/bash", "-c", 'exec -a "$0" /usr/lib/lab/kmod "${@:1}"', *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in found.stdout.splitlines():
        verb, _, rest = line.strip().partition(" ")
        path, _, options = rest.partition(" ")
        if verb == "insmod":
            with contextlib.suppress(OSError):  # as in the real one: what cannot be loaded is left for later
                machine.insert((root / path.lstrip("/")).read_bytes(), options.strip(), Caller())
