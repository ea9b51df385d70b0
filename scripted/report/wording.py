"""The words for what happens in a step: one short phrase for each event, microbatch and reply.

Shared by the step table and the timeline, so that both say the same. Takes no decision, holds no state. What came from
a client is made printable here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from engine.messages import (
    Abort,
    AbortAll,
    CallAnswer,
    Completion,
    ContinueGeneration,
    Event,
    EvictCache,
    FinishReason,
    FlushCache,
    Generate,
    GetStats,
    OperatorEvent,
    PauseGeneration,
    PipelineFailed,
    Refusal,
    ReleasePressure,
    Reply,
    SetPressure,
    StartProfile,
    StatsAnswer,
    StopProfile,
    TokenOutput,
    UpdateWeights,
)
from engine.plan import ForwardMode, Microbatch, Segment
from engine.scheduler.ports import StepRecord

__all__ = [
    "answer_text",
    "call_names",
    "event_text",
    "microbatch_text",
    "plural",
    "printable",
    "reply_text",
    "segment_text",
    "short_rid",
]

# A rid longer than this keeps its head and its tail: generated ones differ in the one or the other.
_RID_CHARACTERS: Final = 14
_RID_HEAD: Final = 5
_RID_TAIL: Final = 7
# A batch names so many of its requests or tokens, and counts the others.
_NAMED: Final = 4
_BUSY_COUNT: Final = re.compile(r"\b[a-z_]+=\d+\b")


def printable(text: str) -> str:
    """The text in one line of printable ASCII: control characters, newlines and the like become escapes."""
    return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]


def short_rid(rid: str) -> str:
    """A rid as a label; a long one keeps head and tail."""
    rid = printable(rid)
    return rid if len(rid) <= _RID_CHARACTERS else f"{rid[:_RID_HEAD]}..{rid[-_RID_TAIL:]}"


def plural(count: int, noun: str) -> str:
    """``1 token``, ``2 tokens``, ``2 microbatches``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


def call_names(records: Iterable[StepRecord]) -> dict[str, str]:
    """What each administrative call was, by its call_id, so that its answer can say so."""
    names: dict[str, str] = {}
    for record in records:
        for event in record.events:
            call_id = getattr(event, "call_id", None)
            if call_id is not None:
                names[call_id] = _call_name(event)
    return names


def event_text(event: Event, controls: Collection[int] = ()) -> str:
    """One event of a step, as what arrived at the scheduler; ``controls`` are microbatches that have no requests."""
    match event:
        case Completion() if event.microbatch_id in controls and event.error is None:
            return f"result #{event.microbatch_id} (done)"
        case SetPressure() | ReleasePressure() | EvictCache():
            return _pressure_text(event)
        case Generate():
            return f"generate {short_rid(event.rid)} ({plural(len(event.prompt_ids), 'token')})"
        case Completion():
            return _completion_text(event)
        case PipelineFailed():
            return f"{printable(event.process)} DIED: {printable(event.cause)}"
        case Abort() if event.finish_reason is not FinishReason.ABORT:
            return f"end {short_rid(event.rid)} ({event.finish_reason})"
        case FlushCache() if event.timeout_s is not None:
            return f"FLUSH, waits up to {event.timeout_s:g} s"
        case FlushCache():
            return "FLUSH"
    return _call_name(event)


def microbatch_text(microbatch: Microbatch) -> str:
    """A launch: ``#1 prefill a[64:125] last chunk``, ``#2 decode a@125 b@40``."""
    segments = _some([segment_text(segment, microbatch.mode) for segment in microbatch.segments])
    if microbatch.mode is ForwardMode.UPDATE:
        return f"#{microbatch.id} update to {printable(microbatch.weights or 'the configured weights')}"
    if microbatch.mode is ForwardMode.PROFILE:
        return f"#{microbatch.id} {'end' if microbatch.trace_dir is None else 'begin'} to profile"
    return f"#{microbatch.id} {microbatch.mode} {segments}"


def segment_text(segment: Segment, mode: ForwardMode) -> str:
    """One request's share: its positions, and whether this ends its prompt."""
    name = short_rid(segment.rid)
    if mode is ForwardMode.DECODE:
        return f"{name}@{segment.start}"
    last = " last chunk" if segment.emits and segment.start and mode is ForwardMode.PREFILL else ""
    return f"{name}[{segment.start}:{segment.start + len(segment.token_ids)}]{last}"


def reply_text(reply: Reply, calls: Mapping[str, str]) -> str:
    """One reply of a step; ``calls`` names the administrative calls."""
    match reply:
        case TokenOutput():
            return f"{short_rid(reply.rid)} -> {_output_text(reply)}"
        case Refusal():
            return f"{short_rid(reply.rid)} -> refused ({reply.kind}): {printable(reply.message)}"
        case CallAnswer():
            return f"{calls.get(reply.call_id, 'call')} -> {answer_text(reply)}"
        case StatsAnswer():
            return "stats -> 200"


def answer_text(answer: CallAnswer) -> str:
    """``200: flushed 7 cached pages``, or what refused the call: ``refused 400: in_flight=2``."""
    message = printable(answer.message)
    if answer.ok:
        return f"200: {message}"
    busy = [count for count in _BUSY_COUNT.findall(message) if not count.endswith("=0")]
    return f"refused 400: {' '.join(busy) or message}"


def _call_name(event: Event) -> str:
    match event:
        case Abort():
            return f"abort {short_rid(event.rid)}"
        case AbortAll():
            return "abort all"
        case FlushCache():
            return "flush"
        case UpdateWeights():
            return f"weights {printable(event.model_path or 'as configured')}"
        case PauseGeneration():
            return f"pause ({event.mode})"
        case ContinueGeneration():
            return "continue"
        case StartProfile():
            return "start profile"
        case StopProfile():
            return "stop profile"
        case GetStats():
            return "get stats"
    return type(event).__name__


def _pressure_text(event: OperatorEvent) -> str:
    if isinstance(event, ReleasePressure):
        return "pressure off"
    if isinstance(event, EvictCache):
        return "evict the cache" if event.pages is None else f"evict {plural(event.pages, 'page')}"
    left = ((event.leave_pages, "free page"), (event.leave_rows, "free row"), (event.leave_unlocked, "unlocked node"))
    return "pressure: " + ", ".join(plural(count, what) for count, what in left if count is not None)


def _completion_text(completion: Completion) -> str:
    if completion.error is not None:
        return f"result #{completion.microbatch_id} FAILED: {printable(completion.error)}"
    tokens = _some([str(token) for token in completion.token_ids])
    return f"result #{completion.microbatch_id} {f'-> {tokens}' if tokens else '(chunk)'}"


def _output_text(output: TokenOutput) -> str:
    parts = [f"token {' '.join(map(str, output.token_ids))}"] if output.token_ids else []
    if output.finish_reason is not None:
        parts.append(f"ends: {output.finish_reason}")
    if output.error is not None:
        parts.append(printable(output.error))
    return ", ".join(parts) or "nothing new"


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return " ".join(names) if more <= 0 else f"{' '.join(names[:_NAMED])} +{more} more"
