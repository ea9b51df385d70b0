"""The words for what happens in a step: one short phrase for each event, microbatch and reply.

Shared by the step table and the timeline, so that both say the same. Takes no decision, holds no state. What came from
a client is made printable here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from engine.messages import (
    CallAnswer,
    Completion,
    Event,
    GetStats,
    Refusal,
    Reply,
    StartProfile,
    StatsAnswer,
    StopProfile,
    TokenOutput,
)
from engine.plan import ForwardMode, LoraChange, Microbatch, Segment
from engine.scheduler.ports import StepRecord
from scripted.adapters.lockstep.actions import name_in_answers, words_of
from scripted.core.phrases import printable, short_rid

__all__ = [
    "answer_text",
    "call_names",
    "event_text",
    "microbatch_in_full",
    "microbatch_text",
    "reply_text",
    "segment_positions",
]

# A batch names this many of its requests or tokens, and counts the others.
_NAMED: Final = 4
_BUSY_COUNT: Final = re.compile(r"\b[a-z_]+=\d+\b")


def call_names(records: Iterable[StepRecord]) -> dict[str, str]:
    """What each administrative call was, by its call_id, so that its answer can say so."""
    names: dict[str, str] = {}
    for record in records:
        for event in record.events:
            call_id = getattr(event, "call_id", None)
            if call_id is not None:
                names[call_id] = name_in_answers(event) or _other_words(event)
    return names


def event_text(event: Event, controls: Collection[int] = ()) -> str:
    """One event of a step, as what arrived at the scheduler; ``controls`` are microbatches that have no requests."""
    if isinstance(event, Completion) and event.error is None:
        return _completion_text(event, is_control=event.microbatch_id in controls)
    return words_of(event) or _other_words(event)


def microbatch_text(microbatch: Microbatch) -> str:
    """A launch: ``#1 prefill a[64:125] last chunk``, ``#2 decode a@125 b@40``."""
    segments = _some([_share(short_rid(segment.rid), segment, microbatch.mode) for segment in microbatch.segments])
    if microbatch.mode is ForwardMode.UPDATE:
        return f"#{microbatch.id} update to {printable(microbatch.weights or 'the configured weights')}"
    if microbatch.mode is ForwardMode.PROFILE:
        return f"#{microbatch.id} {'end' if microbatch.trace_dir is None else 'begin'} to profile"
    if microbatch.lora is not None:
        return f"#{microbatch.id} {_change_text(microbatch.lora)}"
    return f"#{microbatch.id} {microbatch.mode} {segments}"


def _change_text(change: LoraChange) -> str:
    """What the stages load and drop: ``load lora a as version 3, drop version 1``."""
    load = "" if change.path is None else f"load LoRA {printable(change.name)} as version {change.version}"
    if change.drop == change.version:
        return f"{load}, checked only" if load else f"unload LoRA {printable(change.name)}"
    drop = f"drop version {change.drop}" if load else f"unload LoRA {printable(change.name)}, version {change.drop}"
    return ", ".join(part for part in (load, drop if change.drop else "") if part)


def microbatch_in_full(microbatch: Microbatch) -> str:
    """The same with every request, and nothing shortened."""
    if microbatch.is_control:
        return microbatch_text(microbatch)
    shares = [_share(printable(segment.rid), segment, microbatch.mode) for segment in microbatch.segments]
    return f"#{microbatch.id} {microbatch.mode} {' '.join(shares)}"


def segment_positions(segment: Segment, mode: ForwardMode) -> str:
    """Where in its request a segment is: ``[64:125]`` of a prompt, ``@125`` of a decode, ``@125+4`` with drafts."""
    if mode is ForwardMode.DECODE:
        return f"@{segment.start}" + (f"+{segment.drafts}" if segment.drafts else "")
    return f"[{segment.start}:{segment.start + len(segment.token_ids)}]"


def _share(name: str, segment: Segment, mode: ForwardMode) -> str:
    """One request's share: its positions, and whether this ends its prompt."""
    last = " last chunk" if segment.emits and segment.start and mode is ForwardMode.PREFILL else ""
    return f"{name}{segment_positions(segment, mode)}{last}"


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
    return f"refused {404 if answer.not_found else 400}: {' '.join(busy) or message}"


def _other_words(event: Event) -> str:
    """What no action makes."""
    match event:
        case StartProfile():
            return "start profile"
        case StopProfile():
            return "stop profile"
        case GetStats():
            return "get stats"
    return type(event).__name__


def _completion_text(completion: Completion, *, is_control: bool) -> str:
    tokens = "(done)" if is_control else _some([str(token) for token in completion.token_ids])
    if tokens and not is_control:
        tokens = f"-> {tokens}"
    return f"result #{completion.microbatch_id} {tokens or '(chunk)'}"


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
