"""How the CPU time of a scheduler's step grows with waiting and running requests, cached pages and contexts.

Each point has its own process, with its imports frozen for the garbage collector and without digests, as a live
server has them. Only ``Scheduler.step`` is timed. Run: `python -m benchmarks.growth [--page FILE]`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import random
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table
from scripted_lockstep.simulated.pipeline import SimulatedPipeline

from benchmarks.machine import Machine
from benchmarks.measurement import output_file, percentile
from engine.core.config import EngineConfig
from engine.core.instruments import SilentDigests
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Event, Generate, SamplingParams
from engine.core.scheduler import Scheduler
from lockstep.interruption import interruptible

_STEPS: Final = 2_000
_PAGE_SIZE: Final = 16
_RUNNING: Final = 8
_LONG_ANSWER: Final = 30_000
_SHORT_ANSWER: Final = 8
_SHORT_PROMPT: Final = 32
_CACHED_PROMPT: Final = 2_048
_CHUNK: Final = 2_048
_CONTEXT: Final = 65_536
# More than the prompts of any start take.
_PROMPT_STEPS: Final = 300
_COLUMNS: Final = ("dimension", "size", "p50, us", "p99, us", "longest, us", "collector in it, us")
_PROCESSES: Final = multiprocessing.get_context("spawn")


class GrowthPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The CPU times of the steps at one size, in microseconds.

    ``collector_us`` is the garbage collector's share of the longest step.
    """

    dimension: str
    size: int
    p50_us: float
    p99_us: float
    longest_us: float
    collector_us: float


class _Collections:
    """Adds up the CPU time of the garbage collector, in nanoseconds."""

    def __init__(self) -> None:
        self.ns = self._began = 0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time_ns()
        else:
            self.ns += time.thread_time_ns() - self._began


class _Engine:
    """A scheduler over the simulated pipeline, stepped without waiting."""

    def __init__(self, config: EngineConfig) -> None:
        facts = msgspec.structs.replace(EMBEDDED_FACTS, context_length=_CONTEXT)
        self.scheduler = Scheduler(Limits.of(config, facts))
        self.scheduler.digests = SilentDigests()
        self._pipeline = SimulatedPipeline(self.scheduler.limits)
        self._collections = _Collections()

    def step(self, events: Sequence[Event] = ()) -> tuple[int, int]:
        """Return the CPU time of the step and the collector's share of it, in nanoseconds."""
        completion = self._pipeline.next_completion(0)
        arrived = tuple(events) if completion is None else (completion, *events)
        collected, began = self._collections.ns, time.thread_time_ns()
        result = self.scheduler.step(arrived, 0.0)
        spent = time.thread_time_ns() - began
        if result.microbatch is not None:
            self._pipeline.launch(result.microbatch)
        return spent, self._collections.ns - collected

    def finish(self) -> None:
        while not self.scheduler.is_fully_idle:
            self.step()


def _config(**changed: Any) -> EngineConfig:
    base: dict[str, Any] = {
        "page_size": _PAGE_SIZE,
        "chunked_prefill_size": _CHUNK,
        "max_running_requests": _RUNNING,
        "max_total_tokens": 65_536,
        "max_queued_requests": 20_000,
    }
    return EngineConfig(**(base | changed))


def _request(number: int, prompt: Sequence[int], answer: int) -> Generate:
    sampling = SamplingParams(max_new_tokens=answer, temperature=0, ignore_eos=True)
    return Generate(rid=str(number), prompt_ids=tuple(prompt), sampling=sampling)


def _prompts(seed: int, tokens: int) -> Iterator[list[int]]:
    drawn = random.Random(seed)  # noqa: S311 - repeatable prompts
    while True:
        yield drawn.choices(range(256), k=tokens)


def _waiting(size: int) -> tuple[_Engine, Iterator[Sequence[Event]]]:
    """Let eight short requests run and ``size`` wait, and start one for each that has ended."""
    engine = _Engine(_config())
    prompts = _prompts(size, _SHORT_PROMPT)
    arrivals = itertools.count()
    engine.step([_request(next(arrivals), next(prompts), _SHORT_ANSWER) for _ in range(size + _RUNNING)])

    def events() -> Iterator[Sequence[Event]]:
        while True:
            missing = size - len(engine.scheduler.books.waiting)
            yield [_request(next(arrivals), next(prompts), _SHORT_ANSWER) for _ in range(missing)]

    return engine, events()


def _running(size: int) -> tuple[_Engine, Iterator[Sequence[Event]]]:
    """Let ``size`` requests decode."""
    engine = _Engine(_config(max_running_requests=size, max_total_tokens=size * 4_096))
    prompts = _prompts(size, _SHORT_PROMPT)
    engine.step([_request(number, next(prompts), _LONG_ANSWER) for number in range(size)])
    return engine, itertools.repeat(())


