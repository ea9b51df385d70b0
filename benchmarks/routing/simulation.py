"""Replicas under a routing policy in virtual time: when each request gets its first token, and what was cached.

Owns the model of a replica: one prompt is prefilled at a time, in order of arrival, without its cached chunks; decodes
slow it down and are slowed down by one another. Nothing here sleeps or reads a clock.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from benchmarks.routing.policies import Policy
from benchmarks.routing.workload import CHUNK_TOKENS, Conversation
from engine.core.routing.placement import ReplicaLoad

__all__ = ["Outcome", "ReplicaModel", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaModel:
    """The speed of a replica: about that of an 8B model in bf16 on one accelerator of 2024."""

    prefill_tokens_s: float = 12_000.0
    decode_step_s: float = 0.012
    decode_step_a_request_s: float = 0.0004
    rows: int = 64
    cache_chunks: int = 800

    def step_s(self, running: int) -> float:
        """How long a decode step of ``running`` requests takes."""
        return self.decode_step_s + self.decode_step_a_request_s * running

    def prefill_s(self, tokens: int, running: int) -> float:
        """How long a prompt takes beside ``running`` requests that decode and take their part of each step."""
        return tokens / self.prefill_tokens_s * (1 + running * self.decode_step_a_request_s / self.decode_step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome. ``hit_rate`` is of prompt tokens, imbalance of open requests: largest over mean, each second."""

    requests: int
    hit_rate: float
    mean_imbalance: float
    p50_s: float
    p99_s: float
    virtual_s: float


class _Request:
    __slots__ = ("arrived_s", "chain", "conversation", "pending_tokens", "ticket", "tokens", "turn")

    def __init__(self, conversation: Conversation, turn: int, arrived_s: float) -> None:
        self.conversation = conversation
        self.turn = turn
        self.tokens = conversation.prompt_tokens(turn)
        self.chain = conversation.chain(self.tokens)
        self.pending_tokens = self.tokens
        self.arrived_s = arrived_s
        self.ticket: object = None


class _Replica:
    __slots__ = ("cache", "pending_tokens", "prefilling", "queue", "running")

    def __init__(self) -> None:
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.queue: deque[_Request] = deque()
        self.prefilling = False
        self.running = 0
        self.pending_tokens = 0

    def cached_tokens(self, request: _Request) -> int:
        """How many tokens of a prompt's beginning are cached; the last one is always computed."""
        cache = self.cache
        for length, chunk in enumerate(request.chain):
            if chunk not in cache:
                return length * CHUNK_TOKENS
        return min(len(request.chain) * CHUNK_TOKENS, request.tokens - 1)

    def publish(self, chain: Sequence[int], capacity: int) -> None:
        cache = self.cache
        for chunk in reversed(chain):
            if chunk in cache:
                cache.move_to_end(chunk)
            else:
                cache[chunk] = None
        while len(cache) > capacity:
            cache.popitem(last=False)


# Kinds of event; each is (time, number, kind, replica, what).
_ARRIVES, _PREFILLED, _DECODED, _REPORTS = range(4)


def simulate(
    policy: Policy,
    talk: Iterator[Conversation],
    *,
    replicas: int,
    requests: int,
    model: ReplicaModel,
    report_s: float = 1.0,
    warm_up: float = 0.3,
) -> Outcome:
    """Run ``requests`` requests. The first part of them, ``warm_up``, fills the caches and is not counted.

    Each replica tells its load every ``report_s`` seconds of virtual time.
    """
    return _Run(policy, talk, replicas, requests, model, report_s, warm_up).run()


