"""The cost of importing the harness: a file that only decorates scripts loads no model, HTTP or terminal code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
HEAVY = ("torch", "transformers", "zmq", "fastapi", "uvicorn", "rich", "httpx")


@pytest.mark.parametrize(
    "module", ["scripted", "scripted_lockstep.tiers.sim.runner", "engine", "engine.core.scheduler"]
)
def test_importing_the_harness_imports_nothing_heavy(module: str) -> None:
    """Importing the harness is quick and needs no GPU (D12)."""
    heavy = ("torch", "transformers") if module == "scripted_lockstep.tiers.sim.runner" else HEAVY
    program = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
