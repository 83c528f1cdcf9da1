"""The fleets that schedules begin on, with their specs as documents."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import pickle
from typing import Any

from ruamel.yaml import YAML

from controller.layers.shared import pve_physics as pve
from controller.layers.shared.truth import Fleet
from controller.spec.load import load
from controller.spec.model import Specs
from controller.world.sim import file as simfile
from tests.scenarios import story
from tests.sim.controllers import SPECS as DEMO_SPECS
from tests.sim.controllers import Controller
from tests.sim.fleets import DEMO

Document = dict[str, Any]

SECRET = "hf_" + "PlantedInAConfigOfSomebodyElse0123"  # lies where the controller looks; nobody may be shown it
OLD_RUNFILE = "/root/NVIDIA-Linux-x86_64-575.57.08.run"
OLD_TEXT = "#!/bin/sh\n# NVIDIA-Linux-x86_64-575.57.08: an older one\n"
OLD_DIGEST = hashlib.sha256(OLD_TEXT.encode()).hexdigest()
CONTAINER_130 = (
    "arch: amd64\nhostname: two\nmemory: 512\nostype: debian\nrootfs: ceph-rbd:vm-130-disk-0,size=8G\n"
    f"lxc.environment: HF_TOKEN={SECRET}\n"
)
ALL = [
    *("move-container", "take-over-container", "restart-container", "edit-container-config"),
    *("change-driver", "reboot-host"),
]
CT130: Document = {
    "kind": "Container",
    "name": "ct130",
    "id": 130,
    "host": "kpro5",
    "state": "running",
    "gpus": {"count": 1},
    "policy": {"mode": "enforce", "allow": ALL},
}

STARTS = (
    *("demo", "story", "alive", "story-done", "alive-done", "two-done", "boxes", "boxes-done"),
    *("served", "served-done", "served-done"),
)


@functools.cache
def _start(name: str) -> tuple[bytes, str]:
    first, _, done = name.partition("-")
    fleet, documents = {
        "demo": _demo,
        "story": _story,
        "alive": _alive,
        "two": _two,
        "boxes": _boxes,
        "served": _served,
    }[first]()
    if done:
        for _ in range(2):
            Controller(fleet, wanted=specs_of(documents)).once(timeout=3600)
    return pickle.dumps(fleet), json.dumps(documents)  # the quickest way to copies


def start(name: str) -> tuple[Fleet, list[Document]]:
    """A fleet of ``STARTS`` and the documents of its specs, both to be changed at will."""
    fleet, documents = _start(name)
    return pickle.loads(fleet), json.loads(documents)


def files_of(documents: list[Document]) -> dict[str, bytes]:
    """Documents as people save them: the fleet and its hosts in one file, each other object in its own."""
    files: dict[str, list[str]] = {}
    for document in documents:
        fixed = document["kind"] in ("Fleet", "Host")
        files.setdefault("hosts.yaml" if fixed else f"{document['name']}.yaml", []).append(json.dumps(document))
    return {name: "\n---\n".join(texts).encode() for name, texts in files.items()}


def specs_of(documents: list[Document]) -> Specs:
    """What documents want. Raises SpecErrors."""
    return _loaded(json.dumps(documents))


@functools.lru_cache(maxsize=4096)
def _loaded(documents: str) -> Specs:
    return load(files_of(json.loads(documents)))


def _documents(*paths: Any) -> list[Document]:
    return [json.loads(json.dumps(d)) for path in paths for d in YAML(typ="safe").load_all(path)]


def _demo() -> tuple[Fleet, list[Document]]:
    paths = [path for path in sorted(DEMO_SPECS.glob("*.yaml")) if not path.name.endswith(".sim.yaml")]
    documents = _documents(*paths)
    if all(document["kind"] != "Fleet" for document in documents):
        documents.insert(0, {"kind": "Fleet", "policy": {"mode": "report"}})
    return simfile.load(DEMO.read_text(), "demo"), documents


def _generous(documents: list[Document]) -> None:
    """Everything is permitted: what is done must be right without anybody being asked."""
    for document in documents:
        if document["kind"] == "Container":
            document["policy"] = {"mode": "enforce", "allow": list(ALL)}
        if document["kind"] == "Host" and "nvidia" in document:
            document["policy"] = {"mode": "enforce", "allow": ["change-driver", "rebind-gpu", "reboot-host"]}


def _story(*, alive: bool = False) -> tuple[Fleet, list[Document]]:
    world = story.world(alive=alive)
    world["hosts"]["kpro5"]["files"][OLD_RUNFILE] = OLD_TEXT
    world["hosts"]["kpro6"]["files"][OLD_RUNFILE] = OLD_TEXT
    documents = story.documents()
    of = {document.get("name"): document for document in documents}
    if alive:
        of["kpro6"]["lifecycle"] = "active"
        of["kpro6"]["nvidia"] = {
            "driver": {**of["kpro5"]["nvidia"]["driver"], "kernel_modules": "open"},
            "holders": ["nvidia-persistenced"],
            "gpus": [
                {"pci": card["pci"], "model": card["model"], "owner": "containers"}
                for card in world["hosts"]["kpro6"]["cards"]
            ],
        }
    _generous(documents)
    return simfile.load(json.dumps(world), "story"), documents


def _alive() -> tuple[Fleet, list[Document]]:
    return _story(alive=True)


def _served() -> tuple[Fleet, list[Document]]:
    """The story with the server in its container."""
    fleet, documents = _story()
    servers = [document for document in story.documents(served=True) if document["kind"] == "ModelServer"]
    for server in servers:
        server["policy"] = {"mode": "enforce", "allow": ["restart-server"]}
    return fleet, [*(d for d in documents if d["kind"] != "ModelServer"), *servers]


def _two() -> tuple[Fleet, list[Document]]:
    """The story with a second container on kpro5, each with a card."""
    fleet, documents = _story()
    kpro5 = fleet.hosts["kpro5"]
    failed = pve.write(fleet, kpro5, "/etc/pve/nodes/kpro5/lxc/130.conf", CONTAINER_130)
    assert failed == ""
    of = {document.get("name"): document for document in documents}
    of["ct129"]["gpus"] = {"count": 1}
    documents.append(copy.deepcopy(CT130))
    return fleet, documents


def _boxes() -> tuple[Fleet, list[Document]]:
    """Two plain Linux boxes that get a driver, never disrupted together, beside a node of a cluster of one."""
    runfile = "#!/bin/sh\n# 580.126.09\n"
    box = {
        "platform": "linux",
        "kernel": "6.8.0-60-generic",
        "repository": ["dkms", "linux-headers-6.8.0-60-generic"],
        "cards": [{"pci": "01:00.0", "model": "RTX A6000", "iommu_group": 3}],
        "files": {"/root/nv.run": runfile, OLD_RUNFILE: OLD_TEXT},
    }
    hosts = {name: {**box, "address": f"192.0.2.{number}"} for number, name in enumerate(("box1", "box2"), start=1)}
    documents: list[Document] = [
        {"kind": "Fleet", "policy": {"mode": "report"}, "limits": {"never_together": [["box1", "box2"]]}}
    ]
    for number, name in enumerate(hosts, start=1):
        documents.append(
            {
                "kind": "Host",
                "name": name,
                "address": f"192.0.2.{number}",
                "platform": "linux",
                "nvidia": {
                    "driver": {
                        "version": "580.126.09",
                        "kernel_modules": "proprietary",
                        "source": "runfile",
                        "url": "/root/nv.run",
                        "sha256": hashlib.sha256(runfile.encode()).hexdigest(),
                    },
                    "gpus": [{"pci": "01:00.0", "model": "RTX A6000", "owner": "host"}],
                },
            }
        )
    _generous(documents)
    return simfile.load(json.dumps({"simulated_fleet": 1, "hosts": hosts}), "boxes"), documents
