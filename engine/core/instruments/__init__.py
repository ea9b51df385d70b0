"""Instruments of the core: pressure on an engine's memory, and the digest of its steps.

Serving needs neither. They import memory and messages, not the scheduler.
"""

from engine.core.instruments.digest import DigestChain, SilentDigests, plan_shape
from engine.core.instruments.pressure import Pressure

__all__ = ["DigestChain", "Pressure", "SilentDigests", "plan_shape"]
