"""Virtual time as a script sees it: asked and moved forward, never by itself."""

from __future__ import annotations

import math

from scripted.core.clock import VirtualClock
from scripted.errors import BadCall
from scripted.script.asked import Asked


class ScriptClock(Asked):
    _called = "t.clock"

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._seal()

    def now(self) -> float:
        """Seconds that the script has advanced time by."""
        return self._clock.now()

    def advance(self, seconds: float) -> None:
        """Move time forward; the next step is the first that sees it."""
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not number or not math.isfinite(self._clock.now() + seconds) or seconds < 0:
            raise BadCall(f"t.clock.advance() takes seconds >= 0, got {seconds!r}; it is {self._clock.now():g} s")
        self._clock.advance(seconds)

    def __repr__(self) -> str:
        return f"<virtual time: {self._clock.now():g} s>"
