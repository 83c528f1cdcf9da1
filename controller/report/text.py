"""Text for people: fits 80 columns, tables on a terminal, plain when it is piped."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

import click

from controller.core.words import Disruption, Step
from controller.report.model import (
    DrainReport,
    DriftRow,
    NextBootReport,
    OnceReport,
    PlanReport,
    StatusReport,
    StepRow,
    StopRow,
    UnknownRow,
    WhyReport,
)
from controller.run.ended import Ended, Result
from controller.world.keys import Shown

# Control characters, halves of characters, and what breaks a line or turns the direction of text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: str) -> str:
    """What came from a host, without characters that could move a terminal's cursor or fake a line."""
    return _CONTROL.sub("�", text)


def width() -> int:
    """Columns to write for: the terminal's, between 60 and 100, and 80 when it is piped."""
    return max(60, min(100, shutil.get_terminal_size((80, 24)).columns)) if sys.stdout.isatty() else 80


def wrapped(text: str, indent: str = "  ", later: str | None = None) -> str:
    """A paragraph with an indent, and another for its ``later`` lines; words such as paths are never cut."""
    return textwrap.fill(
        clean(text),
        width(),
        initial_indent=indent,
        subsequent_indent=indent if later is None else later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def counted(count: int, what: str) -> str:
    """A number and its noun: 1 host, 2 hosts."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


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
        parts.append(steps_text(report.steps))
    if report.blocked:
        parts.append(heading("What is blocked"))
        parts.extend(
            f"  {_name(row.object, row.layer)}: {click.style(row.reason, fg='yellow')}\n"
            f"{wrapped(row.message, '    ')}\n{wrapped('To do: ' + row.needs, '    ')}"
            for row in report.blocked
        )
    if report.waiting:
        parts.append(heading("What is under way already"))
        parts.extend(
            f"  {_name(row.object, row.layer)}\n{wrapped(f'waits for a {row.what}: {row.message}', '    ')}"
            for row in report.waiting
        )
    if report.unknown:
        parts.append(heading("What could not be observed"))
        parts.append(_unknown(report.unknown, "  "))
    parts.append(_summary(report))
    return "\n".join(parts)


def _unknown(rows: Sequence[UnknownRow], indent: str) -> str:
    """What could not be judged; what is so for one reason, as all of an unreachable host is, is said once."""
    of_one: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        of_one.setdefault((row.reason, row.message), {}).setdefault(row.object, []).append(row.layer)
    lines = []
    for (reason, message), objects in of_one.items():
        names = "; ".join(f"{obj} {', '.join(layers)}" for obj, layers in objects.items())
        lines.append(f"{wrapped(names, indent, ' ' * len(indent))}: {click.style(reason, fg='red')}")
        lines.append(wrapped(message, " " * (len(indent) + 2)))
    return "\n".join(lines)


def _name(obj: str, layer: str) -> str:
    return f"{obj} {layer}"


def _drift(row: DriftRow) -> str:
    lines = [f"  {_name(row.object, row.layer)}: {click.style(row.reason, fg='yellow')}", wrapped(row.message, "    ")]
    lines.extend(wrapped(f"{key}: {value}", "      ", "        ") for key, value in row.evidence.items())
    return "\n".join(lines)


def steps_text(rows: Sequence[StepRow]) -> str:
    """Steps, one after the other, each with what it needs."""
    return "\n".join(_step(number, row) for number, row in enumerate(rows, 1))


def _step(number: int, row: StepRow) -> str:
    mark = " (provisional)" if row.provisional else ""
    head = f"{row.action} {row.object} on {', '.join(row.hosts)}{mark}"
    lines = [wrapped(head, f"  {number}. ", "     "), wrapped(row.summary, "     ")]
    for permission in row.permissions:
        given = click.style("given", fg="green") if permission.given else click.style("not given", fg="red")
        lines.append(f"     needs {permission.permission} of {permission.object}: {given}")
    if row.suspended is not None:
        lines.append(wrapped(row.suspended, "     waits: ", " " * 12))
    lines.extend("     | " + clean(line) for line in row.diff.splitlines())
    if row.script is not None:
        lines.extend("     # " + clean(line) for line in row.script.splitlines())
    return "\n".join(lines)


def _summary(report: PlanReport) -> str:
    summary = report.summary
    lines = []
    if not report.changes and not report.unknown:
        lines.append(
            click.style(
                f"Everything is as the specs say ({counted(summary.objects, 'object')}). Nothing to do.", fg="green"
            )
        )
    else:
        lines.append(
            f"{counted(summary.objects, 'object')}: {summary.drifted} differ, {counted(summary.steps, 'step')} "
            f"({summary.not_permitted} not permitted), {summary.blocked} blocked, {summary.unknown} unknown."
        )
        stops = ", ".join(_stop_text(row) for row in summary.stops)
        for label, what in (
            ("Deletes", ", ".join(summary.deletes)),
            ("Stops", stops),
            ("Reboots", ", ".join(summary.reboots)),
        ):
            lines.append(wrapped(f"{label}: {what or 'nothing'}.", "", "  "))
    lines.extend(
        ["Leaves alone:", *(wrapped(line, "  - ", "    ") for line in summary.leaves_alone)]
        if summary.leaves_alone
        else []
    )
    return "\n".join(lines)


def _stop_text(row: StopRow) -> str:
    """How long it is gone; of a server, why as well."""
    why = f": {'; '.join(row.why)}" if row.object.startswith("ModelServer/") else ""
    return f"{row.object} (at most {seconds_text(row.at_most_seconds)}{why})"


def seconds_text(seconds: float) -> str:
    """A time that people can use: tenths below ten seconds, minutes from two on."""
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.1f} s" if 0 < seconds < 10 else f"{seconds:.0f} s"


def next_boot_text(report: NextBootReport) -> str:
    """What would be wrong after a reboot now."""
    parts = [f"{host} boots kernel {kernel} next." for host, kernel in report.kernels.items()]
    if report.wrong:
        parts.append(heading("What would be wrong after a reboot now"))
        parts.extend(
            f"  {_name(row.object, row.layer)}: {click.style(row.reason, fg='yellow')}\n"
            f"{wrapped(row.message, '    ')}\n{wrapped('To do: ' + row.needs, '    ')}"
            for row in report.wrong
        )
    if report.unknown:
        parts.append(heading("What could not be observed"))
        parts.append(_unknown(report.unknown, "  "))
    if not report.wrong and not report.unknown:
        parts.append(click.style("It would come back as the specs say.", fg="green"))
    return "\n".join(parts)


def drain_text(report: DrainReport) -> str:
    """What lies on a host, who could take it, and the line to edit."""
    if not (report.containers or report.servers or report.guests_in_no_spec):
        return f"Nothing lies on {report.host} any more."
    lines = [f"On {report.host} lies:"]
    for row in report.containers:
        servers = f", with {', '.join(row.servers)}" if row.servers else ""
        lines.append(f"{row.object} (CT {row.id}, {'runs' if row.runs else 'is stopped'}){servers}")
        able = [candidate.host for candidate in row.candidates if candidate.can]
        if row.wanted_on in able:
            todo = f"`reconcile --once` moves it to {row.wanted_on}, as its spec says"
        elif able:
            todo = f"write `host: {able[0]}` in {row.spec}, then `reconcile --once`"
        else:
            todo = "nobody can take it as things are"
        lines.append(wrapped(todo, "  to do: ", " " * 9))
        for candidate in row.candidates:
            lines.append(f"  {candidate.host}: {'can take it' if candidate.can else candidate.reason}")
            if not candidate.can:
                lines.append(wrapped(f"{candidate.message}. To do: {candidate.needs}", "    "))
    lines += [f"{name}, on the host itself: to do: name another host in its spec" for name in report.servers]
    if report.guests_in_no_spec:
        lines.append(wrapped(f"In no spec, and left alone: {', '.join(report.guests_in_no_spec)}", "", "  "))
    return "\n".join(lines)


def status_text(report: StatusReport, messages: bool) -> str:
    """One line an object, and what runs; with ``messages``, what is the matter with each that is not ready too."""
    rows = []
    more: list[str] = []
    for obj in report.objects:
        ready = next(c for c in obj.conditions if c.type == "Ready")
        true = [c.type for c in obj.conditions if c.status == "True"]
        stalled = "suspended" if "Suspended" in true else "yes" if "Stalled" in true else ""
        colour = {"True": "green", "False": "yellow", "Unknown": "red"}[ready.status]
        since = ago(report.at - ready.since) if ready.since is not None else ""
        rows.append((obj.object, obj.host, click.style(ready.status, fg=colour), since, ready.reason, stalled))
        if messages and (ready.status != "True" or stalled):
            telling = [c.message for c in obj.conditions if c is ready or (c.type in true and c.type in _TELLING)]
            more += [f"{obj.object}:", *(wrapped(message) for message in dict.fromkeys(telling) if message)]
    head = ("OBJECT", "HOST", "READY", "SINCE", "REASON", "STALLED")
    known = any(row[3] for row in rows)  # without a memory there is nothing to say
    lines = [table(*((head, rows) if known else ((*head[:3], *head[4:]), [(*r[:3], *r[4:]) for r in rows])))]
    lines += [
        wrapped(f"{row.id} for {row.object}, {row.state}", f"at work on {row.host}: ", "  ") for row in report.running
    ]
    return "\n".join(lines + more)


_TELLING = ("Stalled", "Suspended")


def ago(seconds: float) -> str:
    """How long something has been so, in its largest unit: 40s, 5m, 3h, 12d."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def why_text(report: WhyReport) -> str:
    """The layers of an object, one a line, with all that is known of those that are not right."""
    lines = [f"{report.object}:", *(wrapped(suspension) for suspension in report.suspended)]
    for row in report.layers:
        name = f"{row.object} {row.layer}"
        if row.verdict in ("ok", "skipped"):
            lines.append(wrapped(f"{name}: {row.message}" if row.message else name, f"  {row.verdict:<8} ", " " * 11))
            continue
        since = f", for {ago(report.at - row.since)}" if row.since is not None else ""
        lines.append(f"  {row.verdict:<8} {name}: {click.style(row.reason, fg=_VERDICT[row.verdict])}{since}")
        lines.append(wrapped(row.message, " " * 11))
        lines += [wrapped(f"{key}: {value}", " " * 13, " " * 15) for key, value in row.evidence.items()]
        lines += [wrapped(row.waits_for, " " * 11)] if row.waits_for else []
    return "\n".join(lines)


_VERDICT = {"unknown": "red", "drift": "yellow"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as what is in them, two spaces between."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(click.unstyle(line[n])) for line in lines) for n in range(len(head))]

    def padded(line: Sequence[str]) -> str:
        cells = (cell + " " * (widths[n] - len(click.unstyle(cell))) for n, cell in enumerate(line))
        return "  ".join(cells).rstrip()

    return "\n".join([click.style(padded(lines[0]), bold=True), *(padded(line) for line in lines[1:])])


def key_text(shown: Shown) -> str:
    """The key of a server, for people who are to say whether it is the right one."""
    lines = [f"{shown.endpoint.known_as}, for {shown.endpoint.host}: {shown.key}"]
    if shown.trusted:
        return "\n".join([*lines, wrapped(f"trusted already, by {shown.where}")])
    if shown.changed:
        lines.append(wrapped(f"this is ANOTHER key than the one known by {shown.where}: {', '.join(shown.known)}"))
    lines.append("  compare it, on the host itself, with what this says:")
    lines.append("    ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub")
    return "\n".join(lines)


def begin_text(step: Step) -> str:
    """A step that is begun."""
    return wrapped(f"{step.action} {step.object}: {step.summary}", "begin:  ", " " * 8)


def ended_text(ended: Ended, seconds: float) -> str:
    """A step that has ended, after so many seconds; of a job, that it has begun and goes on by itself."""
    colour = {Result.WORKED: "green", Result.FAILED: "red", Result.REFUSED: "red"}.get(ended.result, "yellow")
    step = ended.step
    if step.job is not None and ended.result is Result.WORKED:
        return f"job:    {step.action} {step.object} goes on by itself on {step.hosts[0]}"
    head = f"{click.style(ended.result, fg=colour)}: {step.action} {step.object} ({seconds_text(seconds)})"
    return head if ended.result is Result.WORKED else f"{head}\n{wrapped(ended.message, ' ' * 8)}"


def once_text(report: OnceReport, lacking: Sequence[tuple[Step, Sequence[Disruption]]]) -> str:
    """What a pass has left undone, each with its way out, and what it comes to."""
    lines: list[str] = []
    for step, missing in lacking:
        what = f"{step.action} {step.object}"
        if missing:
            lines.append(wrapped(f"{what} needs {', '.join(map(str, missing))}", "waits:  ", " " * 8))
            lines.append("        give it with " + " ".join(f"--allow {d}" for d in missing))
        else:
            lines.append(
                wrapped(f"{what}: {step.object} is only reported on (policy: mode: report)", "waits:  ", " " * 8)
            )
    for step_id, why in report.waiting_for_window.items():
        lines.append(wrapped(f"{step_id}: {why}; --ignore-windows does not wait for it", "waits:  ", " " * 8))
    for step_id, why in report.suspended.items():
        lines.append(wrapped(f"{step_id}: {why}; `reconcile resume` ends that", "waits:  ", " " * 8))
    for row in report.blocked:
        lines.append(f"blocked: {row.object} {row.layer}: {row.reason}")
        lines.append(wrapped(f"{row.message}. To do: {row.needs}", " " * 9))
    if report.unknown:
        lines.append(_unknown(report.unknown, "unknown: "))
    lines.append(_outcome(report, len(lacking)))
    return "\n".join(lines)


def _outcome(report: OnceReport, lacking: int) -> str:
    done = sum(1 for row in report.performed if row.result == Result.WORKED)
    if report.in_wanted_state:
        if not done:
            return click.style("Everything is as the specs say. Nothing was done.", fg="green")
        return click.style(f"Everything is as the specs say, after {counted(done, 'step')}.", fg="green")
    what = [f"{counted(done, 'step')} worked"]
    what += [f"{len(report.failed)} failed"] if report.failed else []
    what += [f"{lacking} not permitted"] if lacking else []
    what += [f"{len(report.waiting_for_window)} outside a window"] if report.waiting_for_window else []
    what += [f"{len(report.suspended)} suspended"] if report.suspended else []
    what += [f"{len(report.blocked)} blocked"] if report.blocked else []
    what += [f"{len(report.unknown)} unknown"] if report.unknown else []
    what += ["time is up, and something still runs"] if report.timed_out else []
    said = f"Not everything is as the specs say: {', '.join(what)}. `reconcile why OBJECT` tells more."
    return wrapped(said, "")
