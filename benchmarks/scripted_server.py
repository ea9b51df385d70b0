"""A scripted server's time to its first script, cold and from a preloaded parent, and its scripts per second.

A cold start is a whole ``scripted run`` in a new process, from its first import to the script's result.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

import msgspec
from scripted_lockstep.demo.race import flush_race
from scripted_lockstep.tiers.server.runner import EngineServer

from benchmarks.measurement import Measurement
from engine.server.launch.preload import PreloadedParent
from scripted.script.decorator import spec_of

__all__ = ["measure"]

COLD_RUNS: Final = 3
WARM_RUNS: Final = 5
SCRIPTS: Final = 60
COLD_TARGET_S: Final = 8.0
WARM_TARGET_S: Final = 1.0
SCRIPTS_TARGET_A_SECOND: Final = 20.0
COLD_TIMEOUT_S: Final = 120.0
SPEC: Final = f"{spec_of(flush_race).file}::flush_race"


def measure() -> Iterator[Measurement]:
    """Measure cold start, warm start and scripts per second, all on four stages."""
    yield Measurement(
        name="first script result of a cold `scripted run`, four stages",
        value=min(_cold_s() for _ in range(COLD_RUNS)),
        unit="s",
        target=COLD_TARGET_S,
        spread=f"best of {COLD_RUNS}",
    )
    with PreloadedParent.start() as parent:
        # The first server waits for the parent's imports; it does not count.
        _warm_s(parent)
        warm = [_warm_s(parent) for _ in range(WARM_RUNS)]
        yield Measurement(
            name="first script result from a preloaded parent, four stages",
            value=statistics.median(warm),
            unit="s",
            target=WARM_TARGET_S,
            spread=f"median of {WARM_RUNS}, {min(warm):.2f} to {max(warm):.2f}",
        )
        rate, slowest_ms = _scripts_a_second(parent)
    yield Measurement(
        name="scripts on a warm server, reset included, four stages",
        value=rate,
        unit="scripts/s",
        target=SCRIPTS_TARGET_A_SECOND,
        at_least=True,
        spread=f"{SCRIPTS} in a row, the slowest took {slowest_ms:.0f} ms",
    )


def _cold_s() -> float:
    started = time.monotonic()
    subprocess.run(  # noqa: S603 - our own interpreter and command
        [sys.executable, "-m", "scripted", "run", SPEC, "--tier", "server"],
        check=True,
        capture_output=True,
        timeout=COLD_TIMEOUT_S,
    )
    return time.monotonic() - started


def _warm_s(parent: PreloadedParent) -> float:
    test = spec_of(flush_race)
    started = time.monotonic()
    with EngineServer.start(test.config, parent=parent) as server:
        server.run(test.script, options=test.options)
        return time.monotonic() - started


def _scripts_a_second(parent: PreloadedParent) -> tuple[float, float]:
    """Measure scripts per second, and the longest script in milliseconds."""
    test = spec_of(flush_race)
    options = msgspec.structs.replace(test.options, record=False)
    with EngineServer.start(test.config, parent=parent) as server:
        server.run(test.script, options=options)
        times = []
        for _ in range(SCRIPTS):
            started = time.monotonic()
            server.run(test.script, options=options)
            times.append(time.monotonic() - started)
    return len(times) / sum(times), max(times) * 1000
