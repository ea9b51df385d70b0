"""The audit of the core: read-only checks of all its books. Read it last.

The core runs without them. Gates run them after a step, or while an engine in production is idle.
"""

from engine.core.audit.scheduler import audit

__all__ = ["audit"]
