"""The command line: reads options, calls what does the work, prints, and ends with the documented exit code."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

import controller
from controller.commands import past, policy, present
from controller.commands.common import (
    COULD_NOT,
    NOT_RIGHT,
    OK,
    Common,
    Ends,
    common,
    conditions_of,
    confirmed,
    found,
    given_on,
    load_specs,
    look,
    looked_at,
    opened,
    planned,
    print_json,
    recorder,
    remembered,
)
from controller.commands.run import run, run_loop
from controller.core.permissions import Grants, asked_for
from controller.core.view import View
from controller.engines import checking
from controller.layers.order import ORDER
from controller.layers.shared.truth import Impossible
from controller.report import fit, model, tell, text
from controller.run import drain as draining
from controller.run import session, state
from controller.run.once import Pass, Report
from controller.spec.across import gpus_of
from controller.spec.model import Specs
from controller.spec.ref import Ref
from controller.spec.schema import schema as spec_schema
from controller.world.fleet import SshWorld
from controller.world.keys import NotPinned, Shown
from controller.world.sim.snapshot import snapshot as snapshot_of
from controller.world.transport import HostError

STOPPING = 3600.0  # seconds that `drain --stop` waits for what is at work on the host

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


_FOR_ONCE = ("dry_run", "allow", "yes", "ignore_windows", "timeout")


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

    Start with `reconcile validate`, then `reconcile plan`, then `reconcile --once`. Without a command it runs the loop.
    """
    context = click.get_current_context()
    if context.invoked_subcommand is not None:
        for name in ("once", *_FOR_ONCE):
            if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
                option = f"--{name.replace('_', '-')}"
                raise click.UsageError(f"{option} does not go before {context.invoked_subcommand}.")
        return
    if not once:
        for name in _FOR_ONCE:
            if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
                raise click.UsageError(f"--{name.replace('_', '-')} is for --once.")
        run_loop(shared)
        return
    specs = load_specs(shared, COULD_NOT)
    given = given_on(specs, allow)
    with opened(shared, specs) as work:
        if dry_run or shared.read_only:
            _plan(shared, work, work.grants(given), scripts=False, detailed=False)
        else:
            _once(shared, work, work.grants(given), yes, timeout, ignore_windows)


for _option in reversed(_ONCE):
    main = _option(main)


main.add_command(run)


def _once(
    shared: Common, work: session.Session, grants: Grants, yes: bool, timeout: float, ignore_windows: bool
) -> None:
    takes = work.narrowed.takes
    try:
        with state.Lock(state.directory(shared.state)):
            held = work.memory.suspensions(work.at)
            if yes:
                predicted = planned(shared, work)
                if not shared.json:
                    report = model.plan_report(predicted, work.specs, work.eyes.facts, grants, takes, False, held)
                    click.echo(text.plan_text(report) + "\n")
                grants = dataclasses.replace(grants, given=grants.given | asked_for(p.step for p in predicted.steps))
            else:
                look(shared, work)
            records = recorder(shared, work)
            upcoming = work.upcoming
            records.seen(upcoming, conditions_of(work, looked_at(work), upcoming, grants, {}), work.at)
            with tell.Told(work.eyes, work.clock, shared.json) as told:
                one = Pass(
                    work.world,
                    ORDER,
                    work.specs,
                    grants,
                    work.clock,
                    told,
                    timeout,
                    takes,
                    ignore_windows,
                    records,
                )
                done = one.run(work.eyes)
            refs = looked_at(work)
            records.seen(done.upcoming, conditions_of(work, refs, done.upcoming, one.grants, done.failed), work.at)
    except (state.StateInUse, state.NoState) as error:
        raise Ends(str(error)) from None
    _end_of_once(shared, work, one.grants, done)


def _end_of_once(shared: Common, work: session.Session, grants: Grants, done: Report) -> None:
    takes = work.narrowed.takes
    report = model.once_report(done, grants, takes, work.excused)
    if shared.json:
        print_json(report)
    else:
        lacking = [s for s in done.upcoming.ready if not grants.may(s) and takes(s.object, s.layer)]
        click.echo(text.once_text(report, [(step, grants.missing(step)) for step in lacking]))
    right = report.in_wanted_state and not report.failed
    raise click.exceptions.Exit(COULD_NOT if report.unknown else OK if right else NOT_RIGHT)


@main.command()
@common
def validate(shared: Common) -> None:
    """Read the specs and say what is wrong with them."""
    specs = load_specs(shared)
    warnings = [
        fit.warning_row(specs, server, warning)
        for server in specs.servers.values()
        for warning in checking.warnings(server, gpus_of(specs, server))
    ]
    if shared.json:
        print_json(model.ValidateReport(objects=[str(obj.ref) for obj in specs], errors=[], warnings=warnings))
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
    specs = load_specs(shared)
    if next_boot and not shared.host:
        raise Ends("cannot tell whose next boot is meant: add --host NAME", COULD_NOT)
    given = given_on(specs, allow)
    with opened(shared, specs) as work:
        if next_boot:
            _next_boot(shared, work, detailed_exitcode)
        _plan(shared, work, work.grants(given), show_scripts, detailed_exitcode)


