"""Real engines on this machine's CPU, started as their plug-ins say, watched by what runs beside them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.engines.registry import engine
from controller.engines.words import Place as EnginePlace
from controller.layers.server_unit.facts import Arguments, as_plain
from controller.layers.server_unit.unit_file import Supervision, unit_text
from controller.layers.shared import checking
from controller.layers.shared.server_physics import words
from controller.spec.model import ModelServer

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / ".engines"
STARTUP = 600.0
"""Seconds that a start may take on a busy machine."""
PARSERS = {
    "sglang": {"tool-call-parser": "qwen25", "reasoning-parser": "qwen3"},
    "vllm": {"tool-call-parser": "hermes", "reasoning-parser": "qwen3"},
}
CPU: Mapping[str, Mapping[str, Any]] = {
    "transformers": {
        "version": "5.24.0",
        "flags": {"device": "cpu", "dtype": "bfloat16"},
        "env": {"OMP_NUM_THREADS": "2"},
    },
    "vllm": {
        "version": "0.32.0",
        "flags": {"max-model-len": 1024, "enforce-eager": True, "max-num-seqs": 8},
        "env": {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "2",
        },
    },
    "sglang": {
        "version": "0.5.23",
        "flags": {
            "device": "cpu",
            "attention-backend": "torch_native",
            "max-total-tokens": 8192,
            "disable-radix-cache": True,
        },
        "env": {"SGLANG_STUBS": "1", "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "2"},
    },
}
"""What each engine is given here so that it does without a GPU."""


@dataclass(frozen=True)
class How:
    """How an engine is run: its environment, the GPUs that it gets by UUID, what it is given besides the model."""

    environment: Path
    version: str
    flags: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    cuda_home: str = ""


def on_cpu(name: str) -> How:
    """Without a GPU, in the environment that tests/engines/install made."""
    return How(ENGINES / name, **CPU[name])


def free_port() -> int:
    """A port below 55,536: SGLang takes another, 10,000 above it (run with 0.5.11)."""
    for port in range(20000 + os.getpid() % 10000, 40000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")


def spec(name: str, port: int, how: How, **checks: Any) -> ModelServer:
    """A server of the tiny model on one of the engines."""
    return ModelServer.model_validate(
        {
            "kind": "ModelServer",
            "name": "tiny",
            "host": "box1",
            "model": {"repo": "test/tiny", "revision": "0" * 40, "directory": "/models"},
            "engine": {"name": name, "version": how.version},
            "serve": {"port": port, "flags": {**how.flags, **PARSERS.get(name, {})}, "env": how.env},
            "checks": {"output": ["arithmetic", "tool-call", "reasoning"], **checks},
        }
    )


@dataclass
class Serving:
    """An engine that runs, and its server's folder."""

    server: ModelServer
    process: subprocess.Popen[bytes]
    folder: Path
    log: Path
    environment: dict[str, str] = field(repr=False)

    def checks(self, *arguments: str, stdin: str = "", timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Run the program that runs beside a server, as it is run there."""
        return subprocess.run(
            [sys.executable, "-I", str(self.folder / "checks.pyz"), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=self.environment,
        )

    def output(self) -> dict[str, Any]:
        """Run the canaries once; what they found."""
        done = self.checks("output", str(self.folder))
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{self.tail()}"
        found: dict[str, Any] = json.loads((self.folder / "checks/output.json").read_text())
        return found

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


@contextmanager
def serving(name: str, model: Path, folder: Path, how: How | None = None, **checks: Any) -> Iterator[Serving]:
    """Start an engine on a model, as its unit's text says; its folder is as in a place, with a systemctl of its own."""
    how = how or on_cpu(name)
    server = spec(name, free_port(), how, **checks)
    kind = engine(name)
    place = EnginePlace(str(how.environment), str(model), "", str(folder / "config.yaml"), how.gpus, how.cuda_home)
    command = kind.command(server, place, None)
    arguments = Arguments(
        command.argv,
        environment=tuple(sorted(command.environment.items())),
        engine=name,
        version=server.engine.version,
        env_digest="e" * 64,
        env_dir=place.env_dir,
        model_dir=str(model),
        address=server.serve.address,
        port=server.serve.port,
        gpus=how.gpus,
    )
    folder.mkdir(parents=True)
    log = folder / "log"
    cache = folder / "cache"
    cache.mkdir()
    argv, environment = started_by(unit_text(server.name, "tiny", arguments, "u" * 64, Supervision()))
    assert (argv, environment) == (command.argv, dict(command.environment))
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env={**environment, "LC_ALL": "C.UTF-8", "HOME": str(cache), "XDG_CACHE_HOME": str(cache)},
            start_new_session=True,
        )
    try:
        lay_down(folder, server, arguments, process.pid)
        yield Serving(server, process, folder, log, {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"})
    finally:
        end(process)


def started_by(text: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and the variables that a unit's text gives its process, read as systemd reads them."""
    argv: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name == "ExecStart":
            argv = words(value)
        elif name == "Environment":
            environment.update(word.split("=", 1) for word in words(value))
    return argv, environment


def lay_down(folder: Path, server: ModelServer, arguments: Arguments, pid: int) -> None:
    """What a server's folder holds, and a systemctl for it."""
    watch = checking.watch(server, arguments, engine(server.engine.name))
    (folder / "checks.pyz").write_bytes(checking.program())
    (folder / "checks.json").write_bytes(watch.settings)
    (folder / "marker.json").write_text(json.dumps({"schema": 1, "object": str(server.ref), "digest": "u" * 64}))
    (folder / "args.json").write_text(json.dumps(as_plain(arguments)))
    (folder / "bin").mkdir(exist_ok=True)
    systemctl = folder / "bin/systemctl"
    systemctl.write_text(
        f"#!/bin/sh\nkill -0 {pid} 2>/dev/null && pid={pid} active=active || pid=0 active=failed\n"
        "for line in ActiveState=$active MainPID=$pid NRestarts=0 Result=success ExecMainCode=0 ExecMainStatus=0; do\n"
        'echo "$line"; done\n'
    )
    systemctl.chmod(0o755)


def end(process: subprocess.Popen[bytes]) -> None:
    """End an engine and all its processes: they are a session of their own."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            continue
    process.wait(timeout=30)


def until_ready(one: Serving) -> dict[str, Any]:
    """Look as the watch does until the server generates; what it saw first and last."""
    ladder: list[str] = []
    until = time.monotonic() + STARTUP
    while time.monotonic() < until:
        assert one.process.poll() is None, f"{one.server.engine.name} ended with {one.process.returncode}: {one.tail()}"
        health = look(one)
        if not ladder or ladder[-1] != health["level"]:
            ladder.append(health["level"])
        if health["level"] == "generates":
            return {**health, "ladder": ladder}
        time.sleep(0.5)
    raise AssertionError(f"{one.server.engine.name} is not ready: {ladder}, {one.tail()}")


LOOK = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from checks import place, watch; "
    "print(json.dumps(watch.Watch(place.Place(Path(sys.argv[2]))).look()))"
)


def look(one: Serving) -> dict[str, Any]:
    """One look of a fresh watch."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOOK, str(one.folder / "checks.pyz"), str(one.folder)],
        capture_output=True, text=True, timeout=300, check=True, env=one.environment,
    )  # fmt: skip
    health: dict[str, Any] = json.loads(done.stdout)
    return health
