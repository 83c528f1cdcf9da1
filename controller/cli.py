"""The command line: reads options, calls what does the work, prints, and ends with the documented exit code."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, TypeVar

import click
from click.core import ParameterSource

import controller
from controller.core import conditions
from controller.core.next_steps import Next
from controller.core.permissions import Grants, asked_for
from controller.core.plan import Plan, PlanLoop, plan
from controller.core.view import View
from controller.core.words import Disruption
from controller.engines import checking
from controller.layers.order import ORDER
from controller.layers.shared.truth import Impossible
from controller.report import fit, model, tell, text
from controller.run import drain as draining
from controller.run import secrets, session, state
from controller.run import specs as spec_files
from controller.run.once import Pass, Report
from controller.spec.across import gpus_of
from controller.spec.load import SpecErrors, load
from controller.spec.model import Specs
from controller.spec.policy import Permission
from controller.spec.ref import Ref
from controller.spec.schema import schema as spec_schema
from controller.world.fleet import SshWorld
from controller.world.keys import NotPinned, Shown
from controller.world.sim.snapshot import snapshot as snapshot_of
from controller.world.transport import HostError

OK, COULD_NOT, NOT_RIGHT = 0, 1, 2
STOPPING = 3600.0  # seconds that `drain --stop` waits for what is at work on the host
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
                _print_json(model.ErrorsReport(errors=end.errors))
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


def _print_json(report: model.Printed) -> None:
    plain = report.model_dump(exclude_none=isinstance(report, model.PlanReport))
    click.echo(text.clean(json.dumps(plain, indent=2, ensure_ascii=False)))


def _load(shared: Common, code: int = NOT_RIGHT) -> Specs:
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
def _opened(shared: Common, specs: Specs) -> Iterator[session.Session]:
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
    finally:
        try:
            work.world.close()
        except OSError as error:
            raise Ends(str(state.NoState(state_dir, error))) from None


def _look(shared: Common, work: session.Session) -> Next:
    with tell.busy(f"looking at {text.counted(len(work.hosts), 'host')}", shared.json):
        return work.look()


def _planned(shared: Common, work: session.Session) -> Plan:
    _look(shared, work)
    try:
        return plan(ORDER, work.specs, work.eyes.facts, work.narrowed.takes)
    except PlanLoop as loop:
        raise Ends(f"{loop}; this is a defect of reconcile, please report it with `reconcile snapshot`") from None


def _grants(specs: Specs, allow: tuple[str, ...]) -> Grants:
    """What the specs allow and the command line gives."""
    given = set()
    for one in allow:
        name, _, obj = one.partition(":")
        if name not in set(Permission):
            raise Ends(f"cannot give {one}: there is no class {name}; {session.there_are(name, Permission)}")
        try:
            ref = Ref.parse(obj) if "/" in obj else session.find(specs, obj)
        except (ValueError, session.Mistake) as error:
            raise Ends(f"cannot give {one}, write CLASS:KIND/NAME: {error}") from None
        if specs.get(ref) is None:  # not an error: another tenant's guest, which a step may disrupt, is in no spec
            close = session.there_are(str(ref), [str(o.ref) for o in specs])
            click.echo(f"--allow {one}: no spec has {ref}" + (f"; {close}" if "mean" in close else ""), err=True)
        given.add(Disruption(ref, Permission(name)))
    return Grants(specs, frozenset(given))


_ONCE = (
    click.option("--once", is_flag=True, help="Make one pass until nothing more can be done now, then exit."),
    click.option("--dry-run", is_flag=True, help="With --once: only show the plan."),
    click.option("--allow", multiple=True, metavar="CLASS:OBJECT", help="With --once: give a permission for this run."),
    click.option(
        "--yes", is_flag=True, help="With --once: give every permission that the shown plan asks for, no more."
    ),
    click.option("--ignore-windows", is_flag=True, help="With --once: do not wait for maintenance windows."),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0),
        default=3600.0,
        show_default=True,
        metavar="SECONDS",
        help="With --once: how long to wait for what runs on hosts.",
    ),
)


class Program(click.Group):
    """Commands in the order of their writing; a wrong command line ends with 1, as 2 says "not as wanted"."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names as they were added."""
        return list(self.commands)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run a command line to its exit. An error is a message, never a traceback."""
        try:
            code = super().main(args, *rest, **{**extra, "standalone_mode": False})
        except click.Abort:
            click.echo(
                "stopped. What was begun on a host ends there by itself; the next run goes on from what it finds.",
                err=True,
            )
            code = COULD_NOT
        except click.UsageError as wrong:
            wrong.show()
            code = COULD_NOT
        except click.ClickException as end:
            end.show()
            code = end.exit_code
        except BrokenPipeError:
            _leave_quietly()
            code = COULD_NOT
        except OSError as error:
            logging.getLogger(__name__).debug("where it happened", exc_info=True)
            click.echo(
                f"cannot go on: {error.strerror or error}" + f": {error.filename}" * bool(error.filename), err=True
            )
            code = COULD_NOT
        try:
            sys.stdout.flush()
        except OSError:
            _leave_quietly()
            code = COULD_NOT
        sys.exit(code if isinstance(code, int) else OK)


def _leave_quietly() -> None:
    """Nobody reads what is printed any more: let the interpreter's last flush go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@click.group(cls=Program, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(controller.__version__, message="reconcile %(version)s")
