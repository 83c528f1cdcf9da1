"""What all commands have in common: their options, what they open, and how they end."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from controller.core import conditions, suspension
from controller.core.conditions import Condition
from controller.core.next_steps import Next
from controller.core.permissions import Grants
from controller.core.plan import Plan, PlanLoop, plan
from controller.core.words import Disruption
from controller.engines import checking
from controller.layers.order import ORDER
from controller.report import model, tell, text
from controller.run import secrets, session, state
from controller.run import specs as spec_files
from controller.run.git import commit_of
from controller.run.memory import Memory
from controller.run.records import Records
from controller.spec.load import SpecErrors, load
from controller.spec.model import Specs
from controller.spec.policy import Permission
from controller.spec.ref import Ref

OK, COULD_NOT, NOT_RIGHT = 0, 1, 2
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Common:
    """The options that every command takes."""

    specs: str | None
    fleet: str
    state: str | None
    host: tuple[str, ...]
    object: tuple[str, ...]
    layer: tuple[str, ...]
    read_only: bool
    output: str
    verbose: int
    no_color: bool

    @property
    def json(self) -> bool:
        """Whether JSON was asked for."""
        return self.output == "json"


_COMMON = (
    click.option("--specs", metavar="DIR", help="Where the spec files are [RECONCILE_SPECS, else specs]."),
    click.option(
        "--fleet", default="ssh", show_default=True, metavar="ssh|sim:FILE", help="Real hosts, or a simulated fleet."
    ),
    click.option(
        "--state",
        metavar="DIR",
        help="Where the controller remembers [RECONCILE_STATE, else reconcile in XDG_STATE_HOME or ~/.local/state].",
    ),
    click.option("--host", multiple=True, metavar="NAME", help="Only this host and what lives on it."),
    click.option("--object", multiple=True, metavar="KIND/NAME", help="Only this object and what it stands on."),
    click.option("--layer", multiple=True, metavar="NAME", help="Only this layer."),
    click.option("--read-only", is_flag=True, help="Start nothing on any host, whatever else is asked."),
    click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Text, or JSON."),
    click.option("-v", "--verbose", count=True, help="Say more; twice for everything."),
    click.option("--no-color", is_flag=True, help="Plain text, also on a terminal [NO_COLOR]."),
)


def common(function: F) -> F:
    """Give a command the common options, as one ``Common``; they may stand before the command's name too."""

    def wrapper(**options: Any) -> Any:
        context = click.get_current_context()
        given = {name: options.pop(name) for name in Common.__dataclass_fields__}
        shared = _with_those_before(context, Common(**given))
        context.obj = shared
        _prepare(shared, context)
        try:
            return function(shared, **options)
        except Ends as end:
            if shared.json:
                print_json(model.ErrorsReport(errors=end.errors))
            raise

    update_wrapper(wrapper, function)
    for option in reversed(_COMMON):
        wrapper = option(wrapper)
    return wrapper  # type: ignore[return-value]  # click's decorators keep the function


def _with_those_before(context: click.Context, own: Common) -> Common:
    """A command's options, and those that stood before its name where it was not given the same."""
    before = context.parent.obj if context.parent is not None else None
    if not isinstance(before, Common):
        return own
    merged = {}
    for name in Common.__dataclass_fields__:
        earlier, later = getattr(before, name), getattr(own, name)
        if isinstance(earlier, tuple) or name == "verbose":
            merged[name] = earlier + later
        elif context.get_parameter_source(name) is ParameterSource.DEFAULT:
            merged[name] = earlier
        else:
            merged[name] = later
    return Common(**merged)


def _prepare(shared: Common, context: click.Context) -> None:
    level = {0: logging.WARNING, 1: logging.INFO}.get(shared.verbose, logging.DEBUG)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger().setLevel(level)
    logging.getLogger("paramiko").setLevel(logging.DEBUG if level == logging.DEBUG else logging.CRITICAL)
    if shared.no_color or os.environ.get("NO_COLOR"):
        context.color = False


class Ends(click.ClickException):
    """A command that could not be carried out, why, and its exit code."""

    def __init__(self, message: str, code: int = COULD_NOT, errors: list[model.ErrorRow] | None = None) -> None:
        super().__init__(message)
        self.errors = errors or [model.ErrorRow(message=message)]
        self.__dict__["exit_code"] = code  # click declares it for the class, and reads it from the instance

    def show(self, file: Any = None) -> None:
        """Print the message, and nothing else, on stderr; on a terminal it is wrapped."""
        one_line = "\n" not in self.message
        click.echo(text.wrapped(self.message, "", "  ") if one_line and sys.stderr.isatty() else self.message, err=True)


def print_json(report: model.Printed) -> None:
    """Print a report as JSON, without characters that could move a terminal's cursor."""
    plain = report.model_dump(exclude_none=isinstance(report, model.PlanReport))
    click.echo(text.clean(json.dumps(plain, indent=2, ensure_ascii=False)))


def load_specs(shared: Common, code: int = NOT_RIGHT) -> Specs:
    """The specs, or the end of the command, with every error in them and this exit code."""
    where = spec_files.directory(shared.specs)
    try:
        specs = load(spec_files.read(where), check_server=checking.problems)
        for path in spec_files.passed_over(where):
            click.echo(f"{path} is not read: a spec file's name ends in .yaml", err=True)
    except SpecErrors as errors:
        rows = [model.ErrorRow.model_validate(error.as_json()) for error in errors.errors]
        raise Ends(str(errors).rstrip("\n"), code, rows) from None
    except spec_files.NoSpecs as error:
        raise Ends(str(error), code) from None
    return dataclasses.replace(specs, secrets=secrets.read(specs.fleet.secrets))


