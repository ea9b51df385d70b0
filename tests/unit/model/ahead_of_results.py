"""One stage with decodes planned before their tokens are known, and the same plans with known tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chained_stages import DEVICE, ChainedStages, limits_for

from engine.core.config import EngineConfig
from engine.core.messages import Completion
from engine.core.plan import UNKNOWN_TOKEN, Microbatch, SamplingSpec
from engine.model.runner import StageRunner
from engine.model.sampler_output import LaunchedStep

SPECS = [
    SamplingSpec(seed=0, return_logprob=True, top_logprobs_num=2),
    SamplingSpec(seed=1, temperature=0.8, logit_bias=((3, 9.0), (9, 5.0)), return_logprob=True),
    SamplingSpec(seed=2, temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, suppressed_ids=(4, 5), suppressed_until=99),
    SamplingSpec(seed=3, return_logprob=True, top_logprobs_num=3),
]
PROMPTS = [[(row * 31 + place * 7) % 190 for place in range(3 + 5 * row)] for row in range(4)]
# The rows whose prompts each microbatch has, and those that decode: in changing company and order, beside prompts, and
# a row with another request.
STEPS: Sequence[tuple[Sequence[int], Sequence[int]]] = [
    ((0, 1, 2), ()),
    ((), (0, 1, 2)),
    ((), (0, 1, 2)),
    ((3,), (2, 0)),
    ((), (0, 2, 3)),
    ((1,), (3, 0)),
    ((), (1, 3, 0)),
    ((), (1, 3, 0)),
    ((), (0, 1, 2, 3)),
]


def stage_of(folder: Path, *, ahead: bool, early: bool | None = None, window: int = 0, **values: Any) -> ChainedStages:
    """A stage that plans are made ahead for, or not; ``early`` as a runner has it."""
    given = {"model": str(folder), "device": DEVICE, "page_size": 4, "kv_sanitizer": True, "async_scheduling": ahead}
    config = EngineConfig(**(given | values))
    return ChainedStages(config, limits_for(config, window=window), early=early)


def results_of(stage: ChainedStages, *, ahead: bool, depth: int = 2) -> list[Completion]:
    """Run ``STEPS``. With ``ahead`` no decode knows its token; up to ``depth`` microbatches are in flight."""
    flight = Flight(stage.runners[0], depth)
    newest: dict[int, int] = {}
    for prompts, decodes in STEPS:
        for row in prompts:
            stage.done.pop(row, None)
        segments = [stage.segment(row, PROMPTS[row], spec=SPECS[row]) for row in prompts]
        segments += [stage.segment(row, [UNKNOWN_TOKEN if ahead else newest[row]]) for row in decodes]
        done = flight.give(stage.plan(*segments))
        if not ahead:
            newest.update(zip([*prompts, *decodes], done[-1].token_ids, strict=True))
    return flight.rest()


class Flight:
    """The microbatches in flight on a runner: launched early if possible, else computed at once."""

    def __init__(self, runner: StageRunner, depth: int = 2) -> None:
        self._runner, self._depth = runner, depth
        self._launched: deque[LaunchedStep] = deque()
        self.done: list[Completion] = []

    def give(self, microbatch: Microbatch) -> list[Completion]:
        """Launch it and return all results that are ready."""
        if self._runner.can_launch(microbatch):
            self._launched.append(self._runner.launch(microbatch))
            if len(self._launched) == self._depth:
                self.done.append(self._runner.finish(self._launched.popleft()))
            return self.done
        self.rest()
        output = self._runner.forward(microbatch)
        assert isinstance(output, Completion), output
        self.done.append(output)
        return self.done

    def rest(self) -> list[Completion]:
        while self._launched:
            self.done.append(self._runner.finish(self._launched.popleft()))
        return self.done