class _Run:
    def __init__(
        self,
        policy: Policy,
        talk: Iterator[Conversation],
        replicas: int,
        requests: int,
        model: ReplicaModel,
        report_s: float,
        warm_up: float,
    ) -> None:
        self._policy = policy
        self._talk = talk
        self._replicas = [_Replica() for _ in range(replicas)]
        self._requests = requests
        self._first_counted = int(requests * warm_up)
        self._model = model
        self._report_s = report_s
        self._numbers = count()
        self._events: list[tuple[float, int, int, int, _Request | None]] = []
        self._arrived = 0
        self._waits = array("d")
        self._tokens = self._hits = 0
        self._imbalances: list[float] = []

    def run(self) -> Outcome:
        self._begin_conversation()
        self._push(self._report_s, _REPORTS, 0, None)
        act = (self._arrive, self._prefilled, self._decoded, self._report)
        now = 0.0
        events = self._events
        while events and self._arrived < self._requests:
            now, _, kind, number, request = heapq.heappop(events)
            act[kind](now, number, request)
        p50, p99 = np.percentile(np.frombuffer(self._waits), (50, 99)).tolist()
        return Outcome(
            requests=len(self._waits),
            hit_rate=self._hits / self._tokens,
            mean_imbalance=float(np.mean(self._imbalances)),
            p50_s=p50,
            p99_s=p99,
            virtual_s=now,
        )

    def _push(self, at_s: float, kind: int, number: int, request: _Request | None) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), kind, number, request))

    def _begin_conversation(self) -> None:
        conversation = next(self._talk)
        self._push(conversation.begins_s, _ARRIVES, 0, _Request(conversation, 0, conversation.begins_s))

    def _arrive(self, now: float, _: int, request: _Request | None) -> None:
        assert request is not None
        if request.turn == 0:
            self._begin_conversation()
        self._arrived += 1
        number, request.ticket = self._policy.choose(request.chain, request.tokens)
        replica = self._replicas[number]
        replica.queue.append(request)
        request.pending_tokens = request.tokens - replica.cached_tokens(request)
        replica.pending_tokens += request.pending_tokens
        self._start(now, number, replica)

    def _start(self, now: float, number: int, replica: _Replica) -> None:
        """Begin the next prompt, if no other is being prefilled and there is a row for it."""
        if replica.prefilling or not replica.queue or replica.running >= self._model.rows:
            return
        request = replica.queue.popleft()
        replica.prefilling = True
        cached = replica.cached_tokens(request)
        if self._arrived > self._first_counted:
            self._tokens += request.tokens
            self._hits += cached
        duration = self._model.prefill_s(request.tokens - cached, replica.running)
        self._push(now + duration, _PREFILLED, number, request)

    def _prefilled(self, now: float, number: int, request: _Request | None) -> None:
        assert request is not None
        replica = self._replicas[number]
        replica.prefilling = False
        replica.pending_tokens -= request.pending_tokens
        replica.running += 1
        if self._arrived > self._first_counted:
            self._waits.append(now - request.arrived_s)
        said = request.conversation.chain(request.tokens + request.conversation.answered[request.turn])
        replica.publish(said, self._model.cache_chunks)
        answer_s = request.conversation.answered[request.turn] * self._model.step_s(replica.running)
        self._push(now + answer_s, _DECODED, number, request)
        self._start(now, number, replica)

    def _decoded(self, now: float, number: int, request: _Request | None) -> None:
        assert request is not None
        replica = self._replicas[number]
        replica.running -= 1
        self._policy.ended(number, request.ticket)
        conversation, turn = request.conversation, request.turn + 1
        if turn < len(conversation.asked):
            again = now + conversation.pauses_s[request.turn]
            self._push(again, _ARRIVES, 0, _Request(conversation, turn, again))
        self._start(now, number, replica)

    def _report(self, now: float, _: int, __: _Request | None) -> None:
        opened = []
        for number, replica in enumerate(self._replicas):
            waiting = len(replica.queue) + replica.prefilling
            opened.append(waiting + replica.running)
            load = ReplicaLoad(running=replica.running, waiting=waiting, pending_prefill_tokens=replica.pending_tokens)
            self._policy.report(number, load)
        mean = sum(opened) / len(opened)
        if self._arrived > self._first_counted and mean:
            self._imbalances.append(max(opened) / mean)
        self._push(now + self._report_s, _REPORTS, 0, None)
