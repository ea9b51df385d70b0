"""Engines with threads, event loops and collectives as machines: one thread or task runs at a time, in a fixed order.

An adapter makes ``Threads`` or an ``EventLoop`` in its machine; ``Collectives`` are the meeting points of ranks.
"""

from scripted.sdk.cooperative.collectives import Collectives
from scripted.sdk.cooperative.event_loop import EventLoop
from scripted.sdk.cooperative.stall import Stall
from scripted.sdk.cooperative.threads import Threads

__all__ = ["Collectives", "EventLoop", "Stall", "Threads"]
