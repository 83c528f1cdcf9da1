"""server.environment in the simulated fleet: environments in places, and what building and proving them does."""

from __future__ import annotations

import json
from collections.abc import Iterator

from controller.core.words import Step
from controller.engines import registry
from controller.facts.words import Section
from controller.layers.shared import inside_physics
from controller.layers.shared.truth import Environment, File, Fleet, Host, Image, Said, Work

FOLDER = "/opt/reconcile/env"
SIZE = 12 << 30  # bytes; CUDA's libraries are most of it
KERNELS = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
"""For what the wheels of engines on PyPI have kernels (torch 2.9 and newer, sglang-kernel and vllm as read)."""
GARBLED = "the the the the the the the the"
"""What a dense Qwen3.5 or 3.6 over several GPUs says under SGLang 0.5.9 (sglang#19070: an all-reduce is left out)."""


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""

    def lines(vmid: int | None) -> Iterator[str]:
        image = inside_physics.image_of(fleet, host, vmid)
        for digest in _folders(image):
            yield f"env {digest}"
            yield f"whole {digest}"

    def wanted(vmid: int | None) -> Iterator[str]:
        image = inside_physics.image_of(fleet, host, vmid)
        yield from sorted(path for path in image.files if path.startswith(f"{FOLDER}/") and path.endswith(".json"))
        yield from sorted(path for path in image.files if path.startswith("/usr/local/cuda-"))

    return Section(0, inside_physics.answer(fleet, host, guests, lines, wanted))


def _folders(image: Image) -> list[str]:
    return sorted(path.removeprefix(f"{FOLDER}/") for path in image.environments if path.startswith(f"{FOLDER}/"))


def takes(step: Step) -> float:
    """Seconds that a step takes."""
    return {"build-environment": 420.0, "prove-environment": 40.0}.get(step.action, 5.0)


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What the layer's scripts do in a place."""
    vmid = None if work.args[0] == "-" else int(work.args[0])
    if vmid is not None and vmid not in host.containers:
        return Said(75, err=f"CT {vmid} does not run\n")
    image, digest = inside_physics.image_of(fleet, host, vmid), work.args[1]
    match work.action:
        case "build-environment":
            said = _build(fleet, host, image, digest, work)
        case "prove-environment":
            said = _prove(fleet, host, vmid, image, digest, work.args[2:])
        case "remove-environment":
            said = _remove(image, digest)
        case _:
            raise ValueError(f"server.environment has no action {work.action}")
    fleet.touch(host)
    return said


def _build(fleet: Fleet, host: Host, image: Image, digest: str, work: Work) -> Said:
    path, order = f"{FOLDER}/{digest}", json.loads(work.stdin)
    if f"{path}.json" in image.files:
        return Said(75, err=f"environment {digest} is there already\n")
    if image.free < SIZE:
        return Said(1, err="error: Failed to extract archive: No space left on device (os error 28)\n")
    engine, version = order["engine"], order["version"]
    shipped = registry.engine(engine).shipped_flags(version)
    python = work.args[5]
    environment = Environment(
        engine=engine,
        version=version,
        python=python,
        arch=host.arch,
        capabilities=list(KERNELS),
        flags=[name for flag in shipped.flags for name in flag.names] if shipped is not None else [],
        size=SIZE,
        nonsense=GARBLED if (engine, version) == ("sglang", "0.5.9") else "",
    )
    marker = {
        "schema": 1,
        "object": order["object"],
        "engine": engine,
        "version": version,
        "python": python,
        "arch": host.arch,
        "capabilities": order["capabilities"],
        "requirements": order["requirements"],
        "torch": {"version": "2.11.0+cu130", "cuda": "13.0", "archs": [_sm(each) for each in KERNELS]},
        "flags": shipped.as_json() if shipped is not None else None,
        "proofs": [],
        "size": SIZE,
        "built": int(fleet.now),
    }
    image.free -= SIZE
    image.environments[path] = environment
    image.files[f"{path}.json"] = File(json.dumps(marker) + "\n", 0o644, int(fleet.now))
    return Said(0)


def _sm(capability: str) -> str:
    return f"sm_{capability.replace('.', '')}"


def _prove(fleet: Fleet, host: Host, vmid: int | None, image: Image, digest: str, args: list[str]) -> Said:
    path = f"{FOLDER}/{digest}"
    driver, boot, *uuids = args
    environment, marker = image.environments.get(path), image.files.get(f"{path}.json")
    if environment is None or marker is None:
        return Said(75, err=f"there is no environment {digest} any more\n")
    said = json.loads(marker.text)
    cards = {f.gpu.uuid: f.gpu for f in host.functions.values() if f.gpu is not None and f.driver == "nvidia"}
    for uuid in uuids:
        card = cards.get(uuid)
        if card is None or card.lost:
            result, text = "failed", "RuntimeError: No CUDA GPUs are available"
        elif card.compute_capability not in environment.capabilities:
            result, text = "failed", "CUDA error: no kernel image is available for execution on the device"
        else:
            result, text = "passed", f"NVIDIA {card.model} is right"
        said["proofs"] = [each for each in said["proofs"] if each["uuid"] != uuid]
        said["proofs"].append({"uuid": uuid, "result": result, "said": text, "driver": driver, "boot": boot})
    image.files[f"{path}.json"] = File(json.dumps(said) + "\n", 0o644, int(fleet.now))
    return Said(0)


def _remove(image: Image, digest: str) -> Said:
    path = f"{FOLDER}/{digest}"
    for name, file in image.files.items():
        if name.startswith("/etc/systemd/system/reconcile-") and f"{path}/" in file.text:
            return Said(75, err=f"environment {digest} is in use: {name}\n")
    removed = image.environments.pop(path, None)
    image.files.pop(f"{path}.json", None)
    image.free += removed.size if removed is not None else 0
    return Said(0)
