"""Instruments beside the core: pressure on an engine's memory, the digest of what an engine did, how large it is.

No client's request needs them. They know the memory and the messages, and no scheduler.
"""

from engine.instruments.digest import DigestChain
from engine.instruments.pressure import Pressure
from engine.instruments.sizes import sizes_of

__all__ = ["DigestChain", "Pressure", "sizes_of"]
