"""Coverage-guided fuzzing of every parser of a host's text, of the frame, and of the spec loader (atheris).

``python -m tests.proof.fuzz SECONDS`` (make fuzz) shares the time among them; the last line is
``N targets, N inputs, N failures``. A failing input is written to a file, and its path is told.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["controller"]):
    from controller.core import observe, probe
    from controller.facts.words import Observation, Section, Unknown
    from controller.spec.errors import render
    from controller.spec.load import read

from tests.proof.fleets import files_of, start
from tests.proof.lies import PARSERS, answers

SPECS, FRAME = "specs", "frame"
TARGETS = (SPECS, FRAME, *sorted(PARSERS))
SLOW = 5  # seconds that one input may take
MEMORY = 1024  # MiB that all of it may take


def once(target: str, data: bytes) -> None:
    """Feed a target with one input; raises when it is not dealt with."""
    if target == SPECS:
        render(read({"a.yaml": data}).errors)
    elif target == FRAME:
        try:
            probe.read(data, "nonce")
        except probe.FrameError:
            return
    else:
        section = Section(0, data.decode("utf-8", "surrogateescape"))
        found = observe.read(PARSERS, Observation("a", 0.0, {target: section})).section(target)
        if isinstance(found, Unknown) and found.reason == "defect":
            raise AssertionError(found.message)


def seeds(target: str, folder: Path) -> None:
    """What fuzzing begins from."""
    texts: list[bytes] = []
    if target == SPECS:
        for name in ("story", "two", "boxes", "demo"):
            texts += files_of(start(name)[1]).values()
        texts += [path.read_bytes() for path in Path("specs").rglob("*.yaml")]
    elif target == FRAME:
        texts = [b"nonce begin\nnonce section a 0 3 2\nout\xff\xfe\nnonce end\n", b"nonce begin\nnonce stuck 12 3\n"]
    else:
        texts = [section.out.encode("utf-8", "surrogateescape") for name, section in answers() if name == target]
    for number, text in enumerate(texts):
        (folder / f"seed-{number}").write_bytes(text)


def fuzz(target: str, seconds: int, folder: Path) -> None:
    """Never comes back: libFuzzer ends the process."""
    corpus = folder / "corpus"
    corpus.mkdir()
    seeds(target, corpus)
    options = [f"-max_total_time={seconds}", f"-timeout={SLOW}", f"-rss_limit_mb={MEMORY}", "-print_final_stats=1"]
    options += [f"-artifact_prefix={folder}/", "-max_len=20000", str(corpus)]
    atheris.Setup([sys.argv[0], *options], lambda data: once(target, data))
    atheris.Fuzz()


def main() -> int:
    """Run each target in a process of its own, and add up."""
    if len(sys.argv) == 4:
        fuzz(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    seconds = max(2, int(float(sys.argv[1])) // len(TARGETS)) if len(sys.argv) > 1 else 5
    inputs, failures = 0, 0
    for target in TARGETS:
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        command = [sys.executable, "-m", "tests.proof.fuzz", target, str(seconds), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        tried = re.search(r"number_of_executed_units: (\d+)", done.stderr)
        inputs += int(tried[1]) if tried else 0
        bad = done.returncode != 0
        failures += bad
        print(f"{int(tried[1]) if tried else 0:9d}  {target}{f'  FAILED, see {folder}' if bad else ''}", flush=True)
        if bad:
            print("\n".join(done.stderr.splitlines()[-25:]))
    print(f"{len(TARGETS)} targets, {inputs} inputs, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
