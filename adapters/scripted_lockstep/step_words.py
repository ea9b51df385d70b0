"""Records of the engine's scheduler as steps that are shown: one short phrase for each event, microbatch and reply.

What came from a client is made printable here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from engine.core.limits import Limits
from engine.core.messages import (
    FAILURES,
    Abort,
    AbortAll,
    CallAnswer,
    Completion,
    Event,
    FlushCache,
    Generate,
    GetStats,
    PagesReceived,
    PagesSent,
    PipelineEvent,
    PipelineFailed,
    PrefillDropped,
    PrefillWanted,
    Refusal,
    Reply,
    StartProfile,
    StatsAnswer,
    StopProfile,
    TokenOutput,
)
from engine.core.plan import (
    Forward,
    ForwardMode,
    LoraChange,
    LoraUpdate,
    Microbatch,
    ProfileSwitch,
    Segment,
    SleepSwitch,
    WeightUpdate,
)
from engine.core.scheduler.ports import StepRecord
from scripted.core.phrases import plural, printable, short_rid
from scripted.report.step_log import Said, ShownBatch, ShownShare, ShownStep, StepLog, content_of, some
from scripted_lockstep.actions import name_in_answers, words_of

_BUSY_COUNT: Final = re.compile(r"\b[a-z_]+=\d+\b")


def log_of(records: Iterable[StepRecord], limits: Limits, calls: Mapping[str, str] | None = None) -> StepLog:
    """The records of a run; ``calls`` are names of calls from before them."""
    records = tuple(records)
    named = {**(calls or {}), **call_names(records)}
    controls = {one.microbatch.id for one in records if one.microbatch is not None and one.microbatch.is_control}
    return StepLog(limits.pp_size, limits.depth, tuple([_shown(one, named, controls) for one in records]))


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
        tokens = some([str(token) for token in event.token_ids])
        done = "(done)" if event.microbatch_id in controls else f"-> {tokens}" if tokens else "(chunk)"
        return f"result #{event.microbatch_id} {done}"
    if isinstance(event, PagesReceived):
        return f"transfer {event.transfer}: {plural(event.pages, 'page')} came"
    if isinstance(event, PagesSent):
        return f"transfer {event.transfer} sent" if event.error is None else f"transfer {event.transfer} NOT SENT"
    return words_of(event) or _other_words(event)


def reply_text(reply: Reply, calls: Mapping[str, str]) -> str:
    """One reply of a step; ``calls`` names the administrative calls."""
    match reply:
        case TokenOutput():
            return f"{short_rid(reply.rid)} -> {_output_text(reply)}"
        case Refusal():
            return f"{short_rid(reply.rid)} -> refused ({reply.kind}): {printable(reply.message)}"
        case CallAnswer():
            return f"{calls.get(reply.call_id, 'call')} -> {_answer_text(reply)}"
        case StatsAnswer():
            return "stats -> 200"
        case PrefillWanted():
            return f"{short_rid(reply.rid)} -> prefill of {len(reply.ids)} tokens at {printable(reply.at)}"
        case PrefillDropped():
            return f"prefill of transfer {reply.transfer} dropped"


def _shown(record: StepRecord, calls: Mapping[str, str], controls: Collection[int]) -> ShownStep:
    return ShownStep(
        step=record.step,
        now=record.now,
        arrived=tuple([_arrived(event, controls) for event in record.events]),
        launched=None if record.microbatch is None else _launched(record.microbatch),
        answered=tuple([_answered(reply, calls) for reply in record.replies]),
        waiting=record.waiting_rids,
        chunked=record.chunked,
        running=record.running_rids,
        transferring=record.transferring,
        in_flight=record.in_flight,
        memory={"free": record.pages_free, "cached": record.pages_cached, "held": record.pages_held},
        digest=record.digest,
        error=record.error,
    )


def _arrived(event: Event, controls: Collection[int]) -> Said:
    of_pipeline = isinstance(event, PipelineEvent)
    if isinstance(event, PipelineFailed) or getattr(event, "error", None) is not None:
        kind = "bad"
    elif of_pipeline:
        kind = "taken"
    else:
        kind = "strong" if isinstance(event, FlushCache | Abort | AbortAll) else "event"
    return Said(
        text=event_text(event, controls),
        kind=kind,
        rid=event.rid if isinstance(event, Generate | Abort) else None,
        batch=getattr(event, "microbatch_id", None),
        of_pipeline=of_pipeline,
        content=content_of(event),
    )


def _answered(reply: Reply, calls: Mapping[str, str]) -> Said:
    refused = isinstance(reply, CallAnswer) and not reply.ok
    kind, rid = "answer", None
    if isinstance(reply, TokenOutput):
        kind, rid = "bad" if reply.finish_reason in FAILURES else "token", reply.rid
    elif isinstance(reply, Refusal):
        kind, rid = "refused", reply.rid
    elif refused:
        kind = "refused"
    full = printable(reply.message) if isinstance(reply, CallAnswer) and refused else ""
    return Said(text=reply_text(reply, calls), kind=kind, rid=rid, full=full, content=content_of(reply))


def _launched(microbatch: Microbatch) -> ShownBatch:
    return ShownBatch(
        id=microbatch.id,
        kind=str(microbatch.mode),
        shares=tuple([_share(segment, microbatch.mode) for segment in microbatch.segments]),
        tokens=microbatch.tokens,
        order=_order(microbatch) if microbatch.is_control else "",
        content=content_of(microbatch),
    )


def _order(microbatch: Microbatch) -> str:
    """What a microbatch without requests tells the stages."""
    match microbatch:
        case WeightUpdate():
            return f"update to {printable(microbatch.path or 'the configured weights')}"
        case ProfileSwitch():
            return f"{'end' if microbatch.folder is None else 'begin'} to profile"
        case SleepSwitch():
            return f"sleep (level={microbatch.level})" if microbatch.level else "wake"
        case LoraUpdate():
            return _change_text(microbatch.change)
        case Forward():
            return str(microbatch.mode)


def _change_text(change: LoraChange) -> str:
    """What the stages load and drop: ``load LoRA a as version 3, drop version 1``."""
    load = "" if change.path is None else f"load LoRA {printable(change.name)} as version {change.version}"
    if change.drop == change.version:
        return f"{load}, checked only" if load else f"unload LoRA {printable(change.name)}"
    drop = f"drop version {change.drop}" if load else f"unload LoRA {printable(change.name)}, version {change.drop}"
    return ", ".join(part for part in (load, drop if change.drop else "") if part)


def _share(segment: Segment, mode: ForwardMode) -> ShownShare:
    """Its positions are ``[64:125]`` of a prompt, ``@125`` of a decode, ``@125+4`` with drafts."""
    end = segment.start + len(segment.token_ids)
    if mode is ForwardMode.DECODE:
        positions = f"@{segment.start}" + (f"+{segment.drafts}" if segment.drafts else "")
    else:
        positions = f"[{segment.start}:{end}]"
    last = " last chunk" if segment.emits and segment.start and mode is ForwardMode.PREFILL else ""
    pages = f", new pages {_numbers(segment.pages)}" if segment.pages else ""
    drafts = f", verifies {plural(segment.drafts, 'draft')}" if segment.drafts else ""
    samples = ", samples a token" if segment.emits else ""
    detail = f"{printable(segment.rid)}[{segment.start}:{end}] in row {segment.row}{pages}{drafts}{samples}"
    return ShownShare(segment.rid, positions, last, detail)


def _numbers(pages: tuple[int, ...]) -> str:
    if len(pages) > 2 and pages == tuple(range(pages[0], pages[-1] + 1)):
        return f"{pages[0]} to {pages[-1]}"
    return " ".join(map(str, pages))


def _answer_text(answer: CallAnswer) -> str:
    """``200: flushed 7 cached pages``, or what refused the call: ``refused 400: in_flight=2``."""
    message = printable(answer.message)
    if answer.ok:
        return f"200: {message}"
    busy = [count for count in _BUSY_COUNT.findall(message) if not count.endswith("=0")]
    return f"refused {404 if answer.not_found else 400}: {' '.join(busy) or message}"


def _other_words(event: Event) -> str:
    match event:
        case StartProfile():
            return "start profile"
        case StopProfile():
            return "stop profile"
        case GetStats():
            return "get stats"
    return type(event).__name__


def _output_text(output: TokenOutput) -> str:
    parts = [f"token {' '.join(map(str, output.token_ids))}"] if output.token_ids else []
    if output.finish_reason is not None:
        parts.append(f"ends: {output.finish_reason}")
    if output.error is not None:
        parts.append(printable(output.error))
    return ", ".join(parts) or "nothing new"
