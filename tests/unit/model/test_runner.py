"""The runner of a stage: independence of batching, failures that stay in their microbatch, records, sanitizer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chained_stages import DEVICE, ChainedStages
from thinned import thinned

from engine.core.config import EngineConfig
from engine.core.errors import IntegrityError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Completion
from engine.core.plan import Forward, ForwardMode, SamplingSpec, Segment, SleepSwitch, WeightUpdate
from engine.model.runner import StageRunner

UNKNOWN_ID = "IndexError" if DEVICE == "cpu" else "token ids must be in"
PROMPT = list(b"the same prompt for everyone")


def chain_of(**values: object) -> ChainedStages:
    config = EngineConfig(device=DEVICE, context_length=256, page_size=4, **values)  # type: ignore[arg-type]
    return ChainedStages(config, Limits.of(config, EMBEDDED_FACTS))


@pytest.fixture(scope="module")
def undisturbed() -> list[int]:
    return chain_of().generate(0, PROMPT, 20, chunk=64, spec=SamplingSpec(seed=9, temperature=0.8, top_p=0.95))


@pytest.mark.parametrize(("chunk", "pp_size"), [(1, 1), (5, 1), (5, 4)])
def test_chunks_and_stages_do_not_change_what_a_seed_says(chunk: int, pp_size: int, undisturbed: list[int]) -> None:
    spec = SamplingSpec(seed=9, temperature=0.8, top_p=0.95)
    assert chain_of(pp_size=pp_size).generate(3, PROMPT, 20, chunk=chunk, spec=spec) == undisturbed


def test_a_retracted_request_goes_on_with_the_same_output(undisturbed: list[int]) -> None:
    """B06: prompt and emitted tokens are prefilled again, in another row."""
    spec = SamplingSpec(seed=9, temperature=0.8, top_p=0.95)
    rest = chain_of().generate(5, PROMPT + undisturbed[:8], 12, chunk=10, spec=spec)
    assert undisturbed[:8] + rest == undisturbed


def test_batch_companions_do_not_change_what_a_seed_says(undisturbed: list[int]) -> None:
    """B01: one forward for a prefill chunk and many decodes of different lengths."""
    chain = chain_of()
    for row in (1, 2):
        chain.forward(chain.segment(row, PROMPT[: 3 * row]))
    spec = SamplingSpec(seed=9, temperature=0.8, top_p=0.95)
    output = list(chain.forward(chain.segment(0, PROMPT, spec=spec), chain.segment(1, [65])).token_ids[:1])
    while len(output) < 20:
        companions = [chain.segment(row, [66 + row]) for row in (1, 2)]
        output.append(chain.forward(companions[0], chain.segment(0, output[-1:]), companions[1]).token_ids[1])
    assert output == undisturbed


def test_only_the_last_chunk_yields_a_token() -> None:
    chain = chain_of()
    assert chain.forward(chain.segment(0, PROMPT[:9], emits=False)).token_ids == ()
    assert len(chain.forward(chain.segment(0, PROMPT[9:])).token_ids) == 1


def test_penalties_see_the_tokens_of_a_cached_prefix() -> None:
    """C02: the second request's segment starts after a prefix that another request wrote."""
    chain = chain_of()
    spec = SamplingSpec(seed=0, repetition_penalty=1e6)
    whole = chain.forward(chain.segment(0, PROMPT, spec=spec)).token_ids
    pages = chain.limits.pages_for(len(PROMPT))
    shared = tuple(range((chain.limits.pages_for(256) - 1) * 8, -1, -8))[:pages]
    segment = Segment("sharer", 7, len(PROMPT) - 1, tuple(PROMPT[-1:]), 0, shared, True, spec)
    assert chain.forward(segment).token_ids == whole
    assert chain.runners[0]._record.history(segment).tolist() == PROMPT


