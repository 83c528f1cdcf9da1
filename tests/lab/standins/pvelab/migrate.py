"""``pct migrate``: PVE/LXC/Migrate.pm of pve-container and PVE/AbstractMigrate.pm of pve-guest-common.

The order: shut down (with --restart), lock ``migrate``, look at the volumes, free them, rename the configuration
to the other node, unlock and start there. Raw ``lxc.*`` keys and ``devN`` are not looked at: a container whose
devices the target lacks arrives there and does not start.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import Any

from pvelab import ct, ctconf, remote, storage
from pvelab.base import Die, fault, lock_file, node, path


class Migration:
    """One move of one container."""

    def __init__(self, vmid: int, target: str, options: dict[str, Any]) -> None:
        self.vmid = vmid
        self.target = target
        self.address = remote.address(target)
        self.restart = bool(options.get("restart"))
        self.online = bool(options.get("online"))
        self.timeout = int(options.get("timeout", 180))
        self.target_storage = options.get("target-storage")
        self.local_volumes: list[tuple[str, str]] = []  # volume and the storage that it goes to
        self.was_running = False
        self.moved = False
        self.problems = False

    def run(self) -> None:
        """Move it, and say how long it took; dies with "migration aborted" or "migration problems"."""
        begin = time.monotonic()
        try:
            with lock_file(f"/var/lock/pve-manager/pve-migrate-{self.vmid}", 10), ct.config_lock(self.vmid):
                self._run()
        except (Die, OSError) as error:
            self._error(f"migration aborted (duration {_duration(begin)}): {_text(error)}")
            raise Die("migration aborted") from None
        if self.problems:
            self._error(f"migration finished with problems (duration {_duration(begin)})")
            raise Die("migration problems")
        self._log(f"migration finished successfully (duration {_duration(begin)})")

    def _run(self) -> None:
        self._prepare()
        try:
            self._move()
        except (Die, OSError) as error:
            self._error(_text(error))
            self._log("aborting phase 1 - cleanup resources")
            self._clean_up()
            raise
        for volume, _ in self.local_volumes:
            name, image = storage.split_volume(volume)
            shutil.rmtree(storage.folder(storage.on_node(name, node()), image), ignore_errors=True)
        self._clean_up()

    def _prepare(self) -> None:
        conf = ct.load(self.vmid)
        ct.check_lock(conf)
        if ct.is_running(self.vmid):
            if self.online:
                raise Die("lxc live migration is currently not implemented")
            if not self.restart:
                raise Die("running container can only be migrated in restart mode")
            self.was_running = True
        for key, volume in ctconf.volumes(conf):
            if volume["type"] != "volume":
                if not volume.get("shared"):
                    raise Die(f"cannot migrate local {volume['type']} mount point '{key}'")
                continue
            self._check_volume(str(volume["volume"]))
        done = remote.run(self.target, ["/bin/true"])
        if done.returncode:
            self._log("# " + " ".join([*remote.command(self.target), "/bin/true"]))
            for line in done.stdout.splitlines():
                self._log(line)
            raise Die("Can't connect to destination address using public key")
        if self.was_running:
            self._log(f"shutdown CT {self.vmid}")
            ct.stop(self.vmid, kill=False, timeout=self.timeout)

    def _check_volume(self, volume: str) -> None:
        name, _ = storage.split_volume(volume)
        source = storage.on_node(name, node())
        goal = storage.on_node(self._goal(source), self.target)
        if "rootdir" not in goal.content:
            raise Die(f"content type 'rootdir' is not available on storage '{goal.name}'")

    def _goal(self, source: storage.Storage) -> str:
        """The storage on the target that a volume goes to: what is shared stays, else ``--target-storage`` says."""
        return source.name if source.shared or not self.target_storage else str(self.target_storage)

    def _move(self) -> None:
        self._log(f"starting migration of CT {self.vmid} to node '{self.target}' ({self.address})")
        conf = ct.load(self.vmid)
        conf["lock"] = "migrate"
        ct.save(self.vmid, conf)
        if (text := fault("pct-migrate-fail")) is not None:
            raise Die(text or "interrupted by signal")
        for key, volume in ctconf.volumes(conf):
            name = str(volume["volume"])
            if volume["type"] != "volume":
                self._log(f"ignoring shared '{volume['type']}' mount point '{key}' ('{name}')")
                continue
            source = storage.on_node(storage.split_volume(name)[0], node())
            if source.shared:
                self._log(f"volume '{name}' is on shared storage '{source.name}'")
                continue
            self._log(f"found local volume '{name}' (in current VM config)")
            self.local_volumes.append((name, self._goal(source)))
        for name, goal in self.local_volumes:
            self._copy(name, goal)
        self._free(conf)
        for name, goal in self.local_volumes:
            _, image = storage.split_volume(name)
            for key, volume in list(ctconf.volumes(conf)):
                if volume["volume"] == name:
                    conf[key] = conf[key].replace(name, f"{goal}:{image}", 1)
        if self.local_volumes:
            ct.save(self.vmid, conf)
        source_file = path(f"/etc/pve/{ct.config_name(self.vmid)}")
        target_file = path(f"/etc/pve/{ct.config_name(self.vmid, self.target)}")
        try:
            source_file.rename(target_file)
        except OSError as error:
            raise Die(f"Failed to move config to node '{self.target}' - rename failed: {error.strerror}") from None
        self.moved = True

    def _copy(self, volume: str, goal: str) -> None:
        """Copy a folder of a local storage over SSH (``storage_migrate``)."""
        name, image = storage.split_volume(volume)
        source = storage.folder(storage.on_node(name, node()), image)
        there = storage.folder(storage.on_node(goal, self.target), image)
        pack = subprocess.Popen(["tar", "-C", str(source), "--numeric-owner", "-cf", "-", "."], stdout=subprocess.PIPE)
        unpack = [*remote.command(self.target), f"mkdir -p {there} && tar -C {there} --numeric-owner -xpf -"]
        done = subprocess.run(unpack, stdin=pack.stdout, capture_output=True, text=True, check=False)
        if pack.wait() or done.returncode:
            raise Die(f"storage migration for '{volume}' to storage '{goal}' failed - {done.stderr.strip()}")

    def _free(self, conf: ctconf.Conf) -> None:
        """Unmount and unmap: nobody may have the file system mounted here when the other node mounts it."""
        subprocess.run(["umount", "--recursive", f"/var/lib/lxc/{self.vmid}/rootfs"], capture_output=True, check=False)
        for image in storage.images(conf):
            storage.unmap_image(image)

    def _clean_up(self) -> None:
        self._log("start final cleanup")
        try:
            if self.moved:
                self._finish_there()
            else:
                self._go_back()
        except Die as error:
            self._error(_text(error))
            self.problems = True

    def _go_back(self) -> None:
        try:
            ct.remove_lock(self.vmid, "migrate")
        except Die as error:
            self._error(_text(error))
        if self.restart and self.was_running:
            self._log("start container on source node")
            ct.vm_start(self.vmid, ct.load(self.vmid), skip_lock=True)

    def _finish_there(self) -> None:
        unlocked = remote.run(self.target, ["pct", "unlock", str(self.vmid)])
        if unlocked.returncode:
            self._error(f"failed to clear migrate lock: {unlocked.stdout.strip()}")
            self.problems = True
        if self.restart and self.was_running:
            self._log("start container on target node")
            words = ["pct", "start", str(self.vmid)]
            shown = " ".join([*remote.command(self.target), *words])
            self._log("# " + shown)
            started = remote.run(self.target, words)
            for line in started.stdout.splitlines():
                self._log(line)
            if started.returncode:
                raise Die(f"command '{shown}' failed: exit code {started.returncode}")

    def _log(self, text: str) -> None:
        for line in text.splitlines():
            print(time.strftime("%Y-%m-%d %H:%M:%S"), line, flush=True)

    def _error(self, text: str) -> None:
        for line in text.splitlines():
            print(time.strftime("%Y-%m-%d %H:%M:%S"), f"ERROR: {line}", flush=True)


def _text(error: Exception) -> str:
    return error.message if isinstance(error, Die) else str(error)


def _duration(begin: float) -> str:
    seconds = int(time.monotonic() - begin)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
