"""The programs that run beside a server: ``checks.pyz watch|output FOLDER [again]``, ``put-back FOLDER <FAILURE``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from . import good, output, watch
from .asking import NoAnswer
from .place import Place

STALE = 75


def main() -> int:
    """Run one of them; its exit code. 75: what it rests on is not there (any more)."""
    what, folder = sys.argv[1], Path(sys.argv[2])
    try:
        place = Place(folder)
        if what == "watch":
            return watch.keep_watch(place)
        if what == "put-back":
            good.put_back(place, json.load(sys.stdin))
            return 0
        result = output.run(place, again=sys.argv[3:] == ["again"])
        for each in result["checks"]:
            print(f"{each['result']} {each['name']}: {each['evidence']}", flush=True)
        return 0
    except (good.Stale, KeyError, NoAnswer) as stale:
        print(stale, file=sys.stderr)
        return STALE
    except (OSError, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr)
        return 1