@common
def main(
    shared: Common, once: bool, dry_run: bool, allow: tuple[str, ...], yes: bool, ignore_windows: bool, timeout: float
) -> None:
    """Keep machines that serve language models as their spec files say.

    Start with `reconcile validate`, then `reconcile plan`, then `reconcile --once`.
    """
    context = click.get_current_context()
    if context.invoked_subcommand is not None:
        for name in ("once", "dry_run", "allow", "yes", "ignore_windows", "timeout"):
            if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
                option = f"--{name.replace('_', '-')}"
                raise click.UsageError(f"{option} does not go before {context.invoked_subcommand}.")
        return
    if not once:
        raise Ends("cannot tell what to do: give a command, or --once; `reconcile --help` lists them")
    specs = _load(shared, COULD_NOT)
    grants = _grants(specs, allow)
    with _opened(shared, specs) as work:
        if dry_run or shared.read_only:
            _plan(shared, work, grants, scripts=False, detailed=False)
        else:
            _once(shared, work, grants, yes, timeout, ignore_windows)


for _option in reversed(_ONCE):
    main = _option(main)


def _once(
    shared: Common, work: session.Session, grants: Grants, yes: bool, timeout: float, ignore_windows: bool
) -> None:
    takes = work.narrowed.takes
    try:
        with state.Lock(state.directory(shared.state)):
            if yes:
                predicted = _planned(shared, work)
                if not shared.json:
                    report = model.plan_report(predicted, work.specs, work.eyes.facts, grants, takes, scripts=False)
                    click.echo(text.plan_text(report) + "\n")
                grants = Grants(work.specs, grants.given | asked_for(p.step for p in predicted.steps))
            else:
                _look(shared, work)
            with tell.Told(work.eyes, work.clock, shared.json) as told:
                done = Pass(
                    work.world, ORDER, work.specs, grants, work.clock, told, timeout, takes, ignore_windows
                ).run(work.eyes)
    except (state.StateInUse, state.NoState) as error:
        raise Ends(str(error)) from None
    _end_of_once(shared, work, grants, done)


def _end_of_once(shared: Common, work: session.Session, grants: Grants, done: Report) -> None:
    takes = work.narrowed.takes
    report = model.once_report(done, grants, takes, work.excused)
    if shared.json:
        _print_json(report)
    else:
        lacking = [s for s in done.upcoming.ready if not grants.may(s) and takes(s.object, s.layer)]
        click.echo(text.once_text(report, [(step, grants.missing(step)) for step in lacking]))
    right = report.in_wanted_state and not report.failed
    raise click.exceptions.Exit(COULD_NOT if report.unknown else OK if right else NOT_RIGHT)


