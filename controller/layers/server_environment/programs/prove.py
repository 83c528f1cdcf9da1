"""Runs one small operation of PyTorch and one of the engine's own kernels on each GPU, in a process of its own.

    python prove.py MARKER DRIVER BOOT UUID...

Standard library only. The results go into the marker. A list of architectures can hide what a fat binary has, and a
kernel can be missing for one operation alone: that an operation gives the right numbers is the only proof.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

LIMIT = 300  # seconds for one GPU; a first operation may compile

PYTORCH = """
import torch
one = torch.full((64, 64), 0.5, device="cuda", dtype=torch.float16)
assert (one @ one).float().sum().item() == 64 * 64 * 16, "a product of matrices came out wrong"
x = torch.linspace(-2, 2, 64 * 128, device="cuda").reshape(64, 128).to(torch.float16)
weight = torch.linspace(0.5, 1.5, 128, device="cuda").to(torch.float16)
wide = x.float()
right = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * weight.float()
"""

KERNELS = {
    "sglang": """
import sgl_kernel
made = sgl_kernel.rmsnorm(x, weight, 1e-6)
assert torch.allclose(made.float(), right, atol=2e-2), "sgl_kernel.rmsnorm came out wrong"
""",
    "vllm": """
from vllm import _custom_ops
made = torch.empty_like(x)
_custom_ops.rms_norm(made, x, weight, 1e-6)
assert torch.allclose(made.float(), right, atol=2e-2), "vllm's rms_norm came out wrong"
""",
}


def main() -> None:
    """Try each GPU and note the results."""
    path, driver, boot, *uuids = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        marker = json.load(file)
    program = PYTORCH + KERNELS.get(marker["engine"], "") + 'print(torch.cuda.get_device_name(), "is right")\n'
    proofs = [{**proof(uuid, program), "driver": driver, "boot": boot} for uuid in uuids]
    for each in proofs:
        print(f"{each['uuid']}: {each['result']}: {each['said']}", flush=True)
    marker["proofs"] = [each for each in marker["proofs"] if each["uuid"] not in uuids] + proofs
    new = f"{path}.reconcile-new"
    with open(new, "w", encoding="utf-8") as file:
        file.write(json.dumps(marker) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def proof(uuid: str, program: str) -> dict[str, Any]:
    """What came of it on one GPU."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", program],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
            check=False,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return {"uuid": uuid, "result": "failed", "said": f"no answer within {LIMIT} s"}
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    said = lines[-1][:1000] if lines else f"exit {done.returncode}"
    if done.returncode == 0:
        return {"uuid": uuid, "result": "passed", "said": said}
    busy = "out of memory" in done.stdout.lower()
    return {"uuid": uuid, "result": "busy" if busy else "failed", "said": said}


if __name__ == "__main__":
    main()
