"""How a step ended, judged by fresh facts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controller.core import observe
from controller.core.next_steps import Next
from controller.core.words import Drift, InSync, Skipped, Step, Unseen, Wait
from controller.facts.units import Job
from controller.facts.words import FleetFacts
from controller.spec.literals import without_secrets
from controller.world.port import Done, Lost, Outcome, Refused

STALE = 75  # EX_TEMPFAIL of sysexits.h: a script found that the facts it was decided on no longer hold


class Result(StrEnum):
    """How a step ended."""

    WORKED = "worked"
    FAILED = "failed"
    STALE = "stale"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True)
class Ended:
    """A step that was performed, and what came of it."""

    step: Step
    result: Result
    message: str


def judge(step: Step, outcome: Outcome, before: Next, after: Next) -> Ended:
    """What came of a step, from what its script said and from what is seen ``after`` it."""
    match outcome:
        case Refused("stale" | "busy" as reason, message):
            return Ended(step, Result.STALE, f"{reason}: {message}")
        case Refused(reason, message):
            return Ended(step, Result.REFUSED, f"{reason}: {message}")
        case Lost(message):
            return Ended(step, Result.LOST, message)
        case Done(rc, _, err) if rc == STALE:
            return Ended(step, Result.STALE, _last(err, step) or "what it rests on has changed")
        case Done(rc, out, err) if rc != 0:
            return Ended(step, Result.FAILED, f"exit {rc}: {_last(err, step) or _last(out, step) or 'it said nothing'}")
        case Done() if step.action == "reboot-host":
            return Ended(step, Result.WORKED, f"{step.hosts[0]} goes down")  # what it brought is seen when it is back
    return _verified(step, before, after)


def _verified(step: Step, before: Next, after: Next) -> Ended:
    """A step has worked when its layer no longer asks for it and no earlier layer has got worse."""
    now = after.verdict(step.object, step.layer)
    if isinstance(now, Drift) and isinstance(now.remedy, Step) and now.remedy.id == step.id:
        return Ended(step, Result.FAILED, f"it ended well, but {step.layer} is still not right: {now.message}")
    if isinstance(now, Unseen):
        return Ended(step, Result.LOST, f"it ended, but {step.layer} could not be looked at: {now.message}")
    for judged in after.judged:
        if judged.object == step.object and judged.layer == step.layer:
            break
        was = before.verdict(judged.object, judged.layer)
        if judged.object in (step.object, *(d.object for d in step.disrupts)) and (
            isinstance(was, InSync | Skipped)
            and isinstance(judged.verdict, Drift)
            and not isinstance(judged.verdict.remedy, Wait)  # what was just started gets there by itself
        ):
            return Ended(
                step, Result.FAILED, f"it made {judged.layer} of {judged.object} worse: {judged.verdict.message}"
            )
    return Ended(step, Result.WORKED, step.summary)


def _last(text: str, step: Step) -> str:
    """The last line that says something: where scripts put what went wrong. Without secrets that the step was given."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return without_secrets(lines[-1], step.stdin)[:300] if lines else ""


def failed_job(step: Step, facts: FleetFacts) -> Job | None:
    """The job that this step started, when it has failed."""
    units = observe.units(facts[step.hosts[0]]) if step.hosts[0] in facts else None
    job = units.job(step.job) if units is not None and step.job is not None else None
    return job if job is not None and job.id == step.id and job.state == "failed" else None


def last_words(job: Job) -> str:
    """Why a job has failed, as far as its log says."""
    said = next((line for line in reversed(job.log) if line.strip()), f"exit {job.rc}")
    return f"the job has failed: {without_secrets(said.strip())[:300]}"


def busy(facts: FleetFacts) -> dict[str, str]:
    """Hosts on which a step runs now (this controller's from before, or another's), which, and who began it."""
    found: dict[str, str] = {}
    for name, host in facts.items():
        units = observe.units(host)
        if units is not None and units.running is not None:
            by = f", begun by {units.lease.name}" if units.lease is not None else ""
            found[name] = f"{units.running.id} runs on {name}{by}"
    return found
