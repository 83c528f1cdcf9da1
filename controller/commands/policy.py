"""``approve``, ``suspend``, ``resume``: what people decide by hand, kept where a running controller sees it at once."""

from __future__ import annotations

import secrets

import click

from controller.commands.common import (
    COULD_NOT,
    NOT_RIGHT,
    Common,
    Ends,
    common,
    confirmed,
    load_specs,
    now,
    opened,
    permission,
    planned,
    print_json,
    remembering,
)
from controller.commands.times import until as until_time
from controller.core.conditions import BREAKER_OPEN
from controller.core.permissions import Approval, Grants
from controller.core.plan import Plan, Planned
from controller.core.suspension import Suspension
from controller.core.words import Disruption
from controller.report import model, past, text
from controller.run import session
from controller.run import specs as spec_files
from controller.run.memory import Event, Kind, Memory
from controller.run.state import person
from controller.spec.load import read
from controller.spec.model import Kind as SpecKind
from controller.spec.ref import Ref

UNTIL = click.option("--until", metavar="2h|TIME", help="For how long, or until when: 2026-12-24T18:00, in UTC.")
REASON = click.option("--reason", default="", metavar="TEXT", help="Why, for those who come after you.")


@click.command()
@click.argument("what", metavar="[CLASS:OBJECT]", required=False)
@UNTIL
@REASON
@click.option("--yes", is_flag=True, help="Approve without asking.")
@common
def approve(shared: Common, what: str | None, until: str | None, reason: str, yes: bool) -> None:
    """Give a permission for the steps that are planned now; without an argument, list those in force.

    Each approval is good for one step, as it is shown, and for no other. It is used up when that step has worked, and
    lapses when the drift is gone, when the spec changes, and at --until.
    """
    specs = load_specs(shared, COULD_NOT)
    with opened(shared, specs) as work:
        if what is None:
            _list(shared, work)
            return
        given, end = permission(specs, what, "approve"), until_time(until, work.at)
        needing = _needing(work, planned(shared, work), given)
        rows = [model.step_row(p, Grants(specs), scripts=False) for p in needing]
        if not shared.json:
            click.echo(text.steps_text(rows))
        agreed = yes or (not shared.json and confirmed(f"approve {given} for this?"))
        approvals = [_approval(work, p, given, end, reason) for p in needing] if agreed else []
        work.memory.approve(*approvals)
        for approval in approvals:
            what_for = f"{approval.action} of {approval.of}" + (f": {approval.summary}" if approval.summary else "")
            message = f"{approval.by} approved {given} for {what_for}"
            _tell(work.memory, work.at, Kind.APPROVAL, f"{approval.id}:approve", given.object, "approve", message)
        if shared.json:
            print_json(model.ApproveReport(steps=rows, approvals=[past.approval_row(a) for a in approvals]))
        if not approvals:
            click.echo("nothing was approved", err=True)
            raise click.exceptions.Exit(COULD_NOT)
        if not shared.json:
            click.echo(f"approved for {text.counted(len(approvals), 'step')}")


def _needing(work: session.Session, predicted: Plan, given: Disruption) -> list[Planned]:
    """The planned steps that need a permission by hand; one that is approved already may be approved anew."""
    grants, takes = Grants(work.specs), work.narrowed.takes
    of_it = [p for p in predicted.steps if given in p.step.disrupts and takes(p.step.object, p.step.layer)]
    needing = [p for p in of_it if given in grants.missing(p.step)]
    if not needing:
        already = f"; it is given already for {text.counted(len(of_it), 'step')}" if of_it else ""
        raise Ends(f"nothing that is planned needs {given}{already}", NOT_RIGHT)
    return needing


