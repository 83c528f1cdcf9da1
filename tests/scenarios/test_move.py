"""A container and its cards follow one edited line to another host, or stay where they are and say why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.scenarios.move import CONF, SHARED, SNAPSHOT, STORAGE, specification
from tests.scenarios.stage import Ran, Stage

LINE = f"lxc.mount.entry: {SHARED} shared none bind,create=dir\n"


def steps(ran: Ran) -> list[tuple[str, str]]:
    assert ran.rc == 0, ran.out + ran.err
    assert ran.json["blocked"] == [], ran.json["blocked"]
    return [(step["layer"], step["action"]) for step in ran.json["steps"]]


def arrived(stage: Stage) -> None:
    """It runs on kpro5 with exactly two cards, and without the mount that is not there."""
    assert stage.node(129) == "kpro5"
    assert stage.started(129).startswith("kpro5 ")
    conf = stage.conf(129).decode()
    assert LINE not in conf
    assert conf.endswith(SNAPSHOT)
    assert [stage.opens(129, f"/dev/nvidia{n}") for n in range(3)] == ["allowed", "allowed", "absent"]
    assert stage.opens(129, "/dev/nvidia-uvm") == "allowed"
    again = stage.reconcile("--once")
    assert "Nothing was done" in again.out, again.out


MOVED = [
    ("container.placement", "move-container"),
    ("container.mounts", "edit-config"),
    ("container.devices", "edit-config"),
    ("container.power", "start"),
]
TAKEN = [("container.placement", "take-over-container"), *MOVED[1:]]


def test_moved_with_both_alive_and_back_again(moving: Stage) -> None:
    before = moving.started(129)
    assert steps(moving.reconcile("plan", "-o", "json")) == MOVED
    assert (moving.node(129), moving.started(129), moving.conf(129).decode()) == ("kpro6", before, CONF)
    done = moving.reconcile("--once")
    assert done.rc == 0, done.out + done.err
    arrived(moving)

    specification(moving, host="kpro6")
    back = moving.reconcile("--once")
    assert back.rc == 0, back.out + back.err
    assert moving.node(129) == "kpro6"
    assert moving.started(129).startswith("kpro6 ")
    assert [moving.opens(129, f"/dev/nvidia{n}") for n in range(3)] == ["allowed", "allowed", "absent"]
    assert "Nothing was done" in moving.reconcile("--once").out


def test_moved_from_a_decommissioned_host_that_is_alive(moving: Stage) -> None:
    specification(moving, kpro6="decommissioned")
    assert steps(moving.reconcile("plan", "-o", "json")) == MOVED
    done = moving.reconcile("--once")
    assert done.rc == 0, done.out + done.err
    arrived(moving)


def test_taken_over_from_a_dead_decommissioned_host(moving: Stage) -> None:
    moving.power_off("kpro6")
    specification(moving, kpro6="decommissioned")
    assert steps(moving.reconcile("plan", "-o", "json")) == TAKEN
    done = moving.reconcile("--once")
    assert done.rc == 0, done.out + done.err
    arrived(moving)
    moving.power_on("kpro6")
    assert moving.started(129).startswith("kpro5 ")
    arrived(moving)


def dead(stage: Stage, **more: str) -> None:
    stage.power_off("kpro6")
    specification(stage, kpro6="decommissioned", **more)  # type: ignore[arg-type]


def only_unreachable(stage: Stage) -> None:
    stage.cut("kpro6")


def unreachable_and_decommissioned(stage: Stage) -> None:
    stage.cut("kpro6")
    specification(stage, kpro6="decommissioned")


def quorum_lost(stage: Stage) -> None:
    stage.part(["kpro5"])


def quorum_lost_and_dead(stage: Stage) -> None:
    dead(stage)
    stage.power_off("kpro4")


def source_without_quorum(stage: Stage) -> None:
    stage.part(["kpro6"])


def watched(stage: Stage) -> None:
    """The host is cut off from everybody, and still runs the container."""
    stage.part(["kpro6"])
    stage.cut("kpro6")
    specification(stage, kpro6="decommissioned")


def edited(old: str, new: str, then: Callable[[Stage], None] | None = None) -> Callable[[Stage], None]:
    def happens(stage: Stage) -> None:
        stage.write_conf(129, CONF.replace(old, new).encode())
        if then is not None:
            then(stage)

    return happens


def ha(stage: Stage) -> None:
    stage.pve("ha/resources.cfg", "ct: 129\n\tstate started\n")


def ha_and_dead(stage: Stage) -> None:
    ha(stage)
    dead(stage)


def other_storage(stage: Stage) -> None:
    stage.write_conf(129, CONF.replace("rootfs: ceph-rbd:", "rootfs: nfs:", 1).encode())
    stage.pve(
        "storage.cfg",
        f"{STORAGE}\nnfs: nfs\n\tserver 192.0.2.9\n\texport /srv\n\tpath /mnt/pve/nfs\n\tcontent rootdir\n",
    )
    dead(stage)


def storage_missing(stage: Stage) -> None:
    stage.pve("storage.cfg", STORAGE.replace("kpro4,kpro5,kpro6", "kpro4,kpro6"))


def too_little_memory(stage: Stage) -> None:
    specification(stage, gpus='{count: 2, memory: ">=64GiB"}')


def mount_needed(stage: Stage) -> None:
    specification(stage, mounts="[]")


def in_maintenance(stage: Stage) -> None:
    specification(stage, kpro6="maintenance")


SWAP = "swap: 0\n"
HELD: dict[str, tuple[Callable[[Stage], None], str]] = {
    "unreachable": (only_unreachable, "source-unreachable"),
    "unreachable-decommissioned": (unreachable_and_decommissioned, "source-online"),
    "quorum-lost": (quorum_lost, "no-quorum"),
    "quorum-lost-dead": (quorum_lost_and_dead, "no-quorum"),
    "source-without-quorum": (source_without_quorum, "no-quorum"),
    "watched": (watched, "watched"),
    "locked": (edited(SWAP, f"{SWAP}lock: migrate\n"), "locked"),
    "locked-dead": (edited(SWAP, f"{SWAP}lock: migrate\n", dead), "locked"),
    "backup": (edited(SWAP, f"{SWAP}lock: backup\n"), "backup-running"),
    "ha": (ha, "ha-managed"),
    "ha-dead": (ha_and_dead, "ha-managed"),
    "local-disk": (edited("ceph-rbd:vm-129-disk-0", "local:129/vm-129-disk-0.raw"), "local-disk"),
    "local-disk-dead": (edited("ceph-rbd:vm-129-disk-0", "local:129/vm-129-disk-0.raw", dead), "local-disk"),
    "local-bind-mount": (edited(SWAP, f"mp0: {SHARED},mp=/more\n{SWAP}"), "local-bind-mount"),
    "not-fenced": (other_storage, "not-fenced"),
    "memory": (too_little_memory, "not-enough-gpus"),
    "storage-missing": (storage_missing, "storage-missing"),
    "mount-missing": (mount_needed, "mount-source-missing"),
    "maintenance": (in_maintenance, "source-in-maintenance"),
}


@pytest.mark.parametrize("case", HELD)
def test_it_stays_and_says_why(moving: Stage, case: str) -> None:
    happens, reason = HELD[case]
    happens(moving)
    before = moving.node(129), moving.conf(129), moving.started(129)
    done = moving.reconcile("--once", "-o", "json")
    assert done.rc in (1, 2), done.out + done.err
    assert done.json["performed"] == []
    told = [*done.json["blocked"], *done.json["unknown"]]
    mine = [(row["layer"], row["reason"]) for row in told if row["object"] == "Container/ct129"]
    assert ("container.placement", reason) in mine, told
    assert (moving.node(129), moving.conf(129), moving.started(129)) == before


def test_fenced_is_a_persons_word_for_storage_that_tells_nothing(moving: Stage) -> None:
    other_storage(moving)
    specification(moving, kpro6="decommissioned", fenced=True)
    planned = moving.reconcile("plan", "-o", "json")
    assert planned.json["steps"][0]["action"] == "take-over-container", planned.out


def test_without_permission_it_waits_and_says_for_what(moving: Stage) -> None:
    specification(moving, allow="[restart-container, edit-container-config]")
    before = moving.started(129)
    done = moving.reconcile("--once")
    assert done.rc == 2
    assert "--allow move-container:Container/ct129" in done.out
    assert (moving.node(129), moving.started(129)) == ("kpro6", before)
