"""``t``: what a script is given. One object a script; verbs, waits and queries in files of their own.

It lives in the scheduler's process, inside the gate, so it sees the live scheduler; it keeps no state of the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.clock import VirtualClock
from engine.scheduler import Scheduler
from scripted.errors import BadCall
from scripted.queries import Queries
from scripted.verbs import Verbs
from scripted.waits import Wait, Waits

if TYPE_CHECKING:
    from scripted.gate import ScriptedGate

__all__ = ["ScriptContext"]


class ScriptContext(Verbs, Waits, Queries):
    """The engine in a script's hands."""

    def __init__(self, gate: ScriptedGate, *, rid_prefix: str = "scripted") -> None:
        self._gate = gate
        self._made: list[Wait] = []
        self._rid_prefix = rid_prefix
        self._rids = 0
        self.reached: dict[str, int] = {}

    @property
    def scheduler(self) -> Scheduler:
        """The live scheduler: there is no wall between a script and the engine."""
        return self._gate.scheduler

    @property
    def clock(self) -> VirtualClock:
        """Virtual time; ``clock.advance(seconds)`` is the only thing that moves it."""
        return self._gate.clock

    def sometimes(self, name: str, condition: object) -> bool:
        """Record whether a window was reached; ``must_reach=[name]`` makes a script fail that never did."""
        if not name:
            raise BadCall("sometimes() takes a name that is not empty")
        self.reached[name] = self.reached.get(name, 0) + bool(condition)
        return bool(condition)

    def check_waits(self) -> None:
        """Raise BadCall for a wait that was made and never run: without ``yield from`` it does nothing at all."""
        forgotten = next((wait for wait in self._made if not wait.used), None)
        self._made.clear()
        if forgotten is not None:
            raise BadCall(f"t.{forgotten.what} did nothing: write 'yield from t.{forgotten.what}'")

    def _next_rid(self) -> str:
        self._rids += 1
        return f"{self._rid_prefix}-{self._rids}"
