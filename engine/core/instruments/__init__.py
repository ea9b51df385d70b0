"""Instruments beside the core: pressure on an engine's memory, and the digest of what an engine did.

No client's request needs them. They know the memory and the messages, and no scheduler.
"""

from engine.core.instruments.digest import DigestChain, plan_shape
from engine.core.instruments.pressure import Pressure

__all__ = ["DigestChain", "Pressure", "plan_shape"]
