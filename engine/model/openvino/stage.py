"""One pipeline stage computed by OpenVINO: a cached or converted graph, compiled, over a pool of blocks.

Owns no request and no page table. A converted graph is compared with transformers before it is cached.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import openvino as ov
import torch

from engine.core.config import EngineConfig
from engine.core.errors import OpenVINOError, StepFailedError
from engine.core.limits import Limits
from engine.core.plan import Segment
from engine.model.arithmetic import relative_difference
from engine.model.batch import Batch, require_hidden
from engine.model.file_pages import give_back_garbage, read_pages_given_back
from engine.model.kv_pool import KVPool
from engine.model.lora import StageLoras
from engine.model.openvino.batch import BlockBatch, BlockPool
from engine.model.openvino.compiled import CompiledStage
from engine.model.openvino.graph_cache import stage_graph
from engine.model.openvino.paging import StageGraph
from engine.model.prompt_logprobs import ScoreTaker, scored_rows, slices_of
from engine.model.stage_slice import OnLoad, StageFacts, phase_report
from engine.model.threads import OPENVINO_THREADS, stage_threads

_log = logging.getLogger(__name__)

# The comparison takes two steps, of which the second reads the KV of the first.
_COMPARED_TOKENS: Final = (7, 4)
# The largest difference from transformers in fp32, relative to the norm of its output. Observed were 2e-6 in fp32 and
# 0.04 in bfloat16; a mistake in the graph makes it larger than 0.5.
_TOLERANCES: Final = {torch.float32: 1e-4, torch.bfloat16: 0.15}
_TOLERANCE_INT8: Final = 0.15


class OpenVINOStage:
    """See ``ComputingStage``. Raises CheckpointError for an incomplete model, OpenVINOError for a model that OpenVINO
    cannot compute here.
    """

    backend = "openvino"
    is_lean = False
    lora: StageLoras | None = None
    device = torch.device("cpu")

    def __init__(self, config: EngineConfig, limits: Limits, stage: int, *, on_load: OnLoad | None = None) -> None:
        self.facts = facts = StageFacts(config, limits, stage)
        threads = stage_threads(config, limits, OPENVINO_THREADS)
        device = f"{self.device} (OpenVINO, {threads} {'thread' if threads == 1 else 'threads'})"
        conversion = _Conversion(config, facts, limits, on_load, device)
        conversion.report("reading")
        with stage_graph(facts, conversion.convert, weights=config.weights) as (found, is_new):
            self._compiled = conversion.compile(found, threads, is_new=is_new)
        # Kept because the memory of a graph's constants must outlive the graph.
        self._owner = found.owner
        del found
        give_back_garbage()
        self._batch: BlockBatch | None = None
        self.pool: KVPool = _pool(self._compiled, limits)
        self.take_pool(self.pool)
        _log.info("stage %d is computed by OpenVINO %s in %s, threads: %d", stage, ov.__version__, facts.dtype, threads)

    def batch(self, segments: Sequence[Segment]) -> BlockBatch:
        assert isinstance(self.pool, BlockPool), "OpenVINO computes over a pool of blocks"
        if self._batch is None or not self._batch.goes_on_with(segments):
            self._batch = BlockBatch(segments, self.pool)
        return self._batch

    def take_pool(self, pool: KVPool) -> None:
        assert isinstance(pool, BlockPool), "OpenVINO computes over a pool of blocks"
        self.pool = pool
        self._batch = None
        self._compiled.take_pool(pool)

    def forward(self, batch: Batch, hidden: torch.Tensor | None, take_scored: ScoreTaker | None = None) -> torch.Tensor:
        """Compute hidden states in the stage's type, or logits in fp32, which the next call overwrites.

        The head is in the graph, so the logits for prompt logprobs are computed with the others, all at once.
        """
        assert isinstance(batch, BlockBatch), "an OpenVINO stage computes only its own batches"
        if self.facts.is_first:
            self._require_known(*batch.id_range)
            hidden = None
        else:
            hidden = require_hidden(hidden, batch.tokens, self.facts.hidden_size)
        if take_scored is not None:
            return self._scored(batch, hidden, take_scored)
        output = self._compiled.forward(batch, hidden)
        return output if self.facts.is_last else output.to(self.facts.dtype, copy=True)

    def _scored(self, batch: BlockBatch, hidden: torch.Tensor | None, take_scored: ScoreTaker) -> torch.Tensor:
        rows = scored_rows(batch.segments)
        batch.arrays["emitting"] = np.concatenate([np.array(rows, np.int64), batch.arrays["emitting"]])
        # The next batch gathers other rows before the head, even if this forward pass fails.
        self._batch = None
        output = self._compiled.forward(batch, hidden)
        for part in slices_of(list(range(len(rows)))):
            take_scored(output[part])
        return output[len(rows) :]

    def _require_known(self, least: int, most: int) -> None:
        last = int(self.facts.model_config.vocab_size) - 1
        if least < 0 or most > last:
            raise StepFailedError(f"token ids must be in 0..{last}, got {least}..{most}")


def _pool(compiled: CompiledStage, limits: Limits) -> BlockPool:
    try:
        return compiled.new_pool(limits)
    except MemoryError as exc:
        raise OpenVINOError(
            f"the KV of {limits.total_pages} pages must fit, but: {exc}; lower max_total_tokens"
        ) from exc


class _Conversion:
    """Converts a stage, and compares its results for two consecutive chunks with transformers' for one sequence."""

    def __init__(
        self, config: EngineConfig, facts: StageFacts, limits: Limits, on_load: OnLoad | None, device: str
    ) -> None:
        self._config = config
        self._device = device
        self._facts = facts
        self._limits = limits
        self._on_load = on_load
        self._int8 = config.weights == "int8"
        self._name = ""
        self._given = self._wanted = torch.empty(0)

    def report(self, doing: str) -> None:
        """Report the phase of the stage."""
        if self._on_load is not None:
            self._on_load(phase_report(self._facts, self._device, doing))

    def convert(self) -> StageGraph:
        from engine.model.openvino.conversion import TracedStage  # with the models of transformers

        trusted = self._config.trust_remote_code
        traced = TracedStage(self._facts, trust_remote_code=trusted, int8=self._int8, on_load=self._on_load)
        self._name = type(traced.module).__name__
        self.report("converting")
        converted = traced.convert()
        self.report("comparing")
        self._given, self._wanted = traced.compute(sum(_COMPARED_TOKENS))
        return converted

    def compile(self, found: StageGraph, threads: int, *, is_new: bool) -> CompiledStage:
        """Compile a graph to a stage, run a first forward pass, which packs its weights, and compare a new graph."""
        give_back_garbage()
        self.report("compiling")
        kept_in = self._config.kv_cache_dtype
        with read_pages_given_back(found.file):
            if is_new and kept_in != "auto":
                # The cache's type is not part of the graph, so the comparison leaves it out.
                self._compare(CompiledStage(found.graph.clone(), self._facts, threads=threads))
            compiled = CompiledStage(found.graph, self._facts, threads=threads, kv_cache_dtype=kept_in)
            if is_new and kept_in == "auto":
                self._compare(compiled)
            else:
                batch = _compared_batch(0, 1, self._small_pool(compiled))
                compiled.forward(batch, None if self._facts.is_first else torch.zeros(1, self._facts.hidden_size))
        return compiled

    def _compare(self, compiled: CompiledStage) -> None:
        """Raise OpenVINOError unless a stage computes the same as transformers."""
        self.report("comparing")
        pool = self._small_pool(compiled)
        start, differences = 0, []
        for count in _COMPARED_TOKENS:
            part = self._given[start : start + count]
            batch = _compared_batch(start, count, pool)
            output = compiled.forward(batch, None if self._facts.is_first else part)
            wanted = self._wanted[start : start + count][-len(output) :]
            differences.append(relative_difference(output, wanted))
            start += count
        tolerance = _TOLERANCE_INT8 if self._int8 else _TOLERANCES[self._facts.dtype]
        if not all(difference < tolerance for difference in differences):
            raise OpenVINOError(
                f"the converted {self._name} must equal transformers, but differs by {differences}, more than "
                f"{tolerance}"
            )
        _log.info("the converted %s differs by %s from transformers", self._name, differences)

    def _small_pool(self, compiled: CompiledStage) -> BlockPool:
        """Make a pool for one row of the compared sequence, and give it to the stage."""
        pages = self._limits.pages_for(sum(_COMPARED_TOKENS))
        window_pages = pages if self._limits.window_tokens else 0
        pool = _pool(
            compiled, msgspec.structs.replace(self._limits, total_pages=pages, window_pages=window_pages, rows=1)
        )
        compiled.take_pool(pool)
        return pool


def _compared_batch(start: int, count: int, pool: BlockPool) -> BlockBatch:
    """Return tokens ``start .. start + count - 1`` of the compared sequence; each token equals its position."""
    places = tuple(range(pool.total_slots // pool.page_size))
    window_pages = places if pool.window is not None else ()
    ids = tuple(range(start, start + count))
    segment = Segment("compare", 0, start, ids, 0, places, emits=True, window_pages=window_pages)
    pool.adopt(segment)
    return BlockBatch([segment], pool)
