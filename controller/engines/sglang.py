"""SGLang. Read in the wheels 0.5.9, 0.5.11, 0.5.12, 0.5.14, 0.5.18, 0.5.23; run as 0.5.23 (CPU), 0.5.11 (H200)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from packaging.version import InvalidVersion, Version

from controller.engines import common, shipped
from controller.engines.common import cause
from controller.engines.fit import GIB, Fit, Line, Model, NotForetold, Outcome, Problem, gib, undivided
from controller.engines.flags import FlagList, Grammar, Rename, Resolved, resolve
from controller.engines.shape import Shape
from controller.engines.words import (
    Cause,
    Command,
    Http,
    KnownBad,
    Metrics,
    Place,
    Requirements,
    Restart,
    tensor_parallel,
)
from controller.spec.model import ModelServer

MIB = 1 << 20
_GONE_IN_20 = "gone in 0.5.20, read in its wheel"
_RENAMES = (
    Rename("cuda-graph-max-bs", "cuda-graph-max-bs-decode", _GONE_IN_20),
    Rename("cuda-graph-bs", "cuda-graph-bs-decode", _GONE_IN_20),
    Rename("mamba-scheduler-strategy", "mamba-radix-cache-strategy", _GONE_IN_20),
    Rename("nsa-prefill-backend", "dsa-prefill-backend", _GONE_IN_20),
    Rename("nsa-decode-backend", "dsa-decode-backend", _GONE_IN_20),
    Rename("oltp-traces-endpoint", "otlp-traces-endpoint", "renamed in 0.5.5, read in its wheel"),
)
_GRAMMAR = Grammar(
    "sglang",
    reserved={
        "model-path": "model.repo",
        "model": "model.repo",
        "revision": "model.revision",
        "speculative-draft-model-path": "model.draft",
        "speculative-draft-model-revision": "model.draft",
        "host": "serve.address",
        "port": "serve.port",
        "served-model-name": "serve.served_model_name",
        "tp-size": "serve.tensor_parallel",
        "tensor-parallel-size": "serve.tensor_parallel",
        "api-key": "serve.api_key",
        "admin-api-key": "serve.api_key",
        "config": "serve.flags",
    },
    renames=_RENAMES,
)
_EAGLES = frozenset({"EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP"})
_OVERHEAD = 1 * GIB  # of each GPU: CUDA context and NCCL. An H200 (140.4 GiB) had 139.1 GiB when loading began
_UNSURE = 1 * GIB  # by which the sum may be wrong: replicated weights, fragments, other versions of libraries
_SLIDING_RATIO = 0.8  # --swa-full-tokens-ratio
_STATE_RATIO = 0.9  # --mamba-full-memory-ratio


class Sglang:
    """The engine ``sglang``."""

    name = "sglang"
    manages = True
    # 1: a combination that it refuses; 2: an option. Both end the same way again. A failing child makes it kill
    # itself (137), which may be memory that is not free yet. A stop is a drain without a deadline of its own.
    restart = Restart(policy="always", prevent=(1, 2), success=(), stop_seconds=90)
    http = Http(
        live="/health",
        generate="/health_generate",
        models="/v1/models",
        metrics="/metrics",
        info=("/server_info", "/get_server_info"),
    )
    known_bad: Sequence[KnownBad] = (
        KnownBad(
            engine="sglang",
            versions="==0.5.9",
            architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
            repos=re.compile(r"(?i)(^|/)Qwen3\.[56]-\d+(\.\d+)?B(?!-A\d)"),
            tensor_parallel_above=1,
            what="the sum over the GPUs after each dense block is left out, and the answers are nonsense",
            fixed="0.5.10",
            source="sglang#19070, sglang#19393, sglang#35912; read in the wheel: qwen3_5.py passes its "
            "use_reduce_scatter as should_allreduce_fusion",
        ),
    )
    causes: Sequence[Cause] = (
        cause(
            "no-state-memory",
            r"Not enough GPU memory for hybrid",
            "the states of linear attention do not fit",
            "lower max-running-requests or speculative-num-draft-tokens, or raise mem-fraction-static",
            "read in 0.5.14",
        ),
        cause(
            "no-cache-memory",
            r"Not enough memory\. Please try to increase --mem-fraction-static",
            "the weights leave no room for the KV cache",
            "raise mem-fraction-static, lower max-running-requests, or use more GPUs: reconcile fit SERVER",
            "sglang#4330, sglang#322",
        ),
        cause(
            "speculation-needs-extra-buffer",
            r"Speculative decoding for \S+ is not compatible with radix cache",
            "speculative decoding of a model with linear attention needs another way of caching states",
            "write mamba-scheduler-strategy: extra_buffer in serve.flags",
            "read in 0.5.11",
        ),
        cause(
            "kernels-do-not-load",
            r"Could not load any common_ops library",
            "sglang-kernel has no library for this GPU, or one for another torch",
            "let the environment be built anew for these GPUs with the versions that this SGLang pins",
            "sglang#32431, sglang#21718, sglang#29317",
        ),
        cause(
            "cudnn-too-old",
            r"CuDNN Compatibility Issue Detected",
            "torch 2.9.1 with cuDNN before 9.15 is refused for models that see",
            "add nvidia-cudnn-cu12==9.16.0.29 to engine.requirements",
            "gpustack#4407, dynamo#5482; read in 0.5.7 to 0.5.9",
        ),
        cause(
            "unknown-algorithm",
            r"Unknown speculative algorithm name",
            "it does not know the algorithm of speculative decoding",
            "correct speculative-algorithm",
            "run with 0.5.23",
        ),
        *common.CAUSES,
        cause(
            "child-died",
            r"Subprocess \S+ crashed with exit code",
            "one of its processes died, and it killed itself",
            "look at the lines before",
            "run with 0.5.23",
        ),
    )

    def requirements(self, server: ModelServer, arch: str) -> Requirements:
        """Exactly one version of ``sglang``; from 0.5.22 on it needs Python 3.11 (METADATA of the wheels)."""
        del arch  # the same names; the index has wheels of both
        version = server.engine.version
        lines = (f"sglang=={version}", *server.engine.requirements)
        return Requirements(lines, "sglang", version, "sglang", server.engine.python or "3.12")

    def shipped_flags(self, version: str) -> FlagList | None:
        """The options that the version has, None when nobody has read them."""
        return shipped.flags(self.name, version)

    def resolve(self, server: ModelServer, flags: FlagList | None, gpus: int) -> Resolved:
        """Give the options that the spec means, under the names that ``flags`` has."""
        del gpus
        return resolve(_GRAMMAR, flags, server.serve.flags)

    def command(self, server: ModelServer, place: Place, flags: FlagList | None) -> Command:
        """``python -m sglang.launch_server``, which every version has; the key comes from the config file."""
        serve, model = server.serve, server.model
        argv = [common.program(place, "python"), "-m", "sglang.launch_server", "--model-path", place.weights_dir]
        argv += ["--host", serve.address, "--port", str(serve.port)]
        argv += ["--served-model-name", self.model_id(server, place.weights_dir)]
        argv += ["--tp-size", str(tensor_parallel(server, len(place.gpus)))]
        if model.draft is not None:
            argv += ["--speculative-draft-model-path", place.draft_dir]
        resolved = self.resolve(server, flags, len(place.gpus))
        if not resolved.has("enable-metrics"):
            argv.append("--enable-metrics")
        hidden = {"api-key": serve.api_key.secret} if serve.api_key else {}
        if hidden:
            argv += ["--config", place.config]
        own = {"SGLANG_CACHE_DIR": f"{place.env_dir}/cache/sglang"}
        return Command(
            (*argv, *resolved.argv),
            common.environment(server, place, own),
            common.secrets(server),
            config_secrets=hidden,
        )

    def model_id(self, server: ModelServer, weights_dir: str) -> str:
        """The served name, or the repository's."""
        del weights_dir
        return server.serve.served_model_name or server.model.repo

    def metrics(self, version: str) -> Metrics:
        """The names in its metrics: the same from 0.5.9 to 0.5.23."""
        del version
        return Metrics(
            running="sglang:num_running_reqs",
            waiting="sglang:num_queue_reqs",
            prompt_tokens="sglang:prompt_tokens_total",
            generation_tokens="sglang:generation_tokens_total",
            cache="sglang:token_usage",
            accept_rate="sglang:spec_accept_rate",
            accept_length="sglang:spec_accept_length",
            drafting="sglang:spec_num_draft_tokens",
        )

    def fit(
        self, server: ModelServer, flags: FlagList | None, model: Model, draft: Model | None, gpus: Sequence[int]
    ) -> Fit:
        """The sum of ``handle_max_mamba_cache`` and ``pool_configurator.py``."""
        return _Sum(server, self.resolve(server, flags, len(gpus)), model, draft, tuple(gpus)).fit()


