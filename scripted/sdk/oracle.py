"""The checks that hold for every scheduler, from events, plans, replies and counts alone.

Each request computes each position once and in order; it reads KV that is its own (``pipeline.py``); it says what it
says alone; it is told one end and nothing after it; limits hold; what is over leaves nothing; nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripted.core.violation import Violation
from scripted.sdk.account import Account
from scripted.sdk.capabilities import Capabilities, Limits, PauseMode
from scripted.sdk.fresh import Fresh
from scripted.sdk.messages import (
    Abort,
    Add,
    Batch,
    BatchFailed,
    BatchResult,
    Event,
    FlushCache,
    Pause,
    Resume,
    Share,
    Stepped,
)
from scripted.sdk.pipeline import SimulatedRunner

__all__ = ["SdkOracle"]


class SdkOracle:
    """Made for a machine that is as good as new, which ``fresh`` describes: what it must be like again in the end."""

    def __init__(self, limits: Limits, can: Capabilities, fresh: Fresh) -> None:
        self.account = Account(limits.context_tokens)
        self.paused: PauseMode | None = None
        self._limits = limits
        self._can = can
        self._fresh = fresh
        self._arrivals = 0
        self._arriving: set[str] = set()
        self._in_flight: dict[int, Batch] = {}
        # The counts that aborts of unknown requests must not change; None except in the step that they are given in.
        self._resting: Mapping[str, int] | None = None

    @property
    def is_settled(self) -> bool:
        """Every request has ended and every call is answered."""
        return self.account.is_settled

    def arrive(self, rid: str) -> int:
        """A request is on its way to the next step; returns how many came before it."""
        self._arriving.add(rid)
        self._arrivals += 1
        return self._arrivals - 1

    @property
    def names(self) -> Iterable[str]:
        """The rids of all requests."""
        return (life.message.rid for life in self.account.lives)

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        """The batches whose results are not back."""
        return tuple(self._in_flight.values())

    def is_live(self, rid: str) -> bool:
        """A request of this rid has begun and not ended."""
        return rid in self.account.live or rid in self._arriving

    # -- a step --

    def after_step(self, events: Sequence[Event], stepped: Stepped, machine: Any, pipeline: SimulatedRunner) -> None:
        """Look at one step. Raises Violation."""
        if self._resting is not None:
            self._check_nothing_changed(machine)
        self._arriving.clear()
        for event in events:
            self._follow(event)
        self.account.lose_blocks(stepped.preempted)
        for reply in stepped.replies:
            self.account.tell(reply)
        self._end_aborted()
        if stepped.microbatch is not None:
            self._check_batch(pipeline.understood or stepped.microbatch, pipeline)
        if pipeline.violation is not None:
            raise pipeline.violation

    def _follow(self, event: Event) -> None:
        account = self.account
        match event:
            case Add():
                account.begin(event)
            case Abort():
                if event.rid in account.live:
                    account.live[event.rid].aborted = True
            case FlushCache():
                account.calls[event.call_id] = None
            case Pause():
                account.calls[event.call_id] = None
                self.paused = next(mode for mode in self._can.pause_modes if mode.name == event.mode)
                if self.paused.aborts:
                    for life in account.live.values():
                        life.aborted = True
            case Resume():
                account.calls[event.call_id] = None
                self.paused = None
            case BatchResult():
                del self._in_flight[event.batch_id]
            case BatchFailed():
                for share in self._in_flight.pop(event.batch_id).shares:
                    if share.rid in account.live:
                        account.live[share.rid].failed = True
                        account.live[share.rid].computed = None

    def _end_aborted(self) -> None:
        """Where aborts are not answered, a client hears no more once it has given up."""
        if not self._can.answers_aborts:
            for rid in [rid for rid, life in self.account.live.items() if life.aborted]:
                self.account.end(rid, "abort")

    def _check_batch(self, batch: Batch, pipeline: SimulatedRunner) -> None:
        limits, rids = self._limits, [share.rid for share in batch.shares]
        if batch.id in self._in_flight:
            raise Violation(f"batch {batch.id} is launched, but one of this id is in flight")
        self._in_flight[batch.id] = batch
        if len(self._in_flight) > limits.depth:
            raise Violation(f"{len(self._in_flight)} batches are in flight, of at most {limits.depth}")
        if self.paused is not None:
            self._check_paused(batch, self.paused)
        if len(set(rids)) != len(rids):
            raise Violation(f"batch {batch.id} has a request twice: {', '.join(rids)}")
        if len(rids) > limits.batch_requests:
            raise Violation(f"batch {batch.id} has {len(rids)} requests, of at most {limits.batch_requests}")
        blocks = {block for share in batch.shares for block in share.block_ids}
        if len(blocks) > limits.blocks:
            raise Violation(f"batch {batch.id} is computed in {len(blocks)} blocks, of {limits.blocks}")
        tokens = sum(share.count for share in batch.shares)
        if tokens > limits.batch_tokens:
            raise Violation(f"batch {batch.id} computes {tokens} tokens, of at most {limits.batch_tokens}")
        for share in batch.shares:
            self._check_share(share)
            self.account.compute(share, pipeline.known_tokens(share.rid))
        self._check_tails(batch)

    def _check_paused(self, batch: Batch, mode: PauseMode) -> None:
        """Nothing is launched, or nothing that had not begun. Raises Violation."""
        if mode.stops_running:
            raise Violation(f"batch {batch.id} is launched while generation is paused ({mode.name})")
        for share in batch.shares:
            life = self.account.live.get(share.rid)
            if life is not None and not life.launched:
                raise Violation(f"{share.rid} begins in batch {batch.id} while generation is paused ({mode.name})")

    def _check_share(self, share: Share) -> None:
        blocks = share.block_ids
        if len(set(blocks)) != len(blocks):
            raise Violation(f"{share.rid} has a block twice: {list(blocks)}")
        life = self.account.live.get(share.rid)
        if not self._can.chunked and life is not None and share.start + share.count < len(life.message.prompt_ids):
            raise Violation(f"{share.rid} computes a part of its prompt, but prompts are not to be cut")

    def _check_tails(self, batch: Batch) -> None:
        """No block is written for two requests at once. Raises Violation."""
        owners: dict[int, str] = {}
        size = self._limits.block_size
        for share in batch.shares:
            first, last = share.start // size, (share.start + share.count - 1) // size
            for block in share.block_ids[first : last + 1]:
                other = owners.setdefault(block, share.rid)
                if other != share.rid:
                    raise Violation(f"batch {batch.id} writes block {block} for {other} and for {share.rid}")

    # -- the end --

    def at_rest(self, machine: Any) -> None:
        """Nothing happens any more: every request has ended and every call is answered. Raises Violation."""
        open_ones = [f"{rid} ({life.state})" for rid, life in self.account.live.items()]
        open_ones += [call_id for call_id, answer in self.account.calls.items() if answer is None]
        if open_ones:
            raise Violation(f"nothing happens any more, but something waits for ever: {', '.join(open_ones)}")
        self._resting = dict(machine.counts())

    def _check_nothing_changed(self, machine: Any) -> None:
        """The step before was given aborts of requests that are not alive, and nothing else. Raises Violation."""
        resting, self._resting = self._resting, None
        assert resting is not None
        changed = [
            f"{name} {resting[name]} to {count}" for name, count in machine.counts().items() if count != resting[name]
        ]
        if changed:
            raise Violation(f"an abort of a request that is not alive changed {', '.join(changed)}")

    def at_end(self, machine: Any) -> None:
        """Everything is over, and the cache was flushed where that is declared. Raises Violation."""
        if not machine.is_idle:
            raise Violation(f"everything has ended, but the scheduler is not idle: {_words(machine.counts())}")
        grown = self._fresh.grown(machine)
        if grown is not None:
            raise Violation(f"everything has ended, but {grown}")


def _words(counts: Mapping[str, int]) -> str:
    return " ".join(f"{name}={count}" for name, count in counts.items())
