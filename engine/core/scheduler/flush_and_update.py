"""Flush and weight update, which need a quiescent engine: done at once, or deferred until it is or time is up.

Both ask the books' one idle predicate, here and nowhere else. They never plan or end a request.
"""

from __future__ import annotations

from engine.core.memory import KVMemory
from engine.core.messages import CallAnswer, FlushCache, UpdateWeights
from engine.core.scheduler.books import Books
from engine.core.scheduler.counters import Counters
from engine.core.scheduler.grammars import Grammars
from engine.core.scheduler.replies import CALL_NAMES, done, refused


class FlushAndUpdate:
    """At most one call waits. ``deadline``, in seconds, is when it gives up; None when none waits."""

    def __init__(self, books: Books, memory: KVMemory, counters: Counters, grammars: Grammars) -> None:
        self._books = books
        self._memory = memory
        self._counters = counters
        self._grammars = grammars
        self._deferred: FlushCache | UpdateWeights | None = None
        self.deadline: float | None = None

    def ask(self, call: FlushCache | UpdateWeights, now: float) -> CallAnswer | None:
        """Do, refuse, or defer; None when the answer comes later."""
        if self._books.is_quiescent:
            return self._do(call)
        if call.timeout_s is None:
            return refused(call, f"the engine is busy: {self._books.what_is_busy()}")
        if self._deferred is not None:
            return refused(call, f"another {CALL_NAMES[type(self._deferred)]} waits for the engine to be idle")
        self._deferred = call
        self.deadline = now + call.timeout_s
        return None

    def answer_due(self, now: float) -> CallAnswer | None:
        """The answer to the call that waits, if there is one and its time has come."""
        call = self._deferred
        if call is None:
            return None
        assert self.deadline is not None, f"{call} waits without a deadline"
        quiescent = self._books.is_quiescent
        if not quiescent and now < self.deadline:
            return None
        self._deferred = self.deadline = None
        if quiescent:
            return self._do(call)
        return refused(call, f"still busy after {call.timeout_s} s: {self._books.what_is_busy()}")

    def finish_update(self, error: str | None, *, is_dead: bool = False) -> CallAnswer:
        """The stages have answered: all of them have the new weights, or with ``error`` all of them the old ones.

        With ``is_dead`` they never will, which is no fault of the call.
        """
        update, self._books.update = self._books.update, None
        assert update is not None, "an update came back that was never asked for"
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
            self._grammars.forget_unused()
            return done(call, f"flushed {self._drop_cache()} cached pages")
        self._books.update = call
        return None

    def _drop_cache(self) -> int:
        pages = self._memory.pages.cached
        self._memory.reset()
        return pages
