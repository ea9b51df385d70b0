"""Places one trace on the page: lanes down, steps across, a box or a mark for everything that a step record holds.

Decides where things stand and what they say; paints nothing. Works from the records alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from engine.config import EngineConfig
from engine.messages import (
    FAILURES,
    Abort,
    AbortAll,
    CallAnswer,
    Event,
    FlushCache,
    Generate,
    PipelineFailed,
    Refusal,
    Reply,
    TokenOutput,
)
from engine.plan import Microbatch
from scripted.core.phrases import plural, printable
from scripted.report.timeline.difference import Difference
from scripted.report.timeline.lanes import (
    ANSWERED,
    ARRIVED,
    CHUNKED,
    NOTES,
    RESULTS,
    RUNNING,
    TAKEN,
    WAITING,
    Lanes,
    client_events,
    pipeline_events,
)
from scripted.report.timeline.palette import Palette
from scripted.report.timeline.positions import controls_of, in_window, launches, pipeline_at
from scripted.report.timeline.state import state_of
from scripted.report.timeline.view import Band, Box, Callout, Chip, DifferenceView, Path, RunView, StepView, Stripe
from scripted.report.timeline.widths import fitting
from scripted.report.trace import Trace
from scripted.report.wording import call_names, event_text, microbatch_in_full, reply_text, segment_positions

__all__ = ["Layout"]

# Requests that a box or a queue shows by name; one more only says how many there are.
_NAMED_IN_BOX: Final = 3
_Message = TypeVar("_Message", bound=msgspec.Struct)
_SLOT_FULL: Final = "+{} more"


class Layout:
    """One trace; shows its records ``first`` to ``last - 1``, counted from the run's own start, from column 0 on."""

    def __init__(self, trace: Trace, number: int, palette: Palette, first: int, last: int) -> None:
        self._trace, self._number, self._palette = trace, number, palette
        self._launched = launches(trace.records)
        self._controls = controls_of(self._launched)
        self._calls = call_names(trace.records)
        self._shown = list(enumerate(trace.records[first:last]))
        self._stages = trace.header.limits.pp_size
        steps = {record.step for _, record in self._shown}
        self._notes = [note for note in trace.notes if note.step in steps]
        shown = [record for _, record in self._shown]
        self._lanes = Lanes(shown, self._launched, self._stages, notes=bool(self._notes))
        self._first = first

    def run(self, difference: Difference | None) -> RunView:
        """The placed run; ``difference`` is where it parts from the first run of the page."""
        header, lanes = self._trace.header, self._lanes
        differs = None if difference is None else self._difference(difference)
        queues = lanes.y(WAITING)
        return RunView(
            number=self._number,
            title=printable(header.title),
            verdict="died" if header.died else "passed" if header.outcome == "passed" else "failed",
            tier=header.tier,
            mutant=printable(header.mutant or ""),
            outcome=printable(header.outcome),
            config=self._config(),
            height=lanes.height,
            queues_y=queues,
            queues_height=lanes.y("stage 0") - queues,
            lanes=tuple(lanes.lanes),
            boxes=(*self._boxes(), *self._queue_boxes()),
            chips=(*self._note_chips(), *self._event_chips(), *self._reply_chips()),
            paths=tuple(self._paths()),
            bands=(*self._windows(), *self._failures()),
            callout=self._callout(),
            states=tuple(self._states(-1 if differs is None else differs.x)),
            difference=differs,
        )

    # -- the pipeline --

    def _boxes(self) -> Iterator[Box]:
        for x, record in self._shown:
            pipeline = pipeline_at(record, self._launched, self._stages)
            for stage, microbatch_id in enumerate(pipeline.stages):
                if microbatch_id is not None:
                    yield self._box(x, self._lanes.y(f"stage {stage}"), microbatch_id, "stage")
            for slot, microbatch_id in enumerate(pipeline.results):
                yield self._box(x, self._lanes.y(RESULTS, slot), microbatch_id, "result")

    def _box(self, x: int, y: float, microbatch_id: int, kind: str) -> Box:
        launch = self._launched.get(microbatch_id)
        if launch is None:
            return Box(x, y, f"#{microbatch_id}", kind, (), f"#{microbatch_id}, launched before this trace")
        label, microbatch = f"#{microbatch_id}", launch.microbatch
        title = f"{microbatch_in_full(microbatch)}, launched in step {launch.step}"
        stripes = fitting(label, list(self._stripes(microbatch)))
        return Box(x, y, label, kind, stripes, title, self._palette.numbers_of(microbatch.rids))

    def _stripes(self, microbatch: Microbatch) -> Iterator[Stripe]:
        if microbatch.is_control:
            yield Stripe(str(microbatch.mode), None)
        named = microbatch.segments[:_NAMED_IN_BOX]
        for segment in named:
            yield self._stripe(segment.rid, segment_positions(segment, microbatch.mode))
        yield from self._more([segment.rid for segment in microbatch.segments[_NAMED_IN_BOX:]])

    def _stripe(self, rid: str, positions: str = "") -> Stripe:
        palette = self._palette
        return Stripe(palette.label(rid), palette.colours[rid], positions, palette.numbers_of([rid]))

    def _more(self, rids: Sequence[str]) -> Iterator[Stripe]:
        """How many there are beyond those shown by name."""
        if rids:
            palette = self._palette
            yield Stripe(f"+{len(rids)}", palette.colours[rids[0]], requests=palette.numbers_of(rids))

    def _paths(self) -> Iterator[Path]:
        """One line a microbatch, through the middle of its boxes to where its result was taken."""
        points: dict[int, list[str]] = {}
        for x, record in self._shown:
            pipeline = pipeline_at(record, self._launched, self._stages)
            for slot, event in enumerate(pipeline_events(record)):
                microbatch_id = getattr(event, "microbatch_id", None)
                if microbatch_id in points:
                    points[microbatch_id].append(_point(x, self._lanes.y(TAKEN, slot)))
            for stage, in_stage in enumerate(pipeline.stages):
                if in_stage is not None:
                    points.setdefault(in_stage, []).append(_point(x, self._lanes.y(f"stage {stage}")))
            for slot, waiting in enumerate(pipeline.results):
                points.setdefault(waiting, []).append(_point(x, self._lanes.y(RESULTS, slot)))
        for microbatch_id, through in points.items():
            launch = self._launched.get(microbatch_id)
            if launch is not None and launch.microbatch.rids:
                rids = launch.microbatch.rids
                yield Path(" ".join(through), self._palette.colours[rids[0]], self._palette.numbers_of(rids))

    # -- events, queues, answers --

    def _event_chips(self) -> Iterator[Chip]:
        for x, record in self._shown:
            yield from self._stack(ARRIVED, x, [self._event_chip(event) for event in client_events(record)])
            yield from self._stack(TAKEN, x, [self._result_chip(event) for event in pipeline_events(record)])

    def _event_chip(self, event: Event) -> _Mark:
        rids = (event.rid,) if isinstance(event, Generate | Abort) else ()
        strong = isinstance(event, FlushCache | Abort | AbortAll)
        return _Mark(event_text(self._labelled(event)), "strong" if strong else "event", rids, coloured=not strong)

    def _result_chip(self, event: Event) -> _Mark:
        bad = isinstance(event, PipelineFailed) or getattr(event, "error", None) is not None
        launch = self._launched.get(getattr(event, "microbatch_id", -1))
        text = event_text(event, self._controls).removeprefix("result ")
        return _Mark(text, "bad" if bad else "taken", launch.microbatch.rids if launch else (), coloured=not bad)

    def _reply_chips(self) -> Iterator[Chip]:
        for x, record in self._shown:
            yield from self._stack(ANSWERED, x, [self._reply_chip(reply) for reply in record.replies])

    def _reply_chip(self, reply: Reply) -> _Mark:
        text = reply_text(self._labelled(reply), self._calls)
        rids = (reply.rid,) if isinstance(reply, Refusal | TokenOutput) else ()
        if isinstance(reply, Refusal) or (isinstance(reply, CallAnswer) and not reply.ok):
            return _Mark(text, "refused", rids)
        if isinstance(reply, TokenOutput):
            bad = reply.finish_reason in FAILURES
            return _Mark(text, "bad" if bad else "token", rids, coloured=not bad)
        return _Mark(text, "answer")

    def _labelled(self, message: _Message) -> _Message:
        """The message with the request's label for its rid: the words then name it as the rest of the page does."""
        rid = getattr(message, "rid", None)
        return message if rid is None else msgspec.structs.replace(message, rid=self._palette.label(rid))

    def _note_chips(self) -> Iterator[Chip]:
        columns = {record.step: x for x, record in self._shown}
        for x in dict.fromkeys(columns[note.step] for note in self._notes):
            texts = [printable(note.text) for note in self._notes if columns[note.step] == x]
            yield from self._stack(NOTES, x, [_Mark("; ".join(texts), "note")])

    def _queue_boxes(self) -> Iterator[Box]:
        for x, record in self._shown:
            chunked = () if record.chunked is None else (record.chunked,)
            yield from self._members(WAITING, x, record.waiting, record.waiting_rids)
            yield from self._members(CHUNKED, x, len(chunked), chunked)
            yield from self._members(RUNNING, x, record.running, record.running_rids)

    def _members(self, lane: str, x: int, count: int, rids: Sequence[str]) -> Iterator[Box]:
        """One box for all members of a queue: how many, and the first of them by name."""
        if not count:
            return
        stripes = (*map(self._stripe, rids[:_NAMED_IN_BOX]), *self._more(rids[_NAMED_IN_BOX:]))
        label = "" if len(rids) == count == 1 else str(count)
        title = f"{lane}: {' '.join(printable(rid) for rid in rids) or plural(count, 'request')}"
        yield Box(x, self._lanes.y(lane), label, "queue", stripes, title, self._palette.numbers_of(rids))

    def _stack(self, lane: str, x: int, chips: Sequence[_Mark]) -> Iterator[Chip]:
        """Chips under each other; when there are more than slots, the last slot says how many are left."""
        slots, height = self._lanes.slots[lane], self._lanes.slot_height[lane]
        shown = chips if len(chips) <= slots else chips[: slots - 1]
        for slot, mark in enumerate(shown):
            colour = self._palette.colours.get(mark.rids[0]) if mark.coloured and mark.rids else None
            numbers = self._palette.numbers_of(mark.rids)
            yield Chip(x, self._lanes.y(lane, slot), height, mark.text, mark.kind, self._title(mark), colour, numbers)
        left = chips[len(shown) :]
        if left:
            title, numbers = "; ".join(map(self._title, left)), self._palette.numbers_of(_rids_of(left))
            y, text = self._lanes.y(lane, slots - 1), _SLOT_FULL.format(len(left))
            yield Chip(x, y, height, text, "more", title, requests=numbers)

    def _title(self, mark: _Mark) -> str:
        """The words of a mark, and in full each rid that they shorten."""
        shortened = [printable(rid) for rid in mark.rids if self._palette.label(rid) != rid]
        return f"{mark.text} ({' '.join(shortened)})" if shortened else mark.text

    # -- the window, the failure, the difference --

    def _windows(self) -> Iterator[Band]:
        start: int | None = None
        for x, record in [*self._shown, (len(self._shown), None)]:
            inside = record is not None and in_window(record)
            if inside and start is None:
                start = x
            elif not inside and start is not None:
                yield Band(start, x - start, "window", "every queue is empty, yet results are in flight")
                start = None

    def _failures(self) -> Iterator[Band]:
        failed = self._failed()
        if failed is not None:
            yield Band(failed, 1, "failed", "the scheduler died")

    def _failed(self) -> int | None:
        """The column of the step that failed; the last one of a run that died without writing that step down."""
        for x, record in self._shown:
            if record.error is not None:
                return x
        complete = self._first + len(self._shown) == len(self._trace.records)
        return len(self._shown) - 1 if self._trace.header.died and self._shown and complete else None

    def _callout(self) -> Callout | None:
        failed = self._failed()
        if failed is None:
            return None
        record = self._shown[failed][1]
        text = record.error or self._trace.header.outcome
        where = "in" if record.error else "after"
        return Callout(failed + 1, self._lanes.y("stage 0"), f"died {where} step {record.step}", printable(text))

    def _difference(self, difference: Difference) -> DifferenceView:
        x = difference.index - self._first
        records = self._trace.records
        step = records[min(difference.index, len(records) - 1)].step if records else 0
        return DifferenceView(x, step, difference.field.replace("_", " "), difference.left, difference.right)

    # -- words --

    def _states(self, differs_at: int) -> Iterator[StepView]:
        for x, record in self._shown:
            yield state_of(
                record,
                x=x,
                stages=self._stages,
                launched=self._launched,
                controls=self._controls,
                calls=self._calls,
                notes=[note.text for note in self._notes if note.step == record.step],
                differs=x == differs_at,
            )

    def _config(self) -> str:
        """The fields that differ from the defaults."""
        defaults = EngineConfig().model_dump()
        chosen = [(name, value) for name, value in self._trace.header.config.items() if value != defaults.get(name)]
        return printable(" ".join(f"{name}={value}" for name, value in chosen)) or "default configuration"


class _Mark(msgspec.Struct, frozen=True):
    """What a chip says, and of which requests."""

    text: str
    kind: str
    rids: tuple[str, ...] = ()
    coloured: bool = False


def _rids_of(marks: Sequence[_Mark]) -> list[str]:
    return list(dict.fromkeys(rid for mark in marks for rid in mark.rids))


def _point(x: int, y: float) -> str:
    return f"{x + 0.5:g},{y + 0.5:g}"
