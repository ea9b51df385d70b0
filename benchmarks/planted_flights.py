"""Bugs planted in vLLM's or SGLang's scheduler, hit under load by chance, recorded, replayed and shrunk.

`.venv-vllm/bin/python -m benchmarks.planted_flights [NAME ...]` prints a row for each bug of
benchmarks/planted_flights.toml, `.venv-sglang/bin/python -m benchmarks.planted_flights --adapter sglang` of
benchmarks/planted_flights_sglang.toml. The load is 64 clients with aborts and flushes, in process: the engine's
scheduler with a simulated model that checks nothing, as a server's does.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from scripted.core.adapters import adapter_named
from scripted.core.mutant import Mutant, read_mutants
from scripted.core.violation import Violation
from scripted.sdk import Abort, Add, FlushCache
from scripted.sdk.as_schedule import schedule_of_flight
from scripted.sdk.flight.reader import read_flight
from scripted.sdk.flight.recorder import FOLDER_VARIABLE, OPTIONS_VARIABLE, FlightRecorder
from scripted.sdk.flight.replay import replay_flight
from scripted.sdk.messages import Event, Share
from scripted.sdk.pipeline import SimulatedRunner
from scripted.search.shrinking import shrink
from scripted.search.windows import cut_to_window

CLIENTS: Final = 64
MOST_NEW: Final = 20
STEPS: Final = 400
SEEDS: Final = 6
# Consecutive empty plans after which a server's recorder would report a stall.
_STALL_PLANS: Final = 40


class Engine(NamedTuple):
    """An engine under load: its machine, its recorder, and the loads' settings."""

    name: str
    machine: Callable[[Any], Any]
    attach: Callable[[Any], FlightRecorder | None]
    settings: tuple[Any, ...]
    planted: str

    @property
    def adapter(self) -> Any:
        return adapter_named(self.name)

    def bugs(self) -> Sequence[Mutant]:
        return read_mutants(Path(__file__).with_name(self.planted))


def vllm() -> Engine:
    from scripted_vllm.config import VllmSettings
    from scripted_vllm.flight.hook import attach
    from scripted_vllm.machine import VllmMachine

    synchronous = VllmSettings(num_gpu_blocks=48, max_num_seqs=16, max_model_len=64, max_num_batched_tokens=64)
    settings = (synchronous, msgspec.structs.replace(synchronous, async_scheduling=True))
    return Engine("vllm", VllmMachine, lambda machine: attach(machine.scheduler), settings, "planted_flights.toml")


def sglang() -> Engine:
    adapter_named("sglang")  # it replaces modules that are not installed
    from scripted_sglang.config import SglangSettings
    from scripted_sglang.flight.hook import attach
    from scripted_sglang.machine import SglangMachine

    sizes: dict[str, Any] = {"max_total_tokens": 192, "max_running_requests": 8, "context_length": 64}
    sizes |= {"chunked_prefill_size": 16, "schedule_conservativeness": 0.1}
    settings = (SglangSettings(**sizes), SglangSettings(**sizes, disable_overlap_schedule=True))

    def attached_inside(machine: SglangMachine) -> FlightRecorder | None:
        with machine.inside():
            return attach(machine.scheduler)

    return Engine("sglang", SglangMachine, attached_inside, settings, "planted_flights_sglang.toml")


ENGINES: Final = {"vllm": vllm, "sglang": sglang}


class _Careless(SimulatedRunner):
    """A runner without checks: a model computes with any block contents."""

    def _check_reads(self, share: Share, block_ids: Any, begin: int, end: int) -> None:
        pass


