"""A drift that a job puts right, by what is known of that job on the host: to be started, at work, or failed before."""

from __future__ import annotations

from collections.abc import Mapping

from controller.core.view import View
from controller.core.words import Drift, Step, Wait
from controller.facts.units import Job, UnitFacts


def drift(view: View, reason: str, message: str, step: Step, evidence: Mapping[str, str] | None = None) -> Drift:
    """The drift with its remedy: the job to start, or to wait for, if one of its name is at work already.

    Of an earlier try of the same step that failed, the end of its log is evidence. It is tried again by the next pass;
    within one pass, whoever drives does not start a failed step twice.
    """
    if step.job is None:
        raise ValueError(f"{step.action} is no job")
    host, told = step.hosts[0], dict(evidence or {})
    job = view.fact(host, "world", UnitFacts).job(step.job)
    if job is None:
        return Drift(reason, message, step, told)
    if job.running:
        return Drift(reason, message, Wait("job", _at_work(job, host), (host,)), told)
    if job.id == step.id and job.state == "failed":
        told["last try"] = f"{_end(job)}: {' / '.join(job.log[-5:])[-600:] or 'it said nothing'}"
        message = f"{message}; the last try failed: {job.log[-1][:200] if job.log else _end(job)}"
    return Drift(reason, message, step, told)


def _at_work(job: Job, host: str) -> str:
    far = ""
    if job.progress is not None:
        far = f", {job.progress.done} of {job.progress.total or '?'}"
    return f"{job.id} {'does not get on' if job.state == 'stalled' else 'runs'} on {host}{far}"


def _end(job: Job) -> str:
    return f"exit {job.rc}" if job.how == "exit" else str(job.how)
