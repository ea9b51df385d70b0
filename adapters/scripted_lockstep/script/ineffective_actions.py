"""Counts actions of a script without effect, which are mistakes of the script, not of the engine.

It reads the history after the run and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.core.messages import (
    Abort,
    AbortAll,
    ContinueGeneration,
    FinishReason,
    Generate,
    LoadLora,
    PauseGeneration,
    PauseMode,
    ReleasePressure,
    SetPressure,
    TokenOutput,
)
from engine.core.scheduler import StepRecord


def count_ineffective_actions(run: Any) -> dict[str, int]:
    """Count verbs without effect, by name, omitting zeros."""
    records = run.records
    messages = [handle.message for handle in run.handles.all]
    loaded = {event.name for record in records for event in record.events if isinstance(event, LoadLora)}
    bounded = [handle for handle in run.handles.all if handle.message.timeout_s or handle.message.waiting_timeout_s]
    ended_by_limit = any(handle.finish_reason == FinishReason.TIMEOUT.value for handle in bounded)
    decoded = any(reply.finish_reason is None for record in records for reply in _outputs(record))
    speculates = run.scheduler.limits.draft_tokens > 0
    known = run.handles.known_rids()
    counts = {
        "aborts that ended no request": sum(_ineffective_aborts(record, known) for record in records),
        "pauses that stopped nobody": sum(_ineffective_pauses(records)),
        "pauses that were continued in their own step": sum(map(_pauses_of_no_step, records)),
        "continuations of what was not paused": _ineffective_continuations(records),
        "holds of results that held nothing": run.results.ineffective_holds,
        "releases of results that nothing held": run.results.ineffective_releases,
        "pressure that no request met": sum(_ineffective_pressure(records)),
        "time that passed for nobody": _is_time_ineffective(records, run.clock.now()),
        "time limits that never came": 0 if ended_by_limit else len(bounded),
        "LoRAs that no request used": len(loaded - {message.lora for message in messages}),
        "scripts with speculation and without a guess": speculates
        and decoded
        and not run.scheduler.counters.drafted_tokens,
    }
    return {name: count for name, count in counts.items() if count}


def _outputs(record: StepRecord) -> Iterable[TokenOutput]:
    return (reply for reply in record.replies if isinstance(reply, TokenOutput))


def _ineffective_aborts(record: StepRecord, known: set[str]) -> int:
    """Count the aborts of a step that ended no request; aborts of rids that were never used are another mistake."""
    ended = {reply.rid for reply in _outputs(record) if reply.finish_reason is not None}
    single = [e.rid for e in record.events if isinstance(e, Abort) and e.finish_reason is FinishReason.ABORT]
    everything = sum(isinstance(event, AbortAll) for event in record.events)
    return sum(rid in known and rid not in ended for rid in single) + (0 if ended else everything)


def _ineffective_pauses(records: Sequence[StepRecord]) -> Iterable[bool]:
    """Yield, for each pause, whether there was nothing to pause while it lasted."""
    before = 0
    for index, record in enumerate(records):
        if any(isinstance(event, PauseGeneration) for event in record.events):
            later = records[index:]
            lasting = later[: next((n for n, one in enumerate(later) if n and one.microbatch is not None), len(later))]
            yield not before and not any(_is_busy(one) for one in lasting)
        before = _size_of(record)


def _pauses_of_no_step(record: StepRecord) -> int:
    """Count the pauses in place that end in their own step; other modes already have an effect."""
    paused, count = False, 0
    for event in record.events:
        if isinstance(event, PauseGeneration):
            paused = event.mode is PauseMode.IN_PLACE
        elif isinstance(event, ContinueGeneration):
            count += paused
            paused = False
    return count


def _ineffective_continuations(records: Sequence[StepRecord]) -> int:
    paused, count = False, 0
    for event in (event for record in records for event in record.events):
        if isinstance(event, ContinueGeneration):
            count += not paused
        if isinstance(event, (PauseGeneration, ContinueGeneration)):
            paused = isinstance(event, PauseGeneration)
    return count


def _ineffective_pressure(records: Sequence[StepRecord]) -> Iterable[bool]:
    """Yield, for each period of pressure, whether nothing needed memory while it lasted."""
    met: bool | None = None
    for record in records:
        for event in record.events:
            if isinstance(event, SetPressure):
                met = bool(met)
            elif isinstance(event, ReleasePressure) and met is not None:
                yield not met
                met = None
        if met is not None:
            met = met or _is_alive(record)
    if met is not None:
        yield not met


def _is_time_ineffective(records: Sequence[StepRecord], now: float) -> bool:
    """Return whether time advanced and the engine was empty from the last advance on."""
    last = records[-1].now if records else 0.0
    after = [record for record in records if record.now == last] if last == now else []
    return now > 0 and not any(map(_is_alive, after))


def _is_alive(record: StepRecord) -> bool:
    """Return whether the engine had a request, or got a call of a client or an operator."""
    acts = (event for event in record.events if not isinstance(event, (SetPressure, ReleasePressure)))
    return bool(_size_of(record) or record.replies or any(True for _ in acts))


def _size_of(record: StepRecord) -> int:
    """Count requests and microbatches in flight."""
    requests = record.waiting + record.running + len(record.transferring) + (record.chunked is not None)
    return requests + len(record.in_flight)


def _is_busy(record: StepRecord) -> bool:
    return bool(record.replies and any(_outputs(record))) or any(isinstance(event, Generate) for event in record.events)
