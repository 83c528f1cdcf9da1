"""``status``, ``gpus``, ``wait``: how everything is now."""

from __future__ import annotations

import dataclasses
import sys

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from controller.commands.common import (
    COULD_NOT,
    NOT_RIGHT,
    OK,
    Common,
    Ends,
    common,
    conditions_of,
    found,
    load_specs,
    look,
    opened,
    print_json,
    remembered,
)
from controller.core.conditions import Condition, Status, Type
from controller.core.next_steps import Next
from controller.report import gpus as cards
from controller.report import model, text
from controller.run import session
from controller.spec.ref import Ref

PERIOD = 5.0  # seconds between looks while something is watched or waited for


@click.command()
@click.argument("name", metavar="[OBJECT]", required=False)
@click.option("--watch", is_flag=True, help="Show it on the terminal as it changes, until stopped.")
@common
def status(shared: Common, name: str | None, watch: bool) -> None:
    """Say how every object is, or one of them, and what is at work now."""
    specs = load_specs(shared)
    one = found(specs, name) if name else None
    if watch and (shared.json or not sys.stdout.isatty()):
        raise Ends(
            "cannot watch: stdout is no terminal, or JSON is asked for; `reconcile events --follow` can be piped"
        )
    messages = one is not None or shared.verbose > 0
    with opened(shared, specs) as work:
        if watch:
            _watch(shared, work, one, messages)
        report = _status(work, one, look(shared, work))
        if shared.json:
            print_json(report)
        else:
            click.echo(text.status_text(report, messages))
        raise click.exceptions.Exit(_code(work, report))


def _status(work: session.Session, one: Ref | None, upcoming: Next) -> model.StatusReport:
    takes = work.narrowed.takes
    seen = dataclasses.replace(upcoming, judged=tuple(j for j in upcoming.judged if takes(j.object, j.layer)))
    refs = [one] if one is not None else [obj.ref for obj in work.specs if takes(obj.ref, "")]
    told = conditions_of(work, refs, seen, work.grants(), _failed(work, seen))
    return model.status_report(work.specs, seen, told, model.running_rows(work.eyes.facts), remembered(work))


def _failed(work: session.Session, upcoming: Next) -> dict[str, str]:
    """The steps that a running controller has tried in vain, and how they failed."""
    backoffs = work.memory.backoffs()
    tried = ((step.id, backoffs.get((step.object, step.layer, step.action))) for step in upcoming.ready)
    return {step: backoff.message for step, backoff in tried if backoff is not None and backoff.message}


def _code(work: session.Session, report: model.StatusReport) -> int:
    asked = [row for row in report.objects if not work.excused(Ref.parse(row.object))]
    ready = {c.status for row in asked for c in row.conditions if c.type == Type.READY}
    return COULD_NOT if Status.UNKNOWN in ready else NOT_RIGHT if Status.FALSE in ready else OK


def _watch(shared: Common, work: session.Session, one: Ref | None, messages: bool) -> None:
    """Show the status again and again. Ends the command when it is stopped."""
    console = Console(no_color=shared.no_color or None)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                said = text.status_text(_status(work, one, work.look()), messages)
                live.update(
                    Text.from_ansi(f"{said}\n\n{work.clock.date():%Y-%m-%d %H:%M:%S} UTC, Ctrl-C ends"), refresh=True
                )
                work.clock.wait(PERIOD)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(OK) from None


@click.command()
@common
def gpus(shared: Common) -> None:
    """Say who has which card of every host, how full it is, and what is pending."""
    specs = load_specs(shared)
    with opened(shared, specs) as work:
        upcoming = look(shared, work)
        hosts = [name for name in specs.hosts if work.narrowed.takes(Ref("Host", name), "")]
        report = cards.gpus_report(specs, work.eyes.facts, upcoming, hosts)
        if shared.json:
            print_json(report)
        else:
            click.echo(cards.gpus_text(report))
        unknown = any(not work.excused(Ref.parse(row.object)) for row in report.unknown)
        pending = any(row.pending for row in report.gpus)
        raise click.exceptions.Exit(COULD_NOT if unknown else NOT_RIGHT if pending else OK)


@click.command()
@click.argument("name", metavar="OBJECT")
@click.option(
    "--for", "wanted", default="Ready", show_default=True, metavar="CONDITION[=STATUS]", help="What to wait for."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait.",
)
@common
def wait(shared: Common, name: str, wanted: str, timeout: float) -> None:
    """Look again and again until an object has a condition. Does nothing else: something else has to bring it about.

    Exits 0 when it has, 2 when it has not in time, and 1 when that could not be seen.
    """
    specs = load_specs(shared, COULD_NOT)
    ref = found(specs, name)
    kind, status = _condition(wanted)
    with opened(shared, specs) as work:
        began, said = work.clock.now(), ""
        while True:
            condition = _present(work, ref, kind, look(shared, work))
            seconds = work.clock.now() - began
            reached = condition.status == status
            told = f"{ref} {kind} is {condition.status} ({condition.reason})" + (
                f": {condition.message}" if condition.message else ""
            )
            if told != said and not shared.json:
                click.echo(text.wrapped(told, "", "  "))
                sys.stdout.flush()  # a reader of a pipe is to see it when it happens
            said = told
            if reached or seconds >= timeout:
                break
            work.clock.wait(min(PERIOD, timeout - seconds))
        if shared.json:
            row = model.ConditionRow(
                type=kind,
                status=condition.status,
                reason=condition.reason,
                message=condition.message,
                since=remembered(work).since(ref, condition),
            )
            print_json(
                model.WaitReport(
                    object=str(ref), condition=row, wanted=f"{kind}={status}", reached=reached, seconds=seconds
                )
            )
        elif not reached:
            click.echo(f"it was not {kind}={status} within {text.seconds_text(timeout)}", err=True)
        unseen = condition.status is Status.UNKNOWN
        raise click.exceptions.Exit(OK if reached else COULD_NOT if unseen else NOT_RIGHT)


def _condition(wanted: str) -> tuple[Type, Status]:
    name, _, status = wanted.partition("=")
    status = status or Status.TRUE
    if name not in set(Type):
        raise Ends(f"cannot wait for {wanted}: there is no condition {name}; {session.there_are(name, Type)}")
    if status not in set(Status):
        raise Ends(f"cannot wait for {wanted}: a condition is True, False or Unknown")
    return Type(name), Status(status)


def _present(work: session.Session, ref: Ref, kind: Type, upcoming: Next) -> Condition:
    told = conditions_of(work, [ref], upcoming, work.grants(), _failed(work, upcoming))[ref]
    return next(condition for condition in told if condition.type is kind)
