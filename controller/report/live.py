"""The present state of a running controller, as rows: what ``/status`` answers."""

from __future__ import annotations

from collections import defaultdict

import controller
from controller.core.words import Drift, Unseen
from controller.report import model
from controller.run.picture import Board, Picture
from controller.spec.model import Host, ModelServer, Object, Specs
from controller.spec.ref import Ref

STUCK = 60.0  # seconds without a move of the loop after which it is not healthy


def is_healthy(board: Board) -> bool:
    """Whether the loop moves."""
    return board.stands_still < STUCK


def lacks(picture: Picture) -> list[str]:
    """What the controller has yet to do before it can be relied on, for people; nothing when it is ready."""
    found = []
    if picture.loaded is None:
        found.append("the specs are not loaded; `reconcile validate` tells their errors")
    if not picture.observed:
        found.append("the first look at every host has not ended")
    return found


def controller_report(board: Board) -> model.ControllerReport:
    """All that a running controller knows."""
    picture = board.picture
    return model.ControllerReport(
        version=controller.__version__,
        healthy=is_healthy(board),
        ready=not lacks(picture),
        last_pass=board.last_pass,
        specs=model.FollowedRow(
            commit=picture.commit,
            dirty=picture.dirty,
            loaded=picture.loaded,
            errors=[model.ErrorRow.model_validate(error.as_json()) for error in picture.spec_errors],
        ),
        hosts=[
            model.LookedRow(host=name, up=h.up, last_seen=h.last_seen, observe_seconds=h.seconds)
            for name, h in picture.hosts.items()
        ],
        objects=_objects(picture),
        running=model.running_rows(picture.facts),
        notes=list(picture.notes),
    )


def _objects(picture: Picture) -> list[model.PresentRow]:
    drift: dict[Ref, list[model.DriftingRow]] = defaultdict(list)
    unknown: dict[Ref, list[model.UnknownRow]] = defaultdict(list)
    pending: dict[Ref, list[model.PendingRow]] = defaultdict(list)
    for judged in picture.upcoming.judged:
        match judged.verdict:
            case Drift(reason, message, _, evidence):
                kept = picture.drifts.get((judged.object, judged.layer))
                row = model.DriftingRow(
                    layer=judged.layer,
                    reason=reason,
                    message=message,
                    evidence=dict(evidence),
                    cause=kept.cause if kept is not None else None,
                    since=kept.since if kept is not None else None,
                )
                drift[judged.object].append(row)
            case Unseen(reason, message):
                name = str(judged.object)
                unknown[judged.object].append(
                    model.UnknownRow(object=name, layer=judged.layer, reason=reason, message=message)
                )
    for each in picture.pending:
        pending[each.object].append(
            model.PendingRow(layer=each.layer, waiting_for=each.waiting_for.value, message=each.message)
        )
    return [
        model.PresentRow(
            object=str(obj.ref),
            host=_host_of(picture.specs, obj),
            mode=obj.policy.mode.value,
            conditions=[
                model.SinceRow(
                    type=kept.type,
                    status=kept.status,
                    reason=kept.reason,
                    message=kept.message,
                    since=kept.since,
                    spec_digest=kept.digest,
                )
                for kept in picture.conditions.get(obj.ref, ())
            ],
            drift=drift[obj.ref],
            unknown=unknown[obj.ref],
            pending=pending[obj.ref],
            suspended=_suspended(picture, obj.ref),
            backoff_seconds=picture.backoff.get(obj.ref, 0.0),
            last_success=picture.last_success.get(obj.ref),
        )
        for obj in picture.specs
    ]


def _host_of(specs: Specs, obj: Object) -> str:
    match obj:
        case Host():
            return obj.name
        case ModelServer():
            return specs.host_of(obj) or ""
    return obj.host


def _suspended(picture: Picture, ref: Ref) -> model.SuspendedRow | None:
    found = picture.suspensions.get(ref)
    if found is None:
        return None
    return model.SuspendedRow(until=found.until, by=found.by, reason=found.reason, at=found.at)