@contextmanager
def opened(shared: Common, specs: Specs) -> Iterator[session.Session]:
    """The world to work with, closed at the end, however the command ends."""
    state_dir = state.directory(shared.state)
    try:
        narrowed = session.narrow(specs, shared.host, shared.object, shared.layer)
        work = session.open_session(specs, shared.fleet, state_dir, narrowed)
    except (session.Mistake, state.NoState) as error:
        raise Ends(str(error)) from None
    for note in work.notes:
        click.echo(note, err=True)
    try:
        yield work
    except state.NoState as error:
        raise Ends(str(error)) from None
    finally:
        try:
            work.close()
        except OSError as error:
            raise Ends(str(state.NoState(state_dir, error))) from None


def look(shared: Common, work: session.Session) -> Next:
    """Look at every host that matters, and work out what follows."""
    with tell.busy(f"looking at {text.counted(len(work.hosts), 'host')}", shared.json):
        return work.look()


def planned(shared: Common, work: session.Session) -> Plan:
    """Look, and predict the whole chain of steps."""
    look(shared, work)
    try:
        return plan(ORDER, work.specs, work.eyes.facts, work.narrowed.takes)
    except PlanLoop as loop:
        raise Ends(f"{loop}; this is a defect of reconcile, please report it with `reconcile snapshot`") from None


@contextmanager
def remembering(shared: Common) -> Iterator[Memory]:
    """The memory alone: for what has to be possible whatever is wrong with specs and hosts."""
    try:
        memory = Memory.open(session.memory_dir(shared.fleet, state.directory(shared.state)))
        for note in memory.notes:
            click.echo(note, err=True)
        try:
            yield memory
        finally:
            memory.close()
    except state.NoState as error:
        raise Ends(str(error)) from None


def now(shared: Common) -> float:
    """The time now by the fleet's clock, in UNIX seconds."""
    try:
        return session.clock_of(shared.fleet, state.directory(shared.state)).date().timestamp()
    except (session.Mistake, state.NoState) as error:
        raise Ends(str(error)) from None


def recorder(shared: Common, work: session.Session) -> Records:
    """The records of what this command does. Raises NoState."""
    state_dir = state.directory(shared.state)
    where = session.memory_dir(shared.fleet, state_dir)
    commit = commit_of(spec_files.directory(shared.specs))
    return Records(work.memory, where, state.identity(state_dir), work.specs, commit)


def conditions_of(
    work: session.Session, refs: Iterable[Ref], upcoming: Next, grants: Grants, failed: Mapping[str, str]
) -> dict[Ref, tuple[Condition, ...]]:
    """The conditions of objects. ``failed`` says of steps how they failed. Raises NoState."""
    suspensions = work.memory.suspensions(work.at)
    lacking = {
        s.id: ", ".join(map(str, grants.missing(s))) or "mode: enforce" for s in upcoming.ready if not grants.may(s)
    }
    stopped = suspension.stopped(upcoming.ready, suspensions, work.specs)
    return conditions.of_all(list(refs), upcoming, lacking, failed, stopped, suspensions)


def remembered(work: session.Session) -> model.Remembered:
    """What is shown of the memory beside what is seen now. Raises NoState."""
    return model.Remembered(
        work.at,
        work.memory.conditions(),
        work.memory.drifts(),
        work.memory.suspensions(work.at),
        work.memory.backoffs(),
    )


def looked_at(work: session.Session) -> list[Ref]:
    """The objects that a command is about and whose hosts it has looked at."""
    seen = work.eyes.facts
    return [
        obj.ref
        for obj in work.specs
        if work.narrowed.takes(obj.ref, "")
        and all(ref.name in seen for ref in work.specs.below(obj.ref) if ref.kind == "Host")
    ]


def permission(specs: Specs, one: str, option: str) -> Disruption:
    """What somebody named as CLASS:OBJECT, the object perhaps in no spec; ``option`` is where they did."""
    name, _, obj = one.partition(":")
    if name not in set(Permission):
        raise Ends(f"cannot give {one}: there is no class {name}; {session.there_are(name, Permission)}")
    try:
        ref = Ref.parse(obj) if "/" in obj else session.find(specs, obj)
    except (ValueError, session.Mistake) as error:
        raise Ends(f"cannot give {one}, write CLASS:KIND/NAME: {error}") from None
    if specs.get(ref) is None:  # not an error: another tenant's guest, which a step may disrupt, is in no spec
        close = session.there_are(str(ref), [str(o.ref) for o in specs])
        click.echo(f"{option} {one}: no spec has {ref}" + (f"; {close}" if "mean" in close else ""), err=True)
    return Disruption(ref, Permission(name))


def given_on(specs: Specs, allow: tuple[str, ...]) -> frozenset[Disruption]:
    """The permissions that the command line gives."""
    return frozenset(permission(specs, one, "--allow") for one in allow)


def found(specs: Specs, name: str) -> Ref:
    """An object by what somebody called it, or the end of the command."""
    try:
        return session.find(specs, name)
    except session.Mistake as mistake:
        raise Ends(str(mistake)) from None


def confirmed(question: str) -> bool:
    """Ask; nobody there to answer is a no."""
    try:
        return click.confirm(question)
    except click.Abort:  # nobody is there to answer
        click.echo()
        return False
