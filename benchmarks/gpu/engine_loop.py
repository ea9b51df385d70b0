"""The engine in one process, without sockets: scheduler and runner in a loop whose parts are timed.

A step's parts are timed from outside, by wrapping the runner's methods. Computes on any device.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import msgspec

from benchmarks.gpu.setting import Setting
from engine.config import EngineConfig
from engine.limits import Limits
from engine.messages import Completion, Event, Generate, SamplingParams, TokenOutput
from engine.model.checkpoint import read_facts
from engine.model.runner import StageRunner
from engine.plan import ForwardMode
from engine.scheduler.scheduler import Scheduler

__all__ = ["PARTS", "Engine", "Run", "StepTimes"]

# The parts of a decode step, and the methods that do them. What a part calls of another one counts for that one.
_METHODS: Final = {
    "page tables, batch, copy to the device": ("_adopt", "_batch"),
    "layers: launched": ("model.forward",),
    "sampling: waits for the device, copy back": ("_sampler.sample",),
}
PLANNING: Final = "scheduler: replies, plan"
REST: Final = "runner around them"
PARTS: Final = (PLANNING, *_METHODS, REST)


class StepTimes(msgspec.Struct):
    """Wall time of one step in seconds, its parts, and how many tokens it computed."""

    mode: ForwardMode
    tokens: int
    seconds: float
    parts: dict[str, float]


class Run(msgspec.Struct):
    """What a batch of requests gave: tokens by request, seconds until the last one, each step's times."""

    tokens: dict[str, list[int]]
    seconds: float
    steps: list[StepTimes]

    @property
    def count(self) -> int:
        """Tokens that were generated."""
        return sum(map(len, self.tokens.values()))

    def decodes(self, rows: int) -> list[StepTimes]:
        """The steps that decode all rows, without the first: it may still wait for what the prompts left."""
        return [step for step in self.steps if step.mode is ForwardMode.DECODE and step.tokens == rows][1:]


class Engine:
    """One engine of all layers. ``values`` are further fields of its configuration."""

    def __init__(self, setting: Setting, *, lean: bool = True, **values: Any) -> None:
        given: dict[str, Any] = {"chunked_prefill_size": setting.context_tokens, "radix_cache": False}
        self._setting = setting
        config = EngineConfig(**(setting.engine_values | given | values))
        self.limits = Limits.of(config, read_facts(config))
        self.runner = StageRunner(config, self.limits, 0, lean=lean)
        self._scheduler = Scheduler(self.limits)
        self._times: dict[str, float] = defaultdict(float)
        self._runs = 0
        for part, methods in _METHODS.items():
            for method in methods:
                _wrap(self.runner, method, part, self._times)

    def prompts(self, rows: int, tokens: int, seed: int) -> list[list[int]]:
        """Random words, the same for each seed."""
        numbers = random.Random(seed)  # noqa: S311 - a workload, no secret
        return [[numbers.randrange(self._setting.vocabulary) for _ in range(tokens)] for _ in range(rows)]

    def run(self, prompts: list[list[int]], new_tokens: int, between: Callable[[], object] | None = None) -> Run:
        """Generate greedily; ``between`` is called after every step. Raises RuntimeError for a request that fails."""
        self._runs += 1
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        rids = [f"{self._runs}.{number}" for number in range(len(prompts))]
        events: tuple[Event, ...] = tuple(
            Generate(rid=rid, prompt_ids=tuple(prompt), sampling=sampling)
            for rid, prompt in zip(rids, prompts, strict=True)
        )
        said: dict[str, list[int]] = {rid: [] for rid in rids}
        steps: list[StepTimes] = []
        began = time.perf_counter()
        while True:
            step_began = time.perf_counter()
            self._times.clear()
            result = self._scheduler.step(events, step_began)
            planned = time.perf_counter()
            for reply in result.replies:
                if not isinstance(reply, TokenOutput) or reply.error is not None:
                    raise RuntimeError(f"a request must give tokens, got {reply}")
                said[reply.rid] += reply.token_ids
            if result.microbatch is None:
                if not result.again and self._scheduler.is_fully_idle:
                    return Run(said, time.perf_counter() - began, steps)
                events = ()
                continue
            completion = self.runner.forward(result.microbatch)
            ended = time.perf_counter()
            if not isinstance(completion, Completion) or completion.error is not None:
                raise RuntimeError(f"a microbatch must give tokens, got {completion}")
            parts = {PLANNING: planned - step_began} | {part: self._times[part] for part in _METHODS}
            parts[REST] = ended - step_began - sum(parts.values())
            microbatch = result.microbatch
            steps.append(StepTimes(microbatch.mode, microbatch.tokens, ended - step_began, parts))
            events = (completion,)
            if between is not None:
                between()


def _wrap(owner: Any, path: str, part: str, times: dict[str, float]) -> None:
    """Time a method of an object, or of one that it holds."""
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    function = getattr(owner, name)

    def timed(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            times[part] += time.perf_counter() - began

    setattr(owner, name, timed)
