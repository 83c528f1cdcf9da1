"""Running a step's script for real on this machine as the place, with all that is ours under a tree of the test's."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from controller.core import probe
from controller.core.words import Script, Step
from controller.facts.words import Section

OURS = ("/opt/reconcile", "/etc/systemd/system", "/run/reconcile/offers")


@dataclass
class Ground:
    """A plain host whose folders of ours lie under ``root``; its programs are this machine's."""

    root: Path

    def path(self, path: str) -> Path:
        """Where something of the host lies."""
        return self.root / path.lstrip("/")

    def text(self, script: Script) -> str:
        """The script as it is laid down, with paths of ours under the root."""
        return self.here(files("controller.world.host").joinpath("lib.sh").read_text(encoding="utf-8") + script.text)

    def here(self, text: str) -> str:
        """A text with paths of ours under the root."""
        for path in OURS:
            text = text.replace(path, f"{self.root}{path}")
        return text

    def ask(self, fragment: str) -> Section:
        """What a layer's fragment answers of this place."""
        text = f"root=\n{probe.script({'section': self.here(fragment)})}\nrun_dir={self.root}/run\n"
        text += probe.look("N", 0, ())
        done = subprocess.run(["dash"], input=text.encode(), capture_output=True, timeout=60, check=False)
        return probe.read(done.stdout, "N")["section"]

    def begin(self, step: Step, stdin: bytes | None = None) -> subprocess.Popen[bytes]:
        """Start the step's script in a session of its own, as a unit is."""
        state, work = self.path("/var/lib/reconcile"), self.path("/var/lib/reconcile/jobs/job")
        work.mkdir(parents=True, exist_ok=True)
        given, laid = work / "stdin", work / "script"
        given.write_bytes(self.here((step.stdin if stdin is None else stdin).decode("latin-1")).encode("latin-1"))
        laid.write_text("set -eu\n" + self.text(step.script))
        with given.open("rb") as source, (work / "out").open("wb") as out:
            return subprocess.Popen(
                ["dash", str(laid), *map(self.here, step.args)],
                stdin=source,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    "PATH": os.environ["PATH"],
                    "RECONCILE_STATE": str(state),
                    "RECONCILE_STEP_DIR": str(work),
                    "RECONCILE_STEP": step.id,
                    "RECONCILE_OBJECT": str(step.object),
                    "RECONCILE_GENERATION": "7",
                },
            )

    def run(self, step: Step, stdin: bytes | None = None, timeout: float = 600) -> int:
        """The exit code of the step's script; what it said is in ``said``."""
        running = self.begin(step, stdin)
        try:
            return running.wait(timeout)
        finally:
            if running.poll() is None:
                os.killpg(running.pid, 9)
                running.wait()

    @property
    def said(self) -> str:
        """What the last script said."""
        return (self.path("/var/lib/reconcile/jobs/job") / "out").read_text(errors="replace")

    @property
    def progress(self) -> str:
        """What the last script reported of its progress."""
        return (self.path("/var/lib/reconcile/jobs/job") / "progress").read_text()
