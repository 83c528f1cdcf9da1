"""``events`` and ``history``: what was done, when, by which change, with what result."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from controller.commands.common import Common, Ends, common, now, print_json, remembering
from controller.commands.times import since as since_time
from controller.report import model, past, text
from controller.run import session
from controller.run.memory import Event, Memory
from controller.spec.ref import Ref

SHOWN = 50  # the last events, where nothing says since when
POLL = 0.5  # seconds between two looks for what another process has written


@click.command()
@click.argument("name", metavar="[OBJECT]", required=False)
@click.option("--since", metavar="2h|TIME", help="From so long ago, or from a time on: 2026-12-24T18:00, in UTC.")
@click.option("--follow", is_flag=True, help="Go on with what happens, until stopped.")
@common
def events(shared: Common, name: str | None, since: str | None, follow: bool) -> None:
    """Say what happened: steps, conditions, specs, approvals. The last 50, or all --since."""
    with remembering(shared) as memory:
        ref = _remembered(memory, name) if name else None
        start = since_time(since, now(shared)) if since else None
        found = memory.events(ref, since=start, limit=None if start is not None else SHOWN)
        if not follow:
            _print(shared, found)
            return
        with _until_stopped():
            last = max((event.number for event in memory.events(limit=1)), default=0)
            _print_each(shared, found)
            while True:
                new = memory.events(ref, after=last)
                _print_each(shared, new)
                last = max((event.number for event in new), default=last)
                while not memory.changed():
                    time.sleep(POLL)


@click.command()
@click.argument("name", metavar="[OBJECT]", required=False)
@click.option("--diff", is_flag=True, help="Show what changed in each spec.")
@common
def history(shared: Common, name: str | None, diff: bool) -> None:
    """List the specs that were applied, the last one first, and what became of them."""
    with remembering(shared) as memory:
        report = past.history_report(memory.history(_remembered(memory, name) if name else None), diff)
    if shared.json:
        print_json(report)
    else:
        click.echo(past.history_text(report))


def _print(shared: Common, found: list[Event]) -> None:
    if shared.json:
        print_json(model.EventsReport(events=[past.event_row(event) for event in found]))
    elif found:
        _print_each(shared, found)
    else:
        click.echo("Nothing has happened yet, as far as is remembered.")


def _print_each(shared: Common, found: list[Event]) -> None:
    for event in found:
        row = past.event_row(event)
        if shared.json:
            line = json.dumps(model.EventsReport(events=[row]).model_dump(), ensure_ascii=False)
            click.echo(text.clean(line))
        else:
            click.echo(past.event_text(row))
    sys.stdout.flush()  # a reader of a pipe is to see it when it happens


@contextmanager
def _until_stopped() -> Iterator[None]:
    """Until Ctrl-C, which is how this is meant to end."""
    try:
        yield
    except KeyboardInterrupt:
        raise click.exceptions.Exit(0) from None


def _remembered(memory: Memory, name: str) -> Ref:
    """An object that something is remembered of; specs are not read, as it may be in none any more."""
    known = sorted(memory.objects())
    found = [ref for ref in known if name in (ref.name, str(ref))]
    if len(found) > 1:
        raise Ends(f"cannot tell which {name} is meant: {', '.join(map(str, found))}")
    if not found:
        names = [str(ref) if "/" in name else ref.name for ref in known]
        raise Ends(f"cannot find anything that is remembered of {name}; {session.there_are(name, names)}")
    return found[0]