@main.command()
@common
def validate(shared: Common) -> None:
    """Read the specs and say what is wrong with them."""
    specs = _load(shared)
    warnings = [
        fit.warning_row(specs, server, warning)
        for server in specs.servers.values()
        for warning in checking.warnings(server, gpus_of(specs, server))
    ]
    if shared.json:
        _print_json(model.ValidateReport(objects=[str(obj.ref) for obj in specs], errors=[], warnings=warnings))
        return
    for row in warnings:
        click.echo(fit.warning_text(row))
    kinds = ((specs.hosts, "host"), (specs.containers, "container"), (specs.servers, "model server"))
    click.echo(f"The specs are valid: {', '.join(text.counted(len(objects), kind) for objects, kind in kinds)}.")


@main.command(name="plan")
@click.option("--detailed-exitcode", is_flag=True, help="Exit 2 when there are changes.")
@click.option("--show-scripts", is_flag=True, help="Show each step's script.")
@click.option("--allow", multiple=True, metavar="CLASS:OBJECT", help="Show the plan as if this were given.")
@click.option("--next-boot", is_flag=True, help="Show what would be wrong after a reboot of --host now, and no plan.")
@common
def plan_command(
    shared: Common, detailed_exitcode: bool, show_scripts: bool, allow: tuple[str, ...], next_boot: bool
) -> None:
    """Show what differs and everything that would be done about it. Touches nothing."""
    specs = _load(shared)
    if next_boot and not shared.host:
        raise Ends("cannot tell whose next boot is meant: add --host NAME", COULD_NOT)
    grants = _grants(specs, allow)
    with _opened(shared, specs) as work:
        if next_boot:
            _next_boot(shared, work, detailed_exitcode)
        _plan(shared, work, grants, show_scripts, detailed_exitcode)


def _plan(shared: Common, work: session.Session, grants: Grants, scripts: bool, detailed: bool) -> None:
    predicted = _planned(shared, work)
    report = model.plan_report(predicted, work.specs, work.eyes.facts, grants, work.narrowed.takes, scripts)
    if shared.json:
        _print_json(report)
    else:
        click.echo(text.plan_text(report))
    unknown = any(not work.excused(Ref.parse(row.object)) for row in report.unknown)
    raise click.exceptions.Exit(COULD_NOT if unknown else NOT_RIGHT if detailed and report.changes else OK)


def _next_boot(shared: Common, work: session.Session, detailed: bool) -> None:
    work.look()
    report = model.next_boot_report(work.specs, work.eyes.facts, shared.host)
    if shared.json:
        _print_json(report)
    else:
        click.echo(text.next_boot_text(report))
    unknown = any(not work.excused(Ref.parse(row.object)) for row in report.unknown)
    raise click.exceptions.Exit(COULD_NOT if unknown else NOT_RIGHT if detailed and report.wrong else OK)


@main.command()
@click.argument("name", metavar="[OBJECT]", required=False)
@common
def status(shared: Common, name: str | None) -> None:
    """Say how every object is, or one of them, and what is at work now."""
    specs = _load(shared)
    one = _found(specs, name) if name else None
    with _opened(shared, specs) as work:
        takes = work.narrowed.takes
        upcoming = _look(shared, work)
        seen = dataclasses.replace(upcoming, judged=tuple(j for j in upcoming.judged if takes(j.object, j.layer)))
        refs = [one] if one is not None else [obj.ref for obj in specs if takes(obj.ref, "")]
        grants = Grants(specs)
        lacking = {
            s.id: ", ".join(map(str, grants.missing(s))) or "mode: enforce" for s in upcoming.ready if not grants.may(s)
        }
        report = model.status_report(
            specs, seen, conditions.of_all(refs, seen, lacking, {}), model.running_rows(work.eyes.facts)
        )
        if shared.json:
            _print_json(report)
        else:
            click.echo(text.status_text(report, messages=one is not None or shared.verbose > 0))
        asked = [row for row in report.objects if not work.excused(Ref.parse(row.object))]
        ready = {c.status for row in asked for c in row.conditions if c.type == "Ready"}
        raise click.exceptions.Exit(COULD_NOT if "Unknown" in ready else NOT_RIGHT if "False" in ready else OK)


