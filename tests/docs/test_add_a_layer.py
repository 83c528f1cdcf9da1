"""docs/add-a-layer.md, followed to the letter in a copy of the project."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^## \d\. [^\n]*`((?:controller|tests)/layers/swap/[\w.]+)`\n(?:.*?)^```\w+\n(.*?)^```$", re.M | re.S
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the page's layer in it."""
    place = tmp_path_factory.mktemp("recipe")
    for folder in ("controller", "tests/layers"):
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "tests/__init__.py"):
        shutil.copy(ROOT / file, place / file)
    blocks = dict(BLOCK.findall((ROOT / "docs/add-a-layer.md").read_text()))
    assert len(blocks) == 6, sorted(blocks)
    for path, code in blocks.items():
        (place / path).parent.mkdir(exist_ok=True)
        (place / path).write_text(code)
    (place / "tests/layers/swap/__init__.py").touch()
    order = place / "controller/layers/order.py"
    text = order.read_text().replace("    userland,\n", "    swap,\n    userland,\n")
    order.write_text(text.replace("    access.LAYER,\n", "    access.LAYER,\n    swap.LAYER,\n"))
    return place


def run(copy: Path, *command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_test_passes(copy: Path) -> None:
    run(copy, "pytest", "-q", "-p", "no:cacheprovider", "tests/layers/swap")


def test_it_is_in_order_where_the_command_line_finds_it(copy: Path) -> None:
    fleet = f"sim:{ROOT / 'specs/demo/fleet.sim.yaml'}"
    specs, state = str(ROOT / "specs/demo"), str(copy / "state")
    run(copy, "controller", "plan", "--layer", "host.swap", "--specs", specs, "--fleet", fleet, "--state", state)


def test_its_style_is_the_projects(copy: Path) -> None:
    run(copy, "ruff", "check", "--no-cache", "controller/layers", "tests/layers/swap")
    run(copy, "ruff", "format", "--no-cache", "--check", "controller/layers", "tests/layers/swap")


def test_its_types_are_right(copy: Path) -> None:
    run(copy, "mypy", "-p", "controller.layers.swap")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_its_shell_is_right(copy: Path) -> None:
    scripts = sorted((copy / "controller/layers/swap").glob("*.sh"))
    assert len(scripts) == 2
    done = subprocess.run(
        ["shellcheck", "-s", "sh", "-e", "SC2154,SC2034,SC2317", *scripts], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
