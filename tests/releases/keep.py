"""Keeps what the present release writes: ``python -m tests.releases.keep``, once for each release, as it is made.

A folder named after the version holds, for each fleet, the specs and the hosts' whole state as it came to rest. A
folder is never written again: what a release has written on people's hosts does not change any more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from controller import __version__
from controller.world.sim import file as simfile
from tests.proof.fleets import start

RELEASES = Path(__file__).parent
FLEETS = ("story-done", "alive-done", "two-done", "boxes-done")


def main() -> int:
    """Write the folder of this version."""
    folder = RELEASES / __version__
    if folder.exists():
        print(f"{folder} is there already: what a release wrote does not change", file=sys.stderr)
        return 1
    folder.mkdir()
    for name in FLEETS:
        fleet, documents = start(name)
        (folder / f"{name}.sim.yaml").write_text(simfile.dump(fleet))
        (folder / f"{name}.json").write_text(json.dumps(documents, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
