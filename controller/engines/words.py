"""What is said between engines and the layers: values, and the protocol that an engine fulfils."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from controller.engines.flags import FlagList, Resolved
from controller.spec.model import ModelServer

if TYPE_CHECKING:
    from controller.engines.fit import Fit, Model


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server's things lie on the machine that serves, as paths in its container or host.

    ``gpus`` are UUIDs of the GPUs in the order in which the engine counts them, () for none. ``config`` is where
    the engine's config file is put. ``cuda_home`` is the CUDA toolkit for what is compiled at start, "" for none.
    """

    env_dir: str
    weights_dir: str
    draft_dir: str
    config: str
    gpus: tuple[str, ...]
    cuda_home: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started.

    ``argv[0]`` is a program of the environment. ``environment`` has no secret; ``secrets`` are variables by the name
    of the secret in the spec (a file of mode 0600 gives them). ``config`` is the engine's config file as far as it is
    no secret, ``config_secrets`` are keys of that file by the name of the secret. There is a file when either is
    not empty; ``config_text`` writes it.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    secrets: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    config_secrets: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_config(self) -> bool:
        """Whether a config file is needed."""
        return bool(self.config or self.config_secrets)

    @property
    def secret_names(self) -> tuple[str, ...]:
        """The names of all secrets that it takes, sorted."""
        return tuple(sorted({*self.secrets.values(), *self.config_secrets.values()}))

    def config_text(self, secret: Mapping[str, str]) -> str:
        """The config file, YAML. ``secret`` are the secrets by name; what it returns is secret if any is used.

        Raises:
            KeyError: a secret is missing.
        """
        values = {**self.config, **{key: secret[name] for key, name in self.config_secrets.items()}}
        # JSON strings are YAML, and quote all that could be read as anything else
        return "".join(f"{key}: {json.dumps(values[key])}\n" for key in sorted(values))


@dataclass(frozen=True, slots=True)
class Requirements:
    """What is installed for an engine, as uv takes it.

    ``lines`` are requirement lines. ``distribution`` is the package whose installed version has to be ``version``,
    ``module`` what has to be importable. ``python`` is a version of Python: 3.12. ``uses_torch`` says whether torch
    and the GPUs' kernels are checked.
    """

    lines: tuple[str, ...]
    distribution: str
    version: str
    module: str
    python: str
    uses_torch: bool = True


@dataclass(frozen=True, slots=True)
class Restart:
    """What systemd does when the engine's main process ends by itself.

    ``prevent`` are exit codes after which a start would only end the same way; ``success`` are exit codes of a proper
    stop besides 0. ``stop_seconds`` is how long a stop may take before it is killed. ``kill_mode`` as systemd names it.
    """

    policy: str
    prevent: tuple[int, ...]
    success: tuple[int, ...]
    stop_seconds: int
    kill_mode: str = "mixed"


@dataclass(frozen=True, slots=True)
class Http:
    """The paths of an engine's HTTP server; "" or () for what it does not have.

    ``live`` answers 200 when the wrapper is there, ``generate`` when a token was generated for it. ``info`` are paths
    that tell of the arguments that it runs with, the newest first.
    """

    live: str
    generate: str
    models: str
    metrics: str
    info: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Names in an engine's Prometheus metrics, "" for what it does not have.

    ``running`` and ``waiting`` are gauges of requests, ``prompt_tokens`` and ``generation_tokens`` counters, ``cache``
    the used part of the KV cache (0 to 1). Of speculative decoding: ``accept_rate`` (accepted of drafted tokens, 0 to
    1) and ``accept_length`` (tokens a forward pass) as gauges where the engine has them, that count only while
    ``drafting`` is above 0; else ``drafted``, ``accepted`` and ``drafts`` as counters.
    """

    running: str
    waiting: str
    prompt_tokens: str
    generation_tokens: str
    cache: str
    accept_rate: str = ""
    accept_length: str = ""
    drafting: str = ""
    drafted: str = ""
    accepted: str = ""
    drafts: str = ""


@dataclass(frozen=True, slots=True)
class Cause:
    """What a line of an engine's log means. ``source`` says where that is known from."""

    code: str
    pattern: re.Pattern[str]
    means: str
    todo: str
    source: str


@dataclass(frozen=True, slots=True)
class Found:
    """A cause found in a log, with the line that shows it."""

    cause: Cause
    line: str


@dataclass(frozen=True, slots=True)
class KnownBad:
    """A combination that is known not to work: versions of an engine with certain models and splits.

    ``versions`` as PEP 440 writes a range, "" for all. ``architectures`` are those of config.json, () for all;
    ``repos`` tells models by their name as long as nobody knows their config. ``fixed`` is the first good version.
    """

    engine: str
    versions: str
    architectures: tuple[str, ...]
    repos: re.Pattern[str]
    tensor_parallel_above: int
    what: str
    fixed: str
    source: str


class Engine(Protocol):
    """One engine. All methods are pure; a plug-in is an object like this under ``reconcile.engines``."""

    name: str
    """As specs name it."""
    manages: bool
    """False for what is only watched: nothing is installed, fetched or started."""
    restart: Restart
    http: Http
    causes: Sequence[Cause]
    known_bad: Sequence[KnownBad]

    def requirements(self, server: ModelServer, arch: str) -> Requirements:
        """What is installed for it on a machine of this architecture (x86_64, aarch64)."""
        ...

    def shipped_flags(self, version: str) -> FlagList | None:
        """The options that the version has, None when nobody has read them."""
        ...

    def resolve(self, server: ModelServer, flags: FlagList | None, gpus: int) -> Resolved:
        """Give the options that the spec means, under the names that ``flags`` has, or what is wrong with them.

        ``flags`` are those of the installed engine, the shipped ones, or None: then every option is taken as it is.
        """
        ...

    def command(self, server: ModelServer, place: Place, flags: FlagList | None) -> Command:
        """How the server is started. What ``resolve`` finds fault with is passed as it is."""
        ...

    def model_id(self, server: ModelServer, weights_dir: str) -> str:
        """The model that requests have to name."""
        ...

    def metrics(self, version: str) -> Metrics:
        """The names in the version's metrics."""
        ...

    def fit(
        self,
        server: ModelServer,
        flags: FlagList | None,
        model: Model,
        draft: Model | None,
        gpus: Sequence[int],
    ) -> Fit:
        """Whether it would start with this model on GPUs of so many bytes each, and for how many tokens.

        Raises:
            fit.NotForetold: nobody can say, and why.
        """
        ...


def tensor_parallel(server: ModelServer, gpus: int) -> int:
    """Over how many GPUs the server's layers are split, when it has so many; at least 1."""
    wanted = server.serve.tensor_parallel
    return max(1, gpus) if wanted == "auto" else wanted


def causes_in(causes: Sequence[Cause], log: Sequence[str]) -> tuple[Found, ...]:
    """What the lines of a log tell, each cause once with the last line that shows it, in order of the causes."""
    found = []
    for cause in causes:
        line = next((line for line in reversed(log) if cause.pattern.search(line)), None)
        if line is not None:
            found.append(Found(cause, line.strip()[:300]))
    return tuple(found)


def startup_seconds(weight_bytes: int) -> float:
    """How long a sound start may take: from the bytes of the weights, in seconds.

    The first start of SGLang 0.5.11 on a fresh machine took 110 to 130 s with a tiny model (kernels are compiled
    then); 300 s is more than twice that. A disk that still deserves the name reads 200 MB/s.
    """
    return 300.0 + weight_bytes / 200e6
