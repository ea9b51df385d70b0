"""Profiles: at most one at a time, started and stopped between two microbatches.

Decides whether a call is valid; the stages measure and write. A call waits here for a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.core.messages import CallAnswer, StartProfile, StopProfile
from engine.core.plan import ProfileSwitch
from engine.core.scheduler.core import Core
from engine.core.scheduler.feature import Feature
from engine.core.scheduler.replies import done, refused


class Profiles(Feature):
    """``folder`` is where the stages write the running profile; None without one."""

    control = ProfileSwitch

    def __init__(self, core: Core) -> None:
        self._core = core
        self.folder: str | None = None
        # The call that waits to be launched, and the call whose result is not back.
        self.due: StartProfile | StopProfile | None = None
        self._launched: StartProfile | StopProfile | None = None

    @property
    def is_open(self) -> bool:
        """True while a call waits for its answer."""
        return self.due is not None or self._launched is not None

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        return {StartProfile: self._on_call, StopProfile: self._on_call}

    def _on_call(self, call: StartProfile | StopProfile) -> None:
        self._core.answer_now(self.ask(call))

    def ask(self, call: StartProfile | StopProfile) -> CallAnswer | None:
        """Refuse an invalid call; None if its result will answer it."""
        if self.is_open:
            return refused(call, "another profile call is in progress; wait for its answer")
        if isinstance(call, StartProfile) and self.folder is not None:
            return refused(call, f"a profile is running into {self.folder}; POST /stop_profile first")
        if isinstance(call, StopProfile) and self.folder is None:
            return refused(call, "no profile is running; POST /start_profile first")
        self.due = call
        return None

    @property
    def is_due(self) -> bool:
        """Return whether a call waits for a slot. Sleep and wake calls go first."""
        return self.due is not None and not self._core.books.turns

    def launch(self, number: int) -> ProfileSwitch | None:
        """Have the stages start or stop the profile, if there is a slot."""
        if len(self._core.books.in_flight) >= self._core.limits.depth:
            return None
        self._launched, self.due = self.due, None
        return ProfileSwitch(number, self._launched.folder if isinstance(self._launched, StartProfile) else None)

    def finish(self, error: str | None) -> None:
        """Answer the call: the stages have carried it out, or have failed."""
        call = self._launched or self.due
        self._launched = self.due = None
        assert call is not None, "a profile call came back that was never made"
        folder, self.folder = self.folder, None
        if error is not None:
            self._core.say(refused(call, error))
        elif isinstance(call, StartProfile):
            self.folder = call.folder
            self._core.say(done(call, f"profiling into {call.folder}"))
        else:
            self._core.say(done(call, f"wrote the profile into {folder}"))

    def give_up(self, why: str) -> None:
        if self.is_open:
            self.finish(why)

    @property
    def is_at_rest(self) -> bool:
        return not self.is_open and self.folder is None
