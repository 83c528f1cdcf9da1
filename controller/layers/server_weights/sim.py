"""server.weights in the simulated fleet: models in places, and what fetching them from the fleet's Hub does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from controller.core.words import Step
from controller.facts.words import Section
from controller.layers.shared import hub_truth, inside_physics
from controller.layers.shared.truth import File, Fleet, Host, Image, Model, Said, WeightFile, Work

FOLDER = "/opt/reconcile/weights"
RATE = 110_000_000  # bytes a second: what a gigabit line carries
MARGIN = 64 << 20


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""

    def lines(vmid: int | None) -> Iterator[str]:
        image = inside_physics.image_of(fleet, host, vmid)
        step = 1 << 30 if image.free >= 64 << 30 else 64 << 20
        yield f"disk {vmid or 1:x} {image.free // step * step} /"
        for path, file in sorted(image.files.items()):
            if path.startswith(f"{FOLDER}/") and path.endswith(".token"):
                digest = hashlib.sha256(file.text.encode()).hexdigest()
                yield f"asked {path.removeprefix(f'{FOLDER}/').removesuffix('.token')} {digest}"
        for key, marker in _markers(image):
            model = image.models.get(marker["directory"])
            for name, part in sorted(model.files.items()) if model is not None else ():
                yield f"file {key} {part.size} {part.mtime}.0000000000 {name}"

    def wanted(vmid: int | None) -> Iterator[str]:
        yield from (f"{FOLDER}/{key}.json" for key, _ in _markers(inside_physics.image_of(fleet, host, vmid)))

    return Section(0, inside_physics.answer(fleet, host, guests, lines, wanted))


def _markers(image: Image) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(image.files):
        if path.startswith(f"{FOLDER}/") and path.endswith(".json"):
            yield path.removeprefix(f"{FOLDER}/").removesuffix(".json"), json.loads(image.files[path].text)


def takes(step: Step) -> float:
    """Seconds that a step takes."""
    files = json.loads(step.stdin)["files"] if step.action == "fetch-weights" else ()
    return 5.0 + sum(int(file["size"]) for file in files) / RATE


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What ``fetch.sh`` does in a place."""
    if work.action == "offer-weights":
        return Said(0, "nobody has asked any more\n")  # hosts of a simulated fleet do not reach each other
    if work.action == "ask-for-weights":
        what, (place, key) = "ask", work.args
    else:
        what, place, key, _ = work.args
    vmid = None if place == "-" else int(place)
    if vmid is not None and vmid not in host.containers:
        return Said(75, err=f"CT {vmid} does not run\n")
    image = inside_physics.image_of(fleet, host, vmid)
    fleet.touch(host)
    if what == "ask":
        image.files[f"{FOLDER}/{key}.token"] = File(fleet.draw_id(host), 0o600, int(fleet.now))
        return Said(0)
    if what == "recheck":
        _compare(fleet, image, key, json.loads(image.files[f"{FOLDER}/{key}.json"].text))
        return Said(0)
    image.files.pop(f"{FOLDER}/{key}.token", None)
    return _fetch(fleet, image, key, json.loads(work.stdin))


def _fetch(fleet: Fleet, image: Image, key: str, order: dict[str, Any]) -> Said:
    """Take what is there and right, and fetch the rest; a marker is there from the beginning."""
    directory = order["directory"]
    model = image.models.setdefault(directory, Model(order["repo"], order["revision"]))
    marker = {name: order[name] for name in ("object", "repo", "revision", "directory")}
    _compare(fleet, image, key, {"schema": 1, **marker, "real": directory, "files": order["files"]})
    missing = [file for file in order["files"] if not _is_right(model, file)]
    if missing and fleet.hub_trouble:
        return Said(1, err=f"nothing more comes, whichever way: {fleet.hub_trouble}\n")
    needed = sum(file["size"] for file in missing)
    if needed + MARGIN > image.free:
        said = f"no space left: {needed} bytes are missing, and {directory} has {image.free} bytes free"
        return Said(1, err=f"{said}\n")
    source = next((m for m in fleet.hub.values() if (m.repo, m.revision) == (order["repo"], order["revision"])), None)
    there = {file.path for file in hub_truth.manifest(source)} if source is not None else set()
    for file in missing:
        if file["path"] not in there:
            return Said(1, err=f"the Hub does not have {file['path']} of {order['repo']} at {order['revision']}: \n")
        before = model.files.get(file["path"])
        image.free -= file["size"] - (before.size if before is not None else 0)
        model.files[file["path"]] = WeightFile(file["size"], file["size"], mtime=int(fleet.now))
    for path in [path for path in model.files if path.startswith(".reconcile/")]:
        image.free += model.files.pop(path).size
    _compare(fleet, image, key, {"schema": 1, **marker, "real": directory, "files": order["files"]})
    return Said(0)


def _is_right(model: Model, file: dict[str, Any]) -> bool:
    found = model.files.get(file["path"])
    return found is not None and found.size == file["size"] and found.sound


def _compare(fleet: Fleet, image: Image, key: str, marker: dict[str, Any]) -> None:
    """Compare what is there, and write down what came of it."""
    model = image.models.get(marker["directory"])
    files = []
    for file in marker["files"]:
        found = model.files.get(file["path"]) if model is not None else None
        compared = found is not None and found.size == file["size"]
        mtime = found.mtime * 10**9 if found is not None and compared else None
        files.append({**file, "mtime": mtime, "damaged": bool(found is not None and compared and not found.sound)})
    text = json.dumps({**marker, "files": files}, indent=1, ensure_ascii=False)
    image.files[f"{FOLDER}/{key}.json"] = File(text + "\n", 0o644, int(fleet.now))
