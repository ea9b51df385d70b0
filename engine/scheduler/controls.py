"""Administrative calls that need more than the next step: flush, weight update, profile.

Asks who owns each of them, launches what the stages are to be told as a microbatch of its own, and turns its result
into the call's answer. It knows no request.
"""

from __future__ import annotations

from engine.limits import Limits
from engine.messages import CallAnswer, FlushCache, StartProfile, StopProfile, UpdateWeights
from engine.plan import ForwardMode, Microbatch
from engine.scheduler.books import Books
from engine.scheduler.flush_and_update import FlushAndUpdate
from engine.scheduler.profiles import Profiles

__all__ = ["ControlCall", "Controls"]

ControlCall = FlushCache | UpdateWeights | StartProfile | StopProfile


class Controls:
    """The calls that are not answered in the step that sees them."""

    def __init__(self, limits: Limits, books: Books, flush_and_update: FlushAndUpdate) -> None:
        self._depth = limits.depth
        self._books = books
        self._flush_and_update = flush_and_update
        self._profiles = Profiles()

    @property
    def deadline(self) -> float | None:
        """When a call that waits gives up, in seconds; None when none waits."""
        return self._flush_and_update.deadline

    @property
    def is_at_rest(self) -> bool:
        """No call waits, and no profile is being taken."""
        profiles = self._profiles
        return self.deadline is None and not profiles.is_open and profiles.folder is None

    def ask(self, call: ControlCall, now: float) -> CallAnswer | None:
        """Do or refuse a call; None when its answer comes later."""
        if isinstance(call, StartProfile | StopProfile):
            return self._profiles.ask(call)
        return self._flush_and_update.ask(call, now)

    def answer_due(self, now: float) -> CallAnswer | None:
        """The answer to the call that waits, if its time has come."""
        return self._flush_and_update.answer_due(now)

    def microbatch(self, number: int) -> Microbatch | None:
        """The next message to the stages, if it is due: an update alone in the pipeline, a profile in a slot."""
        update, in_flight = self._books.update, len(self._books.in_flight)
        if update is not None:
            return None if in_flight else Microbatch(number, ForwardMode.UPDATE, (), weights=update.model_path)
        if self._profiles.due is not None and in_flight < self._depth:
            return Microbatch(number, ForwardMode.PROFILE, (), trace_dir=self._profiles.launch())
        return None

    def finish(self, microbatch: Microbatch, error: str | None) -> CallAnswer:
        """Note that all stages have carried out the last message, or with ``error`` that they could not."""
        if microbatch.mode is ForwardMode.UPDATE:
            return self._flush_and_update.finish_update(error)
        return self._profiles.finish(error)

    def give_up(self, why: str) -> list[CallAnswer]:
        """Give up every call: nothing can be launched any more, and nothing will come back."""
        answers = [self._flush_and_update.finish_update(why)] if self._books.update is not None else []
        return [*answers, self._profiles.finish(why)] if self._profiles.is_open else answers
