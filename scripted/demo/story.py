"""What happened in a run of the flush race, in facts and in sentences.

Reads the records of the run and nothing else: no sentence here is true unless the records say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from engine.messages import CallAnswer, FlushCache, TokenOutput
from engine.scheduler.ports import StepRecord
from scripted.core.phrases import plural, printable
from scripted.report.timeline.positions import in_window
from scripted.report.wording import answer_text

__all__ = ["Race"]


@dataclass(frozen=True, kw_only=True)
class Race:
    """The turning points of one run: the step that opened the window, the flush and its answer, the end."""

    window: StepRecord
    flush: StepRecord
    answer: CallAnswer
    end: StepRecord
    tokens: int
    finish_reason: str | None

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> Self | None:
        """The race in these records; None when its window never opened or no flush was answered."""
        window = next((record for record in records if in_window(record)), None)
        flush = next((record for record in records if _flush_in(record) is not None), None)
        if window is None or flush is None:
            return None
        answer = next((reply for record in records for reply in _answers(record, flush)), None)
        if answer is None:
            return None
        outputs = [reply for record in records for reply in record.replies if isinstance(reply, TokenOutput)]
        last = next((output.finish_reason for output in outputs if output.finish_reason is not None), None)
        return cls(
            window=window,
            flush=flush,
            answer=answer,
            end=records[-1],
            tokens=sum(len(output.token_ids) for output in outputs),
            finish_reason=None if last is None else last.value,
        )

    @property
    def flushed_in_the_window(self) -> bool:
        """The flush met a scheduler whose queues were empty and whose pipeline was not."""
        return self.flush.step == self.window.step + 1

    def sentences(self) -> Iterator[tuple[int, str]]:
        """The story, as a step and what it did."""
        flights = " and ".join(f"#{microbatch_id}" for microbatch_id in self.window.in_flight)
        yield (
            self.window.step,
            (
                f"launches the last chunk of the prompt. Nothing waits, nothing is partly prefilled, nothing runs: "
                f"every queue is empty, but {flights} are in flight and their request owns memory. The window is open."
            ),
        )
        if self.answer.ok:
            yield (
                self.flush.step,
                (
                    "POST /flush_cache arrives. The idle check asks the queues alone, finds them empty, and the prefix "
                    f"tree is reset under the request. The answer is {answer_text(self.answer)}."
                ),
            )
        else:
            yield (
                self.flush.step,
                (
                    "POST /flush_cache arrives. The idle check sees what is in flight. "
                    f"The flush is {answer_text(self.answer)}, and nothing else changes."
                ),
            )
        if self.end.error is not None:
            died = printable(self.end.error)
            yield self.end.step, f"a result comes back to a tree that is gone. The scheduler dies: {died}"
        elif self.finish_reason is not None:
            tokens = plural(self.tokens, "token")
            yield self.end.step, f"the request is done: {tokens}, finish_reason={self.finish_reason!r}."


def _flush_in(record: StepRecord) -> FlushCache | None:
    return next((event for event in record.events if isinstance(event, FlushCache)), None)


def _answers(record: StepRecord, flush: StepRecord) -> Iterator[CallAnswer]:
    asked = _flush_in(flush)
    for reply in record.replies:
        if asked is not None and isinstance(reply, CallAnswer) and reply.call_id == asked.call_id:
            yield reply
