"""What is told while a command works: lines, and on a terminal what is at work now and for how long."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from controller.core.words import Step
from controller.report import text
from controller.report.model import running_rows
from controller.run.ended import Ended
from controller.run.eyes import Eyes
from controller.run.once import Clock


def _plain() -> bool:
    """Whether colours are not wanted (``--no-color``, NO_COLOR)."""
    context = click.get_current_context(silent=True)
    return context is not None and context.color is False


@contextmanager
def busy(what: str, silent: bool) -> Iterator[None]:
    """Show on a terminal that something goes on, while it does; on stderr, and gone afterwards."""
    console = Console(stderr=True, no_color=_plain())
    if silent or not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    with console.status(what):
        yield


class Told:
    """Prints what a pass does while it does it; nothing when the output is to be JSON.

    On a terminal the steps and jobs that are at work are shown below, with their time and progress. They are drawn on
    stdout, which is where the lines go, so that neither writes over the other.
    """

    def __init__(self, eyes: Eyes, clock: Clock, silent: bool) -> None:
        self._eyes = eyes
        self._clock = clock
        self._silent = silent
        self._waiting = ""
        self._began: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._bars: Progress | None = None
        console = Console(highlight=False, no_color=_plain())
        if not silent and console.is_terminal and not console.is_dumb_terminal:
            self._bars = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def started(self, step: Step) -> None:
        """Say what is begun."""
        self._began[step.id] = self._clock.now()
        self._say(text.begin_text(step))
        self._show(step.id, f"{step.action} {step.object}")

    def ended(self, ended: Ended) -> None:
        """Say how it ended, and after how long."""
        self._hide(ended.step.id)
        now = self._clock.now()
        self._say(text.ended_text(ended, now - self._began.get(ended.step.id, now)))

    def waiting(self, message: str) -> None:
        """Say what is waited for, once, and show how far it is."""
        if message != self._waiting:
            self._waiting = message
            self._say(text.wrapped(message, "wait:   ", " " * 8))
        at_work = {f"{row.host} {row.id}": row for row in running_rows(self._eyes.facts)}
        for gone in self._tasks.keys() - at_work.keys():
            self._hide(gone)
        for key, row in at_work.items():
            self._show(key, f"{row.object} on {row.host}", row.done, row.total)

    def _show(self, key: str, what: str, done: int | None = None, total: int | None = None) -> None:
        if self._bars is None:
            return
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(what, total=None)
        if total:
            self._bars.update(self._tasks[key], completed=done or 0, total=total)

    def _hide(self, key: str) -> None:
        if self._bars is not None and key in self._tasks:
            self._bars.remove_task(self._tasks.pop(key))

    def _say(self, line: str) -> None:
        if self._silent:
            return
        if self._bars is None:
            click.echo(line)
            sys.stdout.flush()  # a reader of a pipe is to see it when it happens
        else:
            self._bars.console.out(click.unstyle(line) if _plain() else line)
