"""Flushes of the cache: at once, or deferred until the engine is quiescent or a deadline has passed.

Resets the memory, and only when the books' one idle predicate allows it. It never plans or ends a request.
"""

from __future__ import annotations

from engine.memory import KVMemory
from engine.messages import CallAnswer, FlushCache
from engine.scheduler.books import Books

__all__ = ["Flushes"]


class Flushes:
    """At most one flush waits. ``deadline``, in seconds, is when it gives up; None when no flush waits."""

    def __init__(self, books: Books, memory: KVMemory) -> None:
        self._books = books
        self._memory = memory
        self._deferred: FlushCache | None = None
        self.deadline: float | None = None

    def ask(self, flush: FlushCache, now: float) -> CallAnswer | None:
        """Flush, refuse, or defer; None when deferred."""
        if self._books.is_quiescent:
            return self._flush(flush)
        if flush.timeout_s is None:
            return _refusal(flush, f"the engine is busy: {self._books.what_is_busy()}")
        if self._deferred is not None:
            return _refusal(flush, "another flush waits for the engine to be idle")
        self._deferred = flush
        self.deadline = now + flush.timeout_s
        return None

    def answer_due(self, now: float) -> CallAnswer | None:
        """The answer to the flush that waits, if there is one and its time has come."""
        flush = self._deferred
        if flush is None or self.deadline is None:
            return None
        quiescent = self._books.is_quiescent
        if not quiescent and now < self.deadline:
            return None
        self._deferred = self.deadline = None
        if quiescent:
            return self._flush(flush)
        return _refusal(flush, f"still busy after {flush.timeout_s} s: {self._books.what_is_busy()}")

    def _flush(self, flush: FlushCache) -> CallAnswer:
        pages = self._memory.pages.cached
        self._memory.reset()
        return CallAnswer(call_id=flush.call_id, ok=True, message=f"flushed {pages} cached pages")


def _refusal(flush: FlushCache, why: str) -> CallAnswer:
    return CallAnswer(call_id=flush.call_id, ok=False, message=f"flush refused: {why}")
