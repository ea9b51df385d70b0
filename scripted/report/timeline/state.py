"""The full state of one step in words: what a reader sees on pointing at it.

Owns the wording of the detail pane. Nothing is shortened here, so the pane says what the picture leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.messages import CallAnswer, Event, Reply
from engine.plan import Microbatch, Segment
from engine.scheduler.ports import StepRecord
from scripted.core.phrases import plural, printable, short_rid
from scripted.report.timeline.positions import Launch, in_window, pipeline_at, queues_are_clear
from scripted.report.timeline.view import Section, StepView
from scripted.report.wording import event_text, microbatch_text, reply_text

__all__ = ["state_of"]


def state_of(
    record: StepRecord,
    *,
    x: int,
    stages: int,
    launched: Mapping[int, Launch],
    controls: frozenset[int],
    calls: Mapping[str, str],
    notes: Iterable[str],
    differs: bool,
) -> StepView:
    """The state of one step. ``launched``, ``controls`` and ``calls`` are of the whole run, ``notes`` of this step."""
    flags = (("failed", bool(record.error)), ("window", in_window(record)), ("differs", differs))
    sections = (
        Section("failed", (printable(record.error),) if record.error else ()),
        Section("notes", tuple(printable(note) for note in notes)),
        Section("arrived", tuple(_in_full(event, event_text(event, controls)) for event in record.events)),
        Section("launched", _launched(record.microbatch)),
        Section("in flight", tuple(_in_flight(record, stages, launched))),
        Section("queues", _queues(record)),
        Section("answered", tuple(_answer(reply, calls) for reply in record.replies)),
        Section("pages", (f"{record.pages_free} free, {record.pages_cached} cached, {record.pages_held} held",)),
        Section("digest", (printable(record.digest),)),
    )
    return StepView(
        x,
        record.step,
        _headline(record),
        tuple(name for name, is_set in flags if is_set),
        tuple(section for section in sections if section.lines),
    )


def _headline(record: StepRecord) -> str:
    if record.error:
        return "the scheduler died in this step"
    if in_window(record):
        return f"the window: every queue is empty, {plural(len(record.in_flight), 'microbatch')} in flight"
    return "" if record.in_flight or not queues_are_clear(record) else "idle"


def _launched(microbatch: Microbatch | None) -> tuple[str, ...]:
    if microbatch is None:
        return ()
    if microbatch.is_control:
        return (microbatch_text(microbatch),)
    return (
        f"#{microbatch.id} {microbatch.mode}, {plural(microbatch.tokens, 'token')}",
        *(_segment(segment) for segment in microbatch.segments),
    )


def _segment(segment: Segment) -> str:
    end = segment.start + len(segment.token_ids)
    samples = ", samples a token" if segment.emits else ""
    if segment.drafts:
        samples = f", verifies {plural(segment.drafts, 'draft')}{samples}"
    pages = f", new pages {_numbers(segment.pages)}" if segment.pages else ""
    return f"{printable(segment.rid)}[{segment.start}:{end}] in row {segment.row}{pages}{samples}"


def _numbers(pages: tuple[int, ...]) -> str:
    if len(pages) > 2 and pages == tuple(range(pages[0], pages[-1] + 1)):
        return f"{pages[0]} to {pages[-1]}"
    return " ".join(map(str, pages))


def _in_flight(record: StepRecord, stages: int, launched: Mapping[int, Launch]) -> Iterable[str]:
    pipeline = pipeline_at(record, launched, stages)
    for microbatch_id in pipeline.results:
        yield f"result of {_named(microbatch_id, launched)} waits"
    for stage, in_stage in reversed(list(enumerate(pipeline.stages))):
        if in_stage is not None:
            yield f"stage {stage}: {_named(in_stage, launched)}"


def _named(microbatch_id: int, launched: Mapping[int, Launch]) -> str:
    launch = launched.get(microbatch_id)
    if launch is None:
        return f"#{microbatch_id}, launched before the first step of this trace"
    if launch.microbatch.is_control:
        return f"{microbatch_text(launch.microbatch)}, launched in step {launch.step}"
    rids = " ".join(printable(rid) for rid in launch.microbatch.rids)
    return f"#{microbatch_id} {launch.microbatch.mode} of {rids}, launched in step {launch.step}"


def _queues(record: StepRecord) -> tuple[str, ...]:
    if queues_are_clear(record):
        return ("waiting, chunked and running are empty",)
    chunked = "nothing" if record.chunked is None else printable(record.chunked)
    return (
        f"waiting: {_members(record.waiting, record.waiting_rids)}",
        f"chunked: {chunked}",
        f"running: {_members(record.running, record.running_rids)}",
    )


def _members(count: int, rids: tuple[str, ...]) -> str:
    if not count:
        return "nothing"
    return f"{count} ({' '.join(printable(rid) for rid in rids)})" if rids else str(count)


def _in_full(message: Event | Reply, words: str) -> str:
    """The words with the whole rid."""
    rid = getattr(message, "rid", None)
    return words if rid is None else words.replace(short_rid(rid), printable(rid), 1)


def _answer(reply: Reply, calls: Mapping[str, str]) -> str:
    """The reply in words, a refused call with its whole message."""
    words = _in_full(reply, reply_text(reply, calls))
    if isinstance(reply, CallAnswer) and not reply.ok:
        return f"{words} (the full answer: {printable(reply.message)})"
    return words
