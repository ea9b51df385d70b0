"""Prompt logprobs of the paged, chunked, staged forward equal transformers' log-softmax, in every slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from chained_stages import DEVICE, ChainedStages, limits_for
from reference_logits import Reference, reference_logits
from thinned import thinned

from engine.core.config import EngineConfig
from engine.core.messages import PromptLogprob
from engine.core.plan import SamplingSpec, Segment
from engine.model import prompt_logprobs
from engine.model.prompt_logprobs import PromptScores

TOLERANCE = 1e-4  # fp32, as of logits
LENGTH = 31
SPEC = SamplingSpec(seed=0, prompt_top_logprobs_num=3)


# What is done with logits differs by the head: one of its own, one tied to the embedding, one with a cap. That logits
# are right for every family ``test_forward_equality`` shows.
SCORED = ("llama", "qwen3_tied", "gemma2_softcap")


@pytest.fixture(scope="module")
def reference(checkpoint_of: Callable[[str], Path]) -> Reference:
    return reference_logits(checkpoint_of, LENGTH)


def scored(chain: ChainedStages, row: int, ids: Sequence[int], *, start: int, chunk: int) -> list[PromptLogprob]:
    """The prompt logprobs of a row from a position on, computed part by part beside a decoding row."""
    values: list[PromptLogprob] = []
    chain.forward(chain.segment(row + 1, ids[:5]))
    for first in range(0, len(ids), chunk):
        last = first + chunk >= len(ids)
        segment = chain.segment(row, ids[first : first + chunk], emits=last, spec=SPEC)
        if max(first, start) < min(first + chunk, len(ids) - 1):
            following = -1 if last else ids[first + chunk]
            segment = msgspec.structs.replace(segment, logprobs_from=max(first, start), next_id=following)
        completion = chain.forward(chain.segment(row + 1, [7]), segment)
        assert completion.error is None, completion.error
        values += [value for part in completion.prompt_logprobs for value in part]
    return values


def assert_equal(values: Sequence[PromptLogprob], logits: torch.Tensor, ids: Sequence[int], start: int) -> None:
    expected = torch.log_softmax(logits.float(), dim=-1)
    assert len(values) == len(ids) - 1 - start
    for position, value in enumerate(values, start):
        row, said = expected[position], expected[position][ids[position + 1]]
        assert value.logprob == pytest.approx(float(said), abs=TOLERANCE)
        # Neighbours in rank may be nearer to each other than both computations are.
        assert int((row > said + TOLERANCE).sum()) < value.rank <= int((row > said - TOLERANCE).sum()) + 1
        assert [logprob for _, logprob in value.top] == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)
        assert [float(row[token]) for token, _ in value.top] == pytest.approx(
            [logprob for _, logprob in value.top], abs=TOLERANCE
        )


@pytest.mark.parametrize(("chunk", "pp_size"), thinned([(4, 2), (1, 1), (64, 4), (7, 1)], one_in=2))
@pytest.mark.parametrize("family", SCORED)
def test_values_equal_those_of_transformers(
    family: str, chunk: int, pp_size: int, checkpoint_of: Callable[[str], Path], reference: Reference
) -> None:
    """C02, B02: by chunks of one token, of a page and of odd length, on one stage and on several."""
    sequences, expected = reference(family)
    ids = sequences[0].tolist()
    config = EngineConfig(model=str(checkpoint_of(family)), pp_size=pp_size, device=DEVICE, page_size=4)
    chain = ChainedStages(config, limits_for(config))
    for row, start in ((0, 0), (3, 9)):
        assert_equal(scored(chain, row, ids, start=start, chunk=chunk), expected[0], ids, start)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("family", ["qwen3_tied", "gemma2_softcap"])
def test_a_slice_is_no_seam(
    family: str, lean: bool, checkpoint_of: Callable[[str], Path], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is applied to a few rows at a time, by transformers' own forward too, whose logits it may cap."""
    monkeypatch.setattr(prompt_logprobs, "SLICE_ROWS", 4)
    sequences, expected = reference(family)
    ids = sequences[1].tolist()
    config = EngineConfig(model=str(checkpoint_of(family)), device=DEVICE, page_size=4)
    chain = ChainedStages(config, limits_for(config), lean=lean)
    assert chain.runners[0].model.is_lean is (lean and family == "qwen3_tied")
    assert_equal(scored(chain, 0, ids, start=2, chunk=19), expected[1], ids, 2)


def test_a_cached_prefix_gives_the_same_values(checkpoint_of: Callable[[str], Path], reference: Reference) -> None:
    """B04: the positions before the first one that is asked for are another row's."""
    sequences, expected = reference("llama")
    ids = sequences[0].tolist()
    config = EngineConfig(model=str(checkpoint_of("llama")), device=DEVICE, page_size=4, kv_sanitizer=True)
    chain = ChainedStages(config, limits_for(config))
    first = chain.segment(0, ids[:16], emits=False)
    chain.forward(first)
    own = tuple(range(7, 4096 // 4, 8))[: chain.limits.pages_for(LENGTH) - 4]
    pages = (*first.pages[:4], *own)
    rest = Segment("r7", 7, 16, tuple(ids[16:]), 0, pages, True, SPEC, logprobs_from=16)
    (part,) = chain.forward(rest).prompt_logprobs
    assert_equal(part, expected[0], ids, 16)


def test_each_segment_gets_as_many_of_the_best_as_it_wants() -> None:
    logits = torch.log_softmax(torch.tensor([[0.0, 1.0, 2.0, float("-inf")]]), dim=-1).repeat(3, 1)
    segments = [
        Segment("a", 0, 0, (1, 2, 0), 0, (0,), True, logprobs_from=0),
        Segment("b", 1, 0, (1,), 0, (1,), False),
        Segment("c", 2, 4, (2,), 0, (), False, logprobs_from=4, next_id=3),
    ]
    specs = {"a": SamplingSpec(seed=0, prompt_top_logprobs_num=2), "c": SamplingSpec(seed=0)}
    scores = PromptScores(segments, lambda segment: specs[segment.rid])
    scores.take(logits[:2])
    scores.take(logits[2:])
    (two, one), (none,) = scores.parts()
    assert (two.rank, [token for token, _ in two.top]) == (1, [2, 1])
    assert (one.rank, one.logprob) == (3, pytest.approx(float(logits[0, 0])))
    # A token that the model rules out: JSON has no infinities.
    assert (none.logprob, none.rank, none.top) == (-9999.0, 4, ())
