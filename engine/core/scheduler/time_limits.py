"""Time limits: end a request that was not started in time or took too long.

Owns the deadlines of live requests, in order, and the error text for the client. A request without limits, or one that
has ended, has no entry.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.core.errors import IntegrityError
from engine.core.messages import FinishReason, Generate
from engine.core.scheduler.core import Core
from engine.core.scheduler.deadlines import earliest
from engine.core.scheduler.feature import Feature
from engine.core.scheduler.request import Request


class Allowed(NamedTuple):
    """The time limits of one request, in seconds. ``waits_s`` is None after its first start."""

    since: float
    total_s: float | None
    waits_s: float | None

    @property
    def rule(self) -> tuple[float, str, float]:
        """Return the first deadline, the name of its limit, and the limit; ties go to the request's own."""
        waits_s, total_s = self.waits_s, self.total_s
        if waits_s is not None and (total_s is None or waits_s < total_s):
            return self.since + waits_s, "waiting_timeout_s", waits_s
        assert total_s is not None, "only requests with a limit have an entry"
        return self.since + total_s, "timeout_s", total_s


class TimeLimits(Feature):
    """The deadlines of one scheduler's requests. ``waiting_timeout_s`` bounds the wait for the first start.

    The shorter of the engine's and the request's own bound applies, and only to the first start: a retracted request
    has ``timeout_s`` alone. A deadline has passed when the time reaches it. ``deadline`` is the first one, in seconds;
    None without one.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting_s = core.limits.waiting_timeout_s
        self._allowed: dict[str, Allowed] = {}
        # The deadline and the arrival of each request in ``_allowed``, sorted.
        self._queue: list[tuple[float, int, Request]] = []

    def enter(self, request: Request, message: Generate) -> None:
        """Start the clock of a request."""
        waits_s = earliest(message.waiting_timeout_s, self._waiting_s)
        if waits_s is not None or message.timeout_s is not None:
            self._put(request, Allowed(self._core.now, message.timeout_s, waits_s))

    def start(self, request: Request) -> None:
        """Lift the bound on waiting: a started request can only exceed its own ``timeout_s``."""
        allowed = self._allowed.get(request.rid)
        if allowed is not None and allowed.waits_s is not None:
            self.end(request)
            if allowed.total_s is not None:
                self._put(request, allowed._replace(waits_s=None))

    def end(self, request: Request) -> None:
        """Forget the deadline of a request."""
        allowed = self._allowed.pop(request.rid, None)
        if allowed is not None:
            del self._queue[bisect.bisect_left(self._queue, (allowed.rule[0], request.arrival))]
            self.deadline = self._queue[0][0] if self._queue else None

    def on_time(self, now: float) -> None:
        """End the requests whose deadline has passed."""
        assert self.deadline is not None
        if self.deadline <= now:
            for request in self.over(now):
                self._core.end(request, FinishReason.TIMEOUT, error=self.why(request, now))

    def over(self, now: float) -> list[Request]:
        """Return the requests whose deadline has passed, by deadline, then by arrival."""
        return [request for _, _, request in self._queue[: bisect.bisect_right(self._queue, (now, math.inf))]]

    def why(self, request: Request, now: float) -> str:
        """Return the client's error for a request that timed out, with the numbers."""
        allowed = self._allowed[request.rid]
        _, name, limit_s = allowed.rule
        passed, tokens = now - allowed.since, len(request.ids) - request.prompt_tokens
        if name == "waiting_timeout_s":
            return f"not started after {passed:g} s, {name} is {limit_s:g}; come back later or allow more time"
        return f"not ended after {passed:g} s, with {tokens} tokens, {name} is {limit_s:g}; allow more time"

    def check(self, live: Sequence[Request]) -> None:
        """Check that only live requests have deadlines, and that no started request has one for its start."""
        del live
        if self.deadline != (self._queue[0][0] if self._queue else None) or len(self._queue) != len(self._allowed):
            raise IntegrityError(f"{self._queue} have time limits, but ``deadline`` is {self.deadline}")
        if self.deadline is None:
            return
        for request, must_start in self.entries():
            if self._core.books.requests.get(request.rid) is not request:
                raise IntegrityError(f"{request} has a time limit, but has ended")
            if must_start and (request.lease is not None or request.retractions):
                raise IntegrityError(f"{request} has started, but still has a limit for its start")

    def entries(self) -> Iterator[tuple[Request, bool]]:
        """Yield each request with a limit, in order of deadlines, and whether the limit is for its start."""
        for _, _, request in self._queue:
            yield request, self._allowed[request.rid].waits_s is not None

    def _put(self, request: Request, allowed: Allowed) -> None:
        self._allowed[request.rid] = allowed
        bisect.insort(self._queue, (allowed.rule[0], request.arrival, request))
        self.deadline = self._queue[0][0]
