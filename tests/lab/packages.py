"""What a host of the lab can install: a small repository for its own apt, and NVIDIA's installer as a file.

Everything is built here: real packages, installed by the real apt and dpkg, that hold next to nothing. The repository
lies in each host at ``/usr/share/lab-repository``; no other one is known to it.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

STANDINS = Path(__file__).parent / "standins"
REPOSITORY = "usr/share/lab-repository"

# Kernels that there are packages for; one that is not listed has none in any repository.
PVE_KERNELS = ("6.8.12-9-pve", "6.8.12-11-pve", "6.17.2-1-pve")
DEBIAN_KERNELS = ("6.1.0-38-amd64",)
DRIVERS = ("570.86.15", "580.126.09")  # that NVIDIA's repository has
PROGRAMS = ("nvidia-smi", "nvidia-modprobe", "nvidia-persistenced")


@dataclass(frozen=True)
class Package:
    """A Debian package: its files by path, links by path and target, and what runs when it was unpacked."""

    name: str
    version: str
    depends: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    postinst: str = ""

    def build(self, folder: Path) -> str:
        """Write the package into a folder, and return its paragraph for the folder's index."""
        control = {"Package": self.name, "Version": self.version, "Architecture": "all", "Depends": self.depends}
        control |= {"Maintainer": "The lab <lab@example.org>", "Description": f"{self.name}, played by the lab"}
        text = "".join(f"{key}: {value}\n" for key, value in control.items() if value)
        parts = {
            "debian-binary": b"2.0\n",
            "control.tar.gz": _tar(
                {"control": (text.encode(), 0o644)}
                | ({"postinst": (f"#!/bin/sh\nset -e\n{self.postinst}".encode(), 0o755)} if self.postinst else {})
            ),
            "data.tar.gz": _tar(
                {path: (content, 0o755 if "bin/" in path else 0o644) for path, content in self.files.items()},
                self.links,
            ),
        }
        archive = b"!<arch>\n"
        for name, data in parts.items():
            archive += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode() + data
            archive += b"\n" * (len(data) % 2)
        file = f"{self.name}_{self.version}_all.deb"
        (folder / file).write_bytes(archive)
        digest = hashlib.sha256(archive).hexdigest()
        return f"{text}Filename: ./{file}\nSize: {len(archive)}\nSHA256: {digest}\n"


def _mode(path: str) -> int:
    return 0o755 if "bin/" in path or path.startswith("etc/kernel/") else 0o644