ENGINE = Sglang()


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


class _Sum:
    """One sum, as one start of SGLang does it."""

    def __init__(
        self, server: ModelServer, given: Resolved, model: Model, draft: Model | None, gpus: tuple[int, ...]
    ) -> None:
        self.given, self.model, self.draft, self.gpus = given, model, draft, gpus
        self.shape: Shape = model.shape
        self.version = _version(server.engine.version)
        self.env: Mapping[str, object] = server.serve.env
        self.split = tensor_parallel(server, len(gpus))
        self.algorithm = (given.text("speculative-algorithm") or "").upper()
        self.lines: list[Line] = []
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.slots = 0

    def fit(self) -> Fit:
        self._refuse_what_is_not_known()
        if self.split > len(self.gpus):
            self.problems.append(_too_few(self.split, len(self.gpus)))
        self.problems += undivided(self.shape, self.split, len(self.gpus))
        gpu = min(self.gpus)
        seen = gpu - _OVERHEAD
        fraction, how = self._fraction(gpu)
        weights = self.model.weight_bytes // self.split
        rest = round(seen * fraction) - weights
        self.lines += [
            Line("memory of a GPU", f"the smallest of {len(self.gpus)}", gpu),
            Line("CUDA context, NCCL", "what is gone before weights are loaded", -_OVERHEAD),
            Line("activations, CUDA graphs", f"1 - {fraction:.3f} of the rest; {how}", round(seen * fraction) - seen),
            Line("weights", f"{gib(self.model.weight_bytes)} of tensors / {self.split}", -weights),
        ]
        element = self._element()
        linear = self.shape.linear
        state = self._state(linear.bytes_per_request(self.split)) if linear else 0
        requests, pool, likely = self._divide(rest, state)
        kv = self._cell(element)
        tokens = max(0, int(pool // kv)) if kv else 0
        if (most := self.given.number("max-total-tokens")) is not None:
            tokens = min(tokens, int(most))
        self.lines.append(Line("KV cache", f"room for {tokens:,} tokens of {kv:,.0f} bytes", pool))
        context = int(self.given.number("context-length") or self.shape.max_context)
        if likely and 0 < tokens < context:
            self._say_better_ratio(kv, state, pool, requests)
        self._drafting(element, seen - round(seen * fraction), tokens)
        return Fit(
            outcome=self._outcome(pool, likely, tokens, context),
            split=self.split,
            gpus=self.gpus,
            weights=weights,
            kv_token=round(kv),
            state_request=state,
            context=context,
            pool_tokens=tokens,
            requests=requests,
            lines=tuple(self.lines),
            problems=tuple(self.problems),
            notes=tuple(self.notes),
            kv_how=self.shape.kv_how(self.split, element),
            state_how=linear.how(self.split) if linear else "",
        )

    def _outcome(self, pool: int, likely: bool, tokens: int, context: int) -> Outcome:
        if pool <= 0 and not any(problem.code == "no-cache-memory" for problem in self.problems):
            self.problems.append(
                Problem(
                    "no-cache-memory",
                    f"the weights leave no room for the KV cache: {gib(-pool)} are lacking on each GPU",
                    "use more GPUs, a smaller or quantized model, or raise mem-fraction-static",
                )
            )
        hard = {problem.code for problem in self.problems} - {"speculation-needs-extra-buffer", "states-too-big"}
        if hard - {"no-cache-memory"} or pool < -_UNSURE:
            return Outcome.REFUSES
        if pool <= 0 or not likely or self.problems:
            return Outcome.DOUBTFUL
        return Outcome.SHORT if tokens < context else Outcome.FITS

    def _refuse_what_is_not_known(self) -> None:
        """Raise NotForetold for what changes the sum in a way that is not in it."""
        if not self.gpus:
            raise NotForetold("it uses no GPU")
        if min(self.gpus) <= _OVERHEAD:
            raise NotForetold("nobody knows how much memory its GPUs have")
        for name in (
            "pp-size",
            "dp-size",
            "attn-dp-size",
            "nnodes",
            "cpu-offload-gb",
            "offload-group-size",
            "dcp-size",
        ):
            if (self.given.number(name) or 0) > (0 if "offload" in name else 1):
                raise NotForetold(f"{name} is not in this sum")
        for name in ("enable-dp-attention", "enable-unified-memory"):
            if self.given.has(name):
                raise NotForetold(f"{name} is not in this sum")
        if self.given.text("quantization"):
            raise NotForetold("weights that are quantized at start are not in this sum")
        if (self.given.text("device") or "cuda") != "cuda":
            raise NotForetold("it does not run on GPUs")

    # The part of memory for weights and caches (0.5.11: _handle_gpu_memory_settings; 0.5.23: memory_hook.py)

    def _fraction(self, gpu: int) -> tuple[float, str]:
        given = self.given.number("mem-fraction-static")
        if given is not None:
            return given, "mem-fraction-static"
        size = gpu / MIB
        chunk, batch = self._defaults(size)
        chunk = int(self.given.number("chunked-prefill-size") or chunk)
        batch = int(self.given.number("cuda-graph-max-bs", "cuda-graph-max-bs-decode") or batch)
        reserved = 512 + max(chunk, 2048) * 1.5 + batch * 2 + self.split / 8 * 1024 + self._prefill_graphs(chunk)
        if size > 60 * 1024:
            reserved = max(reserved, 10 * 1024)
        if self.algorithm and self.version < Version("0.5.13"):
            eagle = 4 if self.version >= Version("0.5.10") else 2
            reserved += {"STANDALONE": 6, "NGRAM": 0}.get(self.algorithm, eagle) * 1024
        fraction = round((size - reserved) / size, 3)
        how = f"the default: {reserved:,.0f} MiB kept free"
        if self.shape.sees and not self.given.has("language-only"):
            # adjust_mem_fraction_for_vlm: it asks for num_hidden_layers, and takes 24 where the config says depth
            score = float(self.shape.vision_hidden**2) / 1024**2 if self.shape.vision_hidden else 1.0
            factor = 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (score - 1.0)))
            fraction, how = fraction * factor, f"{how}, times {factor:.3f} for a model that sees"
        return fraction, how

    def _defaults(self, size: float) -> tuple[int, int]:
        """Chunked prefill size and largest batch of CUDA graphs by the GPU's MiB."""
        many = self.split >= 4
        newer = self.version >= Version("0.5.20")
        if size < 20 * 1024:
            return 2048, 8
        if size < 35 * 1024:
            return (4096, 160 if many else 48) if newer else (2048, 80 if many else 24)
        if size < 60 * 1024:
            return 4096, 160 if many else 32
        if size < 160 * 1024:
            return 8192, 512 if many else 256
        return 16384, 512

    def _prefill_graphs(self, chunk: int) -> float:
        """MiB for graphs of prefill, on by default from 0.5.10 on."""
        if self.version < Version("0.5.10") or self.given.has("disable-piecewise-cuda-graph"):
            return 0
        if self.shape.latent:
            return 1.5 * 1024
        steps = (
            *range(4, 33, 4),
            *range(48, 257, 16),
            *range(288, 513, 32),
            *range(576, 1025, 64),
            *range(1280, 4097, 256),
            *range(4608, chunk + 1, 512),
        )
        return 8.0 * len([step for step in steps if step <= chunk])

    # What is left, for states and tokens

    def _state(self, per_request: int) -> int:
        """The states of a request with the type that was asked for in place of the config's."""
        asked = self.given.text("mamba-ssm-dtype") or self.env.get("SGLANG_MAMBA_SSM_DTYPE")
        linear = self.shape.linear
        if linear is None or asked not in ("bfloat16", "float16"):
            return per_request
        return dataclasses.replace(linear, state_bytes=2).bytes_per_request(self.split)

    def _divide(self, rest: int, state: int) -> tuple[int | None, int, bool]:
        """The most requests at once, the bytes for tokens, and whether it would start as far as states go."""
        asked = self.given.number("max-running-requests")
        most = int(asked) if asked is not None else 48 if self.algorithm else None
        if asked is None and self.algorithm:
            self.notes.append(
                "speculative decoding limits it to 48 requests at once unless max-running-requests says so"
            )
        if not state:
            return most, rest, True
        drafts = int(self.given.number("speculative-num-draft-tokens") or 0) if self.algorithm else 0
        strategy = self.given.text("mamba-scheduler-strategy", "mamba-radix-cache-strategy") or "auto"
        self._check_strategy(strategy)
        if drafts and self.version < Version("0.5.13"):
            return self._divide_as_before(rest, state, drafts, most or 48, strategy)
        slots, requests = self._together(rest, state, drafts, most, strategy)
        copies = state * (requests + 1) * drafts
        self._say_states(state, slots + 1, copies, requests, drafts)
        return requests, rest - (slots + 1) * state - copies, slots > 0

    def _together(self, rest: int, state: int, drafts: int, most: int | None, strategy: str) -> tuple[int, int]:
        """Slots for states and requests, as 0.5.14 and later share memory between states and tokens."""
        if (fixed := self.given.number("max-mamba-cache-size")) is not None:
            slots = int(fixed)
        elif self.given.has("disable-radix-cache") and most is not None:
            slots = most
        else:
            ratio = self.given.number("mamba-full-memory-ratio") or _STATE_RATIO
            budget = rest * ratio / (1 + ratio)
            slots = max(0, int((budget - state * (1 + drafts)) // (state * (1 + drafts / self._ratio(strategy)))))
        possible = slots // self._ratio(strategy)
        return slots, possible if most is None else min(most, possible)

    def _divide_as_before(
        self, rest: int, state: int, drafts: int, most: int, strategy: str
    ) -> tuple[int | None, int, bool]:
        """Until 0.5.12 the copies for drafts are taken first, for all requests that may ever run."""
        copies = state * most * drafts
        ratio = self.given.number("mamba-full-memory-ratio") or _STATE_RATIO
        left = rest - copies
        slots = int(left * ratio / (1 + ratio) // state)
        if (fixed := self.given.number("max-mamba-cache-size")) is not None:
            slots = int(fixed)
        elif self.given.has("disable-radix-cache"):
            slots = most
        if left - slots * state > 0 and slots > 0:
            requests = min(most, slots // self._ratio(strategy))
            self._say_states(state, slots, copies, most, drafts)
            return requests, left - slots * state, True
        better = self._fewer(rest, state, drafts, ratio)
        self.problems.append(
            Problem(
                "states-too-big",
                f"copies of states for {most} requests with {drafts} drafts each take {gib(copies)} of the "
                f"{gib(rest)} that the weights leave: this version takes them first, and refuses to start",
                f"write max-running-requests: {better} in serve.flags" if better else "use more or bigger GPUs",
            )
        )
        self.notes.append("the KV cache in this sum is the most that another number of requests could leave to it")
        slots, requests = self._together(rest, state, drafts, most, strategy)
        copies = state * (requests + 1) * drafts
        self._say_states(state, slots + 1, copies, requests, drafts)
        return requests, rest - (slots + 1) * state - copies, False

    def _fewer(self, rest: int, state: int, drafts: int, ratio: float) -> int:
        """The most requests for which states and drafts leave as much to tokens as they take themselves."""
        return max(0, min(48, int(rest * ratio / (1 + ratio) / 2 // (state * drafts))))

    def _ratio(self, strategy: str) -> int:
        """Slots for states that a request needs (_calculate_mamba_ratio)."""
        if self.given.has("disable-radix-cache"):
            return 1
        return 5 if strategy.startswith("extra_buffer") or self._buffers_by_itself(strategy) else 3

    def _buffers_by_itself(self, strategy: str) -> bool:
        return strategy == "auto" and self.version >= Version("0.5.13")

    def _check_strategy(self, strategy: str) -> None:
        """0.5.10 to 0.5.12 take ``auto`` for no_buffer, and refuse that with speculative decoding (0.5.11: read)."""
        before = Version("0.5.10") <= self.version < Version("0.5.13")
        if not (self.algorithm and before) or self.given.has("disable-radix-cache") or strategy == "extra_buffer":
            return
        self.problems.append(
            Problem(
                "speculation-needs-extra-buffer",
                "this version refuses speculative decoding of a model with linear attention, as long as it caches "
                "states without an extra buffer",
                "write mamba-scheduler-strategy: extra_buffer in serve.flags",
            )
        )

    def _say_states(self, state: int, slots: int, copies: int, requests: int, drafts: int) -> None:
        self.slots = slots
        self.lines.append(Line("states of linear attention", f"{slots} slots of {state / 1e6:,.1f} MB", -slots * state))
        if drafts:
            how = f"{drafts} drafts of {requests} requests, {state / 1e6:,.1f} MB each"
            self.lines.append(Line("copies of states for drafts", how, -copies))

    def _say_better_ratio(self, kv: float, state: int, pool: int, requests: int | None) -> None:
        """Where states take more slots than its requests can use, tokens could have the rest."""
        strategy = self.given.text("mamba-scheduler-strategy", "mamba-radix-cache-strategy") or "auto"
        needed = (requests or 0) * self._ratio(strategy)
        if not needed or needed >= self.slots or self.given.has("max-mamba-cache-size"):
            return
        freed = (self.slots - needed) * state
        ratio = math.ceil(100 * needed * state / (pool + freed)) / 100
        self.notes.append(
            f"{needed} slots are enough for the states of {requests} requests: mamba-full-memory-ratio: {ratio:g} "
            f"would leave room for {int((pool + freed) // kv):,} tokens"
        )

    # Bytes of a token

    def _element(self) -> float:
        kind = self.given.text("kv-cache-dtype") or "auto"
        if kind.startswith(("fp8", "mxfp8")):
            return 1
        if "fp4" in kind:
            return 0.5 + 1 / 16
        return self.shape.width

    def _cell(self, element: float) -> float:
        """Bytes of the pool for each token of full length (pool_configurator.py)."""
        full, sliding = self.shape.kv_bytes(self.split, element), self.shape.sliding_bytes(self.split, element)
        if not sliding or self.given.has("disable-hybrid-swa-memory") or not self.shape.full:
            return full + sliding
        return full + (self.given.number("swa-full-tokens-ratio") or _SLIDING_RATIO) * sliding

    def _drafting(self, element: float, spare: int, tokens: int) -> None:
        """What a draft model takes of the memory outside of the pool."""
        if not self.algorithm or self.algorithm == "NGRAM":
            return
        token = self.shape.draft_bytes(self.split, element)
        weights = 0
        if self.draft is not None:
            token = self.draft.shape.kv_bytes(self.split, element) + self.draft.shape.sliding_bytes(self.split, element)
            weights = self.draft.weight_bytes // self.split
        size = weights + token * tokens
        how = f"{gib(weights)} of weights, {token:,} bytes for each of {tokens:,} tokens; beside the KV cache"
        self.lines.append(Line("draft layers", how))
        if size > spare:
            self.problems.append(
                Problem(
                    "draft-does-not-fit",
                    f"the draft model takes {gib(size)} of {gib(spare)} that are left for graphs and activations",
                    "lower mem-fraction-static, or max-total-tokens",
                )
            )


def _too_few(split: int, gpus: int) -> Problem:
    return Problem(
        "too-few-gpus",
        f"each layer is to be split over {split} GPUs, and the server has {gpus}",
        "write serve.tensor_parallel: auto, or assign more GPUs",
    )
