"""The pipeline of one stage: launch queues or enqueues, asking computes or awaits, in launch order."""

from __future__ import annotations

import msgspec
import pytest
import torch
from handmade_plans import PlanWriter, generate, take

from engine.core.config import EMBEDDED_LORA, EngineConfig
from engine.core.errors import DeviceLostError, EngineError, IntegrityError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import LoraRead
from engine.core.plan import (
    UNKNOWN_TOKEN,
    Forward,
    ForwardMode,
    LoraChange,
    LoraOrder,
    LoraUpdate,
    Microbatch,
    SamplingSpec,
    Segment,
)
from engine.model.runner import StageRunner
from engine.model.sampler_output import LaunchedStep
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
    assert not pipeline.takes_more
    assert runner.counters.microbatches == 0
    assert [take(pipeline).microbatch_id for _ in range(3)] == [1, 2, 3]
    assert not pipeline.ready


def test_a_failure_and_a_view_come_after_what_was_launched(pipeline: LocalPipeline) -> None:
    """A05: as where stages have processes of their own, which read both after the plans."""
    writer = PlanWriter(LIMITS)
    pipeline.launch(writer.plan(0, [1, 2, 3]))
    pipeline.fail_next_step(0)
    pipeline.launch(writer.plan(1, [1, 2, 3]))
    assert not pipeline.takes_more
    (view,) = pipeline.describe()
    assert (view.last_microbatch_id, view.failed) == (2, 1)
    assert [take(pipeline).error is None for _ in range(2)] == [True, False]
    assert not pipeline.ready


def test_it_has_no_wake_source(pipeline: LocalPipeline) -> None:
    assert list(pipeline.wake_sources()) == []


def test_an_injected_failure_comes_in_launch_order(pipeline: LocalPipeline) -> None:
    """A failure stays alone and never ends the process (A05)."""
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


# -- launched without waiting for the device, on a CPU by the runner's switch --

AHEAD_LIMITS = msgspec.structs.replace(LIMITS, async_scheduling=True, depth=2, max_loras=1)


@pytest.fixture(scope="module")
def early_runner(_one_torch_thread: None) -> StageRunner:
    config = CONFIG.model_copy(update={"kv_sanitizer": True, "max_loras": 1})
    return StageRunner(config, AHEAD_LIMITS, 0, early=True)


@pytest.fixture
def early(early_runner: StageRunner) -> LocalPipeline:
    early_runner.forget()
    return LocalPipeline(early_runner)


def told_to_device(runner: StageRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the microbatches that the runner launches from now on."""
    numbers: list[int] = []
    launch = runner.launch

    def note(microbatch: Microbatch) -> LaunchedStep:
        numbers.append(microbatch.id)
        return launch(microbatch)

    monkeypatch.setattr(runner, "launch", note)
    return numbers


def test_it_launches_when_it_is_told_to(early: LocalPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode after a token that is not back, and tokens as those of the pipeline that computes when it is asked."""
    expected = generate(LocalPipeline(StageRunner(CONFIG, LIMITS, 0)), PlanWriter(LIMITS), 0, list(b"hello"), 4)
    numbers, writer = told_to_device(early._runner, monkeypatch), PlanWriter(LIMITS)
    early.launch(writer.plan(0, list(b"hello")))
    said = []
    for number in range(2, 5):
        early.launch(writer.plan(0, [UNKNOWN_TOKEN]))
        assert numbers[-1] == number
        assert early.ready
        said += take(early).token_ids
    assert [*said, *take(early).token_ids] == expected
    assert not early.ready
    assert early.next_completion(None) is None


def test_a_failure_of_a_launch_is_told_in_its_turn(early: LocalPipeline) -> None:
    """A05: not by the launch, and not before the results of what was launched before it."""
    writer = PlanWriter(LIMITS)
    early.launch(writer.plan(0, [1, 2, 3]))
    early.fail_next_step(0)
    early.launch(writer.plan(1, [1, 2, 3]))
    early.launch(writer.plan(2, [1, 2, 3]))
    results = [take(early) for _ in range(3)]
    assert [result.microbatch_id for result in results] == [1, 2, 3]
    assert [result.error and "injected" in result.error for result in results] == [None, True, None]
    assert results[0].token_ids == results[2].token_ids
    assert early.describe()[0].failed == 1


def test_what_no_request_may_see_ends_the_pipeline_in_its_turn(early: LocalPipeline) -> None:
    """A07: another row's page is overwritten, which the record of slots notices once the tokens are known."""
    writer = PlanWriter(LIMITS)
    early.launch(writer.plan(0, [1, 2, 3]))
    stolen = Segment("thief", 1, 0, (7, 8, 9), 0, (0,), True, SamplingSpec(seed=0))
    early.launch(Forward(2, ForwardMode.PREFILL, (stolen,)))
    early.launch(writer.plan(0, [UNKNOWN_TOKEN]))
    assert [take(early).error for _ in range(2)] == [None, None]
    with pytest.raises(IntegrityError, match="a page was overwritten by another owner"):
        early.next_completion(None)


def test_a_device_that_was_lost_is_told_in_its_turn(early: LocalPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A06: wherever the host notices it first."""
    writer = PlanWriter(LIMITS)
    early.launch(writer.plan(0, [1, 2, 3]))
    early.fail_next_step(0)
    early.launch(writer.plan(1, [1, 2, 3]))

    def synchronize(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(early._runner.model, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert take(early).error is None
    with pytest.raises(DeviceLostError, match="stage 0 has lost cuda:0"):
        early.next_completion(None)


def test_what_waits_holds_up_all_after_it(early: LocalPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A LoRA is loaded after what was launched before it, and before what is computed with it."""
    numbers, writer = told_to_device(early._runner, monkeypatch), PlanWriter(LIMITS)
    early.launch(writer.plan(0, [1, 2, 3]))
    change = LoraChange("a", 1, f"{EMBEDDED_LORA}:3")
    early.order_lora(LoraOrder(1, "a", change.path))
    early._lora_reader.wait()
    assert early.answers() == (LoraRead(version=1),)
    early.launch(LoraUpdate(2, change))
    (segment,) = writer.plan(1, [1, 2, 3]).segments
    early.launch(Forward(3, ForwardMode.PREFILL, (msgspec.structs.replace(segment, lora=1),)))
    assert numbers == [1]
    assert early.takes_more
    assert [(take(early).microbatch_id, list(numbers)) for _ in range(3)] == [(1, [1]), (2, [1, 3]), (3, [1, 3])]
    assert early.describe()[0].failed == 0


@pytest.mark.parametrize("is_early", [False, True])
def test_what_is_planned_ahead_is_launched_first_and_nothing_else(is_early: bool) -> None:
    """A penalty has to know what was said: its result comes first, or requests would stay in batches of their own."""
    runner = StageRunner(CONFIG, AHEAD_LIMITS, 0, early=is_early)
    for spec, expected in ((SamplingSpec(seed=0), True), (SamplingSpec(seed=0, repetition_penalty=2.0), False)):
        pipeline = LocalPipeline(runner)
        assert not pipeline.takes_more
        segment = Segment("r", 0, 0, (1, 2, 3), 0, (0,), True, spec)
        pipeline.launch(Forward(1, ForwardMode.PREFILL, (segment,)))
        assert pipeline.takes_more is expected
        assert len(take(pipeline).token_ids) == 1
