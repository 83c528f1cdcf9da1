"""The image of the virtual machine: a Debian with its own kernel, built once and kept under the digest of its recipe.

The kernel and two initramfs lie beside the disk: one as Debian makes it, and one of an operator who gave all cards of
a model to vfio-pci by their ids.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("RECONCILE_LAB_CACHE", "/var/cache/reconcile-lab"))
SUITE = "bookworm"
PACKAGES = (
    "linux-image-amd64",
    "openssh-server",
    "systemd",
    "systemd-sysv",
    "iproute2",
    "pciutils",
    "kmod",
    "udev",
    "driverctl",
    "initramfs-tools",
)
CARD = "8086:10d3"  # e1000e: the twins are network cards with a real driver

CUSTOMIZE = r"""
set -eu
rm -f /etc/ssh/ssh_host_*
ssh-keygen -q -A
printf 'PermitRootLogin prohibit-password\nPasswordAuthentication no\n' > /etc/ssh/sshd_config.d/vm.conf
echo vm > /etc/hostname
mkdir -p /root/.ssh /etc/systemd/network
printf '[Match]\nDriver=virtio_net\n[Network]\nDHCP=yes\n' > /etc/systemd/network/10-vm.network
systemctl enable -q systemd-networkd
cd /etc/systemd/system
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service \
    fstrim.timer systemd-networkd-wait-online.service getty@tty1.service serial-getty@ttyS0.service; do
    ln -sf /dev/null "$unit"
done
# Under emulation every module that is not there saves time. The initramfs brings what the disk needs, and e1000e.
sed -i 's/^MODULES=.*/MODULES=list/; s/^COMPRESS=.*/COMPRESS=zstd/' /etc/initramfs-tools/initramfs.conf
printf 'virtio_pci\nvirtio_blk\next4\n' > /etc/initramfs-tools/modules
kernel=$(ls /lib/modules)
mkinitramfs -o /boot/initrd.plain "$kernel"
cp -a /etc/initramfs-tools /tmp/with-ids
printf 'vfio_pci\n' >> /tmp/with-ids/modules
printf 'options vfio-pci ids=@CARD@\nsoftdep e1000e pre: vfio-pci\n' > /etc/modprobe.d/vfio.conf
mkinitramfs -d /tmp/with-ids -o /boot/initrd.ids "$kernel"
rm -rf /etc/modprobe.d/vfio.conf /tmp/with-ids /boot/initrd.img-* /var/lib/apt/lists/* /var/cache/apt/* \
    /usr/share/doc/* /usr/share/man/* /usr/share/locale/*
""".replace("@CARD@", CARD)


@dataclass(frozen=True)
class Image:
    """What QEMU is given, and the key that logs in as root."""

    place: Path

    @property
    def disk(self) -> Path:
        """A file system without partitions."""
        return self.place / "disk.img"

    @property
    def kernel(self) -> Path:
        """Debian's own."""
        return self.place / "vmlinuz"

    def initrd(self, *, ids: bool) -> Path:
        """The initramfs, with ``vfio-pci ids=`` or without."""
        return self.place / ("initrd.ids" if ids else "initrd.plain")

    @property
    def key(self) -> Path:
        """The private key of whoever may log in as root."""
        return self.place / "key"


def get(cache: Path = CACHE) -> Image:
    """Return the image, and build it first if this recipe was not built yet (two minutes)."""
    recipe = "\n".join((SUITE, *PACKAGES, CUSTOMIZE))
    finished = cache / f"vm-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "vm-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.is_dir():
            _build(cache, finished)
    return Image(finished)


def _build(cache: Path, finished: Path) -> None:
    work = Path(tempfile.mkdtemp(prefix="building-vm-", dir=cache))
    try:
        tree = work / "tree"
        script = work / "customize.sh"
        script.write_text(CUSTOMIZE)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(work / "key"))
        _run(
            "nice",
            "mmdebstrap",
            "--quiet",
            "--mode=root",
            "--variant=minbase",
            f"--include={','.join(PACKAGES)}",
            f"--customize-hook=copy-in {script} /tmp",
            '--customize-hook=chroot "$1" sh /tmp/customize.sh',
            '--customize-hook=rm "$1/tmp/customize.sh"',
            f"--customize-hook=upload {work / 'key.pub'} /root/.ssh/authorized_keys",
            SUITE,
            str(tree),
        )
        for name in ("initrd.plain", "initrd.ids"):
            shutil.move(tree / "boot" / name, work / name)
        kernel = next((tree / "boot").glob("vmlinuz-*"))
        shutil.copyfile(kernel, work / "vmlinuz")
        _run("nice", "mkfs.ext4", "-q", "-d", str(tree), str(work / "disk.img"), "2G")
        shutil.rmtree(tree)
        work.rename(finished)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
