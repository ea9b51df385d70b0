"""The audit of the core: read-only consistency checks of its state. Read it last.

The core runs without these checks. A gate runs them after a step, or in production while the engine is idle.
"""

from engine.core.audit.scheduler import audit

__all__ = ["audit"]
