"""``reconcile run``: the loop."""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType

import click
import structlog

from controller.commands.common import Common, Ends, common
from controller.layers.order import ORDER
from controller.report.serve import DEFAULT, CannotListen, Listen, Server
from controller.run import session, state
from controller.run import specs as spec_files
from controller.run.daemon import Daemon
from controller.run.git import commit_of
from controller.run.loop import Loop
from controller.run.memory import Memory
from controller.run.picture import Board
from controller.run.records import Records
from controller.spec.model import Specs

_log = logging.getLogger(__name__)


@click.command()
@click.option(
    "--listen",
    default=DEFAULT,
    show_default=True,
    metavar="HOST:PORT",
    help="Where to serve /metrics, /healthz, /readyz and /status.",
)
@common
def run(shared: Common, listen: str) -> None:
    """Watch specs and hosts, and put right what differs, until stopped.

    SIGTERM and Ctrl-C stop it when the steps at work have ended; asked a second time, at once. What was begun on a host
    ends there by itself, and the next start goes on from what it finds.
    """
    run_loop(shared, listen)


def run_loop(shared: Common, listen: str = DEFAULT) -> None:
    """The loop, until it is stopped."""
    if shared.host or shared.object or shared.layer:
        raise click.UsageError("the loop looks after all objects; --host, --object and --layer are for other commands.")
    if shared.read_only:
        raise click.UsageError(
            "--read-only is for other commands; with `policy: {mode: report}` the loop touches nothing."
        )
    state_dir = state.directory(shared.state)
    try:
        address = Listen.parse(listen)
        with _logging(shared), state.Lock(state_dir):
            _run(shared, address)
    except (ValueError, CannotListen, session.Mistake, state.NoState, state.StateInUse) as error:
        raise Ends(str(error)) from None


def _run(shared: Common, address: Listen) -> None:
    where, state_dir = spec_files.directory(shared.specs), state.directory(shared.state)
    controller = state.identity(state_dir)
    kept = session.memory_dir(shared.fleet, state_dir)
    memory = Memory.open(kept)
    if not where.exists() and not memory.last_good():  # with something to remember, it goes on and says what is missing
        raise Ends(f"cannot find specs: there is no {where}; name a folder with --specs DIR or RECONCILE_SPECS")
    world, _ = session.open_world(Specs(), shared.fleet, state_dir)
    board = Board()
    records = Records(memory, kept, controller, Specs(), commit_of(where))
    daemon = Daemon(Loop(ORDER, records, board, random.Random()), world, where, memory, board)  # noqa: S311 - jitter
    for note in memory.notes:
        _log.warning("%s", note)
    with contextlib.closing(memory), contextlib.closing(world), Server(address, board) as server, _signals(daemon):
        _log.info("looking after %s as %s; see http://%s", where, controller.name, server.listen)
        daemon.run()
        _log.info("stopped")


@contextmanager
def _signals(daemon: Daemon) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        daemon.stop()

    before = {one: signal.signal(one, stop) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def _logging(shared: Common) -> Iterator[None]:
    """Log for people on a terminal, in JSON lines elsewhere (or with ``-o json``)."""
    plain = sys.stderr.isatty() and not shared.json
    render = structlog.dev.ConsoleRenderer(colors=not shared.no_color) if plain else structlog.processors.JSONRenderer()
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.ExtraAdder(),
            _with_about,
            lambda _, __, fields: {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields},
            structlog.processors.format_exc_info,
        ],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = [handler]
    root.setLevel(min(level, logging.INFO))
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def _with_about(logger: object, name: str, fields: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """What an event of the controller's is about, as fields of the line."""
    about = fields.pop("about", {})
    return {**fields, **about}
