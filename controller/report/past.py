"""What is remembered, for people and programs: events, applied specs, approvals, suspensions."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import click

from controller.core.permissions import Approval
from controller.core.suspension import Suspension
from controller.report import model
from controller.report.text import seconds_text, table, wrapped
from controller.run.memory import Applied, Event, Kind, Outcome

SHORT = 12  # hexadecimal digits of a digest or a commit that people are shown
_COLOURS = {
    "worked": "green",
    "failed": "red",
    "refused": "red",
    Outcome.REACHED: "green",
    Outcome.FAILED: "red",
    Outcome.APPLYING: "yellow",
}


def time_text(at: float) -> str:
    """A moment, to the second, in UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"


def event_row(event: Event) -> model.EventRow:
    """An event as a row."""
    return model.EventRow(
        number=event.number,
        at=event.at,
        kind=event.kind,
        object=None if event.object is None else str(event.object),
        layer=event.layer,
        action=event.action,
        step=event.step,
        cause=event.cause,
        result=event.result,
        message=event.message,
        spec_digest=event.digest,
        commit=event.commit,
        seconds=event.seconds,
    )


def event_text(row: model.EventRow) -> str:
    """An event, in one line or two: when, of what object, what."""
    head = f"{time_text(row.at)} {row.object or 'controller'} "
    match row.kind:
        case Kind.STEP_STARTED:
            head += f"{row.action} begun" + (f" ({row.cause})" if row.cause else "")
        case Kind.STEP_ENDED:
            took = f" after {seconds_text(row.seconds)}" if row.seconds is not None else ""
            head += f"{row.action} {click.style(row.result, fg=_COLOURS.get(row.result, 'yellow'))}{took}"
        case _:
            return wrapped(f"{head}{row.message}", "", "  ")
    return f"{head}\n{wrapped(row.message)}" if row.message else head


def history_report(history: Sequence[Applied], diff: bool) -> model.HistoryReport:
    """Applied specs, the last one first; with ``diff``, each against the one of its object before it."""
    before: dict[str, Applied] = {}
    rows = []
    for applied in reversed(history):
        name = str(applied.object)
        rows.append(
            model.AppliedRow(
                object=name,
                spec_digest=applied.digest,
                commit=applied.commit,
                at=applied.at,
                outcome=applied.outcome,
                outcome_at=applied.outcome_at,
                spec=json.loads(applied.text),
                diff=_diff(before.get(name), applied) if diff else None,
            )
        )
        before[name] = applied
    return model.HistoryReport(applied=rows[::-1])


def _diff(before: Applied | None, after: Applied) -> str:
    if before is None:
        return ""
    old, new = (json.dumps(json.loads(one.text), indent=2, sort_keys=True).splitlines() for one in (before, after))
    return "\n".join(difflib.unified_diff(old, new, before.digest[:SHORT], after.digest[:SHORT], n=2, lineterm=""))


def history_text(report: model.HistoryReport) -> str:
    """Applied specs: a table, or with diffs one after the other."""
    if not report.applied:
        return "No spec was applied yet, as far as is remembered."
    if all(row.diff is None for row in report.applied):
        head = ("APPLIED (UTC)", "OBJECT", "SPEC", "COMMIT", "OUTCOME")
        return table(head, [_cells(row) for row in report.applied])
    lines: list[str] = []
    for row in report.applied:
        lines.append("  ".join(filter(None, _cells(row))))
        lines += [f"    {line}" for line in (row.diff or "the first one that is remembered").splitlines()]
    return "\n".join(lines)


def _cells(row: model.AppliedRow) -> tuple[str, ...]:
    commit, dirty, _ = row.commit.partition("-dirty")
    outcome = click.style(row.outcome, fg=_COLOURS.get(row.outcome))
    return time_text(row.at), row.object, row.spec_digest[:SHORT], commit[:SHORT] + ("+" if dirty else ""), outcome


def approval_row(approval: Approval) -> model.ApprovalRow:
    """An approval as a row."""
    return model.ApprovalRow(
        id=approval.id,
        permission=approval.permission,
        object=str(approval.object),
        of=str(approval.of),
        layer=approval.layer,
        action=approval.action,
        reason=approval.reason,
        summary=approval.summary,
        until=approval.until,
        why=approval.why,
        by=approval.by,
        at=approval.at,
    )


def approvals_text(rows: Sequence[model.ApprovalRow]) -> str:
    """Approvals in force: what each is for, and who gave it."""
    if not rows:
        return "No approval is in force."
    lines: list[str] = []
    for row in rows:
        until = f"until {time_text(row.until)} UTC" if row.until is not None else "while the drift lasts"
        lines.append(wrapped(f"{row.permission}:{row.object} for {row.action} of {row.of} ({row.reason})", "", "  "))
        lines += [wrapped(row.summary)] if row.summary else []
        given = f"given by {row.by}, {time_text(row.at)} UTC, {until}"
        lines.append(wrapped(f"{given}: {row.why}" if row.why else given))
    return "\n".join(lines)


def suspensions_report(suspensions: Iterable[Suspension]) -> model.SuspensionsReport:
    """Suspensions in force, as rows."""
    return model.SuspensionsReport(
        suspensions=[
            model.SuspensionRow(object=str(each.object), until=each.until, reason=each.reason, by=each.by, at=each.at)
            for each in suspensions
        ]
    )
