"""The lanes of a run: which there are, how high each is, and where it stands.

Owns the vertical layout, in the order in which a request meets the lanes. A lane is as high as its fullest step
needs, up to a bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from scripted.report.step_log import Launch, Message, Note, Said, ShownStep, StepLog
from scripted.report.timeline.view import Lane

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

# A lane never has more chips than this; the step's state has the others.
_SLOTS: Final = 4
# Chips that hold two or three lines of text are higher than a lane of boxes.
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
            self._add(NOTES, _most(Counter(note.step for note in notes).values()), height=_TWO_LINES)
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
        """The top of a lane's slot; what does not fit shares the last slot."""
        lane = next(lane for lane in self.lanes if lane.name == name)
        return round(lane.y + min(slot, self.slots[name] - 1) * self.slot_height[name], 3)

    def _add(self, name: str, slots: int = 1, group: str = "", height: float = 1.0) -> None:
        total = round(slots * height, 3)
        self.lanes.append(Lane(name, round(self.height, 3), total, group))
        self.slots[name], self.slot_height[name] = slots, height
        self.height = round(self.height + total, 3)


def client_events(step: ShownStep) -> list[Said]:
    """What came from clients; the rest came from the pipeline."""
    return [said for said in step.arrived if not said.of_pipeline]


def pipeline_events(step: ShownStep) -> list[Said]:
    return [said for said in step.arrived if said.of_pipeline]


def _most(counts: Iterable[int]) -> int:
    return max(1, min(_SLOTS, max(counts, default=1)))