class Load:
    """Clients that send a request after each answer, hang up, and sometimes flush the cache."""

    def __init__(
        self, engine: Engine, settings: Any, seed: int, clients: int = CLIENTS, most_new: int = MOST_NEW
    ) -> None:
        self.machine = engine.machine(settings)
        limits, can = engine.adapter.limits_of(settings)
        self._runner = _Careless(limits, can)
        self._chance = random.Random(seed)  # noqa: S311 - a load that can be repeated
        self._free = clients
        self._most_new = most_new
        self._live: list[str] = []
        self._requests = 0
        self.empty = 0

    @property
    def stands(self) -> bool:
        return self.empty >= _STALL_PLANS and bool(self._live)

    def step(self, *, arrivals: bool = True) -> None:
        """Run one iteration of an engine's loop. Raises the scheduler's exceptions."""
        events: list[Event] = []
        result = self._runner.next_completion(None)
        if result is not None:
            events.append(result)
        events += self._clients(arrivals)
        stepped = self.machine.step(events, 0.0)
        self._runner.follow(events, stepped)
        for reply in stepped.replies:
            if getattr(reply, "finish_reason", None) is not None and reply.rid in self._live:
                self._live.remove(reply.rid)
                self._free += 1
        if stepped.microbatch is not None:
            self._runner.launch(stepped.microbatch)
        self.empty = 0 if stepped.microbatch is not None or result is not None else self.empty + 1

    def _clients(self, arrivals: bool) -> Iterator[Event]:
        chance = self._chance
        while arrivals and self._free and chance.random() < 0.5:
            self._free -= 1
            self._requests += 1
            # Prompts made of the same parts in any order, like templates and documents.
            parts = [range(40 + 9 * one, 48 + 9 * one) for one in chance.choices(range(6), k=chance.randrange(4))]
            prompt = [token for part in parts for token in part]
            prompt += [chance.randrange(33, 126) for _ in range(chance.randrange(1, 12))]
            request = Add(
                rid=f"r{self._requests}", prompt_ids=tuple(prompt), max_new_tokens=chance.randrange(1, self._most_new)
            )
            self._live.append(request.rid)
            self._runner.begin(request)
            yield request
        if self._live and chance.random() < 0.06:
            yield Abort(rid=chance.choice(self._live))
        if chance.random() < 0.02:
            yield FlushCache(call_id=f"flush-{self._requests}-{chance.random()}")


def recorded(engine: Engine, settings: Any, seed: int, folder: Path) -> Path | None:
    """Run a load with a recorder to a crash, a stall or its end; return the recorder's file."""
    load = Load(engine, settings, seed)
    recorder = attached(engine, load, folder)
    try:
        for turn in range(2 * STEPS):
            load.step(arrivals=turn < STEPS)
            if load.stands:
                return recorder.leave("stall")
    except Exception:  # noqa: BLE001 - the recorder has written what the scheduler died of
        return recorder.written[-1] if recorder.written else recorder.leave("call")
    finally:
        recorder.close()
    return recorder.leave("call")


def attached(engine: Engine, load: Load, folder: Path) -> FlightRecorder:
    """Record a load from now on, in one ring."""
    os.environ |= {FOLDER_VARIABLE: str(folder), OPTIONS_VARIABLE: "steps=100000 stall_s=0"}
    recorder = engine.attach(load.machine)
    del os.environ[FOLDER_VARIABLE], os.environ[OPTIONS_VARIABLE]
    assert recorder is not None, "the environment asks for one"
    return recorder


def row_of(engine: Engine, mutant: Mutant, folder: Path) -> str:
    """Plant a bug, record, replay and shrink; return a row of the table."""
    runs = [(settings, seed) for seed in range(SEEDS) for settings in engine.settings]
    with mutant.switched_on():
        for number, (settings, seed) in enumerate(runs, 1):
            path = recorded(engine, settings, seed, folder)
            if path is None:
                continue
            flight, begun = read_flight(path), time.process_time()
            outcome = replay_flight(engine.adapter, flight)
            path.unlink()
            if outcome.breaks is None:
                continue
            replayed_s, begun = time.process_time() - begun, time.process_time()
            as_recorded = "yes" if outcome.differs is None else f"to step {outcome.differs.plan}"
            schedule = schedule_of_flight(engine.adapter, settings, flight, outcome).schedule
            small = shrink(cut_to_window(schedule))
            shrunk_s = time.process_time() - begun
            events = f"{len(small.schedule.placed)}" if small.fails else "not as a schedule"
            why = "" if flight.end is None else flight.end.why
            return (
                f"| `{mutant.name}`: {mutant.bug} | {number} | {why} | {as_recorded} | {_short(outcome.breaks)} | "
                f"{len(schedule.placed)} | {replayed_s:.1f} | {events} | {shrunk_s:.1f} |"
            )
    return f"| `{mutant.name}`: {mutant.bug} | - | not hit in {len(runs)} loads | | | | | | |"


def _short(text: str) -> str:
    return text.split("; ")[0].replace("|", "/")[:140]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="planted bugs; default: all")
    parser.add_argument("--adapter", choices=tuple(ENGINES), default="vllm")
    options = parser.parse_args()
    engine = ENGINES[options.adapter]()
    sys.stdout.write("| bug | loads | written at | replayed | the promise | events | s | shrunk to | s |" + "\n")
    sys.stdout.write("| --- | ---: | --- | --- | --- | ---: | ---: | ---: | ---: |" + "\n")
    with tempfile.TemporaryDirectory() as folder:
        for mutant in engine.bugs():
            if not options.names or mutant.name in options.names:
                try:
                    sys.stdout.write(row_of(engine, mutant, Path(folder)) + "\n")
                except Violation as exc:
                    sys.stdout.write(f"| `{mutant.name}` | | | | {exc} | | | | |" + "\n")


if __name__ == "__main__":
    main()
