"""Turns records of the engine's scheduler into the steps that reports show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
    LoraRead,
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
from scripted.sdk.step_words import StepWords
from scripted_lockstep.actions import all_actions

_BUSY_COUNT: Final = re.compile(r"\b[a-z_]+=\d+\b")


def log_of(records: Iterable[StepRecord], limits: Limits, calls: Mapping[str, str] | None = None) -> StepLog:
    """Return the log of a run. ``calls`` names the calls that were made before its first record."""
    records = tuple(records)
    words = EngineWords(records, calls)
    return StepLog(limits.pp_size, limits.depth, tuple(map(words.shown, records)))


def call_names(records: Iterable[StepRecord]) -> dict[str, str]:
    """Return the names of administrative calls by id, which their answers are shown with."""
    return EngineWords(records).calls


class EngineWords(StepWords):
    """Describes the events and replies of some records, whose calls and control microbatches it has looked up."""

    strong = (FlushCache, Abort, AbortAll)
    of_request = (Generate, Abort)
    failed_ends = FAILURES

    def __init__(self, records: Iterable[StepRecord] = (), calls: Mapping[str, str] | None = None) -> None:
        super().__init__(all_actions(), calls)
        self._controls: set[int] = set()
        for record in records:
            for event in record.events:
                self.note_call(event)
            if record.microbatch is not None and record.microbatch.is_control:
                self._controls.add(record.microbatch.id)

    def shown(self, record: StepRecord) -> ShownStep:
        return ShownStep(
            step=record.step,
            now=record.now,
            arrived=tuple([self._event(event) for event in record.events]),
            launched=None if record.microbatch is None else _launched(record.microbatch),
            answered=tuple([self.reply(reply) for reply in record.replies]),
            waiting=record.waiting_rids,
            chunked=record.chunked,
            running=record.running_rids,
            transferring=record.transferring,
            in_flight=record.in_flight,
            memory={"free": record.pages_free, "cached": record.pages_cached, "held": record.pages_held},
            digest=record.digest,
            error=record.error,
        )

    def event_text(self, event: Event) -> str:
        """Describe an event that arrives at the scheduler."""
        match event:
            case Completion() if event.error is None:
                tokens = f"-> {some([str(token) for token in event.token_ids])}" if event.token_ids else "(chunk)"
                return f"result #{event.microbatch_id} {'(done)' if event.microbatch_id in self._controls else tokens}"
            case LoraRead():
                said = "read" if event.error is None else f"NOT READ: {printable(event.error)}"
                return f"LoRA version {event.version} {said}"
            case PagesReceived():
                return f"transfer {event.transfer}: {plural(event.pages, 'page')} came"
            case PagesSent():
                return f"transfer {event.transfer} {'sent' if event.error is None else 'NOT SENT'}"
        return super().event_text(event)

    def other_words(self, event: Event) -> str:
        match event:
            case StartProfile():
                return "start profile"
            case StopProfile():
                return "stop profile"
            case GetStats():
                return "get stats"
        return super().other_words(event)

    def _event(self, event: Event) -> Said:
        return self.arrived(
            event,
            self.event_text(event),
            batch=getattr(event, "microbatch_id", None),
            is_result=isinstance(event, PipelineEvent),
            is_failure=isinstance(event, PipelineFailed) or getattr(event, "error", None) is not None,
        )

    def reply(self, reply: Reply) -> Said:
        match reply:
            case TokenOutput():
                return self.tokens(reply, " ".join(map(str, reply.token_ids)), reply.error)
            case Refusal():
                return self.refused(reply, f"refused ({reply.kind}): {printable(reply.message)}")
            case CallAnswer():
                full = "" if reply.ok else printable(reply.message)
                return self.answered(reply, _answer_text(reply), ok=reply.ok, full=full)
        return Said(text=_plain_text(reply), kind="answer", content=content_of(reply))


def event_text(event: Event) -> str:
    """Describe one event by itself."""
    return EngineWords().event_text(event)


def _plain_text(reply: StatsAnswer | PrefillWanted | PrefillDropped) -> str:
    match reply:
        case StatsAnswer():
            return "stats -> 200"
        case PrefillWanted():
            return f"{short_rid(reply.rid)} -> prefill of {len(reply.ids)} tokens at {printable(reply.at)}"
        case PrefillDropped():
            return f"prefill of transfer {reply.transfer} dropped"


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
    """Describe a control microbatch."""
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
    """Describe the LoRAs to load and drop: ``load LoRA a as version 3, drop version 1``."""
    load = "" if change.path is None else f"load LoRA {printable(change.name)} as version {change.version}"
    if change.drop == change.version:
        return f"{load}, checked only" if load else f"unload LoRA {printable(change.name)}"
    drop = f"drop version {change.drop}" if load else f"unload LoRA {printable(change.name)}, version {change.drop}"
    return ", ".join(part for part in (load, drop if change.drop else "") if part)


def _share(segment: Segment, mode: ForwardMode) -> ShownShare:
    """Show a segment: ``[64:125]`` for a chunk, ``@125`` for a decode, ``@125+4`` for a decode with 4 drafts."""
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
    """Describe an answer, such as ``200: flushed 7 cached pages`` or ``refused 400: in_flight=2``."""
    message = printable(answer.message)
    if answer.ok:
        return f"200: {message}"
    busy = [count for count in _BUSY_COUNT.findall(message) if not count.endswith("=0")]
    return f"refused {404 if answer.not_found else 400}: {' '.join(busy) or message}"
