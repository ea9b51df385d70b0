"""The reasons why requests of a script's engine do not advance, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator

from engine.core.scheduler import Scheduler
from engine.core.scheduler.deadlines import earliest
from scripted.core.results import Results
from scripted_lockstep.simulated.held_orders import HeldOrders


def causes_of_holds(results: Results, grammars: HeldOrders, loras: HeldOrders) -> Iterator[str]:
    """Yield what withholds results, grammars and LoRAs."""
    if results.is_holding:
        yield f"results are held, {len(results)} microbatches in flight wait for t.release_results()"
    if grammars.is_holding:
        yield f"grammars are held, {len(grammars)} are not ready until t.release_grammars()"
    if loras.is_holding:
        yield f"LoRAs are held, {len(loras)} are not read until t.release_loras()"
    for stage in sorted(results.stalled):
        yield f"stage {stage} is stalled, nothing completes until t.resume_stage({stage})"
    for stage in sorted(results.cut):
        yield f"the link of stage {stage} is cut, nothing completes until t.heal_link({stage})"


def causes_of_memory(scheduler: Scheduler) -> Iterator[str]:
    """Yield what an operator keeps from requests."""
    memory = scheduler.memory
    window = 0 if memory.sliding_window is None else memory.sliding_window.pages.reserved
    kept = (
        (memory.pages.reserved, "pages", "exhaust_kv"),
        (window, "window pages", "exhaust_window"),
        (memory.rows.reserved, "rows", "exhaust_rows"),
    )
    for count, what, verb in kept:
        if count:
            yield f"{count} {what} are kept back by t.{verb}(), until t.release_exhausted()"
    if scheduler.pressure.pins:
        yield "nodes of the prefix tree are locked by t.exhaust_locks(), until t.release_exhausted()"


def causes_of_the_engine(scheduler: Scheduler) -> Iterator[str]:
    """Yield the states of the engine in which requests wait, and what they wait for."""
    if scheduler.failure is not None:
        yield f"the engine has lost its pipeline: {scheduler.failure}"
    elif not scheduler.books.is_awake:
        yield "the engine sleeps, or is about to, until t.wake()"
    elif scheduler.books.paused is not None:
        yield f"generation is paused ({scheduler.books.paused.value}), until t.continue_generation()"
    features = scheduler.features
    call = earliest(features.flush_and_update.deadline, features.loras.deadline)
    waits = (
        (call, "a deferred call waits, at most until"),
        (features.time_limits.deadline, "a request has time until"),
        (features.transfers.deadline, "KV of another engine is waited for, at most until"),
    )
    for deadline, what in waits:
        if deadline is not None:
            now = f"it is {scheduler.now:g} s now, and only t.clock.advance(seconds) moves that"
            yield f"{what} {deadline:g} s; {now}"