@pytest.mark.parametrize("failing", thinned([1, 0, 3], one_in=3))
def test_a_failed_forward_fails_its_own_microbatch(failing: int) -> None:
    """A05: the increments of the failed plan hold, so the row can go on."""
    chain, whole = chain_of(pp_size=4), chain_of(pp_size=4)
    chain.runners[failing].fail_next()
    failed = chain.forward(chain.segment(0, PROMPT))
    assert failed.token_ids == ()
    assert failed.error is not None
    assert f"stage {failing} failed in microbatch 1" in failed.error
    chain.done[0] = 0
    retried = Segment("again", 0, 0, tuple(PROMPT), 0, (), True)
    assert chain.forward(retried).token_ids == whole.forward(whole.segment(0, PROMPT)).token_ids
    assert {runner.counters.failed for runner in chain.runners[failing:]} == {1}
    assert {runner.counters.microbatches for runner in chain.runners} == {2}


def test_wrong_hidden_states_fail_the_microbatch() -> None:
    chain = chain_of(pp_size=2)
    output = chain.runners[1].forward(chain.plan(chain.segment(0, PROMPT)), torch.zeros(3, 64))
    assert isinstance(output, Completion)
    assert "must have shape (28, 64), got (3, 64)" in str(output.error)


@pytest.mark.parametrize(
    ("segment", "text"),
    [
        (Segment("r", 0, 0, (1,), 0, (10**6,), True), "pages of a segment must be in"),
        (Segment("r", 0, 0, (1,), 0, (-1,), True), "pages of a segment must be in"),
        (Segment("r", 10**6, 0, (1,), 0, (1,), True), "row of a segment must be in"),
        (Segment("r", 0, 0, (1,), 10**6, (1,), True), "places of pages of a segment must be in"),
        (Segment("r", 0, 0, (10**6,), 0, (1,), True), UNKNOWN_ID),
        (Segment("r", 0, 10**6, (1,), 0, (1,), True), "places of pages of a segment must be in"),
    ],
)
def test_a_broken_plan_fails_its_microbatch(segment: Segment, text: str) -> None:
    """A05: on every stage, and none of them dies of it."""
    chain = chain_of(pp_size=2)
    assert text in str(chain.forward(segment).error)
    assert chain.forward(chain.segment(1, PROMPT)).error is None


def test_counters_and_digest_tell_what_was_done_and_can_forget() -> None:
    one, two = chain_of(), chain_of()
    assert one.runners[0].counters.last_microbatch_id == -1
    empty = one.runners[0].slots_digest()
    one.generate(0, PROMPT, 3, chunk=4, spec=SamplingSpec(seed=0))
    two.generate(0, PROMPT, 3, chunk=9, spec=SamplingSpec(seed=0))
    assert one.runners[0].slots_digest() == two.runners[0].slots_digest() != empty
    assert one.runners[0].slots_written == len(PROMPT) + 2
    assert one.runners[0].counters.tokens == len(PROMPT) + 2
    one.runners[0].forget()
    assert one.runners[0].slots_digest() == empty
    assert one.runners[0].counters.microbatches == 0


def test_the_origin_of_kv_follows_the_weights() -> None:
    """Only engines that exchange KV read it; a sleep changes nothing."""
    assert chain_of().runners[0].page_images().layout.origin is None
    (runner,) = chain_of(role="decode").runners
    origins = [runner.page_images().layout.origin]
    for number, control in enumerate(
        (WeightUpdate(1, "embedded:3"), SleepSwitch(2, 1), SleepSwitch(3, 0), WeightUpdate(4, None)), start=1
    ):
        assert runner.prepare(control) is None
        runner.settle(number, commit=True)
        origins.append(runner.page_images().layout.origin)
    first, updated, asleep, awake, again = origins
    assert first == again != updated == asleep == awake
    assert runner.prepare(WeightUpdate(5, "embedded:3")) is None
    runner.settle(5, commit=False)
    assert runner.page_images().layout.origin == first