def _approval(work: session.Session, planned: Planned, given: Disruption, until: float | None, why: str) -> Approval:
    step = planned.step
    return Approval(
        id=secrets.token_hex(4),
        permission=given.permission,
        object=given.object,
        of=step.object,
        layer=step.layer,
        action=step.action,
        reason=step.reason,
        digest=work.specs.digest_of(step.object),
        until=until,
        why=why,
        by=person(),
        at=work.at,
        summary="" if step.provisional else step.summary,
    )


def _list(shared: Common, work: session.Session) -> None:
    rows = [past.approval_row(approval) for approval in work.memory.approvals(work.at)]
    if shared.json:
        print_json(model.ApproveReport(steps=[], approvals=rows))
    else:
        click.echo(past.approvals_text(rows))


@click.command()
@click.argument("name", metavar="OBJECT")
@UNTIL
@REASON
@common
def suspend(shared: Common, name: str, until: str | None, reason: str) -> None:
    """Leave an object alone: nothing touches or disrupts it, nor what lives on it, until it is resumed.

    A step that is at work already is finished. The object is looked at all the same.
    """
    with remembering(shared) as memory:
        ref, at = _meant(shared, memory, name), now(shared)
        suspension = Suspension(ref, until_time(until, at), reason, person(), at)
        memory.suspend(suspension)
        _tell(memory, at, Kind.SUSPENSION, f"{ref}:suspend:{at}", ref, "suspend", str(suspension))
        _suspensions(shared, memory, at, str(suspension))


@click.command()
@click.argument("name", metavar="OBJECT")
@common
def resume(shared: Common, name: str) -> None:
    """End the suspension of an object, or have tried again what did not help and was stopped.

    The latter is the breaker: a step that disrupts, and was done several times within an hour in vain.
    """
    with remembering(shared) as memory:
        ref, at = _meant(shared, memory, name), now(shared)
        if not memory.resume(ref) and not _stopped_by_breaker(memory, ref):
            raise Ends(f"{ref} is not suspended", NOT_RIGHT)
        message = f"{ref} is resumed by {person()}"
        _tell(memory, at, Kind.SUSPENSION, f"{ref}:resume:{at}", ref, "resume", message)
        _suspensions(shared, memory, at, message)


def _stopped_by_breaker(memory: Memory, ref: Ref) -> bool:
    return any(kept.reason == BREAKER_OPEN for kept in memory.conditions([ref]).get(ref, ()))


def _suspensions(shared: Common, memory: Memory, at: float, message: str) -> None:
    if shared.json:
        print_json(past.suspensions_report(memory.suspensions(at).values()))
    else:
        click.echo(text.wrapped(message, "", "  "))


def _meant(shared: Common, memory: Memory, name: str) -> Ref:
    """An object by what somebody called it: of the specs, broken ones too, or one that something is remembered of.

    Any other is taken by its kind and name: it may be in a file that cannot be read, or another tenant's guest, and
    nothing that disrupts it is to be done.
    """
    known = sorted({*_in_specs(shared), *memory.objects()})
    found = [ref for ref in known if name in (ref.name, str(ref))]
    if len(found) > 1:
        raise Ends(f"cannot tell which {name} is meant: {', '.join(map(str, found))}")
    if found:
        return found[0]
    kind, slash, rest = name.partition("/")
    if slash and rest and kind in {*SpecKind, "Guest"}:
        click.echo(f"no spec that can be read has {name}", err=True)
        return Ref(kind, rest)
    close = session.there_are(name, [str(ref) if slash else ref.name for ref in known])
    raise Ends(f"cannot find {name} in the specs, write KIND/NAME for what is in none; {close}")


def _in_specs(shared: Common) -> set[Ref]:
    try:
        reading = read(spec_files.read(spec_files.directory(shared.specs)))
    except spec_files.NoSpecs:
        return set()
    return {*(obj.ref for obj in reading.specs), *reading.frozen}


def _tell(memory: Memory, at: float, kind: Kind, key: str, ref: Ref, action: str, message: str) -> None:
    memory.event(Event(key, at, kind, ref, action=action, message=message))
