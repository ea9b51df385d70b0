"""The draft model by itself: how many tokens it guesses, where, and which it never guesses."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.limits import Limits, embedded_facts
from engine.messages import Completion
from engine.model.drafting import DraftModel
from engine.plan import Forward, ForwardMode, Microbatch, SamplingSpec, Segment

CONFIG = EngineConfig(
    device="cpu", page_size=8, max_total_tokens=256, context_length=128, speculative_algorithm="draft_model",
    speculative_draft_model="embedded:7", speculative_num_draft_tokens=4,
)  # fmt: skip
LIMITS = Limits.of(CONFIG, embedded_facts(CONFIG.model))
# Lengths of two prompts: pages end at 8 and 16.
SHORT, LONG = tuple(range(40, 42)), tuple(range(50, 64))


def prefill(*prompts: tuple[int, ...]) -> Microbatch:
    """One segment a prompt, each in a row and pages of its own."""
    segments = [
        Segment(f"r{row}", row, 0, ids, 0, (2 * row, 2 * row + 1)[: -(-len(ids) // 8)], True, SamplingSpec(seed=0))
        for row, ids in enumerate(prompts)
    ]
    return Forward(0, ForwardMode.PREFILL, tuple(segments))


def told(*tokens: int) -> Completion:
    return Completion(microbatch_id=0, token_ids=tokens)


def guesses(*prompts: tuple[int, ...], never: tuple[int, ...] = ()) -> tuple[tuple[int, ...], ...]:
    batch, model = prefill(*prompts), DraftModel(CONFIG, LIMITS, never=never, device=torch.device("cpu"))
    model.adopt(batch)
    return model.guess(batch, told(*[33] * len(prompts)))


@pytest.fixture(scope="module")
def guessed() -> tuple[tuple[int, ...], ...]:
    return guesses(SHORT, LONG)


def test_a_request_is_guessed_for_as_far_as_its_pages_go(guessed: tuple[tuple[int, ...], ...]) -> None:
    """Its own last page and not the next one, which may be another's."""
    assert [len(one) for one in guessed] == [4, 2]


def test_what_is_guessed_does_not_depend_on_the_batch(guessed: tuple[tuple[int, ...], ...]) -> None:
    assert guesses(SHORT) + guesses(LONG) == guessed


def test_a_token_that_is_never_sampled_is_not_guessed(guessed: tuple[tuple[int, ...], ...]) -> None:
    first = guessed[0][0]
    assert guesses(SHORT, never=(first,))[0][0] != first


def test_guesses_go_on_from_the_last_token_that_was_accepted(guessed: tuple[tuple[int, ...], ...]) -> None:
    """Two drafts were planned and one held: the KV of the other is computed over."""
    model, batch = DraftModel(CONFIG, LIMITS, never=(), device=torch.device("cpu")), prefill(SHORT)
    model.adopt(batch)
    model.guess(batch, told(33))
    right, wrong = guessed[0][0], 99
    segment = Segment("r0", 0, len(SHORT), (33, right, wrong), 0, (), True, drafts=2)
    decode = Forward(1, ForwardMode.DECODE, (segment,))
    model.adopt(decode)
    (next_guesses,) = model.guess(decode, Completion(microbatch_id=1, token_ids=(right, guessed[0][1]), accepted=(1,)))
    assert next_guesses[:2] == guessed[0][2:]
