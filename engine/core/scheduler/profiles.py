"""Profiles: the stages take at most one at a time of themselves, begun and ended between two microbatches.

Decides only whether a call is in order; the stages measure and write. A call waits here until there is a slot for it.
"""

from __future__ import annotations

from engine.core.messages import CallAnswer, StartProfile, StopProfile
from engine.core.scheduler.replies import done, refused


class Profiles:
    """``folder`` is where the present profile is to be written; None when none is taken."""

    def __init__(self) -> None:
        self.folder: str | None = None
        # The call that is not launched yet, and the one whose result is not back.
        self.due: StartProfile | StopProfile | None = None
        self._launched: StartProfile | StopProfile | None = None

    @property
    def is_open(self) -> bool:
        """True while a call waits for its answer."""
        return self.due is not None or self._launched is not None

    def ask(self, call: StartProfile | StopProfile) -> CallAnswer | None:
        """Refuse a call that is out of order; None when it is answered with its result."""
        if self.is_open:
            return refused(call, "another profile call is not answered yet; wait for its answer")
        if isinstance(call, StartProfile) and self.folder is not None:
            return refused(call, f"one is being taken into {self.folder}; POST /stop_profile first")
        if isinstance(call, StopProfile) and self.folder is None:
            return refused(call, "none is being taken; POST /start_profile first")
        self.due = call
        return None

    def launch(self) -> str | None:
        """Where the stages write from now on; None tells them to stop."""
        self._launched, self.due = self.due, None
        return self._launched.folder if isinstance(self._launched, StartProfile) else None

    def finish(self, error: str | None) -> CallAnswer:
        """Note that the stages have answered, or that they never will."""
        call = self._launched or self.due
        self._launched = self.due = None
        assert call is not None, "a profile call came back that was never made"
        folder, self.folder = self.folder, call.folder if isinstance(call, StartProfile) and error is None else None
        if error is not None:
            return refused(call, error)
        what = f"profiling into {call.folder}" if isinstance(call, StartProfile) else f"wrote the profile into {folder}"
        return done(call, what)
