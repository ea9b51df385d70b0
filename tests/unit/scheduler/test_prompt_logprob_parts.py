"""Prompt logprobs in the scheduler: the requests and replies of each chunk, and a prompt without output."""

from __future__ import annotations

import msgspec
import pytest
from simulated_engine import SimulatedEngine, alone, generate, prompt

from engine.core.errors import IntegrityError
from engine.core.messages import (
    Completion,
    FinishReason,
    Generate,
    PauseGeneration,
    PauseMode,
    PromptLogprob,
    TokenOutput,
)
from engine.core.messages import ContinueGeneration as Continue


def scored(rid: str, length: int, start: int = 0, new: int = 2) -> Generate:
    return msgspec.structs.replace(generate(rid, prompt(length), new), prompt_logprobs_from=start)


def asked(engine: SimulatedEngine, rid: str = "r") -> list[tuple[int, tuple[int, ...]]]:
    """Return the prompt logprobs that the segments of a request ask for, in launch order."""
    segments = [one for microbatch in engine.microbatches for one in microbatch.segments if one.rid == rid]
    return [(one.logprobs_from, one.targets) for one in segments if one.logprobs_from >= 0]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (0, [(0, (1, 17)), (16, (17, 33)), (32, (33, 40))]),
        (15, [(15, (16, 17)), (16, (17, 33)), (32, (33, 40))]),
        (16, [(16, (17, 33)), (32, (33, 40))]),
        (38, [(38, (39, 40))]),
        (39, []),
    ],
)
def test_each_part_asks_for_the_tokens_after_its_own(start: int, expected: list[tuple[int, tuple[int, int]]]) -> None:
    """B02: the last position of a part needs the first token of the next one, the last of a prompt needs none."""
    engine, ids = SimulatedEngine(chunked_prefill_size=16), prompt(40)
    engine.run(scored("r", 40, start))
    assert asked(engine) == [(first, ids[slice(*targets)]) for first, targets in expected]


def test_a_request_that_asks_for_nothing_says_nothing_of_it() -> None:
    engine = SimulatedEngine(chunked_prefill_size=16)
    engine.run(generate("r", prompt(40)))
    assert asked(engine) == []


@pytest.mark.parametrize("landed", range(5))
def test_a_retraction_asks_for_the_rest_only(landed: int) -> None:
    """B06: with anything in flight; the values equal those of an undisturbed request."""
    told: list[PromptLogprob] = []
    undisturbed = SimulatedEngine(chunked_prefill_size=16)
    undisturbed.run(scored("r", 60, 3))
    engine = SimulatedEngine(chunked_prefill_size=16, pp_size=2)
    engine.step(scored("r", 60, 3))
    for _ in range(landed):
        told += parts(engine.step(completions=1).replies)
    told += parts(engine.step(PauseGeneration(call_id="p", mode=PauseMode.RETRACT)).replies)
    while engine.in_flight:
        told += parts(engine.step(completions=1).replies)
    before = len(asked(engine))
    engine.step(Continue(call_id="c"))
    while not engine.life("r").ended:
        told += parts(engine.step(completions=1).replies)
    assert len(told) == 60 - 4
    assert [targets for _, targets in asked(engine)[before:]] == [
        prompt(60)[first + 1 : min(60, first + 17 if first % 16 == 0 else first // 16 * 16 + 17)]
        for first, _ in asked(engine)[before:]
    ]
    assert told == everything_told(scored("r", 60, 3))


def parts(replies: tuple[object, ...]) -> list[PromptLogprob]:
    return [value for reply in replies if isinstance(reply, TokenOutput) for value in reply.prompt_logprobs]


def everything_told(message: Generate) -> list[PromptLogprob]:
    engine, told = SimulatedEngine(), []
    engine.step(message)
    while not engine.life(message.rid).ended:
        told += parts(engine.step(completions=1).replies)
    return told


def test_a_cached_prefix_is_used_up_to_the_first_position_that_is_due() -> None:
    """B04: also by the policy that puts cached prompts first."""
    engine = SimulatedEngine(schedule_policy="lpm")
    engine.run(generate("warm", prompt(64), 1))
    for start, cached in ((0, 0), (15, 0), (16, 16), (40, 32), (63, 48), (-1, 48)):
        message = scored("r", 64, start)
        request = engine.scheduler._admission.request_of(message, 9)
        engine.scheduler.features.prompt_logprobs.enter(request, message)
        assert engine.scheduler.memory.cached_tokens(request.ids, request.hit_limit_tokens) == cached
        engine.run(scored(f"from{start}", 64, start))
        first = next(one for batch in engine.microbatches for one in batch.segments if one.rid == f"from{start}")
        assert first.start == cached


@pytest.mark.parametrize("values", [(), ((PromptLogprob(0.0, 1),) * 18,), ((PromptLogprob(0.0, 1),) * 19,) * 2])
def test_a_result_that_does_not_fit_its_plan_is_refused(values: tuple[tuple[PromptLogprob, ...], ...]) -> None:
    engine = SimulatedEngine()
    microbatch = engine.step(scored("r", 20)).microbatch
    assert microbatch is not None
    result = Completion(microbatch_id=microbatch.id, token_ids=(5,), prompt_logprobs=values)
    with pytest.raises(IntegrityError, match=r"came back with prompt logprobs of .*, but \[19\] were requested"):
        engine.scheduler.step((result,), 0.0)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48])
def test_a_prompt_alone_says_nothing_and_leaves_all_its_pages(length: int) -> None:
    """B02: with depth, in parts, and cached already."""
    engine = SimulatedEngine(pp_size=2, chunked_prefill_size=16)
    for rid in ("r", "again"):
        engine.run(generate(rid, prompt(length), 0))
        life = engine.life(rid)
        assert (life.tokens, life.finish_reason) == ([], FinishReason.LENGTH)
    assert engine.scheduler.memory.pages.cached == length // 16
    assert engine.scheduler.stats().generated_tokens == 0
    engine.run(generate("b", prompt(length), 3))
    assert engine.life("b").tokens == list(alone(generate("b", prompt(length), 3)))
