"""Means of prompts that come in parts, side by side, in rows that other prompts had before."""

from __future__ import annotations

import numpy as np
import torch

from engine.core.plan import Segment
from engine.model.pooling import Pooling, PoolingKind
from engine.model.prompt_vectors import PromptVectors


def part(row: int, start: int, count: int, *, emits: bool) -> Segment:
    ids = tuple(range(count))
    return Segment(f"r{row}", row=row, start=start, token_ids=ids, page_start=0, pages=(), emits=emits)


def vectors_of(said: object) -> list[list[float]]:
    _, entries = said  # type: ignore[misc]  # ids and entries
    return [np.frombuffer(entry.vector, np.float32).tolist() for entry in entries]


def test_a_mean_is_of_all_parts_and_of_nothing_before() -> None:
    taken = PromptVectors(Pooling(PoolingKind.MEAN, is_normalized=False))
    first = torch.tensor([[1.0, 0.0], [3.0, 0.0], [10.0, 2.0]])
    assert vectors_of(taken.take(first, [part(0, 0, 2, emits=False), part(1, 0, 1, emits=True)])) == [[10.0, 2.0]]
    # Row 0 is given to another prompt: what was summed up for the first one is forgotten.
    assert vectors_of(taken.take(torch.tensor([[5.0, 5.0]]), [part(0, 0, 1, emits=False)])) == []
    assert vectors_of(taken.take(torch.tensor([[7.0, 1.0], [0.0, 0.0]]), [part(0, 1, 2, emits=True)])) == [[4.0, 2.0]]


def test_a_normalized_vector_has_length_one() -> None:
    taken = PromptVectors(Pooling(PoolingKind.LAST, is_normalized=True))
    (vector,) = vectors_of(taken.take(torch.tensor([[3.0, 4.0]]), [part(0, 0, 2, emits=True)]))
    assert np.allclose(vector, [0.6, 0.8])


def test_a_part_that_failed_takes_no_other_prompt_along() -> None:
    """The part before was in a microbatch that failed, and this one was already launched, beside another prompt."""
    taken = PromptVectors(Pooling(PoolingKind.MEAN, is_normalized=False))
    _, other = vectors_of(
        taken.take(torch.tensor([[7.0, 1.0], [4.0, 2.0]]), [part(0, 8, 1, emits=True), part(1, 0, 1, emits=True)])
    )
    assert other == [4.0, 2.0]
