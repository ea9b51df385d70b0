"""Lockstep's engine: an LLM serving engine whose scheduler is a pure state machine driven through a step gate.

Its names are imported when they are asked for: a command that is interrupted in its first second is in its own code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.core.config import EngineConfig
    from engine.core.errors import EngineError

__all__ = ["EngineConfig", "EngineError", "__version__"]

__version__ = "0.1.0"

_LAZY = {"EngineConfig": "engine.core.config", "EngineError": "engine.core.errors"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value
