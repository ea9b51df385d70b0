"""The simulated pipeline: tokens come from the KV that is really read, so every wrong page shows."""

from __future__ import annotations

import pytest
from scripted_lockstep.simulated.pipeline import SimulatedPipeline

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Completion, PipelineFailed
from engine.core.plan import Forward, ForwardMode, SamplingSpec, Segment

GREEDY = SamplingSpec(seed=0)


def pipeline_of(pages: int = 8) -> SimulatedPipeline:
    config = EngineConfig(pp_size=2, page_size=4, max_total_tokens=4 * pages)
    return SimulatedPipeline(Limits.of(config, EMBEDDED_FACTS))


def segment(
    tokens: tuple[int, ...],
    *,
    row: int = 0,
    start: int = 0,
    pages: tuple[int, ...] = (),
    page_start: int = 0,
    spec: SamplingSpec | None = None,
    emits: bool = True,
) -> Segment:
    return Segment(f"r{row}", row, start, tokens, page_start, pages, emits, spec)


def completion_of(pipeline: SimulatedPipeline, *segments: Segment) -> Completion:
    pipeline.launch(Forward(0, ForwardMode.PREFILL, segments))
    done = pipeline.next_completion(0)
    assert isinstance(done, Completion)
    return done


def test_chunks_give_the_token_of_the_whole_prompt() -> None:
    whole = completion_of(pipeline_of(), segment((1, 2, 3, 4, 5), pages=(0, 1), spec=GREEDY))
    pipeline = pipeline_of()
    completion_of(pipeline, segment((1, 2, 3), pages=(5,), spec=GREEDY, emits=False))
    parts = completion_of(pipeline, segment((4, 5), start=3, pages=(2,), page_start=1))
    assert parts.token_ids == whole.token_ids
    assert not pipeline.corruptions


@pytest.mark.parametrize("tokens", [(2, 1), (1, 3), (1, 2, 3)])
def test_other_tokens_give_another_token(tokens: tuple[int, ...]) -> None:
    pipeline = pipeline_of()
    first = completion_of(pipeline, segment((1, 2), pages=(0,), spec=GREEDY))
    assert completion_of(pipeline, segment(tokens, pages=(0,), spec=GREEDY)).token_ids != first.token_ids


def test_page_written_by_another_request_is_a_corruption() -> None:
    pipeline = pipeline_of()
    clean = pipeline_of()
    for each in (pipeline, clean):
        completion_of(each, segment((1, 2), pages=(0,), spec=GREEDY))
    completion_of(pipeline, segment((7, 8), row=1, pages=(0,), spec=GREEDY))
    disturbed = completion_of(pipeline, segment((3,), start=2))
    assert "r0 (row 0) reads positions 0 to 1" in pipeline.corruptions[0]
    assert disturbed.token_ids != completion_of(clean, segment((3,), start=2)).token_ids


def test_position_that_was_never_written_is_a_corruption() -> None:
    pipeline = pipeline_of()
    completion_of(pipeline, segment((5,), start=3, pages=(0,), spec=GREEDY))
    assert "position 2 in page 0 was never written" in pipeline.corruptions[0]


def test_prefix_of_pages_that_do_not_follow_each_other_is_a_corruption() -> None:
    pipeline = pipeline_of()
    completion_of(pipeline, segment((1, 2, 3, 4), pages=(0,), spec=GREEDY))
    completion_of(pipeline, segment((5, 6, 7, 8), pages=(1,), spec=GREEDY))
    completion_of(pipeline, segment((9,), start=8, pages=(0, 1, 2), spec=GREEDY))
    assert "are not one prefix" in pipeline.corruptions[0]


def test_logprobs_have_one_entry_a_token() -> None:
    """Requests without logprobs get None, at any place in the microbatch."""
    pipeline = pipeline_of()
    wants = SamplingSpec(seed=0, return_logprob=True, top_logprobs_num=2)
    first = segment((1,), pages=(0,), spec=GREEDY)
    second = segment((2,), row=1, pages=(1,), spec=wants)
    completion_of(pipeline, first, second)
    pipeline.launch(Forward(1, ForwardMode.DECODE, (segment((3,), start=1), segment((4,), row=1, start=1))))
    done = pipeline.next_completion(0)
    assert isinstance(done, Completion)
    assert [logprob is not None for logprob in done.logprobs] == [False, True]
    assert done.logprobs[1] is not None
    assert done.logprobs[1].top[0] == (done.token_ids[1], done.logprobs[1].logprob)
    assert completion_of(pipeline, segment((5,), start=2)).logprobs == ()


def test_sampling_depends_on_seed_and_position_alone() -> None:
    specs = [SamplingSpec(seed=seed, temperature=1.0) for seed in (1, 2, 1)]
    tokens = [completion_of(pipeline_of(), segment((1, 2), pages=(0,), spec=spec)).token_ids for spec in specs]
    assert tokens[0] == tokens[2] != tokens[1]


def test_suppressed_tokens_are_not_said_before_their_time() -> None:
    pipeline = pipeline_of()
    (token,) = completion_of(pipeline, segment((1,), pages=(0,), spec=GREEDY)).token_ids
    early = SamplingSpec(seed=0, suppressed_ids=(token,), suppressed_until=2)
    assert completion_of(pipeline, segment((1,), pages=(0,), spec=early)).token_ids != (token,)
    late = SamplingSpec(seed=0, suppressed_ids=(token,), suppressed_until=1)
    assert completion_of(pipeline, segment((1,), pages=(0,), spec=late)).token_ids == (token,)
    everything = SamplingSpec(seed=0, suppressed_ids=tuple(range(200)), suppressed_until=9)
    assert len(completion_of(pipeline, segment((1,), pages=(0,), spec=everything)).token_ids) == 1


def test_failed_microbatch_poisons_its_rows_until_their_next_request() -> None:
    """A05: what was launched later for the same request computes nothing, and is no corruption."""
    pipeline = pipeline_of()
    pipeline.fail_next_step(1)
    failed = completion_of(pipeline, segment((1, 2, 3, 4), pages=(0,), spec=GREEDY, emits=False))
    assert (
        failed.error == "stage 1 failed in microbatch 0: StepFailedError: a failure was injected into this forward pass"
    )
    completion_of(pipeline, segment((5,), start=4, pages=(1,), page_start=1))
    completion_of(pipeline, segment((1,), pages=(0,), spec=GREEDY))
    assert not pipeline.corruptions


def test_dead_stage_loses_what_is_in_flight() -> None:
    """A dead or late stage ends every stream with an error (A06)."""
    pipeline = pipeline_of()
    pipeline.launch(Forward(0, ForwardMode.PREFILL, (segment((1,), pages=(0,), spec=GREEDY),)))
    pipeline.kill_stage(1)
    assert pipeline.ready
    assert isinstance(pipeline.next_completion(0), PipelineFailed)
    assert pipeline.next_completion(0) is None


def test_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="stage must be 0 to 1, got 2"):
        pipeline_of().fail_next_step(2)


def test_kv_digest_follows_the_content() -> None:
    pipeline = pipeline_of()
    empty = pipeline.kv_digest()
    completion_of(pipeline, segment((1,), pages=(0,), spec=GREEDY))
    assert pipeline.kv_digest() != empty
