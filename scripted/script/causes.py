"""Why nothing moves: what keeps an engine from moving when a script's budget of steps is spent, each with its remedy.

Reads the rig; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from scripted.rig.rig import Rig

__all__ = ["causes_of"]


def causes_of(rig: Rig) -> list[str]:
    """One clause for each known thing that keeps requests from advancing; empty when there is none."""
    return [*_of_results(rig), *_of_memory(rig), *_of_the_engine(rig)]


def _of_results(rig: Rig) -> Iterator[str]:
    results = rig.results
    if results.is_holding:
        yield f"results are held, {len(results)} microbatches in flight wait for t.release_results()"
    if rig.grammars.is_holding:
        yield f"grammars are held, {len(rig.grammars)} are not ready until t.release_grammars()"
    for stage in sorted(results.stalled):
        yield f"stage {stage} is stalled, nothing completes until t.resume_stage({stage})"
    for stage in sorted(results.cut):
        yield f"the link of stage {stage} is cut, nothing completes until t.heal_link({stage})"


def _of_memory(rig: Rig) -> Iterator[str]:
    memory = rig.scheduler.memory
    window = 0 if memory.sliding_window is None else memory.sliding_window.pages.reserved
    kept = (
        (memory.pages.reserved, "pages", "exhaust_kv"),
        (window, "window pages", "exhaust_window"),
        (memory.rows.reserved, "rows", "exhaust_rows"),
    )
    for count, what, verb in kept:
        if count:
            yield f"{count} {what} are kept back by t.{verb}(), until t.release_exhausted()"
    if rig.scheduler.pressure.pins:
        yield "nodes of the prefix tree are locked by t.exhaust_locks(), until t.release_exhausted()"


def _of_the_engine(rig: Rig) -> Iterator[str]:
    scheduler = rig.scheduler
    books = scheduler.books
    if scheduler.failure is not None:
        yield f"the engine has lost its pipeline: {scheduler.failure}"
    elif books.paused is not None:
        yield f"generation is paused ({books.paused.value}), until t.continue_generation()"
    deadline = scheduler.controls.deadline
    if deadline is not None:
        yield (
            f"a deferred call waits, at most until {deadline:g} s; it is {scheduler.now:g} s now, and only "
            "t.clock.advance(seconds) moves that"
        )
    limit = scheduler.time_limits.deadline
    if limit is not None:
        yield (
            f"a request has time until {limit:g} s; it is {scheduler.now:g} s now, and only t.clock.advance(seconds) "
            "moves that"
        )
    if books.is_fully_idle and not rig.has_unseen:
        yield "the engine is fully idle, so no further step can change anything"
