"""The command line: reads options, calls what does the work, prints, and ends with the documented exit code."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, TypeVar

import click
from pydantic import BaseModel

import controller
from controller.core import conditions
from controller.core.permissions import Grants, asked_for
from controller.core.plan import Plan, PlanLoop, plan
from controller.core.words import Block, Disruption, Drift, InSync, Skipped, Step, Unseen, Wait
from controller.layers.order import ORDER
from controller.report import model, text
from controller.run import session, state
from controller.run import specs as spec_files
from controller.run.once import Ended, Pass, Report
from controller.spec.load import SpecErrors, load
from controller.spec.model import Specs
from controller.spec.policy import Permission
from controller.spec.ref import Ref
from controller.spec.schema import schema as spec_schema
from controller.world.fleet import SshWorld
from controller.world.keys import NotPinned
from controller.world.sim.snapshot import snapshot as snapshot_of
from controller.world.transport import HostError

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
    click.option("--state", metavar="DIR", help="Where the controller remembers [RECONCILE_STATE]."),
    click.option("--host", multiple=True, metavar="NAME", help="Only what lives on this host."),
    click.option("--object", multiple=True, metavar="KIND/NAME", help="Only this object and what it stands on."),
    click.option("--layer", multiple=True, metavar="NAME", help="Only this layer."),
    click.option("--read-only", is_flag=True, help="Start nothing on any host, whatever else is asked."),
    click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Text, or JSON."),
    click.option("-v", "--verbose", count=True, help="Say more; twice for everything."),
    click.option("--no-color", is_flag=True, help="Plain text, also on a terminal."),
)


def common(function: F) -> F:
    """Give a command the common options, as one ``Common``."""

    def wrapper(**options: Any) -> Any:
        names = Common.__dataclass_fields__
        shared = Common(**{name: options.pop(name) for name in names})
        _prepare(shared)
        return function(shared, **options)

    update_wrapper(wrapper, function)
    for option in reversed(_COMMON):
        wrapper = option(wrapper)
    return wrapper  # type: ignore[return-value]  # click's decorators keep the function


def _prepare(shared: Common) -> None:
    level = {0: logging.WARNING, 1: logging.INFO}.get(shared.verbose, logging.DEBUG)
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if level > logging.DEBUG:
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)
    if shared.no_color:
        context = click.get_current_context()
        context.color = False


class Ends(click.ClickException):
    """A command that ends early, with a message and an exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.__dict__["exit_code"] = code  # click declares it for the class, and reads it from the instance

    def show(self, file: Any = None) -> None:
        """Print the message, and nothing else, on stderr."""
        click.echo(self.message, err=True)


def _load(shared: Common, code: int = NOT_RIGHT) -> Specs:
    """The specs, or the end of the command, with every error in them and this exit code."""
    try:
        return load(spec_files.read(spec_files.directory(shared.specs)))
    except SpecErrors as errors:
        if shared.json:
            click.echo(json.dumps(errors.as_json(), indent=2))
        raise Ends(str(errors), code) from None
    except (spec_files.NoSpecs, OSError) as error:
        raise Ends(str(error), code) from None


def _open(shared: Common, specs: Specs) -> session.Session:
    try:
        narrowed = session.narrow(specs, shared.host, shared.object, shared.layer)
        work = session.open_session(specs, shared.fleet, state.directory(shared.state), narrowed)
    except session.Mistake as mistake:
        raise Ends(str(mistake), COULD_NOT) from None
    for note in work.notes:
        click.echo(note, err=True)
    return work


def _planned(work: session.Session) -> Plan:
    work.look()
    try:
        return plan(ORDER, work.specs, work.eyes.facts)
    except PlanLoop as loop:
        raise Ends(
            f"{loop}; this is a defect of reconcile, please report it with `reconcile snapshot`", COULD_NOT
        ) from None


def _grants(specs: Specs, allow: tuple[str, ...]) -> Grants:
    given = set()
    for one in allow:
        name, _, obj = one.partition(":")
        try:
            permission, ref = Permission(name), Ref.parse(obj)
        except ValueError:
            classes = ", ".join(Permission)
            raise Ends(
                f"cannot read --allow {one}: write CLASS:KIND/NAME; the classes are {classes}", COULD_NOT
            ) from None
        given.add(Disruption(ref, permission))
    return Grants(specs, frozenset(given))


