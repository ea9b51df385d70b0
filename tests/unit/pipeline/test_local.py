"""The pipeline of one stage: launch queues, asking computes, in launch order."""

from __future__ import annotations

import pytest
from handmade_plans import PlanWriter, generate, take

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.limits import EMBEDDED_FACTS, Limits
from engine.model.runner import StageRunner
from engine.pipeline.local import LocalPipeline

CONFIG = EngineConfig(device="cpu", context_length=256)
LIMITS = Limits.of(CONFIG, EMBEDDED_FACTS)


@pytest.fixture(scope="module")
def runner(_one_torch_thread: None) -> StageRunner:
    return StageRunner(CONFIG, LIMITS, 0)


@pytest.fixture
def pipeline(runner: StageRunner) -> LocalPipeline:
    runner.forget()
    return LocalPipeline(runner)


def test_nothing_is_computed_before_it_is_asked_for(pipeline: LocalPipeline, runner: StageRunner) -> None:
    writer = PlanWriter(LIMITS)
    assert pipeline.next_completion(None) is None
    assert not pipeline.ready
    for row in range(3):
        pipeline.launch(writer.plan(row, [1, 2, 3]))
    assert pipeline.ready
    assert runner.counters.microbatches == 0
    assert [take(pipeline).microbatch_id for _ in range(3)] == [1, 2, 3]
    assert not pipeline.ready


def test_it_has_no_wake_source(pipeline: LocalPipeline) -> None:
    assert list(pipeline.wake_sources()) == []


def test_an_injected_failure_comes_in_launch_order(pipeline: LocalPipeline) -> None:
    """A05."""
    writer = PlanWriter(LIMITS)
    pipeline.fail_next_step(0)
    for row in range(2):
        pipeline.launch(writer.plan(row, [1, 2, 3]))
    first, second = take(pipeline), take(pipeline)
    assert "injected" in str(first.error)
    assert second.error is None
    assert len(second.token_ids) == 1


def test_only_stage_zero_can_be_made_to_fail(pipeline: LocalPipeline) -> None:
    with pytest.raises(EngineError, match="stage must be 0"):
        pipeline.fail_next_step(1)


def test_it_describes_itself(pipeline: LocalPipeline) -> None:
    generate(pipeline, PlanWriter(LIMITS), 0, list(b"hello"), 4)
    (view,) = pipeline.describe()
    assert (view.stage, view.last_microbatch_id, view.microbatches, view.tokens) == (0, 4, 4, 8)
    pipeline.forget()
    (view,) = pipeline.describe()
    assert (view.last_microbatch_id, view.microbatches, view.slots_written) == (-1, 0, 0)


def test_close_drops_what_was_launched(pipeline: LocalPipeline) -> None:
    pipeline.launch(PlanWriter(LIMITS).plan(0, [1]))
    pipeline.close()
    pipeline.close()
    assert pipeline.next_completion(0) is None


def test_it_needs_a_runner_of_all_layers() -> None:
    config = EngineConfig(device="cpu", pp_size=2)
    with pytest.raises(EngineError, match="runner of all layers, got stage 1"):
        LocalPipeline(StageRunner(config, Limits.of(config, EMBEDDED_FACTS), 1))
