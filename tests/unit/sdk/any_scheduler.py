"""Example adapters of schedulers that this project did not write, and how a test runs a script on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripted.core.adapters import adapter_named
from scripted.script.options import ScriptOptions

REPOSITORY = Path(__file__).parents[3]
BROKEN = str(REPOSITORY / "examples/your_scheduler/adapter.py")
FIXED = str(REPOSITORY / "examples/your_scheduler/fixed.py")
# Pauses, failing batches and priorities, too.
OUTSIDE = str(REPOSITORY / "examples/lockstep/outside.py")


def ended(script: Callable[..., Any], adapter: str = FIXED, mutant: str | None = None, **options: Any) -> Any:
    """Run a script on an adapter in its default configuration."""
    known: Any = adapter_named(adapter)
    options = {"must_step": True} | options
    return known.run_script(script, {}, config=known.read_config({}), options=ScriptOptions(**options), mutant=mutant)