def test_the_sanitizer_finds_a_page_with_two_owners() -> None:
    chain = chain_of(kv_sanitizer=True)
    chain.forward(Segment("a", 0, 0, (1, 2, 3, 4, 5), 0, (0, 1), False, SamplingSpec(seed=0)))
    chain.forward(Segment("b", 1, 0, (9, 9, 9, 9, 9), 0, (0, 2), False, SamplingSpec(seed=0)))
    with pytest.raises(IntegrityError, match=r"KV of a \(row 0\) at position"):
        chain.forward(Segment("a", 0, 5, (6,), 0, (), True))


def test_the_sanitizer_finds_a_page_overwritten_by_a_sibling() -> None:
    """Two requests share their first page, so the overwritten second page still continues a valid chain."""
    chain = chain_of(kv_sanitizer=True)
    chain.forward(Segment("a", 0, 0, (1, 2, 3, 4, 5), 0, (0, 1), False, SamplingSpec(seed=0)))
    chain.forward(Segment("b", 1, 4, (9,), 0, (0, 1), False, SamplingSpec(seed=0)))
    with pytest.raises(IntegrityError, match="overwritten by another owner"):
        chain.forward(Segment("a", 0, 5, (6,), 0, (), True))


@pytest.mark.parametrize("failing_stage", [0, 1])
def test_the_sanitizer_is_blind_to_the_rest_of_a_failed_prompt(failing_stage: int) -> None:
    """A05: the next chunk of a failed request is on its way already; its row is checked again for its next request."""
    chain = chain_of(kv_sanitizer=True, pp_size=2)
    chain.runners[failing_stage].fail_next()
    assert "injected" in str(
        chain.forward(Segment("a", 0, 0, (1, 2, 3, 4, 5), 0, (0, 1), False, SamplingSpec(seed=0))).error
    )
    assert chain.forward(Segment("a", 0, 5, (6,), 0, (), True)).error is None
    chain.forward(Segment("b", 0, 0, (1, 2, 3, 4, 5), 0, (0, 1), False, SamplingSpec(seed=0)))
    chain.forward(Segment("c", 1, 0, (9, 9, 9, 9, 9), 0, (0, 2), False, SamplingSpec(seed=0)))
    with pytest.raises(IntegrityError, match=r"KV of b \(row 0\) at position"):
        chain.forward(Segment("b", 0, 5, (6,), 0, (), True))


def test_without_the_sanitizer_nothing_is_checked() -> None:
    chain = chain_of()
    chain.forward(Segment("a", 0, 0, (1, 2, 3, 4, 5), 0, (0, 1), False, SamplingSpec(seed=0)))
    chain.forward(Segment("b", 1, 0, (9, 9, 9, 9, 9), 0, (0, 2), False, SamplingSpec(seed=0)))
    assert chain.forward(Segment("a", 0, 5, (6,), 0, (), True)).error is None


def test_a_runner_sets_the_threads_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[int] = []
    monkeypatch.setattr("engine.model.runner.stage_threads", lambda config, *_: config.threads)
    monkeypatch.setattr(torch, "set_num_threads", said.append)
    config = EngineConfig(threads=3)
    StageRunner(config, Limits.of(config, EMBEDDED_FACTS), 0)
    assert said == [3]


def test_slots_follow_the_page_table() -> None:
    pool = chain_of().runners[0].model.pool
    pool.adopt(Segment("r", 2, 0, (), 0, (7, 3), False))
    pool.adopt(Segment("r", 2, 0, (), 2, (5,), False))
    assert pool.slots(2, 3, 10).tolist() == [31, 12, 13, 14, 15, 20, 21]
    assert pool.slots(2, 4, 4).dtype == np.int64


def test_a_microbatch_without_emitting_rows_has_no_logits() -> None:
    chain = chain_of()
    plan = Forward(1, ForwardMode.PREFILL, (chain.segment(0, PROMPT, emits=False),))
    assert chain.runners[0].logits(plan).shape == (0, EMBEDDED_FACTS.vocab_size)