def _plan(shared: Common, work: session.Session, grants: Grants, scripts: bool, detailed: bool) -> None:
    predicted, held = planned(shared, work), work.memory.suspensions(work.at)
    report = model.plan_report(predicted, work.specs, work.eyes.facts, grants, work.narrowed.takes, scripts, held)
    if shared.json:
        print_json(report)
    else:
        click.echo(text.plan_text(report))
    unknown = any(not work.excused(Ref.parse(row.object)) for row in report.unknown)
    raise click.exceptions.Exit(COULD_NOT if unknown else NOT_RIGHT if detailed and report.changes else OK)


def _next_boot(shared: Common, work: session.Session, detailed: bool) -> None:
    work.look()
    report = model.next_boot_report(work.specs, work.eyes.facts, shared.host)
    if shared.json:
        print_json(report)
    else:
        click.echo(text.next_boot_text(report))
    unknown = any(not work.excused(Ref.parse(row.object)) for row in report.unknown)
    raise click.exceptions.Exit(COULD_NOT if unknown else NOT_RIGHT if detailed and report.wrong else OK)


@main.command()
@click.argument("name", metavar="OBJECT")
@common
def why(shared: Common, name: str) -> None:
    """Say what is the first layer of an object that is not right, and what it waits for."""
    specs = load_specs(shared)
    ref = found(specs, name)
    with opened(shared, specs) as work:
        parts = tuple(reversed(specs.below(ref)))
        report = model.why_report(ref, parts, look(shared, work), work.grants(), remembered(work))
        if shared.json:
            print_json(report)
        else:
            click.echo(text.why_text(report))


@main.command(name="fit")
@click.argument("name", metavar="SERVER")
@common
def fit_command(shared: Common, name: str) -> None:
    """Say whether a model fits the GPUs of its server, as a sum that a person can check."""
    specs = load_specs(shared)
    server = specs.servers.get(name.removeprefix("ModelServer/"))
    if server is None:
        raise Ends(f"cannot find a server called {name}; {session.there_are(name, specs.servers)}")
    with opened(shared, specs) as work:
        look(shared, work)
        report = fit.fit_report(View(specs, work.eyes.facts), server)
        if shared.json:
            print_json(report)
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
    specs = load_specs(shared)
    if name not in specs.hosts:
        raise Ends(f"cannot drain {name}: no spec has it; {session.there_are(name, specs.hosts)}")
    with opened(shared, specs) as work:
        look(shared, work)
        try:
            found = draining.drain(specs, work.eyes.facts, name)
            if stop and not shared.read_only:
                _stop_all(shared, work, draining.stopping(specs, found), allow)
                found = draining.drain(specs, work.eyes.facts, name)
        except session.Mistake as mistake:
            raise Ends(str(mistake)) from None
        report = model.drain_report(found, specs)
        if shared.json:
            print_json(report)
        else:
            click.echo(text.drain_text(report))
        raise click.exceptions.Exit(OK if found.empty else NOT_RIGHT)


def _stop_all(
    shared: Common, work: session.Session, stopped: tuple[Specs, frozenset[Ref]], allow: tuple[str, ...]
) -> None:
    """Stop what agrees to it, and say of the rest what it waits for."""
    specs, refs = stopped
    grants = dataclasses.replace(work.grants(given_on(specs, allow)), specs=specs)

    def takes(ref: Ref, layer: str) -> bool:
        return ref in refs and layer in ("", "container.power")

    try:
        with state.Lock(state.directory(shared.state)), tell.Told(work.eyes, work.clock, shared.json) as told:
            records = recorder(shared, work)
            done = Pass(work.world, ORDER, specs, grants, work.clock, told, STOPPING, takes, records=records).run(
                work.eyes
            )
    except (state.StateInUse, state.NoState) as error:
        raise Ends(str(error)) from None
    for step in (s for s in done.upcoming.ready if takes(s.object, s.layer) and not grants.may(s)):
        missing = " ".join(f"--allow {d}" for d in grants.missing(step)) or f"mode: enforce of {step.object}"
        click.echo(f"{step.object} is not stopped without {missing}", err=True)
    for message in done.suspended.values():
        click.echo(message, err=True)
    for judged, block in done.upcoming.blocked:
        if takes(judged.object, judged.layer):
            click.echo(f"{judged.object} is not stopped: {block.message}. To do: {block.needs}", err=True)


@main.command()
@common
def snapshot(shared: Common) -> None:
    """Print the observed fleet as a file that --fleet sim:FILE loads, to rehearse on.

    It is YAML, with -o json too: a file has one format.
    """
    specs = load_specs(shared)
    with opened(shared, specs) as work:
        look(shared, work)
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
    specs = load_specs(shared)
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
                pin = not shown.trusted and (yes or (not shared.json and confirmed("  pin it?")))
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
        print_json(model.TrustReport(keys=keys))
    if not all(row.trusted for row in keys):
        click.echo("nothing was pinned" if len(keys) == 1 else f"{keys[-1].server} was not pinned", err=True)
        raise click.exceptions.Exit(COULD_NOT)


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

    OF is spec (when nothing is given), the name of a command, or errors: what every command prints that could not be
    carried out.
    """
    printed = model.PRINTED[what].model_json_schema(mode="serialization") if what in model.PRINTED else spec_schema()
    click.echo(json.dumps(printed, indent=2))


@main.command()
@common
def version(shared: Common) -> None:
    """Print the version."""
    if shared.json:
        print_json(model.VersionReport(version=controller.__version__))
    else:
        click.echo(f"reconcile {controller.__version__}")


for _command in (
    present.status,
    present.wait,
    present.gpus,
    policy.approve,
    policy.suspend,
    policy.resume,
    past.events,
    past.history,
):
    main.add_command(_command)
