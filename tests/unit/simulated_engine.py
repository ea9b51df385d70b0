"""A scheduler on a simulated pipeline, driven step by step: completions come back when a test says so.

After every step it checks what must hold after every step: the audit, the token budget, the depth, and that a gate
which was told that nothing more can be done would have missed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import msgspec
from scripted_lockstep.simulated.pipeline import SimulatedPipeline

from engine.core.audit import audit
from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import (
    Abort,
    CallAnswer,
    Completion,
    Event,
    FinishReason,
    Generate,
    Refusal,
    RefusalKind,
    SamplingParams,
    TokenOutput,
)
from engine.core.plan import ForwardMode, Microbatch
from engine.core.scheduler import Scheduler, StepResult

# An engine that is not idle after this many steps counts as stuck.
DRAIN_LIMIT_STEPS = 50_000
POLICIES = get_args(EngineConfig.model_fields["schedule_policy"].annotation)


def limits_of(*, window: int = 0, **config: object) -> Limits:
    """``window`` is what the model's window layers see, 0 for a model without such layers."""
    return Limits.of(EngineConfig(**config), msgspec.structs.replace(EMBEDDED_FACTS, window_tokens=window))


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    """Tokens that repeat nowhere, so that a page in the wrong place is seen."""
    return tuple((salt * 31 + i * i * 7 + i * 13) % 200 for i in range(length))


def generate(rid: str, ids: tuple[int, ...], new: int = 4, *, priority: int = 0, **sampling: object) -> Generate:
    params = SamplingParams(**{"max_new_tokens": new, "temperature": 0.0} | sampling)
    return Generate(rid=rid, prompt_ids=ids, sampling=params, priority=priority)


@dataclass
class Life:
    """One request as its client saw it."""

    message: Generate
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    refusal: RefusalKind | None = None
    error: str | None = None

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.refusal is not None


class SimulatedEngine:
    """``step`` takes messages and how many of the completions that are ready come back before them."""

    def __init__(self, *, window: int = 0, **config: object) -> None:
        self.limits = limits_of(window=window, **config)
        self.scheduler = Scheduler(self.limits)
        self.pipeline = SimulatedPipeline(self.limits)
        self.lives: list[Life] = []
        self.answers: dict[str, CallAnswer] = {}
        self.microbatches: list[Microbatch] = []
        self.last: StepResult | None = None
        self.now = 0.0

    @property
    def in_flight(self) -> int:
        return len(self.scheduler.books.in_flight)

    def step(self, *messages: Event, completions: int = 0) -> StepResult:
        events: list[Event] = []
        while len(events) < completions and (done := self.pipeline.next_completion(0)) is not None:
            events.append(done)
        return self.apply(*events, *self.pipeline.answers(), *messages)

    def apply(self, *events: Event) -> StepResult:
        """Run one step with exactly these events, and every check that holds after any step."""
        self.lives += [Life(event) for event in events if isinstance(event, Generate)]
        result = self.last = self.scheduler.step(events, self.now)
        for reply in result.replies:
            self._book(reply)
        for order in result.loras:
            self.pipeline.order_lora(order)
        if result.microbatch is not None:
            self._check_budget(result.microbatch)
            self.microbatches.append(result.microbatch)
            self.pipeline.launch(result.microbatch)
        audit(self.scheduler)
        assert self.in_flight <= self.limits.depth
        if not result.again and events:
            idle = self.apply()
            assert idle.microbatch is None, f"a gate that waited would have missed {idle.microbatch}"
            assert not idle.replies
        return result

    def drain(self, *messages: Event) -> None:
        """Steps with everything that is ready until the engine is fully idle. Fails if it is stuck or does not end."""
        self.step(*messages, completions=self.limits.depth)
        for _ in range(DRAIN_LIMIT_STEPS):
            if self.scheduler.is_fully_idle and not self.pipeline.loras:
                return
            assert self.last is not None
            stuck = not (self.last.again or self.in_flight or self.pipeline.loras)
            assert not stuck, f"stuck: {self.scheduler.stats()} {list(self.scheduler.books.requests.values())}"
            self.step(completions=1)
        raise AssertionError(f"not idle after {DRAIN_LIMIT_STEPS} steps: {self.scheduler.stats()}")

    def run(self, *messages: Generate) -> list[list[int]]:
        """The tokens of each of these requests, run to their ends."""
        first = len(self.lives)
        self.drain(*messages)
        return [life.tokens for life in self.lives[first:]]

    def fill_until(self, *messages: Event, chunked: bool, waiting: int = 0) -> None:
        """Steps without completions until the queue and ``chunked`` are as wanted."""
        self.step(*messages)
        books = self.scheduler.books
        for _ in range(self.limits.depth):
            if (books.chunked is not None) == chunked and len(books.waiting) == waiting:
                return
            self.step()
        raise AssertionError(f"the window never opened: {self.scheduler.stats()}")

    def life(self, rid: str) -> Life:
        """The latest request of this rid."""
        return [life for life in self.lives if life.message.rid == rid][-1]

    def abort(self, rid: str) -> StepResult:
        return self.step(Abort(rid=rid))

    def ready_ids(self) -> list[int]:
        return [done.microbatch_id for done in self.pipeline._done if isinstance(done, Completion)]

    def _book(self, reply: object) -> None:
        if isinstance(reply, TokenOutput):
            life = next(life for life in self.lives if life.message.rid == reply.rid and not life.ended)
            life.tokens += reply.token_ids
            life.finish_reason, life.error = reply.finish_reason, reply.error
            assert reply.completion_tokens == len(life.tokens)
        elif isinstance(reply, Refusal):
            life = self.life(reply.rid)
            assert not life.ended
            assert not life.tokens
            life.refusal = reply.kind
        elif isinstance(reply, CallAnswer):
            assert reply.call_id not in self.answers
            self.answers[reply.call_id] = reply

    def _check_budget(self, microbatch: Microbatch) -> None:
        if microbatch.is_control:
            assert not microbatch.segments
            return
        limits = self.limits
        most = limits.rows if microbatch.mode is ForwardMode.DECODE else limits.prefill_budget_tokens
        assert 1 <= microbatch.tokens <= most
        assert len(set(microbatch.rids)) == len(microbatch.rids)


def alone(message: Generate, **config: object) -> list[int]:
    """Return the output of an undisturbed request."""
    quiet: dict[str, object] = {"context_length": config.get("context_length")}
    return SimulatedEngine(**quiet).run(message)[0]
