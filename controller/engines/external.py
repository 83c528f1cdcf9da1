"""external: a server that somebody else installs and starts, and that is only watched."""

from __future__ import annotations

from collections.abc import Sequence

from controller.engines.fit import Fit, Model, NotForetold
from controller.engines.flags import Fault, FlagList, Resolved
from controller.engines.words import Cause, Command, Http, KnownBad, Metrics, Place, Requirements, Restart
from controller.spec.model import ModelServer


class External:
    """The engine ``external``: any server with OpenAI's interface."""

    name = "external"
    manages = False
    restart = Restart(policy="no", prevent=(), success=(), stop_seconds=0)
    http = Http(live="", generate="", models="/v1/models", metrics="/metrics", info=())
    known_bad: Sequence[KnownBad] = ()
    causes: Sequence[Cause] = ()

    def requirements(self, server: ModelServer, arch: str) -> Requirements:
        """Raises TypeError: nothing is installed for it."""
        raise TypeError(f"nothing is installed for {server.name} on {arch}: it is watched only")

    def shipped_flags(self, version: str) -> FlagList | None:
        """None: it is not started with any."""
        del version
        return None

    def resolve(self, server: ModelServer, flags: FlagList | None, gpus: int) -> Resolved:
        """It takes no options."""
        del flags, gpus
        faults = (
            Fault(name, f"cannot pass --{name} to what is only watched", "", "remove it")
            for name in sorted(server.serve.flags)
        )
        return Resolved((), (), tuple(faults))

    def command(self, server: ModelServer, place: Place, flags: FlagList | None) -> Command:
        """Raises TypeError: it is not started."""
        raise TypeError(f"{server.name} is not started by us: it is watched only")

    def model_id(self, server: ModelServer, weights_dir: str) -> str:
        """The served name, or the repository's."""
        del weights_dir
        return server.serve.served_model_name or server.model.repo

    def metrics(self, version: str) -> Metrics:
        """None are known."""
        del version
        return Metrics("", "", "", "", "")

    def fit(
        self, server: ModelServer, flags: FlagList | None, model: Model, draft: Model | None, gpus: Sequence[int]
    ) -> Fit:
        """Raises NotForetold."""
        raise NotForetold("it is watched only")


ENGINE = External()
