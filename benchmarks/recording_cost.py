"""Cost of a recording: throughput of a whole server with and without a recording of every step.

Two servers of the embedded model get the same work in short alternating blocks, so that other load slows both down. The
median of the pairs' ratios has a 95 % interval from resampling the pairs. The time to record a single step is given
too, because other load disturbs it less.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

import httpx
import psutil
from scripted_lockstep.simulated.pipeline import SimulatedPipeline

from benchmarks.measurement import Measurement, median_interval
from benchmarks.processes import process_cpu_s
from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Event, Generate, SamplingParams
from engine.core.recording import RecordingFile, RecordingGate
from engine.core.scheduler import Gate, Scheduler, Step, StepResult
from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent

__all__ = ["measure"]

PAIRS: Final = 300
WARM_UP_BLOCKS: Final = 3
CLIENTS: Final = 16
TOKENS: Final = 48
PROMPT_TOKENS: Final = 64
ROUNDS: Final = 40
START_BOUND_S: Final = 120.0
END_BOUND_S: Final = 10.0
ANSWER_BOUND_S: Final = 120.0
COST_TARGET_PERCENT: Final = 2.0


def measure() -> Iterator[Measurement]:
    """Measure wall time and the scheduler's CPU time, on against off, and the recording's size."""
    with tempfile.TemporaryDirectory() as folder, PreloadedParent.start() as parent:
        record = Path(folder) / "run.rec"
        with (
            _MeasuredServer(parent, Path(folder), "off") as off,
            _MeasuredServer(parent, Path(folder), "on", record=record) as on,
        ):
            for _ in range(WARM_UP_BLOCKS):
                off.block()
                on.block()
            # The order alternates as well.
            pairs = [_pair(off, on) if number % 2 else _pair(on, off)[::-1] for number in range(PAIRS)]
        # Buffered data is written when the server ends.
        size, tokens = record.stat().st_size, on.tokens
    for name, which in (("throughput", 0), ("the scheduler's CPU time", 1)):
        ratios = [there[which] / here[which] for here, there in pairs]
        low, high = ((bound - 1) * 100 for bound in median_interval(ratios))
        yield Measurement(
            name=f"recording, cost in {name}",
            value=(statistics.median(ratios) - 1) * 100,
            unit="%",
            target=COST_TARGET_PERCENT,
            spread=f"{PAIRS} pairs of {CLIENTS} x {TOKENS} tokens, 95 % interval {low:+.1f} to {high:+.1f} %",
        )
    yield Measurement(
        name="recording, time added to a step",
        value=_added_us(),
        unit="us",
        spread=f"{CLIENTS} decodes a step, best of {ROUNDS} rounds of {TOKENS} steps",
    )
    yield Measurement(name="recording, size", value=size / tokens, unit="bytes a token", spread=f"{tokens} tokens")


class _MeasuredServer:
    """One server, its clients, and the times of its blocks."""

    def __init__(self, parent: PreloadedParent, folder: Path, name: str, *, record: Path | None = None) -> None:
        self.tokens = 0
        self._open = ExitStack()
        home = folder / name
        home.mkdir()
        settings = ServerSettings(port=0, record="" if record is None else str(record), radix_cache=False)
        self._process = parent.serve(settings, home, home / "log")
        serving = self._process.wait_ready(START_BOUND_S)
        self._scheduler = psutil.Process(serving.pids["scheduler"])
        self._http = self._open.enter_context(httpx.Client(base_url=serving.base_url, timeout=ANSWER_BOUND_S))
        self._crowd = self._open.enter_context(ThreadPoolExecutor(CLIENTS))

    def block(self) -> tuple[float, float]:
        """Return the wall seconds and the scheduler's CPU seconds of one block."""
        before, begun = process_cpu_s(self._scheduler), time.monotonic()
        list(self._crowd.map(self._ask, range(CLIENTS)))
        return time.monotonic() - begun, process_cpu_s(self._scheduler) - before

    def __enter__(self) -> _MeasuredServer:
        return self

    def __exit__(self, *failure: object) -> None:
        self._open.close()
        self._process.terminate()
        self._process.wait(END_BOUND_S)

    def _ask(self, number: int) -> None:
        body = {
            "input_ids": [32 + (number * 7 + place) % 90 for place in range(PROMPT_TOKENS)],
            "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
        }
        self._http.post("/generate", json=body).raise_for_status()
        self.tokens += TOKENS


class _Fed:
    """A gate with prepared steps, so that only the surrounding gate takes time."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = iter(steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        return None

    def next_step(self, previous: StepResult | None) -> Step | None:  # noqa: ARG002 - the protocol's
        """Return the next prepared step."""
        return next(self._steps, None)


def _added_us() -> float:
    """Return the microseconds per step that a recording gate adds to the gate inside it."""
    scheduler = Scheduler(Limits.of(EngineConfig(), EMBEDDED_FACTS))
    steps, results = _run_of_decodes(scheduler)
    with tempfile.TemporaryDirectory() as folder:
        bare = min(_feed_s(_Fed(steps), results) for _ in range(ROUNDS))
        path = Path(folder) / "run.rec"
        recorded = min(
            _feed_s(RecordingGate(_Fed(steps), scheduler, [RecordingFile(path)]), results) for _ in range(ROUNDS)
        )
    return (recorded - bare) / len(steps) * 1e6


def _run_of_decodes(scheduler: Scheduler) -> tuple[list[Step], list[StepResult]]:
    pipeline = SimulatedPipeline(scheduler.limits)
    sampling = SamplingParams(max_new_tokens=TOKENS, temperature=0)
    prompts = [tuple((number * 7 + place) % 90 for place in range(PROMPT_TOKENS)) for number in range(CLIENTS)]
    events: tuple[Event, ...] = tuple(
        Generate(rid=f"c{number}", prompt_ids=prompt, sampling=sampling) for number, prompt in enumerate(prompts)
    )
    steps: list[Step] = []
    results: list[StepResult] = []
    while not steps or not scheduler.is_fully_idle:
        steps.append(Step(events, 0.0))
        results.append(scheduler.step(events, 0.0))
        if (microbatch := results[-1].microbatch) is not None:
            pipeline.launch(microbatch)
        completion = pipeline.next_completion(0)
        events = () if completion is None else (completion,)
    return steps, results


def _feed_s(gate: Gate, results: Sequence[StepResult]) -> float:
    with gate:
        gate.next_step(None)
        begun = time.perf_counter()
        for result in results:
            gate.next_step(result)
        return time.perf_counter() - begun


def _pair(first: _MeasuredServer, second: _MeasuredServer) -> tuple[tuple[float, float], tuple[float, float]]:
    return first.block(), second.block()
