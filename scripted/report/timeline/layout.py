"""Places one trace on the page: lanes down, steps across, a box or a mark for every item of a step.

Decides positions and texts, and paints nothing. Works from the steps alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from scripted.core.phrases import printable
from scripted.report.difference import Difference
from scripted.report.step_log import Launch, Message, Note, Said, ShownStep, StepLog, own_file
from scripted.report.timeline.palette import Palette
from scripted.report.timeline.state import StepView, state_of
from scripted.report.timeline.view import Band, Box, Callout, Chip, Lane, Led, Path, Stripe, fits
from scripted.report.trace import Trace

NOTES: Final = "notes"
ARRIVED: Final = "arrives"
WAITING: Final = "waiting"
CHUNKED: Final = "chunked"
RUNNING: Final = "running"
RESULTS: Final = "result waits"
TAKEN: Final = "result taken"
ANSWERED: Final = "answers"
TRANSFERS: Final = "transfers"
SAID: Final = "to others"

# A lane shows at most this many chips; the step's pane lists the others.
_SLOTS: Final = 4
# Chips with two or three lines of text are taller than a lane of boxes.
_TWO_LINES: Final = 1.3
_THREE_LINES: Final = 1.8


class Lanes:
    """Every lane of one run, placed from top to bottom."""

    def __init__(
        self,
        log: StepLog,
        shown: Sequence[ShownStep],
        launched: dict[int, Launch],
        notes: Sequence[Note],
        said: Sequence[Message] = (),
    ) -> None:
        self.lanes: list[Lane] = []
        self.height = 0.0
        self.slots: dict[str, int] = {}
        self.slot_height: dict[str, float] = {}
        if notes:
            self._add(NOTES, _most(Counter(note.step for note in notes).values()), height=_THREE_LINES)
        self._add(ARRIVED, _most(len(client_events(step)) for step in shown), "in", _TWO_LINES)
        self._add(WAITING, group="queues")
        self._add(CHUNKED)
        self._add(RUNNING)
        if any(step.transferring for step in shown):
            self._add(TRANSFERS)
        for stage in range(log.stages):
            self._add(f"stage {stage}", group="" if stage else "pipeline")
        self._add(RESULTS, _most(len(log.pipeline_at(step, launched).results) for step in shown))
        self._add(TAKEN, _most(len(pipeline_events(step)) for step in shown), "out", _TWO_LINES)
        self._add(ANSWERED, _most(len(step.answered) for step in shown), height=_THREE_LINES)
        if said:
            self._add(SAID, _most(Counter(message.sent for message in said).values()), "fleet", _TWO_LINES)

    def y(self, name: str, slot: int = 0) -> float:
        """Return the top of a lane's slot; slots beyond the last share it."""
        lane = next(lane for lane in self.lanes if lane.name == name)
        return round(lane.y + min(slot, self.slots[name] - 1) * self.slot_height[name], 3)

    def _add(self, name: str, slots: int = 1, group: str = "", height: float = 1.0) -> None:
        total = round(slots * height, 3)
        self.lanes.append(Lane(name, round(self.height, 3), total, group))
        self.slots[name], self.slot_height[name] = slots, height
        self.height = round(self.height + total, 3)


def client_events(step: ShownStep) -> list[Said]:
    """Return the events of clients; all others are the pipeline's."""
    return [said for said in step.arrived if not said.of_pipeline]


def pipeline_events(step: ShownStep) -> list[Said]:
    return [said for said in step.arrived if said.of_pipeline]


def _most(counts: Iterable[int]) -> int:
    return max(1, min(_SLOTS, max(counts, default=1)))


# How many requests a box or a queue names; the others are counted.
_NAMED_IN_BOX: Final = 3
# Kinds of marks that take their request's colour.
_COLOURED: Final = ("event", "taken", "token")
# Client events that a failure names as its lead-up.
_LED_TO_IT: Final = 4
# Outcomes of runs that have not failed; a debugger's run goes on.
_GOOD: Final = ("passed", "running")
_SLOT_FULL: Final = "+{} more"