def _found(specs: Specs, name: str) -> Ref:
    try:
        return session.find(specs, name)
    except session.Mistake as mistake:
        raise Ends(str(mistake)) from None


@main.command()
@click.argument("name", metavar="OBJECT")
@common
def why(shared: Common, name: str) -> None:
    """Say what is the first layer of an object that is not right, and what it waits for."""
    specs = _load(shared)
    ref = _found(specs, name)
    with _opened(shared, specs) as work:
        parts = tuple(reversed(session.below(specs, ref)))
        report = model.why_report(ref, parts, _look(shared, work), Grants(specs))
        if shared.json:
            _print_json(report)
        else:
            click.echo(text.why_text(report))


@main.command(name="fit")
@click.argument("name", metavar="SERVER")
@common
def fit_command(shared: Common, name: str) -> None:
    """Say whether a model fits the GPUs of its server, as a sum that a person can check."""
    specs = _load(shared)
    server = specs.servers.get(name.removeprefix("ModelServer/"))
    if server is None:
        raise Ends(f"cannot find a server called {name}; {session.there_are(name, specs.servers)}")
    with _opened(shared, specs) as work:
        _look(shared, work)
        report = fit.fit_report(View(specs, work.eyes.facts), server)
        if shared.json:
            _print_json(report)
        else:
            click.echo(fit.fit_text(report))
        code = {"fits": OK, fit.UNKNOWN: COULD_NOT}.get(report.outcome, NOT_RIGHT)
        raise click.exceptions.Exit(code)


@main.command(name="drain")
@click.argument("name", metavar="HOST")
@click.option("--stop", is_flag=True, help="Stop the containers that lie there, one after the other.")
@click.option("--allow", multiple=True, metavar="CLASS:OBJECT", help="With --stop: give a permission for this run.")
@common
def drain_command(shared: Common, name: str, stop: bool, allow: tuple[str, ...]) -> None:
    """Say what has to leave a host, who could take it, and which line to edit."""
    specs = _load(shared)
    if name not in specs.hosts:
        raise Ends(f"cannot drain {name}: no spec has it; {session.there_are(name, specs.hosts)}")
    with _opened(shared, specs) as work:
        _look(shared, work)
        try:
            found = draining.drain(specs, work.eyes.facts, name)
            if stop and not shared.read_only:
                _stop_all(shared, work, draining.stopping(specs, found), allow)
                found = draining.drain(specs, work.eyes.facts, name)
        except session.Mistake as mistake:
            raise Ends(str(mistake)) from None
        report = model.drain_report(found, specs)
        if shared.json:
            _print_json(report)
        else:
            click.echo(text.drain_text(report))
        raise click.exceptions.Exit(OK if found.empty else NOT_RIGHT)


def _stop_all(
    shared: Common, work: session.Session, stopped: tuple[Specs, frozenset[Ref]], allow: tuple[str, ...]
) -> None:
    """Stop what agrees to it, and say of the rest what it waits for."""
    specs, refs = stopped
    grants = _grants(specs, allow)

    def takes(ref: Ref, layer: str) -> bool:
        return ref in refs and layer in ("", "container.power")

    try:
        with state.Lock(state.directory(shared.state)), tell.Told(work.eyes, work.clock, shared.json) as told:
            done = Pass(work.world, ORDER, specs, grants, work.clock, told, STOPPING, takes).run(work.eyes)
    except (state.StateInUse, state.NoState) as error:
        raise Ends(str(error)) from None
    for step in (s for s in done.upcoming.ready if takes(s.object, s.layer) and not grants.may(s)):
        missing = " ".join(f"--allow {d}" for d in grants.missing(step)) or f"mode: enforce of {step.object}"
        click.echo(f"{step.object} is not stopped without {missing}", err=True)
    for judged, block in done.upcoming.blocked:
        if takes(judged.object, judged.layer):
            click.echo(f"{judged.object} is not stopped: {block.message}. To do: {block.needs}", err=True)


