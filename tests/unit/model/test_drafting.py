"""The draft model by itself: how many tokens it guesses, where, and which it never guesses."""

from __future__ import annotations

import pytest
import torch

from engine.core.config import EngineConfig
from engine.core.limits import Limits, embedded_facts
from engine.core.messages import Completion
from engine.core.plan import Forward, ForwardMode, Microbatch, SamplingSpec, Segment
from engine.model.drafting import DraftModel

CONFIG = EngineConfig(
    device="cpu", page_size=8, max_total_tokens=256, context_length=128, speculative_algorithm="draft_model",
    speculative_draft_model="embedded:7", speculative_num_draft_tokens=4,
)  # fmt: skip
# Of two prompts; with pages of 8 tokens, one's guesses fit into its own page and the other's go beyond it.
SHORT, LONG = tuple(range(40, 42)), tuple(range(50, 64))


def model_of(page_size: int = 8, never: tuple[int, ...] = ()) -> DraftModel:
    config = CONFIG.model_copy(update={"page_size": page_size})
    limits = Limits.of(config, embedded_facts(config.model))
    return DraftModel(config, limits, never=never, device=torch.device("cpu"))


def prefill(*prompts: tuple[int, ...], page_size: int = 8, spec: SamplingSpec | None = None) -> Microbatch:
    """One segment a prompt, each in a row and pages of its own, neighbours in the pool."""
    spec, segments, free = spec or SamplingSpec(seed=0), list[Segment](), 0
    for row, ids in enumerate(prompts):
        count = -(-len(ids) // page_size)
        pages = tuple(range(free, free + count))
        segments.append(Segment(f"r{row}", row, 0, ids, 0, pages, True, spec))
        free += count
    return Forward(0, ForwardMode.PREFILL, tuple(segments))


def told(*tokens: int) -> Completion:
    return Completion(microbatch_id=0, token_ids=tokens)


def guesses(
    *prompts: tuple[int, ...], page_size: int = 8, never: tuple[int, ...] = (), spec: SamplingSpec | None = None
) -> tuple[tuple[int, ...], ...]:
    batch, model = prefill(*prompts, page_size=page_size, spec=spec), model_of(page_size, never)
    model.adopt(batch)
    return model.guess(batch, told(*[33] * len(prompts)))


@pytest.fixture(scope="module")
def guessed() -> tuple[tuple[int, ...], ...]:
    return guesses(SHORT, LONG)


@pytest.mark.parametrize("page_size", [1, 2, 8, 32])
def test_what_is_guessed_does_not_depend_on_pages(guessed: tuple[tuple[int, ...], ...], page_size: int) -> None:
    """Guesses go beyond the request's own last page, and not into the next one, which is another's."""
    assert [len(one) for one in guessed] == [4, 4]
    assert guesses(SHORT, LONG, page_size=page_size) == guessed


@pytest.mark.parametrize("page_size", [1, 8])
def test_guesses_leave_the_pages_of_others_alone(guessed: tuple[tuple[int, ...], ...], page_size: int) -> None:
    """The same guesses again, from the KV of both prompts but for their last tokens, and after all other guesses."""
    model, batch = model_of(page_size), prefill(SHORT, LONG, page_size=page_size)
    model.adopt(batch)
    model.guess(batch, told(33, 33))
    again = [
        Segment(f"r{row}", row, len(ids) - 1, ids[-1:], 0, (), True)
        for row, ids in reversed([*enumerate((SHORT, LONG))])
    ]
    assert model.guess(Forward(1, ForwardMode.DECODE, tuple(again)), told(33, 33)) == guessed[::-1]


def test_nothing_is_guessed_beyond_the_context() -> None:
    ids = tuple(40 + place % 50 for place in range(126))
    (told_two,) = guesses(ids, page_size=1)
    assert len(told_two) == 2


def test_a_guess_follows_the_biases_of_its_request(guessed: tuple[tuple[int, ...], ...]) -> None:
    spec = SamplingSpec(seed=3, temperature=1.0, logit_bias=((70, 100.0),))
    assert guesses(SHORT, spec=spec) == ((70,) * 4,)
    first = guessed[0][0]
    held_back = SamplingSpec(seed=0, suppressed_ids=(first,), suppressed_until=len(SHORT) + 2)
    assert guesses(SHORT, spec=held_back)[0][0] != first


def test_what_is_guessed_does_not_depend_on_the_batch(guessed: tuple[tuple[int, ...], ...]) -> None:
    assert guesses(SHORT) + guesses(LONG) == guessed


def test_a_token_that_is_never_sampled_is_not_guessed(guessed: tuple[tuple[int, ...], ...]) -> None:
    first = guessed[0][0]
    assert guesses(SHORT, never=(first,))[0][0] != first


def test_guesses_go_on_from_the_last_token_that_was_accepted(guessed: tuple[tuple[int, ...], ...]) -> None:
    """Two drafts were planned and one held: the KV of the other is computed over."""
    model, batch = model_of(), prefill(SHORT)
    model.adopt(batch)
    model.guess(batch, told(33))
    right, wrong = guessed[0][0], 99
    segment = Segment("r0", 0, len(SHORT), (33, right, wrong), 0, (), True, drafts=2)
    decode = Forward(1, ForwardMode.DECODE, (segment,))
    model.adopt(decode)
    (next_guesses,) = model.guess(decode, Completion(microbatch_id=1, token_ids=(right, guessed[0][1]), accepted=(1,)))
    assert next_guesses[:2] == guessed[0][2:]
