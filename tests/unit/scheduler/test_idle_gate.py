"""A step tells its gate whether the next one could plan anything without an event."""

from __future__ import annotations

import pytest

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Completion, Event, Generate, PauseGeneration, PauseMode, SamplingParams
from engine.core.scheduler import Scheduler
from engine.core.scheduler.ports import StepResult

CHUNK = 16


def engine(pp_size: int) -> Scheduler:
    config = EngineConfig(pp_size=pp_size, chunked_prefill_size=CHUNK)
    return Scheduler(Limits.of(config, EMBEDDED_FACTS))


def generate(rid: str, tokens: int) -> Generate:
    return Generate(rid=rid, prompt_ids=(1,) * tokens, sampling=SamplingParams(max_new_tokens=8, temperature=0))


def step(scheduler: Scheduler, *events: Event) -> StepResult:
    return scheduler.step(events, 0.0)


def test_a_full_pipeline_asks_for_no_step() -> None:
    """A02: a step that can plan nothing costs as much as one that can, each token."""
    result = step(engine(pp_size=1), generate("a", 3 * CHUNK))
    assert result.microbatch is not None
    assert not result.again


def test_a_free_slot_with_work_asks_for_a_step_and_without_work_for_none() -> None:
    """A01: all that can be launched is launched without an event, and then the gate may sleep."""
    scheduler = engine(pp_size=4)
    launched = [step(scheduler, generate("a", 2 * CHUNK), generate("b", CHUNK))]
    while launched[-1].again:
        launched.append(step(scheduler))
    assert [result.microbatch is not None for result in launched] == [True, True, True]
    assert step(scheduler).microbatch is None


def test_a_running_request_in_flight_is_no_work() -> None:
    scheduler = engine(pp_size=4)
    first = step(scheduler, generate("a", CHUNK))
    assert not first.again
    decode = step(scheduler, Completion(microbatch_id=first.microbatch.id, token_ids=(5,)))
    assert decode.microbatch is not None
    assert not decode.again


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_a_pause_asks_for_no_step(mode: PauseMode) -> None:
    scheduler = engine(pp_size=4)
    first = step(scheduler, generate("a", CHUNK))
    step(scheduler, Completion(microbatch_id=first.microbatch.id, token_ids=(5,)))
    assert not step(scheduler, PauseGeneration(call_id="p", mode=mode)).again
    assert step(scheduler).microbatch is None
