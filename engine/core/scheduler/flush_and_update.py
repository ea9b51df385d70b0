"""Flush and weight update, which need a quiescent engine: done at once, or deferred until the engine is quiescent or
the call times out.

Only this file checks the books' idle predicate for them. They never plan a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.core.checkpoint import Checkpoint, CheckpointParts
from engine.core.errors import IntegrityError
from engine.core.messages import CallAnswer, FlushCache, UpdateWeights
from engine.core.plan import WeightUpdate
from engine.core.scheduler.core import Core
from engine.core.scheduler.feature import Feature
from engine.core.scheduler.replies import done, refused
from engine.core.scheduler.request import Request


class FlushAndUpdate(Feature):
    """At most one call waits. ``deadline``, in seconds, is when it times out; None if no call waits."""

    control = WeightUpdate
    # Set while an update is requested or in flight: it is launched alone, and nothing else meanwhile.
    is_due = False

    def __init__(self, core: Core) -> None:
        self._core = core
        self._books = core.books
        self._memory = core.memory
        self._counters = core.counters
        self._deferred: FlushCache | UpdateWeights | None = None

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        return {FlushCache: self._on_call, UpdateWeights: self._on_call}

    def _on_call(self, call: FlushCache | UpdateWeights) -> None:
        self._core.answer_now(self.ask(call, self._core.now))

    def ask(self, call: FlushCache | UpdateWeights, now: float) -> CallAnswer | None:
        """Do, refuse, or defer a call; None when the answer comes later."""
        if self._books.is_quiescent:
            return self._do(call)
        if call.timeout_s is None:
            why = f"the engine is busy: {self._books.what_is_busy()}; send a timeout to wait until it is idle"
            return refused(call, why)
        if self._deferred is not None:
            return refused(call, f"another {self._deferred.words} waits for the engine to be idle")
        self._deferred = call
        self.deadline = now + call.timeout_s
        return None

    def on_time(self, now: float) -> None:
        """Answer the waiting call if it is due."""
        self._core.answer_now(self.answer_due(now))

    def answer_due(self, now: float) -> CallAnswer | None:
        """Return the answer to the waiting call if it is due."""
        call = self._deferred
        assert call is not None, "a deadline is set, but no call waits"
        assert self.deadline is not None, f"{call} waits without a deadline"
        quiescent = self._books.is_quiescent
        if not quiescent and now < self.deadline:
            return None
        self._deferred = self.deadline = None
        if quiescent:
            return self._do(call)
        return refused(call, f"still busy after {call.timeout_s} s: {self._books.what_is_busy()}")

    def launch(self, number: int) -> WeightUpdate | None:
        """Return the update, once nothing is in flight."""
        update = self._books.update
        assert update is not None, "an update is launched that was never requested"
        return None if self._books.in_flight else WeightUpdate(number, update.model_path)

    def finish(self, error: str | None) -> None:
        """Answer the update, and tell the features about new weights."""
        self._core.say(self.finish_update(error))
        if error is None:
            for feature in self._core.hooks.change_weights:
                feature.change_weights()

    def give_up(self, why: str) -> None:
        if self._books.update is not None:
            self._core.say(self.finish_update(why, is_dead=True))

    @property
    def is_at_rest(self) -> bool:
        return self._deferred is None

    def check(self, live: Sequence[Request]) -> None:
        """Check that an update is due while one is requested, and that a deadline is set while a call waits."""
        del live
        update, deferred = self._books.update, self._deferred
        if self.is_due is not (update is not None) or (self.deadline is None) is not (deferred is None):
            raise IntegrityError(
                f"the update {update} has is_due={self.is_due}, and the call {deferred} has the deadline "
                f"{self.deadline}"
            )

    def snapshot(self, parts: CheckpointParts) -> None:
        parts["weights"] = self._books.weights

    def restore(self, checkpoint: Checkpoint) -> None:
        self._books.weights = checkpoint.weights

    def finish_update(self, error: str | None, *, is_dead: bool = False) -> CallAnswer:
        """Return the answer to the update: all stages have the new weights, or with ``error`` all have the old ones.

        With ``is_dead`` the stages are gone, which is not the call's fault.
        """
        update, self._books.update = self._books.update, None
        self.is_due = False
        assert update is not None, "an update came back that was never requested"
        if error is not None:
            fault = None if update.model_path is None or is_dead else "model_path"
            return refused(update, f"{error}; the weights are as they were", fault=fault)
        pages = self._drop_cache()
        self._books.weights = update.model_path or ""
        self._counters.weights_version += 1
        message = f"updated the weights to version {self._counters.weights_version}, flushed {pages} cached pages"
        return done(update, message)

    def _do(self, call: FlushCache | UpdateWeights) -> CallAnswer | None:
        if isinstance(call, FlushCache):
            for feature in self._core.hooks.flush:
                feature.flush()
            return done(call, f"flushed {self._drop_cache()} cached pages")
        self._books.update = call
        self.is_due = True
        return None

    def _drop_cache(self) -> int:
        pages = self._memory.pages.cached
        self._memory.reset()
        return pages
