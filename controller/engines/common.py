"""What the engines have in common: where things lie, the caches of compiled kernels, causes that all of them know."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from controller.engines.words import Cause, Place
from controller.spec.model import ModelServer, SecretRef


def program(place: Place, name: str) -> str:
    """A program of the environment."""
    return f"{place.env_dir}/bin/{name}"


def environment(server: ModelServer, place: Place, own: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables without secrets: ours, the engine's own, and over all those of the spec.

    What is compiled at start lies in the environment's own directory: a cache that was filled for another GPU
    generation breaks a start (facts: FlashInfer, Triton, Inductor and SGLang keep it in the home directory).
    """
    cache = f"{place.env_dir}/cache"
    made = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(place.gpus),
        "HF_HUB_OFFLINE": "1",  # the weights are there; nothing is fetched, or asked for, at start
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "HOME": cache,
        "XDG_CACHE_HOME": cache,
        "FLASHINFER_WORKSPACE_BASE": cache,
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "PATH": ":".join(
            [
                f"{place.env_dir}/bin",  # ninja
                *([f"{place.cuda_home}/bin"] if place.cuda_home else []),
                "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            ]
        ),
        "PYTHONUNBUFFERED": "1",
        **({"CUDA_HOME": place.cuda_home} if place.cuda_home else {}),
        **(own or {}),
    }
    given = {name: value for name, value in server.serve.env.items() if not isinstance(value, SecretRef)}
    hidden = {name for name, value in server.serve.env.items() if isinstance(value, SecretRef)}
    return {name: value for name, value in sorted({**made, **given}.items()) if name not in hidden}


def secrets(server: ModelServer) -> dict[str, str]:
    """The variables that are secrets, by the secret's name."""
    return {name: value.secret for name, value in sorted(server.serve.env.items()) if isinstance(value, SecretRef)}


def json_text(value: object) -> str:
    """A value as JSON, the same for the same value."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def cause(code: str, pattern: str, means: str, todo: str, source: str) -> Cause:
    """A cause, its pattern written as text."""
    return Cause(code, re.compile(pattern), means, todo, source)


CAUSES = (
    cause(
        "no-kernel-image",
        r"no kernel image is available for execution on the device",
        "its kernels were not compiled for this GPU generation",
        "let the environment be built anew for these GPUs; with an old torch take a version for CUDA 12.8 or newer",
        "vllm#16901, vllm#19906, sglang#7249, sglang#38515",
    ),
    cause(
        "shared-memory-full",
        r"Error while creating shared memory segment|posix_fallocate failed|/dev/shm.*No space left",
        "shared memory (/dev/shm) is too small",
        'give the container a bigger /dev/shm, or write serve.env: {NCCL_SHM_DISABLE: "1"}',
        "vllm#1710, nccl#290, nccl#342",
    ),
    cause(
        "disk-full",
        r"\[Errno 28\]|No space left on device",
        "a disk is full",
        "free space where the environment and its caches lie",
        "OSError of Python",
    ),
    cause(
        "no-ninja",
        r"FileNotFoundError: .*'ninja'|Ninja is required to load C\+\+ extensions",
        "it compiles kernels at start and has no ninja",
        "add ninja to engine.requirements",
        "fak#923",
    ),
    cause(
        "no-nvcc",
        r"Could not find nvcc|nvcc: (command )?not found|CUDA_HOME environment variable is not set",
        "it compiles kernels at start and has no CUDA toolkit",
        "install the toolkit of the engine's CUDA version, or choose backends that need none",
        "vllm#49497, flashinfer#4410",
    ),
    cause(
        "cuda-out-of-memory",
        r"torch\.OutOfMemoryError|CUDA out of memory|CUDA error: out of memory",
        "a GPU's memory ran out, after the caches were laid out or because another process uses it",
        "lower the part of memory for weights and caches, and see who else uses the GPU: reconcile gpus",
        "sglang#4330, sglang#322",
    ),
    cause(
        "port-taken",
        r"\[Errno 98\]|address already in use",
        "another process listens on the port",
        "stop that process, or give the server another port",
        "run with SGLang 0.5.23 and vLLM 0.32.0",
    ),
    cause(
        "flag-refused",
        r"error: (unrecognized arguments|ambiguous option|argument [^:]+: )",
        "it does not know an option",
        "correct serve.flags",
        "argparse; sglang#5032, sglang#12818",
    ),
    cause(
        "weights-damaged",
        r"SafetensorError|incomplete metadata, file not fully covered|Weight files referenced in index but missing",
        "a file of the weights is damaged or missing",
        "let the weights be verified: reconcile --once with --layer server.weights",
        "run with SGLang 0.5.23 and vLLM 0.32.0",
    ),
    cause(
        "cache-not-writable",
        r"PermissionError: .*(\.triton|\.cache|flashinfer)",
        "it may not write the directory of its compiled kernels",
        "write TRITON_CACHE_DIR and HOME in serve.env, to where it may write",
        "sonar#458, triton#518",
    ),
    cause(
        "nccl-hangs",
        r"(Init nccl|init_process_group|c10d).*(timed out|timeout)|ncclSystemError|NCCL WARN",
        "the GPUs' processes do not reach each other",
        "write NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME in serve.env, and look at peer to peer between the GPUs",
        "sglang#958, vllm#14340, vllm#8447",
    ),
    cause(
        "heads-not-divisible",
        r"must be divisible by tensor parallel size|is not divisible by",
        "the model's heads do not divide over the GPUs",
        "write another serve.tensor_parallel; reconcile fit SERVER names those that divide",
        "run with vLLM 0.32.0",
    ),
)
"""Telling lines of any engine, the most telling first."""
