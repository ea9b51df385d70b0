"""Sampling: each parameter does what its name says, and randomness depends on (seed, position) alone (C02)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from chained_stages import DEVICE
from hypothesis import given
from hypothesis import strategies as st

from engine.core.plan import SamplingSpec, Segment
from engine.model.sampler_output import Sampled
from engine.model.sampling import History, Sampler, uniform

VOCAB = 8
LOGITS = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01, 0.0, 0.0]) + 1e-9)


class SamplerHere(Sampler):
    """On the device of ``pytest --device``."""

    def __init__(self, *, never: tuple[int, ...], vocab_size: int) -> None:
        super().__init__(never=never, vocab_size=vocab_size, device=torch.device(DEVICE))

    def sample(self, logits: torch.Tensor, segments: Sequence[Segment], history: History) -> Sampled:
        return super().sample(logits.to(DEVICE), segments, history)


def sample(
    spec: SamplingSpec,
    *,
    position: int = 5,
    logits: torch.Tensor = LOGITS,
    history: tuple[int, ...] = (),
    never: tuple[int, ...] = (),
) -> int:
    sampler = SamplerHere(never=never, vocab_size=VOCAB)
    segment = Segment("r", 0, position - 1, (0,), 0, (), True, spec)
    sampler.adopt(segment)
    ids, _ = sampler.sample(logits[None], [segment], lambda _: np.array(history, np.int32))
    return ids[0]


def drawn(spec_of: object, count: int = 300) -> Counter[int]:
    return Counter(sample(spec_of, position=position) for position in range(1, count + 1))  # type: ignore[arg-type]


def test_greedy_takes_the_best() -> None:
    assert sample(SamplingSpec(seed=0)) == 0


def test_never_sampled_ids_are_never_sampled() -> None:
    assert sample(SamplingSpec(seed=0), never=(0, 1)) == 2


def test_temperature_follows_the_distribution() -> None:
    counts = drawn(SamplingSpec(seed=3, temperature=1.0), 2000)
    assert abs(counts[0] / 2000 - 0.4) < 0.04
    assert abs(counts[3] / 2000 - 0.1) < 0.03


def test_a_tiny_temperature_is_greedy() -> None:
    assert set(drawn(SamplingSpec(seed=3, temperature=1e-30), 20)) == {0}


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 5e-324},
        {"temperature": 1e-50},
        {"temperature": 1.7e308},
        {"temperature": 1.0, "repetition_penalty": 5e-324},
        {"temperature": 1e-50, "repetition_penalty": 1e-50},
        {"temperature": 1.0, "suppressed_ids": tuple(range(VOCAB)), "suppressed_until": 99},
    ],
    ids=str,
)
def test_extreme_parameters_give_a_token_of_the_vocabulary(
    extreme: dict[str, float], filters: dict[str, float]
) -> None:
    """A05: an id beyond the vocabulary, or an error, would fail the whole microbatch."""
    spec = SamplingSpec(seed=1, **(extreme | filters))  # type: ignore[arg-type]
    assert 0 <= sample(spec, history=(0, 1, 2), never=(7,)) < VOCAB


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        (SamplingSpec(seed=1, temperature=1.0, top_k=2), {0, 1}),
        (SamplingSpec(seed=1, temperature=1.0, top_k=1), {0}),
        (SamplingSpec(seed=1, temperature=1.0, top_p=0.5), {0, 1}),
        (SamplingSpec(seed=1, temperature=1.0, top_p=1e-9), {0}),
        (SamplingSpec(seed=1, temperature=1.0, min_p=0.3), {0, 1, 2}),
        (SamplingSpec(seed=1, temperature=1.0, min_p=1.0), {0}),
        (SamplingSpec(seed=1, temperature=1.0, top_k=3, top_p=0.6), {0, 1}),
    ],
)
def test_filters_leave_exactly_what_they_should(spec: SamplingSpec, allowed: set[int]) -> None:
    assert set(drawn(spec)) == allowed


def test_suppressed_ids_hold_until_their_position() -> None:
    spec = SamplingSpec(seed=0, suppressed_ids=(0,), suppressed_until=10)
    assert [sample(spec, position=position) for position in (9, 10)] == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-30])
def test_a_bias_is_added_to_the_logits_of_its_ids_alone(temperature: float) -> None:
    def best(*biases: tuple[int, float]) -> int:
        return sample(SamplingSpec(seed=0, temperature=temperature, logit_bias=biases))

    # ln(0.4 / 0.3) is 0.288.
    assert [best((1, 0.28)), best((1, 0.3)), best((0, -0.3)), best((0, -100.0), (1, -100.0))] == [0, 1, 1, 2]


def test_a_bias_overcomes_no_ban_and_shows_in_no_logprob() -> None:
    """Neither the ids that may never be sampled nor those that ``min_new_tokens`` suppresses."""
    spec = SamplingSpec(seed=0, logit_bias=((7, 100.0),), return_logprob=True)
    assert sample(spec, never=(7,)) == 0
    suppressed = SamplingSpec(seed=0, suppressed_ids=(7,), suppressed_until=10, logit_bias=((7, 100.0),))
    assert [sample(suppressed, position=position) for position in (9, 10)] == [0, 7]
    sampler = SamplerHere(never=(), vocab_size=VOCAB)
    segment = Segment("r", 0, 4, (0,), 0, (), True, spec)
    sampler.adopt(segment)
    ids, (logprob,) = sampler.sample(LOGITS[None], [segment], lambda _: np.zeros(0, np.int32))
    assert ids == (7,)
    assert logprob is not None
    assert logprob.logprob == pytest.approx(float(torch.log_softmax(LOGITS, -1)[7]))


def test_repetition_penalty_counts_the_prompt_too() -> None:
    spec = SamplingSpec(seed=0, repetition_penalty=4.0, prompt_tokens=1)
    assert sample(spec, history=(0,)) == 1


def test_frequency_and_presence_count_the_output_only() -> None:
    for penalized in (
        SamplingSpec(seed=0, frequency_penalty=0.2, prompt_tokens=2),
        SamplingSpec(seed=0, presence_penalty=0.5, prompt_tokens=2),
    ):
        assert sample(penalized, history=(0, 0)) == 0
        assert sample(penalized, history=(1, 1, 0, 0)) == 1


def test_frequency_counts_each_time_and_presence_once() -> None:
    frequency = SamplingSpec(seed=0, frequency_penalty=0.2)
    assert [sample(frequency, history=(0,) * count) for count in (1, 2)] == [0, 1]
    presence = SamplingSpec(seed=0, presence_penalty=0.2)
    assert [sample(presence, history=(0,) * count) for count in (1, 2)] == [0, 0]


def test_logprobs_are_the_models_own() -> None:
    sampler = SamplerHere(never=(), vocab_size=VOCAB)
    plain = Segment("a", 0, 0, (0,), 0, (), True, SamplingSpec(seed=0))
    asked = Segment(
        "b", 1, 0, (0,), 0, (), True, SamplingSpec(seed=0, temperature=9.0, return_logprob=True, top_logprobs_num=2)
    )
    for segment in (plain, asked):
        sampler.adopt(segment)
    ids, logprobs = sampler.sample(LOGITS.repeat(2, 1), [plain, asked], lambda _: np.zeros(0, np.int32))
    assert logprobs[0] is None
    assert logprobs[1] is not None
    expected = torch.log_softmax(LOGITS, -1)
    assert logprobs[1].logprob == pytest.approx(float(expected[ids[1]]))
    assert [token for token, _ in logprobs[1].top] == [0, 1]
    assert logprobs[1].top[0][1] == pytest.approx(float(expected[0]))


@given(
    st.lists(
        st.builds(
            SamplingSpec,
            seed=st.integers(0, 2**63 - 1),
            temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
            top_k=st.sampled_from([-1, 3]),
            top_p=st.sampled_from([1.0, 0.8]),
            min_p=st.sampled_from([0.0, 0.1]),
            frequency_penalty=st.sampled_from([0.0, 0.5]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_batch_says_what_each_row_says_alone(specs: list[SamplingSpec]) -> None:
    logits = torch.randn(len(specs), VOCAB, generator=torch.Generator().manual_seed(1))
    sampler = SamplerHere(never=(), vocab_size=VOCAB)
    segments = [Segment(str(row), row, row, (0,), 0, (), True, spec) for row, spec in enumerate(specs)]
    for segment in segments:
        sampler.adopt(segment)
    ids, _ = sampler.sample(logits, segments, lambda segment: np.array([segment.row], np.int32))
    alone = [sample(spec, position=row + 1, logits=logits[row], history=(row,)) for row, spec in enumerate(specs)]
    assert list(ids) == alone


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**31))
def test_uniform_numbers_lie_in_the_unit_interval(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0


def test_uniform_numbers_are_pinned() -> None:
    """A change here changes what every seeded request says."""
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0)] == [
        0.6524484863740321,
        0.03401170130434639,
        0.36818951565166946,
    ]
    numbers = [uniform(seed, position) for seed in range(40) for position in range(50)]
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02


def test_plain_greedy_rows_choose_the_first_best_allowed_token_alone_and_beside_random_rows() -> None:
    """C02: the way without copies chooses what the general way does."""
    logits = torch.randint(0, 4, (5, 64), generator=torch.Generator().manual_seed(1)).float()
    expected = []
    for row in logits:
        row = row.clone()
        row[[3, 7]] = float("-inf")
        expected.append(int((row == row.max()).nonzero()[0]))
    sampler = SamplerHere(never=(3, 7), vocab_size=64)
    segments = [Segment(f"r{row}", row, 0, (1,), 0, (), True, SamplingSpec(seed=row)) for row in range(5)]
    for segment in segments:
        sampler.adopt(segment)
    assert list(sampler.sample(logits, segments, _no_history)[0]) == expected
    sampler.adopt(Segment("r4", 4, 0, (1,), 0, (), True, SamplingSpec(seed=4, temperature=1.0)))
    assert list(sampler.sample(logits, segments, _no_history)[0])[:4] == expected[:4]


def _no_history(segment: Segment) -> np.ndarray:
    raise AssertionError(f"no request needs the history of {segment.rid}")


@pytest.mark.parametrize("start", [0, 1, 64])
def test_a_row_s_new_request_brings_its_own_settings_wherever_it_starts(start: int) -> None:
    """C02: also after a cached prefix, where its first segment does not begin at the first position."""
    sampler = SamplerHere(never=(), vocab_size=VOCAB)
    seeded = SamplingSpec(seed=11, temperature=5.0, return_logprob=True)
    sampler.adopt(Segment("before", 0, 0, (0,), 0, (), True, SamplingSpec(seed=0)))
    first = Segment("after", 0, start, (0,), 0, (), True, seeded)
    sampler.adopt(first)
    # Its later segments bring none, and keep those.
    later = [Segment("after", 0, start + place, (0,), 0, (), True) for place in range(1, 9)]
    for segment in later:
        sampler.adopt(segment)
    chosen, logprobs = sampler.sample(LOGITS.repeat(9, 1), [first, *later], lambda _: np.zeros(0, np.int32))
    assert list(chosen) == [sample(seeded, position=start + place) for place in range(1, 10)]
    assert set(chosen) != {0}
    assert len(logprobs) == 9


def test_what_is_raised_for_one_request_ends_that_one_alone() -> None:
    """B11: the others of its microbatch, prompts and decodes, go on as they would without it."""
    penalty = SamplingSpec(seed=0, frequency_penalty=1.0, return_logprob=True)
    specs = [penalty, SamplingSpec(seed=7, temperature=1.0), penalty]
    segments = [Segment(f"r{row}", row, 4, (0,), 0, (), True, spec) for row, spec in enumerate(specs)]
    sampler = SamplerHere(never=(), vocab_size=VOCAB)
    for segment in segments:
        sampler.adopt(segment)
    whole_ids, whole_logprobs = sampler.sample(LOGITS.repeat(3, 1), segments, _short_history)
    assert sampler.errors == ()

    def broken(segment: Segment) -> np.ndarray:
        if segment.row == 2:
            raise ValueError("its history is lost")
        return _short_history(segment)

    ids, logprobs = sampler.sample(LOGITS.repeat(3, 1), segments, broken)
    assert (ids[:2], logprobs[:2]) == (whole_ids[:2], whole_logprobs[:2])
    (error,) = sampler.errors
    assert error.rid == "r2"
    assert error.error == "no token can be chosen after 5 tokens: ValueError: its history is lost"
    with pytest.raises(ValueError, match="its history is lost"):
        sampler.sample(LOGITS[None], segments[2:], broken)


def test_what_is_raised_after_a_guess_refuses_the_guess() -> None:
    penalty = SamplingSpec(seed=0, frequency_penalty=1.0)
    places = [Segment("r", 0, 4, (0,) * count, 0, (), True, penalty) for count in (1, 2)]
    sampler = SamplerHere(never=(), vocab_size=VOCAB)
    sampler.adopt(places[0])

    def broken(segment: Segment) -> np.ndarray:
        if len(segment.token_ids) == 2:
            raise ValueError("after the guess")
        return _short_history(segment)

    ids, _ = sampler.sample(LOGITS.repeat(2, 1), places, broken)
    assert (ids[0], sampler.errors, sampler.dead_ends) == (0, (), (1,))


def _short_history(segment: Segment) -> np.ndarray:
    return np.array([3], np.int32)