_ONCE = (
    click.option("--once", is_flag=True, help="Make one pass until nothing more can be done now, then exit."),
    click.option("--dry-run", is_flag=True, help="With --once: only show the plan."),
    click.option("--allow", multiple=True, metavar="CLASS:OBJECT", help="Give a permission for this run."),
    click.option("--yes", is_flag=True, help="Give every permission that the shown plan asks for, no more."),
    click.option("--timeout", default=3600.0, show_default=True, help="Seconds to wait for what runs on hosts."),
)


class Group(click.Group):
    """Commands in the order of their writing, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names as they were added."""
        return list(self.commands)


@click.group(cls=Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@common
def main(shared: Common, once: bool, dry_run: bool, allow: tuple[str, ...], yes: bool, timeout: float) -> None:
    """Keep machines that serve language models as their spec files say.

    Start with `reconcile validate`, then `reconcile plan`, then `reconcile --once`.
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    if not once:
        raise Ends("cannot tell what to do: give a command, or --once; `reconcile --help` lists them", COULD_NOT)
    specs = _load(shared, COULD_NOT)
    work = _open(shared, specs)
    try:
        if dry_run or shared.read_only:
            _plan(shared, work, _grants(specs, allow), scripts=False, detailed=False)
        _once(shared, work, _grants(specs, allow), yes, timeout)
    finally:
        work.world.close()


for _option in reversed(_ONCE):
    main = _option(main)


def _once(shared: Common, work: session.Session, grants: Grants, yes: bool, timeout: float) -> None:
    narrowed = work.narrowed
    if yes:
        predicted = _planned(work)
        report = model.plan_report(predicted, work.specs, work.eyes.facts, grants, narrowed.takes, scripts=False)
        if not shared.json:
            click.echo(text.plan_text(report) + "\n")
        asked = asked_for(p.step for p in predicted.steps if narrowed.takes(p.step.object, p.step.layer))
        grants = Grants(work.specs, grants.given | asked)
    else:
        work.look()
    teller = Told(shared.json)
    try:
        with state.Lock(state.directory(shared.state)):
            done = Pass(
                work.world,
                ORDER,
                work.specs,
                grants,
                work.clock,
                teller,
                timeout,
                narrowed.takes,
            ).run(work.eyes)
    except state.StateInUse as busy:
        raise Ends(str(busy), COULD_NOT) from None
    _end_of_once(shared, work, grants, done)


def _end_of_once(shared: Common, work: session.Session, grants: Grants, done: Report) -> None:
    takes = work.narrowed.takes
    unknown = [u for u in model.unknown_rows(done.upcoming, takes) if not work.excused(Ref.parse(u.object))]
    right = model.all_right(done.upcoming, lambda ref, layer: takes(ref, layer) and not work.excused(ref))
    lacking = [s for s in done.upcoming.ready if not grants.may(s) and takes(s.object, s.layer)]
    blocked = [(j, b) for j, b in done.upcoming.blocked if takes(j.object, j.layer)]
    if shared.json:
        click.echo(
            json.dumps(
                {
                    "performed": [
                        {"id": e.step.id, "object": str(e.step.object), "result": e.result, "message": e.message}
                        for e in done.ended
                    ],
                    "in_wanted_state": right,
                    "blocked": [{"object": str(j.object), "layer": j.layer, "reason": b.reason} for j, b in blocked],
                    "waiting_for_permission": [str(d) for s in lacking for d in grants.missing(s)],
                    "unknown": [u.model_dump() for u in unknown],
                    "timed_out": done.timed_out,
                },
                indent=2,
            )
        )
    else:
        for step in lacking:
            click.echo(_waits(step, grants))
        for judged, block in blocked:
            click.echo(f"blocked: {judged.object} {judged.layer}: {block.reason}")
            click.echo(text.wrapped(f"{block.message}. To do: {block.needs}"))
        for row in unknown:
            click.echo(f"unknown: {row.object} {row.layer}: {row.reason}")
            click.echo(text.wrapped(row.message))
        click.echo(text.once_text(done, right, len(blocked), len(unknown), len(lacking)))
    raise click.exceptions.Exit(COULD_NOT if unknown else OK if right and not done.failed else NOT_RIGHT)


def _waits(step: Step, grants: Grants) -> str:
    missing = grants.missing(step)
    if missing:
        allow = " ".join(f"--allow {d}" for d in missing)
        return f"waits: {step.action} {step.object} needs {', '.join(map(str, missing))}\n  give it with {allow}"
    return f"waits: {step.action} {step.object}: {step.object} is only reported on (policy: mode: report)"


class Told:
    """Prints what happens while it happens; nothing when the output is to be JSON."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._waiting = ""

    def started(self, step: Step) -> None:
        """Say what is begun."""
        self._say(f"begin:  {step.action} {step.object} on {', '.join(step.hosts)}: {step.summary}")

    def ended(self, ended: Ended) -> None:
        """Say how it ended."""
        self._say(text.ended_text(ended))

    def waiting(self, message: str) -> None:
        """Say what is waited for, once."""
        if message != self._waiting:
            self._waiting = message
            self._say(f"wait:   {message}")

    def _say(self, line: str) -> None:
        if not self._quiet:
            click.echo(text.clean(line) if "\x1b" not in line else line)


@main.command()
@common
def validate(shared: Common) -> None:
    """Read the specs and say what is wrong with them."""
    specs = _load(shared)
    if shared.json:
        click.echo(json.dumps({"objects": [str(obj.ref) for obj in specs], "errors": []}, indent=2))
        return
    count = len(specs.hosts), len(specs.containers), len(specs.servers)
    click.echo(f"The specs are valid: {count[0]} hosts, {count[1]} containers, {count[2]} model servers.")


@main.command(name="plan")
@click.option("--detailed-exitcode", is_flag=True, help="Exit 2 when there are changes.")
@click.option("--show-scripts", is_flag=True, help="Show each step's script.")
@click.option("--allow", multiple=True, metavar="CLASS:OBJECT", help="Show the plan as if this were given.")
@common
def plan_command(shared: Common, detailed_exitcode: bool, show_scripts: bool, allow: tuple[str, ...]) -> None:
    """Show what differs and everything that would be done about it. Touches nothing."""
    specs = _load(shared)
    work = _open(shared, specs)
    try:
        _plan(shared, work, _grants(specs, allow), show_scripts, detailed_exitcode)
    finally:
        work.world.close()


def _plan(shared: Common, work: session.Session, grants: Grants, scripts: bool, detailed: bool) -> None:
    predicted = _planned(work)
    report = model.plan_report(predicted, work.specs, work.eyes.facts, grants, work.narrowed.takes, scripts)
    click.echo(report.model_dump_json(indent=2, exclude_none=True) if shared.json else text.plan_text(report))
    unknown = any(not work.excused(Ref.parse(row.object)) for row in report.unknown)
    raise click.exceptions.Exit(COULD_NOT if unknown else NOT_RIGHT if detailed and report.changes else OK)


@main.command()
@click.argument("name", metavar="[OBJECT]", required=False)
@common
def status(shared: Common, name: str | None) -> None:
    """Say how every object is, or one of them."""
    specs = _load(shared)
    work = _open(shared, specs)
    try:
        upcoming = work.look()
        refs = [_found(specs, name)] if name else [obj.ref for obj in specs if work.narrowed.takes(obj.ref, "")]
        grants = Grants(specs)
        lacking = {
            s.id: ", ".join(map(str, grants.missing(s))) or "mode: enforce" for s in upcoming.ready if not grants.may(s)
        }
        report = model.status_report(specs, upcoming, conditions.of_all(refs, upcoming, lacking, {}))
        click.echo(report.model_dump_json(indent=2) if shared.json else text.status_text(report))
        ready = [(row, c.status) for row in report.objects for c in row.conditions if c.type == "Ready"]
        if any(s == "Unknown" and not work.excused(Ref.parse(row.object)) for row, s in ready):
            raise click.exceptions.Exit(COULD_NOT)
        raise click.exceptions.Exit(
            OK if all(s == "True" or work.excused(Ref.parse(r.object)) for r, s in ready) else NOT_RIGHT
        )
    finally:
        work.world.close()


def _found(specs: Specs, name: str) -> Ref:
    try:
        return session.find(specs, name)
    except (session.Mistake, ValueError) as mistake:
        raise Ends(str(mistake), COULD_NOT) from None


@main.command()
@click.argument("name", metavar="OBJECT")
@common
def why(shared: Common, name: str) -> None:
    """Say what is the first layer of an object that is not right, and what it waits for."""
    specs = _load(shared)
    ref = _found(specs, name)
    work = _open(shared, specs)
    try:
        upcoming = work.look()
        grants = Grants(specs)
        lines = [f"{ref}:"]
        for part in reversed(session.below(specs, ref)):
            for judged in (j for j in upcoming.judged if j.object == part):
                match judged.verdict:
                    case InSync(note):
                        lines.append(f"  ok       {part} {judged.layer}" + (f": {note}" if note else ""))
                    case Skipped(reason):
                        lines.append(f"  skipped  {part} {judged.layer}" + (f": {reason}" if reason else ""))
                    case Unseen(reason, message):
                        lines += [f"  unknown  {part} {judged.layer}: {reason}", text.wrapped(message, "           ")]
                    case Drift() as drift:
                        lines += [
                            f"  drift    {part} {judged.layer}: {drift.reason}",
                            text.wrapped(drift.message, "           "),
                        ]
                        lines += [text.wrapped(f"{k}: {v}", "             ") for k, v in drift.evidence.items()]
                        lines += [text.wrapped(_remedy(drift, judged.held, grants), "           ")]
        click.echo("\n".join(text.clean(line) for line in lines))
    finally:
        work.world.close()


def _remedy(drift: Drift, held: str, grants: Grants) -> str:
    match drift.remedy:
        case Block(_, message, needs):
            return f"blocked: {message}. To do: {needs}"
        case Wait(what, message, _):
            return f"waits for a {what}: {message}"
        case Step() as step if held and not step.independent:
            return f"waits for {held}; then: {step.summary}"
        case Step() as step if not grants.may(step):
            missing = ", ".join(map(str, grants.missing(step))) or f"mode: enforce of {step.object}"
            return f"waits for a permission: {missing}; then: {step.summary}"
        case step:
            return f"next: {step.summary}"


@main.command()
@common
def snapshot(shared: Common) -> None:
    """Print the observed fleet as a file that --fleet sim:FILE loads, to rehearse on."""
    specs = _load(shared)
    work = _open(shared, specs)
    try:
        work.look()
        missing = sorted(name for name, facts in work.eyes.facts.items() if facts.failure is not None)
        click.echo(snapshot_of(work.eyes.facts, specs), nl=False)
        if missing:
            raise Ends(
                f"these hosts could not be observed and are out of reach in the snapshot too: {', '.join(missing)}",
                COULD_NOT,
            )
    finally:
        work.world.close()


@main.command()
@click.argument("host")
@click.option("--yes", is_flag=True, help="Pin without asking.")
@click.option("--replace", is_flag=True, help="Pin it in place of another key that is known for the host.")
@common
def trust(shared: Common, host: str, yes: bool, replace: bool) -> None:
    """Show the key of a host (and of each host on the way to it), and pin it."""
    specs = _load(shared)
    if host not in specs.hosts:
        raise Ends(f"cannot trust {host}: no spec has it; there are {', '.join(specs.hosts) or 'no hosts'}", COULD_NOT)
    world = SshWorld(specs, state.directory(shared.state), state.identity(state.directory(shared.state)), ORDER)
    try:
        for shown in world.host_keys(host):
            click.echo(f"{shown.endpoint.host} ({shown.endpoint.known_as}): {shown.key}")
            if shown.trusted:
                click.echo(f"  trusted already, by {shown.where}")
                continue
            if shown.changed:
                click.echo(f"  this is ANOTHER key than the one known by {shown.where}: {', '.join(shown.known)}")
            click.echo("  compare it with: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub   (run on the host itself)")
            if not yes and not click.confirm("  pin it?"):
                raise Ends("nothing was pinned", COULD_NOT)
            world.pin(shown, replace=replace)
            click.echo("  pinned")
    except (HostError, NotPinned) as error:
        raise Ends(f"cannot trust {host}: {error}", COULD_NOT) from None
    finally:
        world.close()


@main.command()
@click.argument("what", type=click.Choice(["spec", "plan", "status"]), default="spec")
def schema(what: str) -> None:
    """Print the JSON Schema of spec files, or of what `plan` or `status` print."""
    shapes: dict[str, type[BaseModel]] = {"plan": model.PlanReport, "status": model.StatusReport}
    click.echo(json.dumps(shapes[what].model_json_schema() if what in shapes else spec_schema(), indent=2))


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(f"reconcile {controller.__version__}")
