"""What happened in a run of the flush race, in facts and in sentences.

Reads the steps of the run and nothing else: no sentence here is true unless the steps say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from scripted.core.phrases import printable
from scripted.report.step_log import Said, ShownStep, StepLog


@dataclass(frozen=True, kw_only=True)
class Race:
    """The turning points of one run: the step that opened the window, the flush and its answer, the end."""

    window: ShownStep
    flush: ShownStep
    answer: Said
    end: ShownStep
    last_reply: str

    @classmethod
    def of(cls, log: StepLog) -> Self | None:
        """The race in these steps; None when its window never opened or no flush was answered."""
        window = next((step for step in log.steps if step.in_window), None)
        flush = next((step for step in log.steps if any(said.text == "FLUSH" for said in step.arrived)), None)
        replies = [said for step in log.steps for said in step.answered]
        answer = next((said for said in replies if said.text.startswith("flush -> ")), None)
        if window is None or flush is None or answer is None:
            return None
        told = [said.text for said in replies if said.rid is not None]
        return cls(window=window, flush=flush, answer=answer, end=log.steps[-1], last_reply=(told or [""])[-1])

    @property
    def flushed_in_the_window(self) -> bool:
        """The flush met a scheduler whose queues were empty and whose pipeline was not."""
        return self.flush.step == self.window.step + 1

    def sentences(self) -> Iterator[tuple[int, str]]:
        """The story, as a step and what it did."""
        flights = " and ".join(f"#{batch}" for batch in self.window.in_flight)
        opens = (
            "launches the last chunk of the prompt. Nothing waits, nothing is partly prefilled, nothing runs: every "
            f"queue is empty, but {flights} are in flight and their request owns memory. The window is open."
        )
        yield self.window.step, opens
        answer = self.answer.text.removeprefix("flush -> ")
        sees = (
            f"sees what is in flight. The flush is {answer}, and nothing else changes."
            if self.answer.kind == "refused"
            else "asks the queues alone, finds them empty, and the prefix tree is reset under the request. "
            f"The answer is {answer}."
        )
        yield self.flush.step, f"POST /flush_cache arrives. The idle check {sees}"
        if self.end.error is not None:
            died = printable(self.end.error)
            yield self.end.step, f"a result comes back to a tree that is gone. The scheduler dies: {died}"
        elif self.last_reply:
            yield self.end.step, f"the request is done: {self.last_reply}."
