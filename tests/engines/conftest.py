"""The tiny model, once for all tests; engines that have not been installed here are left out."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.serving import CPU, ENGINES, ROOT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ROOT / "tests/engines" in item.path.parents:
            item.add_marker(pytest.mark.engines)


@pytest.fixture(params=sorted(CPU))
def engine_name(request: pytest.FixtureRequest) -> str:
    """Each engine that is installed here (tests/engines/install)."""
    if not (ENGINES / request.param / "made").exists():
        if os.environ.get("RECONCILE_REQUIRE_ENGINES"):
            pytest.fail(f"{request.param} is not installed: tests/engines/install {request.param} {ENGINES}")
        pytest.skip(f"{request.param} is not installed: make test-engines does it")
    return str(request.param)


@pytest.fixture(scope="session")
def models() -> Path:
    """A directory with the tiny model in it, good and damaged; made once by the first installed engine's torch."""
    python = next((ENGINES / name / "bin/python" for name in CPU if (ENGINES / name / "made").exists()), None)
    if python is None:
        pytest.skip("no engine is installed: make test-engines does it")
    program = ROOT / "tests/engines/tiny_model.py"
    asked = ROOT / "controller/layers/shared/checks/canaries.py"
    digest = hashlib.sha256(program.read_bytes() + asked.read_bytes()).hexdigest()[:16]
    target = ENGINES / "models" / digest
    if not (target / "good").exists():
        subprocess.run([str(python), str(program), str(target)], check=True, timeout=1800)
    return target
