"""Text for people: fits 80 columns, tables on a terminal, plain when it is piped."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

import click

from controller.report.model import DriftRow, PlanReport, StatusReport, StepRow
from controller.run.once import Ended, Report, Result

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def clean(text: str) -> str:
    """What came from a host, without characters that could move a terminal's cursor or fake a line."""
    return _CONTROL.sub("�", text)


def width() -> int:
    """Columns to write for: the terminal's, between 60 and 100, and 80 when it is piped."""
    return max(60, min(100, shutil.get_terminal_size((80, 24)).columns)) if sys.stdout.isatty() else 80


def wrapped(text: str, indent: str = "  ") -> str:
    """A paragraph with an indent; words such as paths are never cut."""
    return textwrap.fill(
        clean(text),
        width(),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def heading(text: str) -> str:
    """A section's name."""
    return click.style(text, bold=True)


def plan_text(report: PlanReport) -> str:
    """A plan: drift, the chain of steps, what is blocked and unknown, and what it comes to."""
    parts: list[str] = []
    if report.drift:
        parts.append(heading("What differs from the specs"))
        parts.extend(_drift(row) for row in report.drift)
    if report.steps:
        parts.append(heading("What would be done, in this order"))
        parts.extend(_step(number, row) for number, row in enumerate(report.steps, 1))
    if report.blocked:
        parts.append(heading("What is blocked"))
        parts.extend(
            f"  {_name(row.object, row.layer)}: {click.style(row.reason, fg='yellow')}\n"
            f"{wrapped(row.message, '    ')}\n{wrapped('To do: ' + row.needs, '    ')}"
            for row in report.blocked
        )
    if report.unknown:
        parts.append(heading("What could not be observed"))
        parts.extend(
            f"  {_name(row.object, row.layer)}: {click.style(row.reason, fg='red')}\n{wrapped(row.message, '    ')}"
            for row in report.unknown
        )
    parts.append(_summary(report))
    return "\n".join(parts)


def _name(obj: str, layer: str) -> str:
    return f"{obj} {layer}"


def _drift(row: DriftRow) -> str:
    lines = [f"  {_name(row.object, row.layer)}: {click.style(row.reason, fg='yellow')}", wrapped(row.message, "    ")]
    lines.extend(wrapped(f"{key}: {value}", "      ") for key, value in row.evidence.items())
    return "\n".join(lines)


def _step(number: int, row: StepRow) -> str:
    mark = " (provisional)" if row.provisional else ""
    lines = [f"  {number}. {row.action} {row.object} on {', '.join(row.hosts)}{mark}", wrapped(row.summary, "     ")]
    for permission in row.permissions:
        given = click.style("given", fg="green") if permission.given else click.style("not given", fg="red")
        lines.append(f"     needs {permission.permission} of {permission.object}: {given}")
    lines.extend("     | " + clean(line) for line in row.diff.splitlines())
    if row.script is not None:
        lines.extend("     # " + clean(line) for line in row.script.splitlines())
    return "\n".join(lines)


def _summary(report: PlanReport) -> str:
    summary = report.summary
    lines = []
    if not report.changes and not report.unknown:
        lines.append(
            click.style(f"Everything is as the specs say ({summary.objects} objects). Nothing to do.", fg="green")
        )
    else:
        lines.append(
            f"{summary.objects} objects: {summary.drifted} differ, {summary.steps} steps "
            f"({summary.not_permitted} not permitted), {summary.blocked} blocked, {summary.unknown} unknown."
        )
        lines.append(f"Deletes: {', '.join(summary.deletes) or 'nothing'}.")
        stops = ", ".join(f"{row.object} (at most {_seconds(row.at_most_seconds)})" for row in summary.stops)
        lines.append(f"Stops: {stops or 'nothing'}.")
        lines.append(f"Reboots: {', '.join(summary.reboots) or 'nothing'}.")
    lines.extend(
        ["Leaves alone:", *(wrapped(line, "  - ") for line in summary.leaves_alone)] if summary.leaves_alone else []
    )
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def status_text(report: StatusReport) -> str:
    """One line an object."""
    rows = []
    for obj in report.objects:
        ready = next(c for c in obj.conditions if c.type == "Ready")
        stalled = any(c.type == "Stalled" and c.status == "True" for c in obj.conditions)
        colour = {"True": "green", "False": "yellow", "Unknown": "red"}[ready.status]
        rows.append(
            (obj.object, obj.host, click.style(ready.status, fg=colour), ready.reason, "yes" if stalled else "")
        )
    return table(("OBJECT", "HOST", "READY", "REASON", "STALLED"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as what is in them, two spaces between."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(click.unstyle(line[n])) for line in lines) for n in range(len(head))]

    def padded(line: Sequence[str]) -> str:
        cells = (cell + " " * (widths[n] - len(click.unstyle(cell))) for n, cell in enumerate(line))
        return "  ".join(cells).rstrip()

    return "\n".join([click.style(padded(lines[0]), bold=True), *(padded(line) for line in lines[1:])])


def ended_text(ended: Ended) -> str:
    """One performed step."""
    colour = {Result.WORKED: "green", Result.FAILED: "red", Result.REFUSED: "red"}.get(ended.result, "yellow")
    step = ended.step
    return f"{click.style(ended.result, fg=colour)}: {step.action} {step.object} on {', '.join(step.hosts)}: " + clean(
        ended.message
    )


def once_text(report: Report, right: bool, blocked: int, unknown: int, not_permitted: int) -> str:
    """What a pass comes to."""
    done = sum(1 for ended in report.ended if ended.result is Result.WORKED)
    if right:
        if not done:
            return click.style("Everything is as the specs say. Nothing was done.", fg="green")
        return click.style(f"Everything is as the specs say, after {done} steps.", fg="green")
    what = [f"{done} steps worked"]
    what += [f"{len(report.failed)} failed"] if report.failed else []
    what += [f"{not_permitted} wait for a permission"] if not_permitted else []
    what += [f"{blocked} blocked"] if blocked else []
    what += [f"{unknown} unknown"] if unknown else []
    what += ["time is up, and something still runs"] if report.timed_out else []
    return "Not everything is as the specs say: " + ", ".join(what) + ". `reconcile why OBJECT` tells more."
