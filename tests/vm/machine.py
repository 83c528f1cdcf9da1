"""A virtual machine with two identical PCI cards behind root ports of their own: a real kernel, IOMMU and vfio-pci."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path

from controller.core.words import Script
from tests.vm.image import Image

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
BOOT_SECONDS = 300  # under emulation, on a machine that others use as well


def missing() -> str:
    """Say why no virtual machine can be had here, "" when one can."""
    if os.geteuid() != 0:
        return "building the image needs root"
    tools = [tool for tool in ("qemu-system-x86_64", "mmdebstrap", "mkfs.ext4", "ssh") if shutil.which(tool) is None]
    return f"{', '.join(tools)} is not installed (tests/vm/install-packages.sh)" if tools else ""


class Machine:
    """A running machine. What it writes to its disk is gone with it, and outlives its reboots."""

    def __init__(self, image: Image, process: subprocess.Popen[bytes], port: int, console: Path) -> None:
        self._image, self._process, self._port, self._console = image, process, port, console
        self.ids = False

    def run(self, command: str, *, stdin: bytes = b"", check: bool = True, timeout: float = 120) -> str:
        """Run a command line as root; returns what it printed. Raises CalledProcessError, with stderr in it."""
        done = subprocess.run([*self._ssh(), command], input=stdin, capture_output=True, timeout=timeout, check=False)
        if check and done.returncode != 0:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr.decode())
        return done.stdout.decode()

    def _ssh(self) -> list[str]:
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=10")
        flags = [flag for option in options for flag in ("-o", option)]
        return ["ssh", "-i", str(self._image.key), "-p", str(self._port), *flags, "root@127.0.0.1"]

    def script(self, script: Script, *args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run an action's script as a unit would: the library before it, its arguments quoted, its own state."""
        library = files("controller.world.host").joinpath("lib.sh").read_text(encoding="utf-8")
        state = "RECONCILE_STATE=/var/lib/reconcile RECONCILE_STEP_DIR=/run/step RECONCILE_STEP=test"
        self.run("mkdir -p /var/lib/reconcile /run/step; cat >/run/step/script", stdin=(library + script.text).encode())
        quoted = " ".join("'" + arg.replace("'", "'\\''") + "'" for arg in args)
        command = f"env {state} RECONCILE_OBJECT=Host/vm RECONCILE_GENERATION=1 sh -eu /run/step/script {quoted}"
        return subprocess.run([*self._ssh(), command], input=stdin, capture_output=True, timeout=120, check=False)

    def driver(self, address: str) -> str:
        """The driver that has a device, "" when none has."""
        link = self.run(f"readlink /sys/bus/pci/devices/{address}/driver", check=False).strip()
        return link.rpartition("/")[2]

    def override(self, address: str) -> str:
        """Its driver_override."""
        return self.run(f"cat /sys/bus/pci/devices/{address}/driver_override").strip()

    def wait(self) -> None:
        """Wait until it is up, with all its units started."""
        until = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                if self.run("systemctl is-system-running --wait", check=False, timeout=60).strip() in (
                    "running",
                    "degraded",
                ):
                    return
            time.sleep(0.5)  # nobody answers yet: there is nothing to be told by
        said = self._console.read_text()[-2000:] if self._console.exists() else "nothing"
        raise TimeoutError(f"the machine is not up (QEMU: {self._process.poll()}); its console: {said}")

    def reboot(self) -> None:
        """Reboot it, and wait until it is up again."""
        before = self.run("cat /proc/sys/kernel/random/boot_id")
        self.run("systemctl reboot", check=False)
        until = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < until:
            with suppress(subprocess.TimeoutExpired):
                now = self.run("cat /proc/sys/kernel/random/boot_id", check=False, timeout=30)
                if now not in ("", before):
                    self.wait()
                    return
            time.sleep(0.5)
        raise TimeoutError(f"the machine did not come back: {self._console.read_text()[-2000:]}")


@contextmanager
def started(image: Image, *, ids: bool) -> Iterator[Machine]:
    """Start a machine, and end it. ``ids``: its initramfs gives all cards of the model to vfio-pci."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="reconcile-vm-") as place:
        console = Path(place) / "console"
        process = subprocess.Popen(
            ["nice", *_command(image, port, console, ids=ids)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=place,
            env={**os.environ, "TMPDIR": place},
        )
        try:
            machine = Machine(image, process, port, console)
            machine.wait()
            yield machine
        finally:
            process.terminate()
            process.wait(30)


def _command(image: Image, port: int, console: Path, *, ids: bool) -> list[str]:
    append = "root=/dev/vda rw console=ttyS0 intel_iommu=on iommu=pt net.ifnames=0 no_timer_check"
    return [
        "qemu-system-x86_64",
        *("-machine", "q35,kernel-irqchip=split"),
        *("-accel", "tcg,thread=multi"),
        *("-cpu", "max", "-smp", "2", "-m", "1024"),
        *("-device", "intel-iommu,intremap=on"),
        *("-display", "none", "-serial", f"file:{console}", "-monitor", "none"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initrd(ids=ids)), "-append", append),
        *("-drive", f"file={image.disk},format=raw,if=virtio,snapshot=on"),
        *(
            "-netdev",
            f"user,id=lan,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:22",
            "-device",
            "virtio-net-pci,netdev=lan",
        ),
        *("-device", "pcie-root-port,id=port1,chassis=1,slot=1", "-device", "e1000e,bus=port1"),
        *("-device", "pcie-root-port,id=port2,chassis=2,slot=2", "-device", "e1000e,bus=port2"),
    ]
