"""The state that the scheduler, its planner and its features share, and their common ways to end a request.

Owns limits, books, memory, counters and time, and the one place where a request ends or goes back to the queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.limits import Limits
from engine.core.memory import KVMemory
from engine.core.messages import LENGTH, CallAnswer, FinishReason, PauseMode, Reply, TokenLogprob
from engine.core.scheduler.books import Books
from engine.core.scheduler.counters import Counters
from engine.core.scheduler.feature import NO_HOOKS, Hooks
from engine.core.scheduler.policy import policy_named
from engine.core.scheduler.replies import output_of
from engine.core.scheduler.request import GONE, RELEASING, RETRACTING, Request


class Core:
    """One engine's state. ``hooks`` are the hooks of its features; ``now`` is in seconds."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.memory = KVMemory.of(limits)
        self.books = Books()
        self.counters = Counters()
        self.policy = policy_named(limits.schedule_policy)
        self.hooks: Hooks = NO_HOOKS
        self.step_number = 0
        self.now = 0.0
        self._replies: list[Reply] = []

    def say(self, reply: Reply) -> None:
        """Send a reply with the result of this step."""
        self._replies.append(reply)

    def answer(self, call_id: str, *, ok: bool, message: str) -> None:
        """Answer an administrative call."""
        self.say(CallAnswer(call_id=call_id, ok=ok, message=message))

    def answer_now(self, answer: CallAnswer | None) -> None:
        """Send the answer to a call, unless it is None: then it comes later."""
        if answer is not None:
            self.say(answer)

    def startable(self) -> Sequence[Request]:
        """Return the waiting requests that may start and may be overtaken, in order of arrival."""
        waiting: Sequence[Request] = self.books.waiting
        for feature in self.hooks.startable:
            waiting = feature.startable(waiting)
        return waiting

    # -- the end of a request --

    def end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        token: int | None = None,
        logprob: TokenLogprob | None = None,
        error: str | None = None,
    ) -> None:
        """End a request, always here: remove it from its place and the registry, reply once, free its memory once."""
        assert not request.is_finished, f"{request} ends twice: {request.finish_reason}, then {reason}"
        request.finish_reason, request.error = reason, error
        request.ended_by_token = token is not None
        self.books.take_out(request)
        for feature in self.hooks.end:
            feature.end(request)
        del self.books.requests[request.rid]
        self._replies.append(output_of(request, token=token, logprob=logprob))
        self.counters.count_end(reason)
        if request.lease is None:
            self._forget(request)
        elif request.in_flight:
            # The pages stay until the last microbatch or transfer that uses them is back, whose result is dropped.
            request.place = RELEASING
            self.books.releasing.append(request)
        else:
            self._free(request)

    def end_all(self) -> int:
        """Abort every live request and return their number."""
        live = list(self.books.requests.values())
        for request in live:
            self.end(request, FinishReason.ABORT)
        return len(live)

    def end_prefilled(self, request: Request) -> None:
        """End a request without new tokens whose whole prompt is confirmed, and sent if it has a delivery."""
        assert request.lease is not None, f"{request} owned no memory at its end"
        self.memory.publish(request.lease, request.ids, counts=True)
        self.end(request, LENGTH)

    def release_if_landed(self, request: Request) -> None:
        """Release or requeue a request whose last microbatch in flight is back."""
        if request.in_flight:
            return
        if request.place is RELEASING:
            self.books.take_out(request)
            self._free(request)
        elif request.place is RETRACTING:
            self.retract(request)

    def _free(self, request: Request) -> None:
        assert request.lease is not None, f"{request} is freed, but owns no memory"
        if request.ended_by_token:
            # All tokens but the newest have confirmed KV. An aborted or failed request publishes nothing.
            self.memory.publish(request.lease, request.ids[:-1], counts=True)
        self.memory.release(request.lease)
        request.lease = None
        self._forget(request)

    def _forget(self, request: Request) -> None:
        request.place = GONE
        for feature in self.hooks.forget:
            feature.forget(request)

    # -- back to the queue --

    def retract(self, request: Request) -> None:
        """Send a request that is in no microbatch back to the queue, to compute prompt and output again."""
        assert not request.in_flight, f"{request} is retracted while it is in flight"
        assert request.lease is not None, f"{request} is retracted, but owns no memory"
        self.books.take_out(request)
        self.memory.release(request.lease)
        request.lease = None
        request.prefill_tokens = request.planned_tokens = 0
        for feature in self.hooks.retract:
            feature.retract(request)
        request.retractions += 1
        self.counters.retractions += 1
        self.books.enqueue(request)

    def retract_all(self) -> None:
        """Send every request that owns memory back to the queue, at once or when its last microbatch is back."""
        for request in list(self.books.requests.values()):
            if request.lease is None or request.place is RETRACTING:
                continue
            if not request.in_flight:
                self.retract(request)
                continue
            for feature in self.hooks.call_back:
                feature.call_back(request)
            self.books.take_out(request)
            request.place = RETRACTING
            self.books.retracting.append(request)

    def stop_requests(self, mode: PauseMode) -> None:
        """Abort or retract live requests, as a pause or a sleep of this mode requires."""
        if mode is PauseMode.ABORT:
            self.end_all()
        elif mode is PauseMode.RETRACT:
            self.retract_all()