def _cached(size: int) -> tuple[_Engine, Iterator[Sequence[Event]]]:
    """Cache ``size`` pages of ended prompts, then start requests one after another that share half a prompt."""
    engine = _Engine(_config(max_total_tokens=(size + 4_096) * _PAGE_SIZE))
    prompts = _prompts(size, _CACHED_PROMPT)
    count = size * _PAGE_SIZE // _CACHED_PROMPT
    kept = [next(prompts) for _ in range(count)]
    for number, prompt in enumerate(kept):
        engine.step([_request(number, prompt, 1)])
        engine.finish()
    drawn = random.Random(size)  # noqa: S311 - repeatable prompts
    arrivals = itertools.count(count)

    def events() -> Iterator[Sequence[Event]]:
        while True:
            half = drawn.choice(kept)[: _CACHED_PROMPT // 2]
            yield [_request(next(arrivals), half + drawn.choices(range(256), k=_SHORT_PROMPT), 1)]

    return engine, events()


def _contexts(size: int) -> tuple[_Engine, Iterator[Sequence[Event]]]:
    """Let eight requests decode after prompts of ``size`` tokens."""
    engine = _Engine(_config(max_total_tokens=_RUNNING * (size + 8_192)))
    prompts = _prompts(size, size)
    engine.step([_request(number, next(prompts), _LONG_ANSWER) for number in range(_RUNNING)])
    return engine, itertools.repeat(())


_DIMENSIONS: Final[dict[str, tuple[Callable[[int], tuple[_Engine, Iterator[Sequence[Event]]]], tuple[int, ...]]]] = {
    "waiting requests": (_waiting, (10, 100, 1_000, 10_000)),
    "running requests": (_running, (1, 8, 64, 512, 1_024)),
    "cached pages": (_cached, (1_024, 10_240, 102_400, 1_024_000)),
    "tokens of each context": (_contexts, (512, 4_096, 16_384, 32_768)),
}


def _freeze() -> None:
    gc.collect()
    gc.freeze()


def measure_point(dimension: str, size: int) -> GrowthPoint:
    """Measure 2,000 steps at one size, once every initial prompt has been computed."""
    engine, events = _DIMENSIONS[dimension][0](size)
    for _ in range(_PROMPT_STEPS):
        engine.step(next(events))
    times = [engine.step(next(events)) for _ in range(_STEPS)]
    longest, collector = max(times)
    spent = [ns / 1000 for ns, _ in times]
    return GrowthPoint(
        dimension=dimension,
        size=size,
        p50_us=percentile(spent, 50),
        p99_us=percentile(spent, 99),
        longest_us=longest / 1000,
        collector_us=collector / 1000,
    )


def _markdown(points: Sequence[GrowthPoint]) -> Iterator[str]:
    yield "| " + " | ".join(_COLUMNS) + " |"
    yield "| --- |" + " ---: |" * (len(_COLUMNS) - 1)
    for point in points:
        yield "| " + " | ".join(_row(point)) + " |"


def _row(point: GrowthPoint) -> list[str]:
    times = (point.p50_us, point.p99_us, point.longest_us, point.collector_us)
    return [point.dimension, f"{point.size:,}", *(f"{value:,.0f}" for value in times)]


def _plots(points: Sequence[GrowthPoint]) -> Iterator[str]:
    """Draw medians and 99th percentiles over the sizes, a plot for each dimension, as Mermaid draws them."""
    for dimension in dict.fromkeys(point.dimension for point in points):
        drawn = [point for point in points if point.dimension == dimension]
        yield from ("", "```mermaid", "xychart-beta", f'    title "{dimension}: p50 and p99 of a step in us"')
        sizes = ", ".join([f'"{point.size:,}"' for point in drawn])
        yield f"    x-axis [{sizes}]"
        yield f"    line [{', '.join(f'{point.p50_us:.0f}' for point in drawn)}]"
        yield f"    line [{', '.join(f'{point.p99_us:.0f}' for point in drawn)}]"
        yield "```"


def _page(points: Sequence[GrowthPoint], machine: Machine) -> str:
    text = (
        f"CPU time of one step of the scheduler, {_STEPS:,} steps a row, pages of {_PAGE_SIZE} tokens, on "
        f"{machine}. `python -m benchmarks.growth` makes this page again."
    )
    lines = ["# How a step grows", "", *textwrap.wrap(text, 100), "", *_markdown(points), *_plots(points), ""]
    return "\n".join(lines)


def main() -> None:
    """Measure all points one after another; print the table and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--page", type=output_file, help="the page to write")
    parser.add_argument("dimensions", nargs="*", choices=[*_DIMENSIONS, []], help="unset: all")
    arguments = parser.parse_args()
    asked = [(name, size) for name in arguments.dimensions or _DIMENSIONS for size in _DIMENSIONS[name][1]]
    points = []
    table = Table(*_COLUMNS)
    with _PROCESSES.Pool(1, _freeze, maxtasksperchild=1) as pool:
        for name, size in asked:
            points.append(pool.apply(measure_point, (name, size)))
            table.add_row(*_row(points[-1]))
    Console().print(table)
    if arguments.page is not None:
        page: Path = arguments.page
        page.write_text(_page(points, Machine.here()))


if __name__ == "__main__":
    with interruptible("benchmarks.growth"):
        main()
