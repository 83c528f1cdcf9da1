"""server.output in the simulated fleet: what engines answer, by their environments and weights, and going back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from controller.core.words import Step
from controller.facts.words import Section
from controller.layers.shared import inside_physics, kernel_physics, server_physics
from controller.layers.shared.truth import File, Fleet, Host, Image, Process, Said, Work

FOLDER = "/opt/reconcile/server"
PARTS = ("args.json", "secrets.env", "config.yaml", "note.sh", "salt", "checks.json", "watch.marker")
SPEED = 50.0
"""Tokens a second of every engine."""


def answer(fleet: Fleet, host: Host, guests: tuple[int, ...]) -> Section:
    """What the fragment prints on this host."""

    def wanted(vmid: int | None) -> Iterator[str]:
        image = inside_physics.image_of(fleet, host, vmid)
        for name in sorted({path.split("/")[4] for path in image.files if path.startswith(f"{FOLDER}/")}):
            yield f"{FOLDER}/{name}/state.json"
            yield f"{FOLDER}/{name}/checks/output.json"

    return Section(0, inside_physics.answer(fleet, host, guests, lambda _: (), wanted))


def takes(step: Step) -> float:
    """Seconds that a step takes."""
    return 30.0 if step.action == "check-output" else 10.0


def act(fleet: Fleet, host: Host, work: Work) -> Said:
    """What ``check-output.sh`` and ``put-back.sh`` do in a place."""
    place, name, *_ = work.args
    vmid = None if place == "-" else int(place)
    if vmid is not None and vmid not in host.containers:
        return Said(75, err=f"CT {vmid} does not run\n")
    fleet.touch(host)
    if work.action == "roll-back":
        return _put_back(fleet, host, vmid, name, json.loads(work.stdin))
    return _ask(fleet, host, vmid, name)


def _ask(fleet: Fleet, host: Host, vmid: int | None, name: str) -> Said:
    image, here = inside_physics.image_of(fleet, host, vmid), f"{FOLDER}/{name}"
    unit = f"reconcile-{name}.service"
    process = next((each for each in inside_physics.session_of(host, vmid).processes if each.unit == unit), None)
    settings, marker, arguments = (
        _json(image, f"{here}/{file}") for file in ("checks.json", "marker.json", "args.json")
    )
    if process is None or not settings:
        return Said(75, err="it does not run, or nobody has said what to ask\n")
    wrong = _nonsense(image, process)
    if not process.listens:
        checks = [_check("capital", "inconclusive", "nothing listens on its port", "inconclusive")]
    elif wrong:
        checks = [_check("capital", "failed", f"the answer does not say Paris; answered {wrong!r}", "wrong-output")]
    else:
        checks = [_check("capital", "passed", "answered 'Paris.'"), *_speed(settings)]
    on = {
        "unit": marker.get("digest", ""),
        "environment": arguments.get("env_digest", ""),
        "process": f"{process.pid} {kernel_physics.ticks(host, process.started)}",
        "asked": settings["canaries"]["asked"],
    }
    figures = {"tokens_per_second": SPEED if process.listens and not process.hangs else None}
    result = {"schema": 1, "at": fleet.now, "measured_on": on, "checks": checks, "figures": figures, "history": []}
    _write(fleet, image, f"{here}/checks/output.json", result)
    if all(check["result"] == "passed" for check in checks):
        _note_good(fleet, image, here, unit, on)
    return Said(0)


def _check(name: str, result: str, evidence: str, reason: str = "") -> dict[str, Any]:
    return {"name": name, "result": result, "evidence": evidence, "reason": reason, "seconds": 1.0}


def _nonsense(image: Image, process: Process) -> str:
    """What it answers in place of what is right, "" when it answers right."""
    if process.hangs:
        return ""
    environment, model = image.environments.get(process.environment), image.models.get(process.model)
    if model is not None and not all(file.sound for file in model.files.values()):
        return "v\ufffdv\ufffdv\ufffd"
    return environment.nonsense if environment is not None else ""


def _speed(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    least, most = settings["canaries"]["tokens_per_second"]
    if least is not None and least > SPEED:
        return [_check("speed", "failed", f"{SPEED} tokens/s, at least {least:g} asked for", "too-slow")]
    if most is not None and most < SPEED:
        return [_check("speed", "failed", f"{SPEED} tokens/s, at most {most:g} believed", "too-fast")]
    return [_check("speed", "passed", f"{SPEED} tokens/s")]


def _note_good(fleet: Fleet, image: Image, here: str, unit: str, on: Mapping[str, str]) -> None:
    state = _json(image, f"{here}/state.json") or {"schema": 1, "failed": []}
    state["good"] = {"unit": on["unit"], "environment": on["environment"]}
    state["failed"] = [each for each in state["failed"] if each["unit"] != on["unit"]]
    for path in [path for path in image.files if path.startswith(f"{here}/good/")]:
        del image.files[path]
    for file in PARTS:
        if f"{here}/{file}" in image.files:
            image.files[f"{here}/good/{file}"] = image.files[f"{here}/{file}"]
    marker = {key: value for key, value in _json(image, f"{here}/marker.json").items() if key != "instead_of"}
    _write(fleet, image, f"{here}/good/marker.json", marker)
    image.files[f"{here}/good/unit"] = image.files[f"/etc/systemd/system/{unit}"]
    _write(fleet, image, f"{here}/state.json", state)


def _put_back(fleet: Fleet, host: Host, vmid: int | None, name: str, failed: dict[str, Any]) -> Said:
    image, here, unit = inside_physics.image_of(fleet, host, vmid), f"{FOLDER}/{name}", f"reconcile-{name}.service"
    state, kept = _json(image, f"{here}/state.json"), _json(image, f"{here}/good/marker.json")
    if not state.get("good") or kept.get("digest") != state["good"]["unit"]:
        return Said(75, err="there is no good unit to go back to\n")
    if _json(image, f"{here}/marker.json").get("digest") not in (failed["unit"], kept["digest"]):
        return Said(75, err="the unit is another by now\n")
    state["failed"] = [*(each for each in state["failed"] if each["unit"] != failed["unit"]), failed][-10:]
    _write(fleet, image, f"{here}/state.json", state)
    for file in PARTS:
        image.files.pop(f"{here}/{file}", None)
        if f"{here}/good/{file}" in image.files:
            image.files[f"{here}/{file}"] = image.files[f"{here}/good/{file}"]
    image.files[f"/etc/systemd/system/{unit}"] = image.files[f"{here}/good/unit"]
    _write(fleet, image, f"{here}/marker.json", {**kept, "instead_of": failed["unit"]})
    server_physics.daemon_reload(fleet, host, vmid)
    server_physics.stop(fleet, host, vmid, unit)
    inside_physics.session_of(host, vmid).ends.pop(name, None)
    failure = server_physics.start(fleet, host, vmid, unit)
    return Said(1, err=f"{failure}\n") if failure else Said(0)


def _json(image: Image, path: str) -> dict[str, Any]:
    file = image.files.get(path)
    if file is None:
        return {}
    said: dict[str, Any] = json.loads(file.text)
    return said


def _write(fleet: Fleet, image: Image, path: str, value: Mapping[str, Any]) -> None:
    image.files[path] = File(json.dumps(value, indent=1, sort_keys=True) + "\n", 0o644, int(fleet.now))
