"""The ports of the scheduler's loop: the step gate, the pipeline and the outbox, and what passes through them.

The gate decides which events the next step sees and when it runs. The loop waits in the gate alone, so a gate can
freeze it. Nothing here knows an implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypedDict

import msgspec

from engine.core.messages import CacheEvent, Event, OrderAnswer, PipelineEvent, Reply
from engine.core.plan import GrammarOrder, LoraOrder, Microbatch, TransferOrder


class Step(msgspec.Struct, frozen=True, gc=False):
    """The input of one scheduler step: events in the order in which they apply, and the time in seconds."""

    events: tuple[Event, ...]
    now: float


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """The output of one scheduler step.

    With ``again`` another step may do more even without events, because the pipeline has a free slot and there is work:
    the gate must not wait. ``deadline`` is the time in seconds, on the clock of ``Step.now``, at which a step is due
    even if nothing happens. ``grammars`` are orders to the last stage, ``loras`` and ``transfers`` orders to all
    stages; they go out before the microbatch. ``cache_events`` are the changes of the prefix cache.
    """

    step: int
    microbatch: Microbatch | None
    replies: tuple[Reply, ...]
    again: bool
    deadline: float | None
    grammars: tuple[GrammarOrder, ...] = ()
    cache_events: tuple[CacheEvent, ...] = ()
    transfers: tuple[TransferOrder, ...] = ()
    loras: tuple[LoraOrder, ...] = ()


class StepShare(TypedDict, total=False):
    """The fields of a step's result that features and the cache fill in."""

    grammars: tuple[GrammarOrder, ...]
    cache_events: tuple[CacheEvent, ...]
    transfers: tuple[TransferOrder, ...]
    loras: tuple[LoraOrder, ...]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one step: its input, its output, and the sizes of everything afterwards.

    ``in_flight`` holds microbatch ids in launch order; pages are counts; ``digest`` is the digest chain after the step.
    ``waiting_rids`` and ``running_rids`` name the counted requests if the recorder keeps names. ``error`` is the
    exception, as ``Type: text``, of the step in which the scheduler died.
    """

    step: int
    now: float
    events: tuple[Event, ...]
    microbatch: Microbatch | None
    replies: tuple[Reply, ...]
    waiting: int
    chunked: str | None
    running: int
    in_flight: tuple[int, ...]
    pages_free: int
    pages_cached: int
    pages_held: int
    digest: str
    waiting_rids: tuple[str, ...] = ()
    running_rids: tuple[str, ...] = ()
    error: str | None = None
    transfers: tuple[TransferOrder, ...] = ()
    transferring: tuple[str, ...] = ()


class Gate(Protocol):
    """Feeds the loop.

    A context manager, entered before the first step and left after the last, with the exception that ended the loop if
    any.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def next_step(self, previous: StepResult | None) -> Step | None:
        """Wait until a step is due and return its events; None ends the loop.

        ``previous`` is the result of the last step (None before the first).
        """


class Pipeline(Protocol):
    """Runs microbatches in launch order and returns their completions in that same order."""

    def launch(self, microbatch: Microbatch) -> None:
        """Hand a microbatch to the first stage. Never blocks on the computation."""

    def next_completion(self, timeout_s: float | None) -> PipelineEvent | None:
        """Return the next completion in launch order; wait up to ``timeout_s`` seconds (None: without limit, 0: not at
        all).

        A pipeline that computes in this process computes here. Returns None when the time is up.
        """

    @property
    def ready(self) -> bool:
        """True if ``next_completion(0)`` would return a completion without a readable wake source: work in this
        process.
        """

    @property
    def takes_more(self) -> bool:
        """True if more should be launched before waiting for that work, because it is planned ahead of its result."""

    def wake_sources(self) -> Sequence[Any]:
        """Sources for a ``zmq.Poller``: when one is readable, ``next_completion(0)`` may return something."""

    def order_grammar(self, order: GrammarOrder) -> None:
        """Have the last stage compile or forget a grammar. Never blocks on the compilation."""

    def order_lora(self, order: LoraOrder) -> None:
        """Have every stage read its share of a LoRA, or drop one that was read. Never blocks on the reading."""

    def order_transfer(self, order: TransferOrder) -> None:
        """Have every stage start or stop a transfer of KV. Never blocks on the other engine."""

    def answers(self) -> Sequence[OrderAnswer]:
        """Return the answers to orders so far, without waiting; an answer wakes the gate as a completion does."""

    def answer_source(self) -> int | None:
        """Return a file descriptor that is readable when there are ``answers``; None if ``wake_sources`` show that."""

    def close(self) -> None: ...


class Outbox(Protocol):
    def send(self, replies: Sequence[Reply]) -> None:
        """Hand over the replies of one step, in order. Never blocks on the receiver."""

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Hand over one step's changes of the prefix cache, after its replies. Never blocks on the receiver."""
