"""The requests that make no progress at the end of a recording of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from engine.core.messages import Generate
from engine.core.recording import read_recording
from engine.core.scheduler import Scheduler, StepRecord
from engine.core.scheduler.request import Place, Request
from scripted.sdk.capabilities import Limits
from scripted.sdk.flight.standing import Hint, Stand, Watch
from scripted_lockstep.recordings.replay import replay_engine

# A request counts as stuck after this many steps without a launch or a token.
_STANDS_AFTER: Final = 16
_LOADS: Final = {
    Place.RECEIVING: Hint("load", "the KV of its prompt from a prefill engine"),
    Place.DELIVERING: Hint("peer", "the decode engine that takes its KV"),
}
_GRAMMAR: Final = Hint("grammar", "its grammar, which is not compiled")


def stands_in_recording(path: Path) -> Sequence[Stand]:
    """Replay a recording. Raises RecordingError for a recording that cannot be replayed."""
    _, records, scheduler = replay_engine(path)
    limits = read_recording(path).header.limits
    watch = Watch(
        Limits(
            block_size=limits.page_size,
            blocks=limits.total_pages,
            batch_tokens=limits.prefill_budget_tokens,
            batch_requests=limits.rows,
            context_tokens=limits.context_length,
            depth=limits.depth,
        )
    )
    moved = _last_moves(records)
    for request in scheduler.books.live():
        _follow(watch, request, moved.get(request.rid, 0))
    for launched in scheduler.books.in_flight:
        for request in launched.requests:
            watch.fly(request.rid, launched.microbatch.id, launched.step)
    watch.paused = "" if scheduler.books.paused is None else scheduler.books.paused.value
    return watch.stands(scheduler.step_number, _STANDS_AFTER, _hints(scheduler), scheduler.memory.pages.free)


def _last_moves(records: Sequence[StepRecord]) -> dict[str, int]:
    """Return the last step in which each request arrived, was launched or got a token."""
    moved: dict[str, int] = {}
    for record in records:
        moved |= {event.rid: record.step for event in record.events if isinstance(event, Generate)}
        if record.microbatch is not None:
            moved |= {segment.rid: record.step for segment in record.microbatch.segments}
    return moved


def _follow(watch: Watch, request: Request, since: int) -> None:
    life = watch.begin(request.rid, request.prompt_tokens, request.limit_tokens - request.prompt_tokens, since)
    life.said = len(request.ids) - request.prompt_tokens
    life.launched = request.planned_tokens > 0 or request.retractions > 0
    if request.lease is not None:
        life.computed, life.blocks = request.planned_tokens, len(request.lease.pages)


def _hints(scheduler: Scheduler) -> dict[str, Hint]:
    live = scheduler.books.live()
    hints = {one.rid: _LOADS[one.place] for one in live if one.place in _LOADS}
    grammars = scheduler.features.grammars
    return hints | {one.rid: _GRAMMAR for one in live if grammars.is_waited_for_by(one)}
