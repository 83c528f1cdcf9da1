"""The image, built from the Dockerfile and run: the demo as an ordinary user, then the loop. Two minutes long."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.image, pytest.mark.timeout(1800)]

TRY = Path(__file__).parent / "try.sh"
# Podman's runtime wants the one hierarchy of cgroups; a machine with the old ones beside it gets that in a namespace.
ALONE = 'umount -R -l /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec "$@"'


def missing() -> str:
    """Say why no image can be built here, "" when one can."""
    if os.geteuid() != 0:
        return "building the image needs root"
    tools = [tool for tool in ("podman", "crun", "mmdebstrap", "unshare") if shutil.which(tool) is None]
    return f"{', '.join(tools)} is not installed (tests/image/install-packages.sh)" if tools else ""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    if os.environ.get("RECONCILE_REQUIRE_IMAGE") != "1":
        pytest.skip("takes two minutes: make test-image")
    if why := missing():
        pytest.fail(why)
    work = tmp_path_factory.mktemp("image")
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ALONE, "sh", str(TRY), str(work)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    shutil.rmtree(work)
    print(*re.findall(r"^== \d+ s: .*$", done.stdout, re.MULTILINE), sep="\n")
    return done.stdout


def test_the_demo_runs_as_an_ordinary_user(said: str) -> None:
    assert re.search(r"^uid 10001$", said, re.MULTILINE)
    assert "As told: 129 runs on kpro5" in said


def test_the_loop_is_healthy_by_the_images_own_check(said: str) -> None:
    assert re.search(r"^== \d+ s: healthy$", said, re.MULTILINE)


def test_the_loop_stops_when_it_is_asked_to(said: str) -> None:
    assert re.search(r"^== \d+ s: the loop ended with 0$", said, re.MULTILINE)


def test_it_is_small(said: str) -> None:
    sizes = re.search(r"image of (\d+) MB on a base of (\d+) MB", said)
    assert sizes
    assert int(sizes[1]) - int(sizes[2]) < 130
