"""transformers serve: the small one, which runs anywhere. Read in the wheel 5.24.0, run as 5.24.0 on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

from controller.engines import common, shipped
from controller.engines.fit import Fit, Line, Model, NotForetold, Outcome, Problem, gib
from controller.engines.flags import Fault, FlagList, Grammar, Resolved, resolve
from controller.engines.words import Cause, Command, Http, KnownBad, Metrics, Place, Requirements, Restart
from controller.spec.model import ModelServer

_GRAMMAR = Grammar(
    "transformers", reserved={"host": "serve.address", "port": "serve.port", "force-model": "model.repo"}
)


class Transformers:
    """The engine ``transformers``."""

    name = "transformers"
    manages = True
    restart = Restart(policy="always", prevent=(2,), success=(143,), stop_seconds=30)  # SIGTERM ends it with 143
    http = Http(live="/health", generate="", models="/v1/models", metrics="", info=())
    known_bad: Sequence[KnownBad] = ()
    causes: Sequence[Cause] = (
        common.cause(
            "no-serving",
            r"Missing dependencies for serving",
            "it was installed without what serving needs",
            "let the environment be built anew",
            "read in 5.24.0",
        ),
        *common.CAUSES,
    )

    def requirements(self, server: ModelServer, arch: str) -> Requirements:
        """One version of ``transformers[serving]``, and torch, which it does not require by itself."""
        del arch
        version = server.engine.version
        lines = (f"transformers[serving]=={version}", "torch", *server.engine.requirements)
        return Requirements(lines, "transformers", version, "transformers", server.engine.python or "3.12")

    def shipped_flags(self, version: str) -> FlagList | None:
        """The options that the version has, None when nobody has read them."""
        return shipped.flags(self.name, version)

    def resolve(self, server: ModelServer, flags: FlagList | None, gpus: int) -> Resolved:
        """Give the options that the spec means; some fields of a spec have no option here."""
        resolved = resolve(_GRAMMAR, flags, server.serve.flags)
        faults = list(resolved.faults)
        if server.serve.api_key is not None:
            faults.append(
                Fault(
                    "api-key",
                    "cannot ask for a key: transformers serve has no such thing",
                    "",
                    "remove serve.api_key, and let it listen where only those who may can reach it",
                    ("serve", "api_key"),
                )
            )
        if server.serve.served_model_name is not None:
            faults.append(
                Fault(
                    "served-model-name",
                    "cannot give the model a name of its own: transformers serve answers to its directory's path",
                    "",
                    "remove serve.served_model_name",
                    ("serve", "served_model_name"),
                )
            )
        if server.model.draft is not None:
            says = "cannot use a draft model: transformers serve does not"
            faults.append(Fault("draft", says, "", "remove it", ("model", "draft")))
        if server.serve.tensor_parallel not in ("auto", 1):
            faults.append(
                Fault(
                    "tensor-parallel",
                    "cannot split layers over GPUs: transformers serve spreads whole layers over them",
                    "",
                    "write serve.tensor_parallel: auto",
                    ("serve", "tensor_parallel"),
                )
            )
        return Resolved(resolved.options, resolved.notes, tuple(faults))

    def command(self, server: ModelServer, place: Place, flags: FlagList | None) -> Command:
        """``transformers serve``, on the CPU where it has no GPU."""
        resolved = self.resolve(server, flags, len(place.gpus))
        argv = [common.program(place, "transformers"), "serve", place.weights_dir]
        argv += ["--host", server.serve.address, "--port", str(server.serve.port)]
        if not resolved.has("device"):
            argv += ["--device", "auto" if place.gpus else "cpu"]
        return Command((*argv, *resolved.argv), common.environment(server, place), common.secrets(server))

    def model_id(self, server: ModelServer, weights_dir: str) -> str:
        """The path of the weights: it refuses requests for any other model (run with 5.24.0: 400)."""
        del server
        return weights_dir

    def metrics(self, version: str) -> Metrics:
        """It has none."""
        del version
        return Metrics("", "", "", "", "")

    def fit(
        self, server: ModelServer, flags: FlagList | None, model: Model, draft: Model | None, gpus: Sequence[int]
    ) -> Fit:
        """Whether the weights fit into the GPUs together; it keeps no pool of keys and values."""
        del flags, draft
        if not gpus or server.serve.flags.get("device") == "cpu":
            raise NotForetold("it uses no GPU")
        if min(gpus) <= 0:
            raise NotForetold("nobody knows how much memory its GPUs have")
        total = sum(gpus)
        lines = (
            Line("memory of all GPUs", f"{len(gpus)} together, as layers are spread over them", total),
            Line("weights", "of tensors", -model.weight_bytes),
            Line("activations, keys and values", "what is left", total - model.weight_bytes),
        )
        shape = model.shape
        lacking = model.weight_bytes - total
        problems = (
            (
                Problem(
                    "no-memory", f"the weights are {gib(lacking)} more than the GPUs have", "use more or bigger GPUs"
                ),
            )
            if lacking > 0
            else ()
        )
        return Fit(
            outcome=Outcome.REFUSES if problems else Outcome.FITS,
            split=1,
            gpus=tuple(gpus),
            weights=model.weight_bytes,
            kv_token=shape.kv_bytes(1, shape.width) + shape.sliding_bytes(1, shape.width),
            state_request=shape.linear.bytes_per_request(1) if shape.linear else 0,
            context=shape.max_context,
            lines=lines,
            problems=problems,
            kv_how=shape.kv_how(1, shape.width),
            state_how=shape.linear.how(1) if shape.linear else "",
        )


ENGINE = Transformers()
