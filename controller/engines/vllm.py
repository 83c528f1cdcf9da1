"""vLLM. Read in the wheel 0.33.0, run as 0.32.0 on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packaging.version import InvalidVersion, Version

from controller.engines import common, shipped
from controller.engines.common import cause
from controller.engines.fit import GIB, Fit, Line, Model, NotForetold, Outcome, Problem, gib, undivided
from controller.engines.flags import FlagList, Grammar, Resolved, Value, resolve
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

_GRAMMAR = Grammar(
    "vllm",
    reserved={
        "model": "model.repo",
        "revision": "model.revision",
        "spec-model": "model.draft",
        "host": "serve.address",
        "port": "serve.port",
        "served-model-name": "serve.served_model_name",
        "tensor-parallel-size": "serve.tensor_parallel",
        "api-key": "serve.api_key",
        "hf-token": "model.token",
        "config": "serve.flags",
        "uds": "serve.address",
    },
    underscores=True,
    dotted=True,
)
_LEAST = 1 * GIB  # of each GPU: CUDA context, NCCL, the smallest activations
_USUAL = 4 * GIB  # with the activations of the profiled batch and CUDA graphs
_SUFFIXES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}


class Vllm:
    """The engine ``vllm``."""

    name = "vllm"
    manages = True
    # It exits with 0 when its engine process dies (vllm#48966; run with 0.32.0), so always. 2: an option.
    restart = Restart(policy="always", prevent=(2,), success=(), stop_seconds=90)
    http = Http(live="/health", generate="", models="/v1/models", metrics="/metrics", info=())
    known_bad: Sequence[KnownBad] = ()
    causes: Sequence[Cause] = (
        cause(
            "no-cache-memory",
            r"No available memory for the cache blocks",
            "the weights leave no room for the KV cache",
            "raise gpu-memory-utilization or use more GPUs: reconcile fit SERVER",
            "run with 0.32.0",
        ),
        cause(
            "context-too-long",
            r"To serve at least one request with the model's max seq len",
            "the KV cache cannot hold one request of the longest context",
            "lower max-model-len, or give it more memory: reconcile fit SERVER",
            "run with 0.32.0",
        ),
        cause(
            "context-beyond-model",
            r"User-specified max_model_len .* is greater than the derived max_model_len",
            "max-model-len is more than the model was made for",
            "lower max-model-len",
            "run with 0.32.0",
        ),
        cause(
            "unknown-parser",
            r"invalid (tool call|reasoning) parser",
            "it does not know a parser",
            "correct tool-call-parser or reasoning-parser",
            "run with 0.32.0",
        ),
        cause(
            "too-few-gpus",
            r"World size \(\d+\) is larger than the number of available GPUs",
            "it sees fewer GPUs than it is to use",
            "assign more GPUs, or write serve.tensor_parallel: auto",
            "read in 0.33.0",
        ),
        cause(
            "memory-taken",
            r"Free memory on device .* is less than desired GPU memory utilization",
            "another process uses the GPU, or the memory is the machine's own",
            "see who uses it: reconcile gpus; on a GB10 write gpu-memory-utilization: 0.85",
            "vllm-project/recipes#632",
        ),
        *common.CAUSES,
        cause(
            "engine-died",
            r"EngineDeadError|Engine core initialization failed|EngineCore encountered a fatal error",
            "its engine process died",
            "look at the lines before",
            "vllm#48966",
        ),
    )

    def requirements(self, server: ModelServer, arch: str) -> Requirements:
        """Exactly one version of ``vllm`` (Python 3.11 or newer, METADATA of 0.33.0)."""
        del arch
        version = server.engine.version
        lines = (f"vllm=={version}", *server.engine.requirements)
        return Requirements(lines, "vllm", version, "vllm", server.engine.python or "3.12")

    def shipped_flags(self, version: str) -> FlagList | None:
        """The options that the version has, None when nobody has read them."""
        return shipped.flags(self.name, version)

    def resolve(self, server: ModelServer, flags: FlagList | None, gpus: int) -> Resolved:
        """Give the options that the spec means. A stop drains; a tool parser needs tools switched on."""
        del gpus
        given: dict[str, Value] = dict(server.serve.flags)
        resolved = resolve(_GRAMMAR, flags, given)
        more: dict[str, Value] = {}
        if resolved.has("tool-call-parser") and not resolved.has("enable-auto-tool-choice"):
            more["enable-auto-tool-choice"] = True
        knows = flags is not None and flags.find("shutdown-timeout") is not None
        if knows and not resolved.has("shutdown-timeout"):
            more["shutdown-timeout"] = str(self.restart.stop_seconds - 30)  # by itself it cuts off what runs
        return resolve(_GRAMMAR, flags, {**given, **more}) if more else resolved

    def command(self, server: ModelServer, place: Place, flags: FlagList | None) -> Command:
        """``vllm serve``; the key comes from the environment."""
        serve = server.serve
        argv = [common.program(place, "vllm"), "serve", place.weights_dir]
        argv += ["--host", serve.address, "--port", str(serve.port)]
        argv += ["--served-model-name", self.model_id(server, place.weights_dir)]
        argv += ["--tensor-parallel-size", str(tensor_parallel(server, len(place.gpus)))]
        resolved = self.resolve(server, flags, len(place.gpus))
        options = [option.argv for option in resolved.options if option.name != "speculative-config"]
        speculative = resolved.value("speculative-config", "sc")
        if server.model.draft is not None:
            speculative = {"model": place.draft_dir, **(speculative if isinstance(speculative, Mapping) else {})}
        if speculative is not None:
            options.append(("--speculative-config", common.json_text(speculative)))
        hidden = {"VLLM_API_KEY": serve.api_key.secret} if serve.api_key else {}
        own = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": f"{place.env_dir}/cache/vllm"}
        return Command(
            (*argv, *(part for option in options for part in option)),
            common.environment(server, place, own),
            {**common.secrets(server), **hidden},
        )

    def model_id(self, server: ModelServer, weights_dir: str) -> str:
        """The served name, or the repository's."""
        del weights_dir
        return server.serve.served_model_name or server.model.repo

    def metrics(self, version: str) -> Metrics:
        """The names in the metrics of 0.32 and 0.33."""
        del version
        return Metrics(
            running="vllm:num_requests_running",
            waiting="vllm:num_requests_waiting",
            prompt_tokens="vllm:prompt_tokens_total",
            generation_tokens="vllm:generation_tokens_total",
            cache="vllm:kv_cache_usage_perc",
            drafted="vllm:spec_decode_num_draft_tokens_total",
            accepted="vllm:spec_decode_num_accepted_tokens_total",
            drafts="vllm:spec_decode_num_drafts_total",
        )

    def fit(
        self, server: ModelServer, flags: FlagList | None, model: Model, draft: Model | None, gpus: Sequence[int]
    ) -> Fit:
        """What ``_check_enough_kv_cache_memory`` compares (v1/core/kv_cache_planning.py)."""
        return _Sum(server, self.resolve(server, flags, len(gpus)), model, draft, tuple(gpus)).fit()


