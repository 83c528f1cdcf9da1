"""The root file systems of the lab: one Debian tree, built once, and a thin layer that makes a CT of it.

Hosts and CTs are overlays of these trees (see ``lab.py``), so a lab costs no copy.
The trees are kept under the digest of the recipe below: a changed recipe is another tree,
and a running lab keeps the one it started with.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("RECONCILE_LAB_CACHE", "/var/cache/reconcile-lab"))

SUITE = "bookworm"  # what Proxmox VE 8 is built on

PACKAGES = (
    "systemd",
    "systemd-sysv",
    "openssh-server",
    "sudo",
    "iproute2",
    "iputils-ping",
    "procps",
    "pciutils",  # lspci, reading the PCI tree that kernel.py serves
    "kmod",  # modprobe.d, aliases and dependencies are worked out by the real one; only the kernel's part stands in
    "initramfs-tools",  # the real update-initramfs, and cpio; boot.py runs what it builds
    "zstd",
    "curl",
    "lxc",  # the CTs of a Proxmox host are real ones
    "python3",  # the stand-ins are Python; python3-minimal has no json
    "locales",  # a host may speak another language
)

# Run inside the new tree. dbus and logind are not installed: a container has no use for them. udev comes with
# initramfs-tools; what it does at boot stands in (standins/kernel/udev-coldplug).
CUSTOMIZE = r"""
set -eu

localedef -i de_DE -f UTF-8 de_DE.UTF-8

# Every host brings keys of its own, written before its first start.
rm -f /etc/ssh/ssh_host_*
cat > /etc/ssh/sshd_config.d/lab.conf <<'END'
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
AllowTcpForwarding yes
END

useradd --create-home --shell /bin/bash ops
echo 'ops ALL=(ALL:ALL) NOPASSWD: ALL' > /etc/sudoers.d/ops
chmod 0440 /etc/sudoers.d/ops

# What would only cost time at each start, or write into a tree that a test compares.
cd /etc/systemd/system
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service \
    fstrim.timer motd-news.timer systemd-tmpfiles-clean.timer getty@tty1.service console-getty.service \
    container-getty@.service getty-static.service lxc.service lxc-net.service lxc-monitord.service \
    modprobe@.service systemd-udevd.service systemd-udevd-control.socket systemd-udevd-kernel.socket \
    systemd-udev-settle.service systemd-hwdb-update.service systemd-modules-load.service \
    systemd-network-generator.service \
    systemd-update-utmp.service systemd-update-utmp-runlevel.service \
    sys-kernel-debug.mount sys-kernel-tracing.mount dev-hugepages.mount dev-mqueue.mount; do
    ln -sf /dev/null "$unit"
done
ln -sf /lib/systemd/system/multi-user.target default.target

# How much is logged should not depend on how large the disk of the machine is.
mkdir -p /etc/systemd/journald.conf.d
printf '[Journal]\nSystemMaxUse=32M\n' > /etc/systemd/journald.conf.d/lab.conf

: > /etc/machine-id
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/share/doc/* /usr/share/man/*
"""

# What differs in a CT: it is reached through its host, and nests nothing.
CT_LAYER = r"""
cd etc/systemd/system
rm -f multi-user.target.wants/ssh.service sshd.service
ln -sf /dev/null ssh.service
ln -sf /dev/null ssh.socket
"""


@dataclass(frozen=True)
class Image:
    """Finished trees, read only by agreement: lower layers of overlays."""

    host: Path
    ct: Path  # a layer to be put above ``host``

    @property
    def host_layers(self) -> tuple[Path, ...]:
        """The lower layers of a host, topmost first."""
        return (self.host,)

    @property
    def ct_layers(self) -> tuple[Path, ...]:
        """The lower layers of a CT, topmost first."""
        return (self.ct, self.host)


def digest() -> str:
    """Name the recipe: what it installs and what it changes."""
    text = "\n".join((SUITE, *PACKAGES, CUSTOMIZE, CT_LAYER))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def get(cache: Path = CACHE) -> Image:
    """Return the trees, and build them first if this recipe was not built yet (about a minute).

    Two that ask at once build it once: the second waits for the first.
    Raises CalledProcessError when mmdebstrap fails; nothing half built is ever taken for a tree.
    """
    finished = cache / digest()
    if not finished.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / "lock"):
            if not finished.is_dir():
                _build(cache, finished)
    return place(digest(), cache)


def place(name: str, cache: Path = CACHE) -> Image:
    """Return where the trees of a digest are, or would be."""
    return Image(host=cache / name / "host", ct=cache / name / "ct")


def _build(cache: Path, finished: Path) -> None:
    work = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    work.chmod(0o755)
    try:
        host = work / "host"
        subprocess.run(
            [
                "mmdebstrap",
                "--quiet",
                "--mode=root",
                "--variant=minbase",
                "--include=" + ",".join(PACKAGES),
                f"--customize-hook=chroot \"$1\" /bin/sh -c '{_quoted(CUSTOMIZE)}'",
                SUITE,
                str(host),
            ],
            check=True,
            stdin=subprocess.DEVNULL,
        )
        ct = work / "ct"
        (ct / "etc/systemd/system").mkdir(parents=True)
        subprocess.run(["/bin/sh", "-euc", CT_LAYER], cwd=ct, check=True)
        work.rename(finished)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _quoted(text: str) -> str:
    """Quote for the inside of single quotes of a shell."""
    return text.replace("'", "'\\''")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
