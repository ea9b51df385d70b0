"""The integrity of the core: checks that look at all of its books and change nothing. To be read last.

The core runs without them. The gates ask for them, after a step or while an engine in production is idle.
"""

from engine.core.audit.scheduler import audit

__all__ = ["audit"]
