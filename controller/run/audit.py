"""The audit log: who did what, why, and how it ended. JSON lines in ``audit.jsonl`` of the state directory.

It is only ever appended to, a line with one write that has reached the disk before anything goes on. The file is opened
anew for each line, so that it can be rotated by renaming it.
"""

from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from controller.core.permissions import Grants
from controller.core.words import Step
from controller.run.ended import Ended
from controller.run.state import Identity, NoState, person, private_file
from controller.spec.literals import without_secrets

FILE = "audit.jsonl"


class Audit:
    """The audit log of a state directory, written to by one controller. Both methods raise NoState.

    Standard input of a step, where its secrets are, is left out; so is what looks like a secret anywhere else.
    """

    def __init__(self, state: Path, controller: Identity) -> None:
        self._state = state
        self._controller = controller
        self._began: dict[str, float] = {}

    def started(
        self, step: Step, grants: Grants, commit: str, at: float, *, cause: str = "", message: str = ""
    ) -> None:
        """A step is about to be performed, by these permissions, for a drift (``cause``, ``message``)."""
        self._began[step.id] = at
        permissions = [
            {"permission": d.permission, "object": str(d.object), "from": grants.source(step, d)} for d in step.disrupts
        ]
        digest = grants.specs.digest_of(step.object) if step.object in grants.specs else ""
        said = without_secrets(message or step.summary, step.stdin)
        why = {"reason": step.reason, "cause": cause, "message": said, "digest": digest}
        self._append("step-started", step, at, permissions=permissions, why={**why, "commit": commit})

    def ended(self, ended: Ended, commit: str, at: float) -> None:
        """A step has ended. Of a job that has worked in no time: it was started, and goes on by itself."""
        seconds = round(at - self._began.pop(ended.step.id, at), 3)
        why = {"reason": ended.step.reason, "commit": commit}
        said = without_secrets(ended.message, ended.step.stdin)
        self._append("step-ended", ended.step, at, why=why, result=ended.result, message=said, seconds=seconds)

    def _append(self, event: str, step: Step, at: float, **more: Any) -> None:
        entry = {
            "at": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
            "event": event,
            "who": {
                "user": person(),
                "controller": self._controller.id,
                "name": self._controller.name,
                "pid": os.getpid(),
            },
            "what": {
                "step": step.id,
                "action": step.action,
                "object": str(step.object),
                "layer": step.layer,
                "hosts": list(step.hosts),
                "job": step.job,
                "script": step.script.name,
                "sha256": hashlib.sha256(step.script.text.encode()).hexdigest(),
                "arguments": [without_secrets(argument, step.stdin) for argument in step.args],
            },
            **more,
        }
        try:
            _append_line(self._state / FILE, json.dumps(entry))
        except OSError as error:
            raise NoState(self._state, error) from None


def _append_line(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = private_file(path, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(file).st_size
        broken = size > 0 and os.pread(file, 1, size - 1) != b"\n"  # the disk was full, or the power failed
        text = (b"\n" if broken else b"") + line.encode() + b"\n"
        if os.write(file, text) != len(text):
            raise OSError(0, f"{path} took only a part of a line: the disk is full")
        os.fsync(file)
    finally:
        os.close(file)