ENGINE = Vllm()


class _Sum:
    """One sum, as one start of vLLM does it."""

    def __init__(
        self, server: ModelServer, given: Resolved, model: Model, draft: Model | None, gpus: tuple[int, ...]
    ) -> None:
        self.given, self.model, self.draft, self.gpus = given, model, draft, gpus
        self.shape = model.shape
        self.split = tensor_parallel(server, len(gpus))
        self.newer = _is_newer(server.engine.version)
        self.speculative = self._speculative()

    def fit(self) -> Fit:
        self._refuse_what_is_not_known()
        problems = list(undivided(self.shape, self.split, len(self.gpus)))
        if self.split > len(self.gpus):
            problems.append(_too_few(self.split, len(self.gpus)))
        gpu, context = min(self.gpus), self._context()
        part = self.given.number("gpu-memory-utilization") or (0.92 if self.newer else 0.9)
        drafted = self.draft.weight_bytes if self.draft else 0
        weights = (self.model.weight_bytes + drafted) // self.split
        asked = self.given.number("kv-cache-memory-bytes")
        usual = int(asked) if asked else round(gpu * part) - weights - _USUAL
        best = int(asked) if asked else usual + _USUAL - _LEAST
        token, fixed, state = self._bytes()
        needed = token * context + fixed
        lines = [
            Line("memory of a GPU", f"the smallest of {len(self.gpus)}", gpu),
            Line("not used", f"1 - {part:g}: gpu-memory-utilization", round(gpu * part) - gpu),
            Line("weights", f"{gib(self.model.weight_bytes + drafted)} of tensors / {self.split}", -weights),
            Line("activations, CUDA graphs, NCCL", f"about; {gib(_LEAST)} at the very least", -_USUAL),
            Line("KV cache", "what is left", usual),
            Line(
                "one request of the longest context",
                f"{context:,} tokens of {token:,} bytes, {gib(fixed)} besides",
                needed,
            ),
        ]
        tokens = max(0, (usual - fixed) // token) if token else 0
        if best <= 0:
            problems.append(_no_room(-best))
        elif needed > best:
            most = max(0, (best - fixed) // token)
            problems.append(
                Problem(
                    "context-too-long",
                    f"one request of {context:,} tokens needs {gib(needed)} of KV cache, and {gib(best)} are left at "
                    "the very most: vLLM does not start then",
                    f"write max-model-len: {most // 1024 * 1024} or less, raise gpu-memory-utilization, "
                    "or use more GPUs",
                )
            )
        outcome = Outcome.REFUSES if problems else Outcome.FITS if needed <= usual else Outcome.DOUBTFUL
        most_requests = self.given.number("max-num-seqs")
        return Fit(
            outcome=outcome,
            split=self.split,
            gpus=self.gpus,
            weights=weights,
            kv_token=token,
            state_request=state,
            context=context,
            pool_tokens=tokens,
            requests=int(most_requests) if most_requests else None,
            lines=tuple(lines),
            problems=tuple(problems),
            notes=("by the usual activations it would not start: within what the sum may be wrong",)
            if outcome is Outcome.DOUBTFUL
            else (),
            kv_how=self._how(),
            state_how=self.shape.linear.how(self.split) if self.shape.linear else "",
        )

    def _refuse_what_is_not_known(self) -> None:
        if not self.gpus:
            raise NotForetold("it uses no GPU")
        if min(self.gpus) <= 0:
            raise NotForetold("nobody knows how much memory its GPUs have")
        for name in ("pipeline-parallel-size", "data-parallel-size", "decode-context-parallel-size", "nnodes"):
            if (self.given.number(name) or 1) > 1:
                raise NotForetold(f"{name} is not in this sum")
        for name in ("cpu-offload-gb", "kv-offloading-size", "num-gpu-blocks-override"):
            if self.given.number(name):
                raise NotForetold(f"{name} is not in this sum")
        if self.given.text("quantization"):
            raise NotForetold("weights that are quantized at start are not in this sum")

    def _context(self) -> int:
        text = self.given.text("max-model-len") or ""
        number = text.rstrip("kKmMgG")
        if number.replace(".", "", 1).isdigit():
            return int(float(number) * _SUFFIXES.get(text[len(number) :], 1))
        return self.shape.max_context

    def _speculative(self) -> int:
        """How many tokens are drafted, 0 without speculative decoding."""
        config = self.given.value("speculative-config", "sc")
        if isinstance(config, Mapping):
            try:
                return int(str(config.get("num_speculative_tokens") or 1))
            except ValueError:
                return 1
        tokens = self.given.number("spec-tokens", "speculative-config.num_speculative_tokens")
        return int(tokens) if tokens else int(self.draft is not None)

    def _how(self) -> str:
        how = self.shape.kv_how(self.split, self._element())
        if self.draft is not None:
            return f"{how} + {self.draft.shape.kv_how(self.split, self._element())} of the draft model"
        return how + (f" + {self.shape.drafting} that drafts" if self.speculative and self.shape.drafting else "")

    def _element(self) -> int:
        kind = self.given.text("kv-cache-dtype") or "auto"
        return 1 if kind.startswith("fp8") else self.shape.width

    def _bytes(self) -> tuple[int, int, int]:
        """For one request: bytes a token of full length, bytes besides, and of these a state of linear attention."""
        element = self._element()
        token = self.shape.kv_bytes(self.split, element)
        window = self.shape.window * self.shape.sliding_bytes(self.split, element)
        if self.draft is not None:
            token += self.draft.shape.kv_bytes(self.split, element)
            window += self.draft.shape.window * self.draft.shape.sliding_bytes(self.split, element)
        elif self.speculative:
            token += self.shape.draft_bytes(self.split, element)
        state = self.shape.linear.bytes_per_request(self.split) if self.shape.linear else 0
        return token, window + state * (1 + self.speculative), state


def _is_newer(version: str) -> bool:
    """Whether gpu-memory-utilization is 0.92 by default (config/cache.py of 0.33.0); it was 0.9 for long."""
    try:
        return Version(version) >= Version("0.32")
    except InvalidVersion:
        return True


def _no_room(lacking: int) -> Problem:
    return Problem(
        "no-cache-memory",
        f"the weights leave no room for the KV cache: {gib(lacking)} are lacking on each GPU",
        "use more GPUs, a smaller or quantized model, or raise gpu-memory-utilization",
    )


def _too_few(split: int, gpus: int) -> Problem:
    return Problem(
        "too-few-gpus",
        f"each layer is to be split over {split} GPUs, and the server has {gpus}",
        "write serve.tensor_parallel: auto, or assign more GPUs",
    )
