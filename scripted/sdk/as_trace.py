"""Steps of a adapter of the SDK in the terms of traces, so that the step table and the timeline show them.

The one module here that imports the engine: the definitions of its messages and plans, which traces are made of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec

from engine import messages as shown
from engine.errors import EngineError
from engine.limits import Limits as TraceLimits
from engine.plan import ForwardMode, Microbatch, Segment
from engine.scheduler.ports import StepRecord
from scripted.sdk.capabilities import Limits
from scripted.sdk.messages import (
    Abort,
    Add,
    Answer,
    Batch,
    BatchFailed,
    BatchResult,
    Event,
    FlushCache,
    Pause,
    Refused,
    Reply,
    Resume,
    Share,
    Tokens,
)
from scripted.sdk.records import Record

__all__ = ["limits_in_traces", "records_in_traces"]

# Token ids are below this; a trace wants a number.
_VOCABULARY: Final = 1 << 17
_MODES: Final = {mode.value: mode for mode in shown.PauseMode}


def limits_in_traces(limits: Limits) -> TraceLimits:
    """One stage, whose batches take as many steps as may be in flight."""
    return TraceLimits(
        pp_size=1,
        depth=limits.depth,
        page_size=limits.block_size,
        total_pages=limits.blocks,
        rows=limits.batch_requests,
        prefill_budget_tokens=limits.batch_tokens,
        chunking=True,
        mixed_chunk=True,
        max_queued_requests=0,
        context_length=limits.context_tokens,
        vocab_size=_VOCABULARY,
        eos_token_ids=(),
        radix_cache=True,
        schedule_policy="fcfs",
        priority_preemption=False,
        seed=0,
    )


def records_in_traces(records: Sequence[Record], limits: Limits) -> tuple[StepRecord, ...]:
    """Every step. Batches are numbered from 0 on, and requests are counted from what clients were told."""
    reader = _Reader(limits)
    return tuple(reader.read(step, record) for step, record in enumerate(records, 1))


class _Reader:
    """What is known of requests and batches up to a step."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._tokens: dict[str, list[int]] = {}
        self._begun: dict[str, bool] = {}
        self._numbers: dict[int, int] = {}
        self._in_flight: list[int] = []
        self._shares: dict[int, tuple[Share, ...]] = {}
        self._launches = 0
        self._digest = b""

    def read(self, step: int, record: Record) -> StepRecord:
        """One step, after all before it."""
        events = tuple([self._event(event) for event in record.step.events])
        stepped = record.stepped
        replies = () if stepped is None else tuple([self._reply(reply) for reply in stepped.replies])
        for rid in () if stepped is None else stepped.preempted:
            if rid in self._begun:
                self._begun[rid] = False
        batch = None if stepped is None or stepped.microbatch is None else self._launch(stepped.microbatch)
        waiting = tuple(rid for rid, begun in self._begun.items() if not begun)
        running = tuple(rid for rid, begun in self._begun.items() if begun)
        free = record.counts.get("blocks_free", 0)
        return StepRecord(
            step=step,
            now=record.step.now,
            events=events,
            microbatch=batch,
            replies=replies,
            waiting=len(waiting),
            chunked=None,
            running=len(running),
            in_flight=tuple(self._in_flight),
            pages_free=free,
            pages_cached=0,
            pages_held=max(0, self._limits.blocks - free),
            digest=self._chained(record),
            waiting_rids=waiting,
            running_rids=running,
            error=record.error,
        )

    def _chained(self, record: Record) -> str:
        """A value that stands for this step and all before it."""
        self._digest = hashlib.blake2b(self._digest + msgspec.msgpack.encode(record), digest_size=8).digest()
        return self._digest.hex()

    def _event(self, event: Event) -> shown.Event:
        match event:
            case Add():
                self._tokens[event.rid] = list(event.prompt_ids)
                self._begun[event.rid] = False
                sampling = shown.SamplingParams(
                    max_new_tokens=event.max_new_tokens, stop_token_ids=event.stop_token_ids
                )
                return shown.Generate(
                    rid=event.rid, prompt_ids=event.prompt_ids, sampling=sampling, priority=event.priority
                )
            case Abort():
                return shown.Abort(rid=event.rid, call_id=None)
            case FlushCache():
                return shown.FlushCache(call_id=event.call_id)
            case Pause():
                mode = _MODES.get(event.mode, shown.PauseMode.IN_PLACE)
                return shown.PauseGeneration(call_id=event.call_id, mode=mode)
            case Resume():
                return shown.ContinueGeneration(call_id=event.call_id)
            case BatchResult():
                return self._result(event)
            case BatchFailed():
                number = self._returned(event.batch_id)
                return shown.Completion(microbatch_id=number, error=event.error)
        raise EngineError(f"a trace has no word for the event {event!r}")

    def _result(self, event: BatchResult) -> shown.Completion:
        for share, ids in zip(self._shares[event.batch_id], event.token_ids, strict=True):
            if share.rid in self._tokens:
                self._tokens[share.rid].extend(ids)
        ids = tuple([token for sampled in event.token_ids for token in sampled])
        return shown.Completion(microbatch_id=self._returned(event.batch_id), token_ids=ids)

    def _returned(self, batch_id: int) -> int:
        number = self._numbers[batch_id]
        self._in_flight.remove(number)
        return number

    def _reply(self, reply: Reply) -> shown.Reply:
        match reply:
            case Tokens():
                if reply.finish_reason is not None:
                    self._begun.pop(reply.rid, None)
                reason = None if reply.finish_reason is None else shown.FinishReason(reply.finish_reason)
                return shown.TokenOutput(rid=reply.rid, token_ids=reply.token_ids, finish_reason=reason)
            case Refused():
                self._begun.pop(reply.rid, None)
                return shown.Refusal(rid=reply.rid, kind=shown.RefusalKind.INVALID, message=reply.reason)
            case Answer():
                return shown.CallAnswer(call_id=reply.call_id, ok=reply.ok, message=reply.text)

    def _launch(self, batch: Batch) -> Microbatch:
        number = self._numbers[batch.id] = self._launches
        self._launches += 1
        self._in_flight.append(number)
        self._shares[batch.id] = batch.shares
        segments = tuple([self._segment(row, share) for row, share in enumerate(batch.shares)])
        kinds = {_is_decode(segment, self._tokens[segment.rid]) for segment in segments}
        mode = ForwardMode.MIXED if len(kinds) > 1 else ForwardMode.DECODE if kinds == {True} else ForwardMode.PREFILL
        return Microbatch(id=number, mode=mode, segments=segments)

    def _segment(self, row: int, share: Share) -> Segment:
        """Its tokens as far as they are known when it is launched: 0 stands for one whose result is in flight."""
        if share.rid in self._begun:
            self._begun[share.rid] = True
        tokens = self._tokens.setdefault(share.rid, [])
        start = share.start if share.start >= 0 else max(0, len(tokens) - 1)
        known = tokens[start : start + share.count]
        ids = (*known, *[0] * (share.count - len(known)))
        return Segment(
            rid=share.rid,
            row=row,
            start=start,
            token_ids=ids,
            page_start=0,
            pages=share.block_ids,
            emits=start + share.count >= len(tokens),
        )


def _is_decode(segment: Segment, tokens: Sequence[int]) -> bool:
    return segment.emits and len(segment.token_ids) == 1 and segment.start >= len(tokens) - 1 > 0