def _tar(files: Mapping[str, tuple[bytes, int]], links: Mapping[str, str] | None = None) -> bytes:
    """Pack files with the folders that lead to them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", format=tarfile.GNU_FORMAT, compresslevel=1) as archive:
        folders = {str(parent) for path in (*files, *(links or {})) for parent in Path(path).parents} - {"."}
        for folder in sorted(folders):
            entry = tarfile.TarInfo(f"./{folder}")
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for path, (content, mode) in files.items():
            entry = tarfile.TarInfo(f"./{path}")
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
        for path, target in (links or {}).items():
            entry = tarfile.TarInfo(f"./{path}")
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return out.getvalue()


def packages() -> list[Package]:
    """Return all that the repository has."""
    return [*_headers(), _dkms(), *_drivers()]


def _headers() -> list[Package]:
    def headers(prefix: str, kernel: str) -> Package:
        tree = f"usr/src/linux-headers-{kernel}"
        return Package(
            f"{prefix}-{kernel}",
            "1.0",
            files={f"{tree}/Makefile": f"# headers of {kernel}\n".encode()},
            links={f"lib/modules/{kernel}/build": f"/{tree}"},
        )

    return [
        *(headers("proxmox-headers", kernel) for kernel in PVE_KERNELS),
        *(headers("linux-headers", kernel) for kernel in DEBIAN_KERNELS),
        Package("proxmox-headers-6.8", "6.8.12-11", "proxmox-headers-6.8.12-11-pve"),
        Package("proxmox-default-headers", "1.1.0", "proxmox-headers-6.8"),
        Package("linux-headers-amd64", "6.1.153-1", f"linux-headers-{DEBIAN_KERNELS[-1]}"),
    ]


def _dkms() -> Package:
    build_for = '#!/bin/sh\nexec dkms autoinstall -k "$1"\n'
    return Package(
        "dkms",
        "3.0.10-8+deb12u1",
        files={
            "usr/sbin/dkms": (STANDINS / "packages/dkms").read_bytes(),
            "usr/lib/lab/kmodules.py": Path(__file__).with_name("kmodules.py").read_bytes(),
            "etc/kernel/postinst.d/dkms": build_for.encode(),
        },
    )


def _drivers() -> list[Package]:
    found = []
    for version in DRIVERS:
        for name, flavour in (("nvidia-kernel-dkms", "proprietary"), ("nvidia-kernel-open-dkms", "open")):
            source = f"usr/src/nvidia-{version}"
            found.append(
                Package(
                    name,
                    f"{version}-1",
                    "dkms",
                    files={
                        f"{source}/dkms.conf": f'PACKAGE_NAME="nvidia"\nPACKAGE_VERSION="{version}"\n'.encode(),
                        f"{source}/flavour": f"{flavour}\n".encode(),
                    },
                    postinst=f"dkms install nvidia/{version}\n",
                )
            )
        library = f"usr/lib/{os.uname().machine}-linux-gnu"
        found.append(
            Package(
                "nvidia-driver-cuda",
                f"{version}-1",
                files={
                    **{f"usr/bin/{name}": (STANDINS / "kernel" / name).read_bytes() for name in PROGRAMS},
                    f"{library}/libnvidia-ml.so.{version}": f"libnvidia-ml {version}, played by the lab\n".encode(),
                    f"{library}/libcuda.so.{version}": f"libcuda {version}, played by the lab\n".encode(),
                },
                links={f"{library}/{name}.so.1": f"{name}.so.{version}" for name in ("libnvidia-ml", "libcuda")},
            )
        )
    return found


@functools.cache
def _repository() -> bytes:
    """Return the whole repository as a tar archive: every host gets the same."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        index = "\n".join(package.build(folder) for package in packages())
        (folder / "Packages").write_text(index)
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            archive.add(folder, arcname=".")
        return out.getvalue()


def install(root: Path, description: Mapping[str, object]) -> None:
    """Give a host the repository as its only one. Its apt has not looked at it yet."""
    del description
    target = root / REPOSITORY
    target.mkdir(parents=True)
    target.chmod(0o755)
    with tarfile.open(fileobj=io.BytesIO(_repository())) as archive:
        archive.extractall(target, filter="data")
    sources = root / "etc/apt/sources.list.d"
    shutil.rmtree(sources, ignore_errors=True)
    sources.mkdir()
    (root / "etc/apt/sources.list").write_text(f"deb [trusted=yes] file:/{REPOSITORY} ./\n")
    (root / "usr/bin/mokutil").write_bytes((STANDINS / "packages/mokutil").read_bytes())
    (root / "usr/bin/mokutil").chmod(0o755)


def runfile(version: str, flavour: str = "open") -> bytes:
    """Return NVIDIA's installer of a version; ``flavour`` is what it takes when it is not told."""
    programs = _plain_tar({name: (STANDINS / "kernel" / name).read_bytes() for name in PROGRAMS})
    text = (STANDINS / "packages/nvidia-installer").read_text()
    for word, value in (
        ("VERSION", version),
        ("FLAVOUR", flavour),
        ("DIGEST", hashlib.sha256(programs).hexdigest()),
    ):
        text = text.replace(f"@{word}@", value)
    return text.encode() + programs


def _plain_tar(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def runfile_name(version: str) -> str:
    """Return the name that NVIDIA gives an installer."""
    return f"NVIDIA-Linux-{os.uname().machine}-{version}.run"
