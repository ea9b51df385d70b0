"""Recorded decodes equal eager ones for any padding, without a GPU.

A tape stands for the graph: it replays the operations that were recorded, on the tensors that they were recorded on,
and no line of Python. The kernel's documented arithmetic stands for the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chained_stages import ChainedStages, limits_for
from thinned import thinned
from torch import nn

from benchmarks.gpu.stand_ins import AskedForANumber, stand_ins, taped
from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError
from engine.core.plan import SamplingSpec, Segment, WeightUpdate
from engine.model import cuda_graphs
from engine.model.batch import DecodeBatch
from engine.model.cuda_graphs import graph_sizes, why_no_graphs
from engine.model.fused_decoder import LeanDecoder
from engine.model.kv_pool import KVPool

PROMPTS = [[(row * 31 + place * 7) % 190 for place in range(5 + 6 * row)] for row in range(5)]
SPECS = [SamplingSpec(seed=row, temperature=0.9 if row % 2 else 0.0) for row in range(5)]


@pytest.fixture(autouse=True)
def _on_the_stand_ins() -> Iterator[None]:
    with stand_ins():
        yield


def chain_of(folder: Path, *, graphs: str = "on", **values: Any) -> ChainedStages:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        page_size=4,
        kv_sanitizer=True,
        max_running_requests=6,
        max_total_tokens=8 * 256,
        cuda_graphs=graphs,
        **values,
    )
    return ChainedStages(config, limits_for(config))


def pool_of(chain: ChainedStages, stage: int = 0) -> KVPool:
    return chain.runners[stage].model.pool


def counted(chain: ChainedStages, stage: int = 0) -> list[int]:
    """The sizes of the batches that a stage's graphs compute from now on."""
    graphs, sizes = chain.runners[stage].model._graphs, []
    forward = graphs.forward

    def count(batch: DecodeBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        sizes.append(batch.size)
        return forward(batch, hidden)

    graphs.forward = count
    return sizes


def said(chain: ChainedStages, rows: int, decodes: int = 9) -> list[list[int]]:
    """Each row's tokens: prompts side by side, then decodes as one batch."""
    segments = [chain.segment(row, PROMPTS[row], spec=SPECS[row]) for row in range(rows)]
    said = [list(chain.forward(*segments).token_ids)]
    for _ in range(decodes):
        completion = chain.forward(*[chain.segment(row, [said[-1][row]]) for row in range(rows)])
        assert completion.error is None, completion.error
        said.append(list(completion.token_ids))
    return said


@pytest.mark.parametrize(
    ("most", "expected"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (64, (1, 2, 4, 8, 16, 32, 64))]
)
def test_sizes_are_powers_of_two_and_the_largest_batch(most: int, expected: tuple[int, ...]) -> None:
    assert graph_sizes(most) == expected


@pytest.mark.parametrize("pp_size", thinned([3, 1], one_in=2))
@pytest.mark.parametrize("family", thinned(["qwen3", "qwen2_biased", "llama"], one_in=3))
def test_tokens_are_those_of_the_eager_forward(family: str, pp_size: int, checkpoint_of: Callable[[str], Path]) -> None:
    """B01, B02: of batches that fill a size and of batches that are padded, greedy and sampled, on every stage."""
    folder = checkpoint_of(family)
    recorded = chain_of(folder, pp_size=pp_size)
    sizes = [counted(recorded, stage) for stage in range(pp_size)]
    plain = chain_of(folder, graphs="off", pp_size=pp_size)
    for rows, size in ((1, 1), (3, 4), (5, 6)):
        assert said(recorded, rows) == said(plain, rows)
        assert sizes == [[size] * 9] * pp_size
        for chain in (recorded, plain):
            chain.done.clear()
        for seen in sizes:
            seen.clear()


def test_padding_writes_into_no_page_of_a_request(checkpoint_of: Callable[[str], Path]) -> None:
    """B02: every slot that no plan has named is as it was; the scratch page is not among those that plans can name."""
    chain = chain_of(checkpoint_of("qwen3"))
    pool = pool_of(chain)
    pool.keys.fill_(7.0)
    pool.values.fill_(7.0)
    said(chain, 3)
    written = chain.runners[0]._record._positions >= 0
    assert written.sum() == sum(len(PROMPTS[row]) + 9 for row in range(3))
    untouched = torch.from_numpy(~written).nonzero()[:, 0]
    assert len(untouched) == pool.total_slots - int(written.sum())
    for kept in (pool.keys, pool.values):
        assert bool((kept[:, untouched] == 7.0).all())
        assert bool((kept[:, pool.total_slots] != 7.0).any())
    broken = Segment("r", 0, 0, (1,), 0, (pool.total_slots // 4,), True, SamplingSpec(seed=0))
    assert "pages of a segment must be in" in str(chain.forward(broken).error)


def test_a_larger_batch_before_leaves_nothing_in_a_smaller_one(checkpoint_of: Callable[[str], Path]) -> None:
    """Buffers are shared by all sizes: rows, pages and lengths of five rows must not show in a batch of three."""
    folder = checkpoint_of("qwen3")
    used, fresh = chain_of(folder), chain_of(folder)
    said(used, 5)
    used.done.clear()
    assert said(used, 3) == said(fresh, 3)


def test_what_is_not_plain_is_computed_eagerly(checkpoint_of: Callable[[str], Path]) -> None:
    """Parts of prompts, drafts, prompt logprobs, a LoRA, more rows than there are."""
    graphs = chain_of(checkpoint_of("qwen3"), max_loras=1).runners[0].model._graphs
    plain = Segment("r", 0, 3, (1,), 0, (), True)
    assert graphs.batch([plain]).size == 1
    others = [
        Segment("r", 0, 3, (1, 2), 0, (), True),
        Segment("r", 0, 3, (1,), 0, (), False),
        Segment("r", 0, 3, (1, 2), 0, (), True, drafts=1),
        Segment("r", 0, 3, (1,), 0, (), True, logprobs_from=3, next_id=4),
        Segment("r", 0, 3, (1,), 0, (), True, lora=1),
    ]
    assert [graphs.batch([plain, other]) for other in others] == [None] * len(others)
    assert graphs.batch([plain] * 7) is None


def test_other_weights_are_recorded_anew(checkpoint_of: Callable[[str], Path]) -> None:
    """B05: what was recorded reads the weights and the pool that were let go."""
    chain = chain_of(checkpoint_of("qwen3"))
    before = said(chain, 2)
    (runner,) = chain.runners
    assert runner.prepare(WeightUpdate(99, str(checkpoint_of("qwen3")))) is None
    runner.settle(99, commit=True)
    sizes = counted(chain)
    chain.done.clear()
    assert said(chain, 2) == before
    assert sizes == [2] * 9


def test_hidden_states_of_another_shape_fail_their_microbatch(checkpoint_of: Callable[[str], Path]) -> None:
    """A failure stays alone and never ends the process (A05)."""
    chain = chain_of(checkpoint_of("qwen3"), pp_size=2)
    said(chain, 1, decodes=1)
    output = chain.runners[1].forward(chain.plan(chain.segment(0, [3])), torch.zeros(3, 64))
    assert "must have shape (1, 64), got (3, 64)" in str(output.error)


@pytest.mark.parametrize(
    ("family", "values", "text"),
    [
        ("mistral_window", {}, None),
        ("gemma3_two_ropes", {}, "transformers' own forward pass computes"),
        ("qwen3", {"attention_backend": "sdpa"}, "its shapes depend on the context"),
    ],
)
def test_what_cannot_be_recorded_is_refused_or_computed_eagerly(
    family: str, values: dict[str, str], text: str | None, checkpoint_of: Callable[[str], Path]
) -> None:
    """C09: 'on' names the reason, 'auto' goes on without."""
    folder = checkpoint_of(family)
    if text is None:
        assert chain_of(folder, **values).runners[0].model._graphs is not None
        return
    with pytest.raises(CheckpointError, match=rf"cuda_graphs must be 'off' or 'auto' here, got 'on': .*{text}"):
        chain_of(folder, **values)
    assert chain_of(folder, graphs="auto", **values).runners[0].model._graphs is None


def test_a_pool_of_window_layers_and_a_cpu_are_reasons(checkpoint_of: Callable[[str], Path]) -> None:
    config = EngineConfig(model=str(checkpoint_of("mistral_window")), device="cpu", page_size=4)
    pool = ChainedStages(config, limits_for(config, window=9)).runners[0].model.pool
    cuda = torch.device("cuda")
    assert why_no_graphs(cuda, pool, lean=True) == "the model has window layers"
    assert why_no_graphs(torch.device("cpu"), pool, lean=True) == "the device is cpu, and graphs need CUDA"


@pytest.mark.parametrize("wrong", ["fails", "differs", "asks"])
def test_what_is_recorded_wrongly_is_not_used(
    wrong: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A07: recorded decodes are tried at the start, so that a wrong one never answers a request."""

    def broken(device: torch.device) -> Callable[[Any], Any]:
        def record(compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            if wrong == "fails":
                raise RuntimeError("operation not permitted when stream is capturing")
            replay = taped(device)(compute)
            return lambda: replay() * 1.5

        return record

    def asking(right: Any, *arguments: Any) -> torch.Tensor:
        output: torch.Tensor = right(*arguments)
        return output * (1.0 + 0.0 * float(output.sum()))

    if wrong == "asks":
        monkeypatch.setattr(LeanDecoder, "forward", functools.partialmethod(lambda *a: asking(_RIGHT, *a)))
    else:
        monkeypatch.setattr("engine.model.stage_model.cuda_recorder", broken)
    chain = chain_of(checkpoint_of("qwen3"), graphs="auto")
    assert chain.runners[0].model._graphs is None
    assert chain.runners[0].model.is_lean
    assert len(said(chain, 2)) == 10


_RIGHT = LeanDecoder.forward


def test_the_tape_replays_operations_and_no_python() -> None:
    """The tape behaves as a CUDA graph does, on which the tests above rely."""
    weight, given, calls = nn.Parameter(torch.eye(2)), torch.tensor([1.0, 2.0]), []

    def compute() -> torch.Tensor:
        calls.append(1)
        return weight.detach() @ given + len(calls)

    replay = taped(torch.device("cpu"))(compute)
    done = len(calls)
    assert replay().tolist() == [1.0 + done, 2.0 + done]
    given += 10
    assert replay().tolist() == [11.0 + done, 12.0 + done]
    assert len(calls) == done
    with pytest.raises(AskedForANumber, match="reads a value"):
        taped(torch.device("cpu"))(lambda: given * float(given.sum()))


def test_the_largest_recorded_size_is_bounded(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "LARGEST_SIZE", 3)
    chain = chain_of(checkpoint_of("qwen3"))
    assert chain.runners[0].model._graphs.sizes == (1, 2, 3)
    assert len(said(chain, 5)) == 10
