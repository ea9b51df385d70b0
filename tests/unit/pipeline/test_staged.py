"""Real stage processes over real sockets: results, order, failures, deaths, shutdown."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from handmade_plans import WAIT_S, PlanWriter, generate, run, take
from stage_farm import NEIGHBOUR_DIED, StageFarm

from engine.core.config import EngineConfig
from engine.core.errors import EngineError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.model.runner import StageRunner
from engine.pipeline.local import LocalPipeline
from engine.pipeline.staged import StagedPipeline

PROMPT = list(b"A prompt for all stages.")
DISCONNECT_MS = int(WAIT_S * 1000)

Engine = tuple[StagedPipeline, list[int]]


@pytest.fixture
def engine_of(farm: StageFarm, private_dir: Path) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(*, pp_size: int = 4, transport: str = "socket") -> Engine:
        config = EngineConfig(device="cpu", pp_size=pp_size, pp_async_depth=2, kv_sanitizer=True)
        pipeline = StagedPipeline(private_dir, pp_size)
        started.append((pipeline, farm.start(config, private_dir, transport=transport)))
        return started[-1]

    yield start
    for pipeline, pids in started:
        pipeline.close()
        for pid in pids:
            _kill(pid)


def limits(pp_size: int = 4) -> Limits:
    return Limits.of(EngineConfig(pp_size=pp_size), EMBEDDED_FACTS)


@pytest.fixture(scope="module")
def expected(_one_torch_thread: None) -> list[int]:
    config = EngineConfig(device="cpu")
    return generate(LocalPipeline(StageRunner(config, limits(1), 0)), PlanWriter(limits(1)), 0, PROMPT, 12)


def test_four_stages_say_what_one_says(engine_of: Callable[..., Engine], farm: StageFarm, expected: list[int]) -> None:
    """C11; afterwards EndStage ends every stage with status 0."""
    pipeline, pids = engine_of()
    assert generate(pipeline, PlanWriter(limits()), 0, PROMPT, 12) == expected
    pipeline.close()
    pipeline.close()
    assert farm.reap(pids) == [0, 0, 0, 0]
    pids.clear()


def test_many_in_flight_complete_in_launch_order(engine_of: Callable[..., Engine], expected: list[int]) -> None:
    pipeline, _ = engine_of()
    writer = PlanWriter(limits())
    for row in range(6):
        pipeline.launch(writer.plan(row, PROMPT))
    completions = [take(pipeline) for _ in range(6)]
    assert [completion.microbatch_id for completion in completions] == [1, 2, 3, 4, 5, 6]
    assert {completion.token_ids for completion in completions} == {(expected[0],)}
    assert pipeline.next_completion(0) is None


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_failure_passes_through_in_launch_order(
    engine_of: Callable[..., Engine], stage: int, expected: list[int]
) -> None:
    """A05, A06: one microbatch fails, those before and after it do not, no process dies."""
    pipeline, _ = engine_of()
    writer = PlanWriter(limits())
    pipeline.launch(writer.plan(0, PROMPT))
    pipeline.fail_next_step(stage)
    for row in (1, 2):
        pipeline.launch(writer.plan(row, PROMPT))
    completions = [take(pipeline) for _ in range(3)]
    assert [completion.error is None for completion in completions] == [True, False, True]
    assert f"stage {stage} failed in microbatch 2: StepFailedError" in str(completions[1].error)
    assert completions[2].token_ids == (expected[0],)
    assert [view.failed for view in pipeline.describe()] == [int(view >= stage) for view in range(4)]


def test_views_are_those_after_everything_launched(engine_of: Callable[..., Engine]) -> None:
    pipeline, _ = engine_of()
    writer = PlanWriter(limits())
    for row in range(3):
        pipeline.launch(writer.plan(row, PROMPT))
    views = pipeline.describe()
    assert [view.stage for view in views] == [0, 1, 2, 3]
    assert {(view.last_microbatch_id, view.microbatches, view.tokens) for view in views} == {(3, 3, 3 * len(PROMPT))}
    assert len({view.slots_digest for view in views}) == 1
    # The completions that arrived before the views are still there, and the loop can learn of them.
    assert pipeline.ready
    assert [take(pipeline).microbatch_id for _ in range(3)] == [1, 2, 3]
    assert not pipeline.ready
    pipeline.forget()
    assert {(view.last_microbatch_id, view.slots_written) for view in pipeline.describe()} == {(-1, 0)}


def test_a_completion_wakes_a_poller(engine_of: Callable[..., Engine]) -> None:
    """Every source of work wakes at once (A03)."""
    pipeline, _ = engine_of(pp_size=2)
    poller = zmq.Poller()
    for source in pipeline.wake_sources():
        poller.register(source, zmq.POLLIN)
    # That both have connected is news too, once.
    pipeline.describe()
    assert poller.poll(0) == []
    pipeline.launch(PlanWriter(limits(2)).plan(0, PROMPT))
    assert poller.poll(DISCONNECT_MS)
    assert pipeline.next_completion(0) is not None


def test_torch_distributed_carries_hidden_states_and_failures(
    engine_of: Callable[..., Engine], expected: list[int]
) -> None:
    pipeline, _ = engine_of(pp_size=2, transport="distributed")
    writer = PlanWriter(limits(2))
    assert generate(pipeline, writer, 0, PROMPT, 4) == expected[:4]
    pipeline.fail_next_step(0)
    assert "stage 0 failed" in str(run(pipeline, writer.plan(1, PROMPT)).error)
    assert run(pipeline, writer.plan(2, PROMPT)).token_ids == (expected[0],)


def test_stages_end_when_the_scheduler_is_gone(
    engine_of: Callable[..., Engine], farm: StageFarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a EndStage: what a kill -9 of the scheduler looks like from a stage."""
    pipeline, pids = engine_of(pp_size=2)
    # A stage learns of an end only after a beginning: be sure that all are connected.
    pipeline.describe()
    monkeypatch.setattr(pipeline, "_broadcast", lambda _: None)
    pipeline.close()
    assert farm.reap(pids) == [0, 0]
    pids.clear()


def test_a_stage_that_waits_for_a_dead_neighbour_ends(engine_of: Callable[..., Engine], farm: StageFarm) -> None:
    """A06: it does not wait forever for hidden states that never come."""
    pipeline, pids = engine_of(pp_size=2)
    writer = PlanWriter(limits(2))
    run(pipeline, writer.plan(0, PROMPT))
    os.kill(pids[0], signal.SIGSTOP)
    pipeline.launch(writer.plan(1, PROMPT))
    os.kill(pids[0], signal.SIGKILL)
    assert farm.reap(pids) == [-signal.SIGKILL, NEIGHBOUR_DIED]
    pids.clear()


def test_silent_stages_are_named(private_dir: Path) -> None:
    pipeline = StagedPipeline(private_dir, 2)
    try:
        with pytest.raises(EngineError, match=r"stages \[0, 1\] did not"):
            pipeline.describe(timeout_s=0.02)
        with pytest.raises(EngineError, match=r"stage must be in 0\.\.1, got 2"):
            pipeline.fail_next_step(2)
        assert pipeline.next_completion(0.01) is None
    finally:
        pipeline.close()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
