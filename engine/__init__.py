"""Lockstep's engine: an LLM serving engine whose scheduler is a pure state machine driven through a step gate."""

from engine.config import EngineConfig
from engine.errors import EngineError

__all__ = ["EngineConfig", "EngineError", "__version__"]

__version__ = "0.1.0"
