"""A long step by what is known of its job on the host: to be started, at work, or failed."""

from __future__ import annotations

from controller.core.view import View
from controller.core.words import Block, Step, Wait
from controller.facts.units import Job, UnitFacts


def remedy(view: View, step: Step, failed: str) -> Step | Wait | Block:
    """What to do about a drift that a job puts right: start it, wait for it, or nothing, as it has failed (``failed``).

    A job that failed is not started again by itself: not in this boot, and not while its step is the same. What a step
    rests on belongs into its arguments, so that it becomes another step when that has changed.
    """
    assert step.job is not None, f"{step.action} is no job"
    job = view.fact(step.hosts[0], "world", UnitFacts).job(step.job)
    if job is None:
        return step
    if job.running:
        return Wait("job", _at_work(job, step.hosts[0]))
    if job.id != step.id or job.rc == 0 or job.began is None:
        return step
    where = f"/var/lib/reconcile/jobs/{step.job}"
    return Block(
        failed,
        f"{step.action} failed on {step.hosts[0]} ({_end(job)}): {_said(job)}",
        f"put right what it says ({where}/out has all of it); it is tried again when that has changed, after a reboot, "
        f"or after `rm -r {where}` there",
    )


def _at_work(job: Job, host: str) -> str:
    far = ""
    if job.progress is not None:
        far = f", {job.progress.done} of {job.progress.total or '?'}"
    return f"{job.id} {'does not get on' if job.state == 'stalled' else 'runs'} on {host}{far}"


def _end(job: Job) -> str:
    return f"exit {job.rc}" if job.how == "exit" else str(job.how)


def _said(job: Job) -> str:
    """The last lines, the last first: that is where programs say what went wrong."""
    return " / ".join(reversed(job.log[-3:]))[:400] or "it said nothing"
