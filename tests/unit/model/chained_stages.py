"""All stages of an engine in one process, and plans written by hand for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.config import EngineConfig
from engine.core.limits import Limits, ModelFacts
from engine.core.messages import Completion
from engine.core.plan import Forward, ForwardMode, Microbatch, SamplingSpec, Segment
from engine.model.runner import StageRunner

# Where the tests of parity compute: ``pytest --device``.
DEVICE = "cpu"


def limits_for(config: EngineConfig, *, vocab_size: int = 199, num_layers: int = 5, window: int = 0) -> Limits:
    facts = ModelFacts(
        name=config.model,
        vocab_size=vocab_size,
        context_length=256,
        num_layers=num_layers,
        kv_bytes_per_token=1,
        window_tokens=window,
    )
    return Limits.of(config, facts, 4096)


class ChainedStages:
    """Hands hidden states from runner to runner; knows each row's progress, so that a plan is one line."""

    def __init__(self, config: EngineConfig, limits: Limits, *, lean: bool = True, early: bool | None = None) -> None:
        self.limits = limits
        self.runners = [StageRunner(config, limits, stage, lean=lean, early=early) for stage in range(limits.pp_size)]
        self.done: dict[int, int] = {}
        self.launched = 0

    def segment(self, row: int, ids: Sequence[int], *, emits: bool = True, spec: SamplingSpec | None = None) -> Segment:
        """The next tokens of a row. Its pages are given once, in an order that is nowhere contiguous.

        Its window pages are a ring: what is out of the window is overwritten.
        """
        start = self.done.get(row, 0)
        count = self.limits.pages_for(self.limits.context_length)
        pages = tuple(range(row + (count - 1) * 8, -1, -8))[:count] if start == 0 else ()
        self.done[row] = start + len(ids)
        sampling = (spec or SamplingSpec(seed=row)) if start == 0 else None
        ring = self.limits.row_window_pages if self.limits.window_tokens else 0
        window_pages = tuple(row * ring + place % ring for place in range(len(pages))) if ring else ()
        return Segment(f"r{row}", row, start, tuple(ids), 0, pages, emits, sampling, window_pages)

    def plan(self, *segments: Segment) -> Microbatch:
        self.launched += 1
        return Forward(self.launched, ForwardMode.MIXED, segments)

    def logits(self, *segments: Segment) -> torch.Tensor:
        microbatch, hidden = self.plan(*segments), None
        for runner in self.runners[:-1]:
            hidden = runner.forward(microbatch, hidden)
            assert isinstance(hidden, torch.Tensor), hidden
        return self.runners[-1].logits(microbatch, hidden).cpu()

    def forward(self, *segments: Segment) -> Completion:
        microbatch, output = self.plan(*segments), None
        for runner in self.runners:
            if isinstance(output, Completion):
                runner.skip(microbatch)
            else:
                output = runner.forward(microbatch, output)
        assert isinstance(output, Completion)
        return output

    def generate(self, row: int, prompt: Sequence[int], count: int, *, chunk: int, spec: SamplingSpec) -> list[int]:
        """Prefill in chunks, then decode one by one."""
        for first in range(0, len(prompt), chunk):
            last = first + chunk >= len(prompt)
            completion = self.forward(self.segment(row, prompt[first : first + chunk], emits=last, spec=spec))
            assert completion.error is None, completion.error
        output = list(completion.token_ids)
        while len(output) < count:
            output += self.forward(self.segment(row, output[-1:])).token_ids
        return output
