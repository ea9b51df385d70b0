"""One pipeline stage computed by OpenVINO: the kept or converted graph, compiled, over a pool of blocks.

Owns no request and no page table. A converted graph is compared with transformers before it is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import openvino as ov
import torch

from engine.config import EngineConfig
from engine.errors import OpenVINOError, StepFailedError
from engine.limits import Limits
from engine.model.batch import Batch
from engine.model.checkpoint import heads_of
from engine.model.kv_pool import KVPool, Slots
from engine.model.openvino.batch import BlockBatch, BlockPool
from engine.model.openvino.compiled import CompiledStage
from engine.model.openvino.conversion import StageGraph, TracedStage
from engine.model.openvino.kept import kept_graph
from engine.model.prompt_logprobs import ScoreTaker, scored_rows, slices_of
from engine.model.stage_slice import OnLoad, StageFacts
from engine.plan import Segment
from engine.process.control import Loading

__all__ = ["OpenVINOStage"]

_log = logging.getLogger(__name__)

# The comparison takes two steps: the second one reads what the first one has written.
_COMPARED_TOKENS: Final = (7, 4)
# The largest difference from transformers in fp32, relative to the norm of its output. In fp32 2e-6 was seen; in
# bfloat16 0.04, and a mistake in the graph makes it larger than 0.5.
_TOLERANCES: Final = {torch.float32: 1e-4, torch.bfloat16: 0.15}
_TOLERANCE_INT8: Final = 0.15


class OpenVINOStage:
    """See ``ComputingStage``. Raises CheckpointError for a model that is not whole, OpenVINOError for one that OpenVINO
    cannot compute here.
    """

    backend = "openvino"
    is_lean = False

    def __init__(self, config: EngineConfig, limits: Limits, stage: int, *, on_load: OnLoad | None = None) -> None:
        self._facts = facts = StageFacts(config, limits, stage)
        self.folder: Path = facts.folder
        self.description: Mapping[str, object] = facts.description
        self.is_first, self.is_last = facts.is_first, facts.is_last
        self.device, self.dtype = torch.device("cpu"), facts.dtype
        self.hidden_size = facts.hidden_size
        convert = partial(_converted, config, facts, limits, on_load)
        self._kept = kept_graph(facts, convert, weights=config.weights)
        self._compiled = CompiledStage(self._kept.graph, facts)
        self.pool: KVPool = _pool(facts, limits)
        self.take_pool(self.pool)
        if on_load is not None:
            dtype = str(self.dtype).removeprefix("torch.")
            on_load(Loading(done=1, total=1, device=f"{self.device} (OpenVINO)", dtype=dtype))
        _log.info("stage %d is computed by OpenVINO %s in %s", stage, ov.__version__, self.dtype)

    def batch(self, segments: Sequence[Segment]) -> BlockBatch:
        assert isinstance(self.pool, BlockPool), "OpenVINO computes over a pool of blocks"
        return BlockBatch(segments, self.pool)

    def take_pool(self, pool: KVPool) -> None:
        assert isinstance(pool, BlockPool), "OpenVINO computes over a pool of blocks"
        self.pool = pool
        self._compiled.take_pool(pool)

    def forward(self, batch: Batch, hidden: torch.Tensor | None, take_scored: ScoreTaker | None = None) -> torch.Tensor:
        """Hidden states in the stage's type, or logits in fp32, which the next call overwrites.

        The head is in the graph, so the logits of prompt logprobs come with the others, all at once.
        """
        assert isinstance(batch, BlockBatch), "a batch of OpenVINO's comes from its stage"
        if self.is_first:
            self._require_known(batch.token_ids_array)
            hidden = None
        else:
            hidden = _require_hidden(hidden, batch, self.hidden_size)
        if take_scored is not None:
            return self._scored(batch, hidden, take_scored)
        output = self._compiled.forward(batch, hidden)
        return output if self.is_last else output.to(self.dtype, copy=True)

    def _scored(self, batch: BlockBatch, hidden: torch.Tensor | None, take_scored: ScoreTaker) -> torch.Tensor:
        rows = scored_rows(batch.segments)
        batch.arrays["emitting"] = np.concatenate([np.array(rows, np.int64), batch.arrays["emitting"]])
        output = self._compiled.forward(batch, hidden)
        for part in slices_of(list(range(len(rows)))):
            take_scored(output[part])
        return output[len(rows) :]

    def _require_known(self, ids: Slots) -> None:
        """OpenVINO would read beside the embedding."""
        last = int(self._facts.model_config.vocab_size) - 1
        if int(ids.min()) < 0 or int(ids.max()) > last:
            raise StepFailedError(f"token ids must be in 0..{last}, got {int(ids.min())}..{int(ids.max())}")


def _pool(facts: StageFacts, limits: Limits) -> BlockPool:
    kv_heads, head_dim = heads_of(facts.model_config, facts.folder)
    pool_of = partial(BlockPool, limits, kv_heads=kv_heads, head_dim=head_dim, dtype=facts.dtype)
    try:
        pool = pool_of(layers=facts.windowed.count(False))
        if limits.window_tokens:
            pool.window = pool_of(layers=facts.windowed.count(True), window_tokens=limits.window_tokens)
    except MemoryError as exc:
        raise OpenVINOError(
            f"the KV of {limits.total_pages} pages must fit, but: {exc}; lower max_total_tokens"
        ) from exc
    return pool


def _converted(config: EngineConfig, facts: StageFacts, limits: Limits, on_load: OnLoad | None) -> StageGraph:
    """Convert, and compare what a chunk and the chunk after it give with one sequence of transformers."""
    int8 = config.weights == "int8"
    traced = TracedStage(facts, trust_remote_code=config.trust_remote_code, int8=int8, on_load=on_load)
    converted = traced.convert()
    first, expected = traced.compute(sum(_COMPARED_TOKENS))
    pages = limits.pages_for(sum(_COMPARED_TOKENS))
    window_pages = pages if limits.window_tokens else 0
    small = msgspec.structs.replace(limits, total_pages=pages, window_pages=window_pages, rows=1)
    pool, compiled = _pool(facts, small), CompiledStage(converted.graph.clone(), facts)
    compiled.take_pool(pool)
    start, differences = 0, []
    for count in _COMPARED_TOKENS:
        part = first[start : start + count]
        batch = _compared_batch(start, count, pages, pool, windowed=bool(limits.window_tokens))
        output = compiled.forward(batch, None if facts.is_first else part)
        wanted = expected[start : start + count][-len(output) :]
        differences.append(float((output - wanted).norm() / wanted.norm()))
        start += count
    tolerance = _TOLERANCE_INT8 if int8 else _TOLERANCES[facts.dtype]
    if not all(difference < tolerance for difference in differences):
        raise OpenVINOError(
            f"the converted {type(traced.module).__name__} must compute what transformers does, but differs by "
            f"{differences}, more than {tolerance}"
        )
    _log.info("the converted %s differs by %s from transformers", type(traced.module).__name__, differences)
    return converted


def _compared_batch(start: int, count: int, pages: int, pool: BlockPool, *, windowed: bool) -> BlockBatch:
    """Tokens ``start .. start + count - 1`` of the compared sequence, each token its own position."""
    places = tuple(range(pages))
    window_pages = places if windowed else ()
    ids = tuple(range(start, start + count))
    segment = Segment("compare", 0, start, ids, 0, places, emits=True, window_pages=window_pages)
    pool.adopt(segment)
    return BlockBatch([segment], pool)


def _require_hidden(hidden: torch.Tensor | None, batch: BlockBatch, hidden_size: int) -> torch.Tensor:
    expected = (batch.tokens, hidden_size)
    if hidden is None or tuple(hidden.shape) != expected:
        found = None if hidden is None else tuple(hidden.shape)
        raise StepFailedError(f"hidden states from the stage before must have shape {expected}, got {found}")
    return hidden
