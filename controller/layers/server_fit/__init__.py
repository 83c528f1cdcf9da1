"""server.fit: the engine would start with these weights, flags and GPUs; tensor parallel divides the heads.

Computed from the model's config.json and index, before anything is moved or downloaded; never made true by a step.
Less room than one request of the longest context is no fault where the engine starts all the same, unless the spec
asks for more (``checks.min_context``): that is told, and what comes after goes on.
"""

from __future__ import annotations

from controller.core.view import View
from controller.core.words import Block, Drift, InSync, Layer, Skipped, Unseen, Verdict
from controller.engines import registry
from controller.engines.checking import known_bad
from controller.engines.fit import Fit, Outcome, gib
from controller.engines.words import Engine, KnownBad
from controller.facts.hub import Description, NotDescribed, Trouble
from controller.facts.words import Known
from controller.layers.server_fit.reasons import Reason
from controller.layers.server_weights.facts import AllWeights
from controller.layers.shared.assignment import Unassigned
from controller.layers.shared.fitting import Unfitted, described, fitted
from controller.layers.shared.inside import place_of, why_not
from controller.layers.shared.server_gpus import cards_of
from controller.spec.model import ModelServer, ServerState

NAME = "server.fit"
_BY_TROUBLE = {
    Trouble.MISSING: Reason.MODEL_NOT_FOUND,
    Trouble.NO_REVISION: Reason.REVISION_NOT_FOUND,
    Trouble.GATED: Reason.MODEL_GATED,
    Trouble.UNAUTHORIZED: Reason.TOKEN_REFUSED,
}


def check(view: View, server: ModelServer) -> Verdict:
    """Whether the engine would start, as far as can be foretold."""
    if server.state is ServerState.ABSENT:
        return Skipped("it is to be absent")
    if skipped := why_not(view.specs, server):
        return Skipped(skipped)
    try:
        engine = registry.engine(server.engine.name)
    except registry.NoEngine as missing:
        block = Block(Reason.UNKNOWN_ENGINE, str(missing), "correct engine.name, or install the plug-in")
        return Drift(Reason.UNKNOWN_ENGINE, str(missing), block)
    if not engine.manages:
        return Skipped("it is watched only")
    cards = cards_of(view, server)
    if isinstance(cards, Unassigned):
        return Drift(Reason.NO_GPU, cards.message, Block(Reason.NO_GPU, cards.message, cards.needs))
    model, draft = described(view, server)
    architectures = tuple(model.config.get("architectures") or ()) if isinstance(model, Description) else None
    bad = known_bad(engine, server, architectures, len(cards))
    if bad is not None and not server.engine.allow_known_bad:
        return _bad(server, bad)
    for told in (model, draft):
        if isinstance(told, NotDescribed):
            return _not_described(view, server, told)
    if not isinstance(model, Description) or isinstance(draft, NotDescribed):
        raise AssertionError("told apart above")
    fit = fitted(engine, server, model, draft, cards)
    if isinstance(fit, Unfitted):
        return InSync(f"whether it fits cannot be foretold: {fit.why}")
    return _judged(engine, server, fit)


def _bad(server: ModelServer, bad: KnownBad) -> Drift:
    message = f"{bad.engine} {server.engine.version} does not serve {server.model.repo} over several GPUs: {bad.what}"
    if not bad.tensor_parallel_above:
        message = f"{bad.engine} {server.engine.version} does not serve {server.model.repo} right: {bad.what}"
    needs = f"write engine.version: {bad.fixed} or later; engine.allow_known_bad: true starts it all the same"
    return Drift(Reason.KNOWN_BAD, message, Block(Reason.KNOWN_BAD, message, needs), {"source": bad.source})


def _not_described(view: View, server: ModelServer, told: NotDescribed) -> Verdict:
    """Nobody can sum; a server whose weights lie there already is not held up by that."""
    if _has_weights(view, server):
        return InSync(f"whether it fits cannot be foretold: {told.message}")
    reason = _BY_TROUBLE.get(told.reason)
    if reason is None:
        return Unseen(told.reason, told.message)
    return Drift(reason, told.message, Block(reason, told.message, told.todo))


def _has_weights(view: View, server: ModelServer) -> bool:
    place = place_of(view.specs, server)
    facts = view.facts.get(place.host)
    known = facts.section("server.weights") if facts is not None else None
    if not isinstance(known, Known) or not isinstance(known.value, AllWeights):
        return False
    here = known.value.of(place.vmid)
    return here is not None and any(each.repo == server.model.repo for each in here.weights)


def _judged(engine: Engine, server: ModelServer, fit: Fit) -> Verdict:
    evidence = {line.what: line.how + (f": {gib(line.bytes)}" if line.bytes is not None else "") for line in fit.lines}
    if fit.outcome is Outcome.REFUSES:
        problem = fit.problems[0]
        reason = Reason(problem.code) if problem.code in set(Reason) else Reason.DOES_NOT_FIT
        message = f"{engine.name} would not start: {'; '.join(p.message for p in fit.problems)}"
        todo = f"{'; '.join(p.todo for p in fit.problems)}; reconcile fit {server.name} shows the sum"
        return Drift(reason, message, Block(reason, message, todo), evidence)
    least, tokens = server.checks.min_context, fit.tokens
    if least is not None and tokens is not None and tokens < least:
        message = f"one request can have {tokens:,} tokens, and checks.min_context asks for {least:,}"
        todo = "; ".join([*(p.todo for p in fit.problems), f"reconcile fit {server.name} shows the sum"])
        block = Block(Reason.CONTEXT_BELOW_MINIMUM, message, todo, holds=False)
        return Drift(Reason.CONTEXT_BELOW_MINIMUM, message, block, evidence)
    return InSync(summary(fit))


def summary(fit: Fit) -> str:
    """What there is to know of a fit that holds nothing up, in one line."""
    said = []
    if fit.outcome is Outcome.DOUBTFUL:
        said.append("by the sum it would not start: " + "; ".join([*(p.message for p in fit.problems), *fit.notes]))
    if fit.pool_tokens is not None and fit.pool_tokens < fit.context:
        said.append(f"it holds {fit.pool_tokens:,} tokens, less than one request of {fit.context:,}")
    elif fit.at_once is not None:
        said.append(f"it holds {fit.pool_tokens:,} tokens: {fit.at_once:.1f} requests of {fit.context:,} at once")
    return "; ".join(said)


LAYER = Layer(name=NAME, kind="ModelServer", reasons=Reason, check=check)