class Layout:
    """Places the steps ``first`` to ``last - 1`` of one trace, counted from the run's start, from column 0 on.

    ``difference`` is the first difference from the page's first run; ``engine`` is the run's name in a fleet.
    """

    def __init__(
        self,
        trace: Trace,
        number: int,
        palette: Palette,
        first: int,
        last: int,
        *,
        difference: Difference | None = None,
        engine: str = "",
    ) -> None:
        self.header, self.number, self.engine = trace.header, number, engine
        self._trace, self._palette, self._first = trace, palette, first
        self._log, self._launched = trace.log, trace.log.launches()
        self._shown = list(enumerate(trace.log.steps[first:last]))
        steps = {step.step for _, step in self._shown}
        self._notes = [note for note in trace.notes if note.step in steps]
        shown = [step for _, step in self._shown]
        messages = () if trace.fleet is None else trace.fleet.messages
        self._said = [(n, one) for n, one in enumerate(messages) if one.sender == engine and one.sent in steps]
        self._heard = [(n, one) for n, one in enumerate(messages) if one.receiver == engine and one.arrived in steps]
        self.lanes = Lanes(self._log, shown, self._launched, self._notes, [one for _, one in self._said])
        self.boxes = (*self._stage_boxes(), *self._queue_boxes())
        self.chips = (*self._note_chips(), *self._event_chips(), *self._reply_chips(), *self._message_chips())
        self.bands = (*self._windows(), *self._failures())
        self.callout = self._callout()
        self.led = self._led()
        self.difference = difference
        # The column of the difference, and the step there.
        self.differs_at, self.differs_in = -1, 0
        if difference is not None:
            steps_of_all = trace.log.steps
            self.differs_at = difference.index - first
            self.differs_in = steps_of_all[min(difference.index, len(steps_of_all) - 1)].step if steps_of_all else 0
        self.states = tuple(self._states())

    @property
    def verdict(self) -> str:
        header = self.header
        return "died" if header.died else header.outcome if header.outcome in _GOOD else "failed"

    @property
    def adapter(self) -> str:
        return self.header.adapter

    @property
    def config(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.header.config.items()) or "default configuration"

    # -- the pipeline --

    def _stage_boxes(self) -> Iterator[Box]:
        for x, step in self._shown:
            pipeline = self._log.pipeline_at(step, self._launched)
            for stage, batch in enumerate(pipeline.stages):
                if batch is not None:
                    yield self._box(x, self.lanes.y(f"stage {stage}"), batch, "stage")
            for slot, batch in enumerate(pipeline.results):
                yield self._box(x, self.lanes.y(RESULTS, slot), batch, "result")

    def _box(self, x: int, y: float, batch: int, kind: str) -> Box:
        label = f"#{batch}"
        if batch not in self._launched:
            return Box(x, y, label, kind, (), f"{label}, launched before this trace")
        shown, step = self._launched[batch]
        shares = [(share.rid, share.positions) for share in shown.shares]
        stripes = self._stripes(label, shares) if shares else (Stripe(shown.kind, None),)
        title = f"{shown.in_full}, launched in step {step}"
        return Box(x, y, label, kind, stripes, title, self._palette.numbers_of(shown.rids))

    def _stripes(self, label: str, shares: Sequence[tuple[str, str]]) -> tuple[Stripe, ...]:
        """Return stripes for as many requests as fit, with their positions if those fit too."""
        rids = [rid for rid, _ in shares]
        for named in range(min(len(shares), _NAMED_IN_BOX), 0, -1):
            for positions in (True, False):
                shown = [self._stripe(rid, where if positions else "") for rid, where in shares[:named]]
                stripes = (*shown, *self._more(rids[named:]))
                if fits(label, stripes):
                    return stripes
        return stripes

    def _stripe(self, rid: str, positions: str = "") -> Stripe:
        palette = self._palette
        return Stripe(palette.label(rid), palette.colours[rid], positions, palette.numbers_of([rid]))

    def _more(self, rids: Sequence[str]) -> Iterator[Stripe]:
        """Yield a stripe that counts the requests not shown by name."""
        if rids:
            palette = self._palette
            yield Stripe(f"+{len(rids)}", palette.colours[rids[0]], requests=palette.numbers_of(rids))

    def paths(self) -> Iterator[Path]:
        """Yield one line per microbatch, through the middle of its boxes to where its result is taken."""
        points: dict[int, list[str]] = {}
        for x, step in self._shown:
            pipeline = self._log.pipeline_at(step, self._launched)
            for slot, said in enumerate(pipeline_events(step)):
                if said.batch in points:
                    points[said.batch].append(_point(x, self.lanes.y(TAKEN, slot)))
            for stage, in_stage in enumerate(pipeline.stages):
                if in_stage is not None:
                    points.setdefault(in_stage, []).append(_point(x, self.lanes.y(f"stage {stage}")))
            for slot, waiting in enumerate(pipeline.results):
                points.setdefault(waiting, []).append(_point(x, self.lanes.y(RESULTS, slot)))
        for batch, through in points.items():
            if batch in self._launched and (rids := self._launched[batch].batch.rids):
                yield Path(" ".join(through), self._palette.colours[rids[0]], self._palette.numbers_of(rids))

    # -- events, queues, answers --

    def _event_chips(self) -> Iterator[Chip]:
        for x, step in self._shown:
            yield from self._stack(ARRIVED, x, [self._mark(said) for said in client_events(step)])
            yield from self._stack(TAKEN, x, [self._mark(said) for said in pipeline_events(step)])

    def _reply_chips(self) -> Iterator[Chip]:
        for x, step in self._shown:
            yield from self._stack(ANSWERED, x, [self._mark(said) for said in step.answered])

    def _message_chips(self) -> Iterator[Chip]:
        """Yield a chip for each message to other engines, as long as there is room."""
        for x, step in self._shown:
            here = [(number, one) for number, one in self._said if one.sent == step.step]
            for slot, (number, one) in enumerate(here):
                y, height = self.lanes.y(SAID, slot), self.lanes.slot_height[SAID]
                kind = "message" if one.arrived is not None else "message lost" if one.lost else "message kept"
                yield Chip(x, y, height, f"to {one.receiver}: {one.text}", kind, one.in_full, message=number)

    def heard(self) -> Iterator[tuple[int, float, int]]:
        """Yield the column, height and number of each message that arrives here."""
        columns = {step.step: x for x, step in self._shown}
        for number, one in self._heard:
            if one.arrived is not None:
                yield columns[one.arrived], self.lanes.y(ARRIVED), number

    def _mark(self, said: Said) -> _Mark:
        """Make a mark that names the request by its label, as the rest of the page does."""
        text = said.text if said.rid is None else said.naming(self._palette.label(said.rid))
        rids: tuple[str, ...] = () if said.rid is None else (said.rid,)
        if said.batch in self._launched:
            text, rids = text.removeprefix("result "), self._launched[said.batch].batch.rids
        return _Mark(text, said.kind, rids, coloured=said.kind in _COLOURED)

    def _note_chips(self) -> Iterator[Chip]:
        columns = {step.step: x for x, step in self._shown}
        own = own_file(self._trace.notes)
        for x in dict.fromkeys(columns[note.step] for note in self._notes):
            here = [note for note in self._notes if columns[note.step] == x]
            texts = [printable(f"{note.place(own)} {note.text}".strip()) for note in here]
            yield from self._stack(NOTES, x, [_Mark(text, "note") for text in texts])

    def _queue_boxes(self) -> Iterator[Box]:
        for x, step in self._shown:
            chunked = () if step.chunked is None else (step.chunked,)
            yield from self._members(WAITING, x, step.waiting)
            yield from self._members(CHUNKED, x, chunked)
            yield from self._members(RUNNING, x, step.running)
            if step.transferring:
                yield from self._members(TRANSFERS, x, step.transferring)

    def _members(self, lane: str, x: int, rids: Sequence[str]) -> Iterator[Box]:
        """Yield one box for all members of a queue: their number, and the first few by name."""
        if rids:
            label = "" if len(rids) == 1 else str(len(rids))
            stripes = self._stripes(label, [(rid, "") for rid in rids])
            title = f"{lane}: {' '.join(map(printable, rids))}"
            yield Box(x, self.lanes.y(lane), label, "queue", stripes, title, self._palette.numbers_of(rids))

    def _stack(self, lane: str, x: int, chips: Sequence[_Mark]) -> Iterator[Chip]:
        """Yield chips below each other; if there are more than slots, the last slot counts the rest."""
        slots, height = self.lanes.slots[lane], self.lanes.slot_height[lane]
        shown = chips if len(chips) <= slots else chips[: slots - 1]
        for slot, mark in enumerate(shown):
            colour = self._palette.colours.get(mark.rids[0]) if mark.coloured and mark.rids else None
            numbers = self._palette.numbers_of(mark.rids)
            yield Chip(x, self.lanes.y(lane, slot), height, mark.text, mark.kind, self._title(mark), colour, numbers)
        left = chips[len(shown) :]
        if left:
            title, numbers = "; ".join(map(self._title, left)), self._palette.numbers_of(_rids_of(left))
            y, text = self.lanes.y(lane, slots - 1), _SLOT_FULL.format(len(left))
            yield Chip(x, y, height, text, "more", title, requests=numbers)

    def _title(self, mark: _Mark) -> str:
        """Return the text of a mark with each shortened rid in full."""
        shortened = [printable(rid) for rid in mark.rids if self._palette.label(rid) != rid]
        return f"{mark.text} ({' '.join(shortened)})" if shortened else mark.text

    # -- the window, the failure, the difference --

    def _windows(self) -> Iterator[Band]:
        start: int | None = None
        for x, step in [*self._shown, (len(self._shown), None)]:
            inside = step is not None and step.in_window
            if inside and start is None:
                start = x
            elif not inside and start is not None:
                yield Band(start, x - start, "window", "every queue is empty, yet results are in flight")
                start = None

    def _failures(self) -> Iterator[Band]:
        failed = self._failed()
        if failed is not None:
            yield Band(failed, 1, "failed", "the run failed")

    def _failed(self) -> int | None:
        """Return the column of the failed step, if it is on the page."""
        index = failed_index(self._trace)
        column = -1 if index is None else index - self._first
        return column if 0 <= column < len(self._shown) else None

    @property
    def cause(self) -> int | None:
        """Return the column of the last event from outside at or before the failure."""
        failed = self._failed()
        events = [x for x, step in self._shown[: (failed or 0) + 1] if client_events(step)]
        return events[-1] if failed is not None and events else None

    def _led(self) -> Led | None:
        """Repeat the events of the cause's column, those that stand out if any do."""
        failed, cause = self._failed(), self.cause
        if failed is None or cause is None or cause == failed:
            return None
        step = self._shown[cause][1]
        marks = [self._mark(said) for said in client_events(step)]
        texts = [mark.text for mark in marks if mark.kind == "strong"] or [mark.text for mark in marks]
        height = self.lanes.slot_height[ARRIVED]
        return Led(cause, failed - cause, self.lanes.y(ARRIVED), height, f"{step.step}: {', '.join(texts)}")

    def _before(self, x: int) -> list[str]:
        """Name the last events from outside before a column's step."""
        said = [f"step {step.step}: {one.in_full}" for _, step in self._shown[:x] for one in client_events(step)]
        return said[-_LED_TO_IT:]

    def _callout(self) -> Callout | None:
        failed = self._failed()
        if failed is None:
            return None
        step = self._shown[failed][1]
        how = "failed" if step.broken else "died"
        where = "in" if step.error else "after"
        text = step.failure or self.header.outcome
        return Callout(failed + 1, self.lanes.y("stage 0"), f"{how} {where} step {step.step}", printable(text))

    def _states(self) -> Iterator[StepView]:
        for x, step in self._shown:
            notes = [note.in_full for note in self._notes if note.step == step.step]
            before = self._before(x) if step.failure else ()
            differs = x == self.differs_at
            yield state_of(step, self._log, self._launched, x=x, notes=notes, differs=differs, before=before)


class _Mark(msgspec.Struct, frozen=True):
    """The text of a chip, and its requests."""

    text: str
    kind: str
    rids: tuple[str, ...] = ()
    coloured: bool = False


def failed_index(trace: Trace) -> int | None:
    """Return the index of the failed step; of a run that died without recording that step, the last one."""
    steps = trace.log.steps
    found = next((index for index, step in enumerate(steps) if step.failure is not None), None)
    return len(steps) - 1 if found is None and trace.header.died and steps else found


def _rids_of(marks: Sequence[_Mark]) -> list[str]:
    return list(dict.fromkeys(rid for mark in marks for rid in mark.rids))


def _point(x: int, y: float) -> str:
    return f"{x + 0.5:g},{y + 0.5:g}"
