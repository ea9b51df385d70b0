"""The engine in one process, without sockets: scheduler, pipeline and all layers in a loop whose parts are timed.

A step's parts are timed from outside, by wrapping the runner's methods. Computes on any device.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from engine.core.config import EngineConfig
from engine.core.limits import Limits
from engine.core.messages import Completion, Event, Generate, SamplingParams, TokenOutput
from engine.core.plan import ForwardMode, Microbatch
from engine.core.scheduler.scheduler import Scheduler
from engine.model.checkpoint import read_facts
from engine.model.runner import StageRunner
from engine.pipeline.local import LocalPipeline

__all__ = ["PARTS", "Engine", "Run", "StepTimes", "prompts_of"]

# The parts of a decode step, and their methods. A call into another part counts for that part.
_METHODS: Final = {
    "page tables, batch, copy to the device": ("_adopt", "_batch"),
    "layers: launched": ("model.forward",),
    "sampling: waits for the device, copy back": ("_sampler.sample",),
}
PLANNING: Final = "scheduler: replies, plan"
REST: Final = "runner around them"
PARTS: Final = (PLANNING, *_METHODS, REST)


class StepTimes(msgspec.Struct):
    """One microbatch's end to the next one's: wall and CPU seconds, seconds by part, computed tokens."""

    mode: ForwardMode
    tokens: int
    seconds: float
    cpu_s: float
    parts: dict[str, float]


class Run(msgspec.Struct):
    """The outcome of a batch: tokens by request, seconds until the last one, each step's times."""

    tokens: dict[str, list[int]]
    seconds: float
    steps: list[StepTimes]

    def decodes(self, rows: int) -> list[StepTimes]:
        """The steps that decode all rows, except the first, which may still wait for the prompts' work."""
        return [step for step in self.steps if step.mode is ForwardMode.DECODE and step.tokens == rows][1:]


class Engine:
    """One engine of all layers. ``early``: its runner launches microbatches that are planned ahead."""

    def __init__(self, config: EngineConfig, *, lean: bool = True, early: bool | None = None) -> None:
        limits = Limits.of(config, read_facts(config))
        self.runner = StageRunner(config, limits, 0, lean=lean, early=early)
        self.scheduler = Scheduler(limits)
        self._pipeline = LocalPipeline(self.runner)
        self._times: dict[str, float] = defaultdict(float)
        self._runs = 0
        for part, methods in _METHODS.items():
            for method in methods:
                _wrap(self.runner, method, part, self._times)

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Run:
        """Generate greedily. Raises RuntimeError for a request or a microbatch that fails."""
        self._runs += 1
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        said: dict[str, list[int]] = {f"{self._runs}.{number}": [] for number in range(len(prompts))}
        events: tuple[Event, ...] = tuple(
            Generate(rid=rid, prompt_ids=tuple(prompt), sampling=sampling)
            for rid, prompt in zip(said, prompts, strict=True)
        )
        steps: list[StepTimes] = []
        launched: deque[Microbatch] = deque()
        began = since = time.perf_counter()
        cpu_since = time.process_time()
        while True:
            step_began = time.perf_counter()
            result = self.scheduler.step(events, step_began)
            self._times[PLANNING] += time.perf_counter() - step_began
            for reply in result.replies:
                if not isinstance(reply, TokenOutput) or reply.error is not None:
                    raise RuntimeError(f"a request must give tokens, got {reply}")
                said[reply.rid] += reply.token_ids
            if result.microbatch is not None:
                launched.append(result.microbatch)
                self._pipeline.launch(result.microbatch)
            events = ()
            if result.again:
                continue
            completion = self._pipeline.next_completion(None)
            if completion is None:
                return Run(said, time.perf_counter() - began, steps)
            if not isinstance(completion, Completion) or completion.error is not None:
                raise RuntimeError(f"a microbatch must give tokens, got {completion}")
            microbatch, now, cpu_now = launched.popleft(), time.perf_counter(), time.process_time()
            parts = {part: self._times[part] for part in (PLANNING, *_METHODS)}
            parts[REST] = now - since - sum(parts.values())
            steps.append(StepTimes(microbatch.mode, microbatch.tokens, now - since, cpu_now - cpu_since, parts))
            since, cpu_since = now, cpu_now
            self._times.clear()
            events = (completion,)


def prompts_of(rows: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return random words, the same for each seed."""
    numbers = random.Random(seed)  # noqa: S311 - a workload, no secret
    return [[numbers.randrange(vocabulary) for _ in range(tokens)] for _ in range(rows)]


def _wrap(owner: Any, path: str, part: str, times: dict[str, float]) -> None:
    """Time a method of an object, or of an object that it holds."""
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