@main.command()
@common
def snapshot(shared: Common) -> None:
    """Print the observed fleet as a file that --fleet sim:FILE loads, to rehearse on.

    It is YAML, with -o json too: a file has one format.
    """
    specs = _load(shared)
    with _opened(shared, specs) as work:
        _look(shared, work)
        try:
            taken = snapshot_of(work.eyes.facts, specs)
        except Impossible as impossible:
            raise Ends(f"cannot take a snapshot, as what was seen cannot be, please try again: {impossible}") from None
        click.echo(taken, nl=False)
        missing = sorted(name for name, facts in work.eyes.facts.items() if facts.failure is not None)
        if missing:
            click.echo(
                f"these hosts could not be observed and are out of reach in the snapshot too: {', '.join(missing)}",
                err=True,
            )
            raise click.exceptions.Exit(COULD_NOT)


@main.command()
@click.argument("name", metavar="HOST")
@click.option("--yes", is_flag=True, help="Pin without asking.")
@click.option("--replace", is_flag=True, help="Pin it in place of another key that is known for the host.")
@common
def trust(shared: Common, name: str, yes: bool, replace: bool) -> None:
    """Show the key of a host (and of each host on the way to it), and pin it."""
    specs = _load(shared)
    name = name.removeprefix("Host/")
    if name not in specs.hosts:
        raise Ends(f"cannot trust {name}: no spec has a host of this name; {session.there_are(name, specs.hosts)}")
    if shared.fleet != "ssh":
        raise Ends(f"cannot trust a host of {shared.fleet}: only real hosts have keys")
    state_dir = state.directory(shared.state)
    keys: list[model.KeyRow] = []
    try:
        world = SshWorld(specs, state_dir, state.identity(state_dir), ORDER)
        try:
            for shown in world.host_keys(name):
                if not shared.json:
                    click.echo(text.key_text(shown))
                pin = not shown.trusted and (yes or (not shared.json and _confirmed("  pin it?")))
                if pin:
                    world.pin(shown, replace=replace)
                    click.echo("  pinned", err=shared.json)
                keys.append(_key_row(shown, pin))
                if not (pin or shown.trusted):
                    break  # a host behind one that is not trusted is not asked
        finally:
            world.close()
    except state.NoState as error:
        raise Ends(str(error)) from None
    except (HostError, NotPinned) as error:
        raise Ends(f"cannot trust {name}: {error}") from None
    if shared.json:
        _print_json(model.TrustReport(keys=keys))
    if not all(row.trusted for row in keys):
        click.echo("nothing was pinned" if len(keys) == 1 else f"{keys[-1].server} was not pinned", err=True)
        raise click.exceptions.Exit(COULD_NOT)


def _confirmed(question: str) -> bool:
    try:
        return click.confirm(question)
    except click.Abort:  # nobody is there to answer
        click.echo()
        return False


def _key_row(shown: Shown, pinned: bool) -> model.KeyRow:
    return model.KeyRow(
        server=shown.endpoint.host,
        known_as=shown.endpoint.known_as,
        key=str(shown.key),
        trusted=shown.trusted or pinned,
        changed=shown.changed,
        known_by=shown.where,
        pinned=pinned,
    )


@main.command()
@click.argument("what", type=click.Choice(["spec", *model.PRINTED]), default="spec", metavar="[OF]")
@common
def schema(shared: Common, what: str) -> None:
    """Print the JSON Schema of spec files, or of what a command prints with -o json.

    OF is spec (when nothing is given), plan, once, status, why, fit, validate, trust, version, or errors: what every
    command prints that could not be carried out.
    """
    printed = model.PRINTED[what].model_json_schema(mode="serialization") if what in model.PRINTED else spec_schema()
    click.echo(json.dumps(printed, indent=2))


@main.command()
@common
def version(shared: Common) -> None:
    """Print the version."""
    if shared.json:
        _print_json(model.VersionReport(version=controller.__version__))
    else:
        click.echo(f"reconcile {controller.__version__}")
