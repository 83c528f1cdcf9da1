"""Whether an environment is what it should be, looked at by its own Python; writes its marker when it is.

    python look.py ORDER READ_FLAGS

Standard library only. What is imported may hang or kill its process, so it is imported in one of its own.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import sysconfig
import time
from typing import Any

IMPORT = 900  # seconds; importing an engine reads gigabytes from a cold disk

TORCH = """
import json, torch
print("torch:" + json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda or "", "archs": list(torch.cuda.get_arch_list())
}))
"""


def main() -> None:
    """Look, and write the marker. Ends with a message when something is not right."""
    with open(sys.argv[1], encoding="utf-8") as file:
        order = json.load(file)
    installed = importlib.metadata.version(order["distribution"])
    if not same(installed, order["version"]):
        sys.exit(f"{order['distribution']} {installed} was installed where {order['version']} is wanted")
    print(f"{order['distribution']} {installed} is installed", flush=True)
    run(f"import {order['module']}", f"import {order['module']}")
    marker = {
        "schema": order["schema"],
        "object": order["object"],
        "engine": order["engine"],
        "version": order["version"],
        "python": platform.python_version(),
        "arch": platform.machine(),
        "capabilities": order["capabilities"],
        "requirements": order["requirements"],
        "torch": torch() if has("torch") else None,
        "flags": flags(order["engine"], sys.argv[2]),
        "proofs": [],
        "size": size(sys.prefix),
        "built": int(time.time()),
    }
    write(f"{sys.prefix}.json", marker)
    print(f"{sys.prefix} is ready: {marker['size'] >> 20} MiB", flush=True)


def same(installed: str, wanted: str) -> bool:
    """A build of the wanted version has a local part more (2.13.0+cpu), unless one was asked for."""
    return installed == wanted or ("+" not in wanted and installed.partition("+")[0] == wanted)


def has(distribution: str) -> bool:
    """Whether it is installed."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def run(what: str, program: str) -> str:
    """What a Python program prints; the end of all when it fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=IMPORT,
            check=False,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"cannot {what}: it took more than {IMPORT} s")
    if done.returncode != 0:
        print(done.stdout[-8000:], flush=True)
        sys.exit(f"cannot {what}: exit {done.returncode}: {last_line(done.stdout)}")
    return done.stdout


def last_line(text: str) -> str:
    """Where Python says what went wrong."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def torch() -> Any:
    """Its version, that of its CUDA, and for which GPUs it has kernels."""
    said = run("import torch", TORCH)
    return json.loads(next(line for line in said.splitlines() if line.startswith("torch:")).removeprefix("torch:"))


def flags(engine: str, program: str) -> Any:
    """The engine's options and parsers; None for an engine whose options nobody can read out."""
    done = subprocess.run(
        [sys.executable, "-I", program, engine, sysconfig.get_path("purelib")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=600,
        check=False,
        text=True,
    )
    if done.returncode == 0:
        return json.loads(done.stdout)
    print(f"the options of {engine} cannot be read out: {last_line(done.stderr)}", flush=True)
    return None


def size(top: str) -> int:
    """Bytes on disk of everything below."""
    total = 0
    for folder, _, names in os.walk(top):
        total += sum(os.lstat(os.path.join(folder, name)).st_blocks * 512 for name in names)
    return total


def write(path: str, value: dict[str, Any]) -> None:
    """Put it beside, on disk, and rename it."""
    new = f"{path}.reconcile-new"
    with open(new, "w", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


if __name__ == "__main__":
    main()
