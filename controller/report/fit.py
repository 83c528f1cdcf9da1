"""Whether a server fits: what ``reconcile fit`` prints, as rows and as a sum on one page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controller.core.view import View
from controller.core.words import NotKnown
from controller.engines import registry
from controller.engines.checking import warnings
from controller.engines.fit import Fit, gib
from controller.engines.words import Engine
from controller.facts.hub import Description, NotDescribed
from controller.layers.shared.assignment import Unassigned
from controller.layers.shared.fitting import Unfitted, described, fitted
from controller.layers.shared.server_gpus import Card, cards_of
from controller.report import text
from controller.report.model import ErrorRow, FitGpuRow, FitLineRow, FitProblemRow, FitReport
from controller.spec.across import gpus_of
from controller.spec.model import ModelServer, Specs
from controller.spec.values import Problem

UNKNOWN = "unknown"


def fit_report(view: View, server: ModelServer) -> FitReport:
    """The sum for a server, on the GPUs that it would have where its spec wants it."""
    try:
        engine = registry.engine(server.engine.name)
        if not engine.manages:
            return _unknown(view.specs, server, "it is watched only")
        cards = cards_of(view, server)
        if isinstance(cards, Unassigned):
            return _unknown(view.specs, server, f"{cards.message}. To do: {cards.needs}")
        model, draft = described(view, server)
    except (registry.NoEngine, NotKnown) as error:
        return _unknown(view.specs, server, str(error))
    for told in (model, draft):
        if isinstance(told, NotDescribed):
            return _unknown(view.specs, server, f"{told.message}. To do: {told.todo}", cards)
    if not isinstance(model, Description) or isinstance(draft, NotDescribed):
        raise AssertionError("told apart above")
    fit = fitted(engine, server, model, draft, cards)
    if isinstance(fit, Unfitted):
        return _unknown(view.specs, server, f"it cannot be foretold: {fit.why}", cards)
    return _unknown(view.specs, server, _in_words(engine, fit), cards).model_copy(
        update={
            "outcome": fit.outcome.value,
            "tensor_parallel": fit.split,
            "weight_bytes": fit.weights,
            "kv_bytes_per_token": fit.kv_token,
            "state_bytes_per_request": fit.state_request,
            "kv_how": fit.kv_how,
            "state_how": fit.state_how,
            "context": fit.context,
            "pool_tokens": fit.pool_tokens,
            "tokens": fit.tokens,
            "requests": fit.requests,
            "lines": [FitLineRow(what=line.what, how=line.how, bytes=line.bytes) for line in fit.lines],
            "problems": [FitProblemRow(code=p.code, message=p.message, next=p.todo) for p in fit.problems],
            "notes": list(fit.notes),
        }
    )


def _unknown(specs: Specs, server: ModelServer, message: str, cards: Sequence[Card] = ()) -> FitReport:
    told = warnings(server, len(cards) or gpus_of(specs, server))
    return FitReport(
        server=server.name,
        outcome=UNKNOWN,
        message=message,
        engine=server.engine.name,
        engine_version=server.engine.version,
        model=server.model.repo,
        revision=server.model.revision,
        gpus=[FitGpuRow(pci=card.pci, model=card.model, memory=card.memory) for card in cards],
        min_context=server.checks.min_context,
        warnings=[warning_row(specs, server, warning) for warning in told],
    )


def _in_words(engine: Engine, fit: Fit) -> str:
    """The outcome, as one sentence."""
    match fit.outcome.value:
        case "refuses":
            return f"{engine.name} would not start"
        case "doubtful":
            return f"{engine.name} may not start: see below"
        case "short":
            return f"{engine.name} starts, and cannot hold one request of {fit.context:,} tokens"
    return "it fits"


def warning_row(specs: Specs, server: ModelServer, warning: Problem) -> ErrorRow:
    """A warning about a server, at the server's place in the spec files."""
    place = specs.places.get(server.ref)
    return ErrorRow(
        message=warning.says,
        code="warning",
        file=place.file if place else None,
        line=place.line if place else None,
        column=place.column if place else None,
        object=str(server.ref),
        field=".".join(map(str, warning.field)) or None,
        nearest=warning.nearest or None,
        next=warning.todo or None,
    )


def warning_text(row: ErrorRow) -> str:
    """A warning as people read it."""
    where = f"{row.file}:{row.line}: " if row.file else ""
    lines = [f"warning: {where}{row.object}, {row.field}", text.wrapped(row.message, "  ")]
    if row.next:
        lines.append(text.wrapped(row.next, "  next: ", " " * 8))
    return "\n".join(lines)


def fit_text(report: FitReport) -> str:
    """The sum, so that a person can check it line by line."""
    lines = [
        text.heading(f"{report.server}: {report.message}"),
        f"{report.model} at {report.revision}, {report.engine} {report.engine_version}",
        *_gpu_lines(report.gpus, report.tensor_parallel),
    ]
    if report.lines:
        lines += ["", text.heading("For each GPU"), *_sum(report.lines)]
    lines += _what_follows(report)
    for problem in report.problems:
        lines += ["", text.wrapped(problem.message, "! ", "  "), text.wrapped(problem.next, "  to do: ", " " * 9)]
    lines += [text.wrapped(note, "- ", "  ") for note in report.notes]
    lines += [warning_text(row) for row in report.warnings]
    return "\n".join(lines)


def _gpu_lines(gpus: Sequence[FitGpuRow], split: int | None) -> Iterable[str]:
    for gpu in gpus:
        memory = "memory not known" if gpu.memory is None else gib(gpu.memory)
        yield f"  {gpu.pci}  {gpu.model or 'model not known'}  {memory}"
    if split is not None:
        yield f"  each layer is split over {text.counted(split, 'GPU')}"


def _sum(rows: Sequence[FitLineRow]) -> Iterable[str]:
    wide = max(len(row.what) for row in rows)
    for row in rows:
        size = "" if row.bytes is None else f"{row.bytes / (1 << 30):,.2f} GiB"
        yield f"  {row.what:<{wide}}  {size:>12}  {row.how}"


def _what_follows(report: FitReport) -> Iterable[str]:
    if report.kv_bytes_per_token is None:
        return
    yield ""
    yield f"  a token takes {report.kv_bytes_per_token:,} bytes on each GPU"
    if report.kv_how:
        yield f"    {report.kv_how}"
    if report.state_bytes_per_request:
        yield f"  a request takes {report.state_bytes_per_request:,} bytes besides, for states"
        yield f"    {report.state_how}"
    if report.pool_tokens is not None and report.context:
        part = report.pool_tokens / report.context
        yield f"  {report.pool_tokens:,} tokens in all are {part:.2f} requests of {report.context:,} tokens"
    if report.requests is not None:
        yield f"  at most {text.counted(report.requests, 'request')} at once"
    if report.min_context is not None and report.tokens is not None:
        enough = "enough" if report.tokens >= report.min_context else "too few"
        yield f"  one request can have {report.tokens:,} tokens, {enough} for min_context: {report.min_context:,}"
