"""The process that scripted servers fork from: it imports once what their gates need."""

from __future__ import annotations

from typing import Final

from engine.launch.preload import PreloadedParent

__all__ = ["FOLLOWER_GATE", "SCRIPTED_GATE", "start_parent"]

SCRIPTED_GATE: Final = "scripted.adapters.lockstep.server.gate:scripted_gate"
FOLLOWER_GATE: Final = "scripted.adapters.lockstep.server.follower:follower_gate"


def start_parent() -> PreloadedParent:
    """Start it. Returns at once: the imports go on while the caller does other things."""
    return PreloadedParent.start(*(gate.partition(":")[0] for gate in (SCRIPTED_GATE, FOLLOWER_GATE)))
