"""Turns engines with threads, event loops and collectives into machines: one thread or task at a time, in fixed order.

An adapter makes ``Threads`` or an ``EventLoop`` in its machine; in ``Collectives`` ranks meet.
"""

from scripted.sdk.cooperative.collectives import Collectives
from scripted.sdk.cooperative.event_loop import EventLoop
from scripted.sdk.cooperative.stall import Stall
from scripted.sdk.cooperative.threads import Threads

__all__ = ["Collectives", "EventLoop", "Stall", "Threads"]
