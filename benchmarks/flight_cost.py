"""The cost of vLLM's flight recorder: microseconds of a step and of each running request, bytes in memory and on disk.

`.venv-vllm/bin/python -m benchmarks.flight_cost [RUNNING ...]` prints a row for each number of running requests. The
calls of a load are recorded once and repeated without the scheduler's own work, with and without a recorder's wrappers,
so that the difference is only the recorder's. `--steps` prints the time of whole steps instead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from scripted_vllm.config import VllmSettings

from benchmarks.planted_flights import Engine, Load, attached, vllm
from scripted.sdk.flight.recorder import FlightRecorder

_RUNNING: Final = (16, 64, 128)
_STEPS: Final = 600
_ROUNDS: Final = 15
# Answers of the usual length: a new request begins once in some hundred steps.
_MOST_NEW: Final = 300
_MILLION: Final = 1_000_000
_MIB: Final = 1 << 20
_NOTED: Final = ("add_request", "schedule", "update_from_output", "finish_requests", "reset_prefix_cache")
_Call = tuple[str, tuple[Any, ...], dict[str, Any], Any]


def load_of(engine: Engine, running: int, seed: int = 0) -> Load:
    settings = VllmSettings(
        num_gpu_blocks=40 * running, max_num_seqs=running, max_model_len=512, max_num_batched_tokens=2048
    )
    return Load(engine, settings, seed, clients=running, most_new=_MOST_NEW)


class _Noted:
    """A load's calls from outside the scheduler, with their results. Calling it repeats them without a scheduler."""

    def __init__(self, running: int) -> None:
        self.load = load_of(vllm(), running)
        self._calls: list[_Call] = []
        self._is_inside = False
        scheduler = self.scheduler = self.load.machine.scheduler
        own = {name: getattr(scheduler, name) for name in _NOTED}
        for name in _NOTED:
            setattr(scheduler, name, self._noting(name, own[name]))
        for _ in range(_STEPS):
            self.load.step()
        self._answers: Iterator[Any] = iter(())
        for name in _NOTED:
            setattr(scheduler, name, lambda *_, **__: next(self._answers))

    def _noting(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return own(*args, **kwargs)
            self._is_inside = True
            returned = own(*args, **kwargs)
            self._is_inside = False
            # An abort's names come as a generator, and the scheduler trims a result.
            self._calls.append((name, args, kwargs, returned))
            return returned

        return call

    def __call__(self) -> float:
        """Make all calls; return the process time in seconds."""
        self._answers = iter([returned for *_, returned in self._calls])
        calls = [(getattr(self.scheduler, name), args, kwargs) for name, args, kwargs, _ in self._calls]
        begun = time.process_time()
        for call, args, kwargs in calls:
            call(*args, **kwargs)
        return time.process_time() - begun

    @property
    def shares(self) -> int:
        return sum([len(plan.num_scheduled_tokens) for name, *_, plan in self._calls if name == "schedule"])


def row_of(running: int, folder: Path) -> str:
    """Return the row for a load with this many clients."""
    noted = _Noted(running)
    bare = min([noted() for _ in range(_ROUNDS)])
    with_it = []
    for _ in range(_ROUNDS):
        own = dict(vars(noted.scheduler))
        recorder = attached(vllm(), noted.load, folder)
        with_it.append(noted())
        sizes = _sizes(recorder)
        recorder.close()
        vars(noted.scheduler).clear()
        vars(noted.scheduler).update(own)
    cost_us = (min(with_it) - bare) / _STEPS * _MILLION
    shares = noted.shares / _STEPS
    memory, disk = (size / _STEPS for size in sizes)
    return (
        f"| {running} | {shares:.0f} | {cost_us:.1f} | {cost_us / shares:.2f} | {memory:.0f} | "
        f"{disk * _MILLION / _MIB:,.0f} |"
    )


def _sizes(recorder: FlightRecorder) -> tuple[int, int]:
    """Return the bytes of a ring in memory and in its file."""
    memory = sum([part.bytes for part in recorder._parts])  # noqa: SLF001 - not public
    path = recorder.leave("call")
    assert path is not None, recorder.failure
    size = path.stat().st_size
    path.unlink()
    return memory, size


def whole_steps(running: int, folder: Path) -> str:
    """Return the ratio of whole steps' times with and without a recorder: the median over alternating pairs."""
    ratios, times = [], []
    for seed in range(_ROUNDS):
        pair = []
        for is_on in (False, True):
            load = load_of(vllm(), running, seed)
            recorder = attached(vllm(), load, folder) if is_on else None
            begun = time.process_time()
            for _ in range(_STEPS):
                load.step()
            pair.append(time.process_time() - begun)
            if recorder is not None:
                recorder.close()
        ratios.append(pair[1] / pair[0])
        times.append(pair[0] / _STEPS * _MILLION)
    return f"| {running} | {statistics.median(times):.0f} | {statistics.median(ratios):.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "running", nargs="*", type=int, metavar="RUNNING", help="clients that always have a request open"
    )
    parser.add_argument(
        "--steps", action="store_true", help="time whole steps instead, with a model that computes nothing"
    )
    options = parser.parse_args()
    head = "| clients | a step in us | with a recorder |\n| ---: | ---: | ---: |\n"
    if not options.steps:
        head = (
            "| clients | requests a step | us a step | us a request | bytes a step in memory | MiB a million steps |\n"
            "| ---: | ---: | ---: | ---: | ---: | ---: |\n"
        )
    sys.stdout.write(head)
    with tempfile.TemporaryDirectory() as folder:
        for running in options.running or _RUNNING:
            row = (whole_steps if options.steps else row_of)(running, Path(folder))
            sys.stdout.write(row + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
