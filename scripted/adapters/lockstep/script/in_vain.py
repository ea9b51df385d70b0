"""What a script did to the engine that met nothing: it was no mistake of the engine that nothing came of it.

Read off the history after the run. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.messages import Abort, AbortAll, FinishReason, Generate, LoadLora, PauseGeneration, TokenOutput
from engine.scheduler import StepRecord

__all__ = ["met_nothing"]


def met_nothing(run: Any) -> dict[str, int]:
    """Counts of verbs that met nothing, by name."""
    records = run.records
    messages = [handle.message for handle in run.handles.all]
    loaded = {event.name for record in records for event in record.events if isinstance(event, LoadLora)}
    bounded = [handle for handle in run.handles.all if handle.message.timeout_s or handle.message.waiting_timeout_s]
    ended_by_limit = any(handle.finish_reason == FinishReason.TIMEOUT.value for handle in bounded)
    decoded = any(reply.finish_reason is None for record in records for reply in _outputs(record))
    speculates = run.scheduler.limits.draft_tokens > 0
    return {
        "aborts that ended no request": sum(_aborts_in_vain(record, run.handles.known_rids()) for record in records),
        "pauses that stopped nobody": sum(_pauses_in_vain(records)),
        "holds of results that held nothing": run.results.holds_in_vain,
        "time limits that never came": 0 if ended_by_limit else len(bounded),
        "LoRAs that no request used": len(loaded - {message.lora for message in messages}),
        "scripts with speculation and without a guess": speculates
        and decoded
        and not run.scheduler.counters.drafted_tokens,
    }


def _outputs(record: StepRecord) -> Iterable[TokenOutput]:
    return (reply for reply in record.replies if isinstance(reply, TokenOutput))


def _aborts_in_vain(record: StepRecord, known: set[str]) -> int:
    """Aborts of a step that ended no request; those of rids that never were are another mistake."""
    ended = {reply.rid for reply in _outputs(record) if reply.finish_reason is not None}
    single = [e.rid for e in record.events if isinstance(e, Abort) and e.finish_reason is FinishReason.ABORT]
    everything = sum(isinstance(event, AbortAll) for event in record.events)
    return sum(rid in known and rid not in ended for rid in single) + (0 if ended else everything)


def _pauses_in_vain(records: Sequence[StepRecord]) -> Iterable[bool]:
    """For each pause whether there was nothing to pause, then and as long as it lasted."""
    before = 0
    for index, record in enumerate(records):
        if any(isinstance(event, PauseGeneration) for event in record.events):
            later = records[index:]
            lasting = later[: next((n for n, one in enumerate(later) if n and one.microbatch is not None), len(later))]
            yield not before and not any(_is_busy(one) for one in lasting)
        before = record.waiting + record.running + len(record.in_flight) + (record.chunked is not None)


def _is_busy(record: StepRecord) -> bool:
    return bool(record.replies and any(_outputs(record))) or any(isinstance(event, Generate) for event in record.events)
