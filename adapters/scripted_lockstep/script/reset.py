"""The reset: brings an engine to the state of a new one before a script, and to idle after it.

A reset that does not reach idle raises NotIdle and names what is still in flight.
"""

from __future__ import annotations

from typing import Any, Final

from engine.core.audit import audit
from engine.core.messages import (
    AbortAll,
    ContinueGeneration,
    ReleasePressure,
    StopProfile,
    UnloadLora,
    UpdateWeights,
    Wake,
)
from scripted.core.errors import NotIdle
from scripted.script.wait import Steps

# The call id of the harness's own calls: no client waits for the answer.
HARNESS_CALL: Final = "harness"
# Steps after an abort of everything: only microbatches in flight remain, depth steps and a margin.
RESET_BUDGET_STEPS: Final = 256
# The engine stays idle for two pipeline rotations after the warm-up, so that everything still under way arrives.
WARM_UP_ROTATIONS: Final = 2
WARM_UP_PROMPT_TOKENS: Final = 8


def reset(run: Any) -> Steps:
    """Bring the engine to the state of a new one."""
    run.recording = False
    run.let_go()
    # Remaining requests are aborted and answered before their connections are dropped: a late abort from the front end
    # could otherwise hit the next script's request of the same rid.
    yield from _abort_everything(run)
    run.world.clients.forget()
    if run.scheduler.counters.weights_version:
        yield from restore_weights(run)
    yield from _unload_loras(run)
    yield from flush(run)
    run.start_over()


def flush(run: Any) -> Steps:
    """Drop the cache of an idle engine."""
    run.flush()
    yield
    if not run.scheduler.is_fully_idle or run.scheduler.memory.pages.cached:
        raise NotIdle(f"the cache could not be flushed: {run.scheduler.books.what_is_busy()}")


def drain(run: Any) -> Steps:
    """End everything that a script left unfinished; the engine is idle afterwards."""
    run.recording = False
    run.let_go()
    yield from _abort_everything(run)
    audit(run.scheduler)


def warm_up(run: Any) -> Steps:
    """Run one real request, then stay idle for two rotations of the pipeline."""
    run.recording = False
    t = run.context_type(run, rid_prefix="warm-up")
    r = t.start_req(prompt_len=WARM_UP_PROMPT_TOKENS, max_new_tokens=2, ignore_eos=True)
    yield from t.run_until_finished(r)
    yield from t.run_until_idle()
    for _ in range(WARM_UP_ROTATIONS * run.scheduler.limits.depth):
        if not run.scheduler.is_fully_idle:
            raise NotIdle(f"the engine was not idle after its warm-up: {run.scheduler.books.what_is_busy()}")
        yield


def _abort_everything(run: Any) -> Steps:
    """Abort everything, including messages that have just arrived, and run until nothing is left."""
    run.inject(ReleasePressure())
    # After messages that have just arrived, which may be a pause.
    run.arrived += [ContinueGeneration(call_id=HARNESS_CALL), AbortAll()]
    yield
    for _ in range(RESET_BUDGET_STEPS):
        # Checked here too, because a mutant may have broken the predicate itself.
        if run.scheduler.is_fully_idle and not (run.scheduler.books.in_flight or run.loras):
            if run.scheduler.is_at_rest or run.failure is not None:
                return
            run.inject(_what_ends(run.scheduler.books))
        yield
    raise NotIdle(
        f"the engine did not get idle within {RESET_BUDGET_STEPS} steps after everything was aborted: "
        f"{run.scheduler.books.what_is_busy()}"
    )


def _what_ends(books: Any) -> StopProfile | UpdateWeights | Wake:
    """Return the next event that brings an idle engine to rest."""
    if books.is_awake:
        return StopProfile(call_id=HARNESS_CALL)
    return UpdateWeights(call_id=HARNESS_CALL) if books.sleep_level > 1 else Wake(call_id=HARNESS_CALL)


def _unload_loras(run: Any) -> Steps:
    """Have the stages drop every LoRA. The configured LoRAs are known again after the reset."""
    loras = run.scheduler.features.loras
    run.inject(*[UnloadLora(call_id=HARNESS_CALL, name=name) for name in loras.known])
    for _ in range(RESET_BUDGET_STEPS):
        if not loras.known:
            return
        yield
    raise NotIdle(f"{', '.join(loras.known)} could not be unloaded within {RESET_BUDGET_STEPS} steps")


def restore_weights(run: Any) -> Steps:
    """Restore the initial weights."""
    version = run.scheduler.counters.weights_version
    run.inject(UpdateWeights(call_id=HARNESS_CALL))
    for _ in range(RESET_BUDGET_STEPS):
        yield
        if run.scheduler.counters.weights_version > version:
            return
    raise NotIdle(f"the engine's own weights did not come back within {RESET_BUDGET_STEPS} steps")
