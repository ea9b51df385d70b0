"""Bugs planted in a live vLLM's scheduler, hit under load, recorded, replayed without a model, shrunk to tests.

`.venv-vllm/bin/python -m benchmarks.live_planted [NAME ...] [--rows FILE] [--keep FOLDER]` forks a vLLM server of
checkpoint S for each bug of benchmarks/planted_flights.toml, and prints a row for each. A row counts only if the
recording process itself has found the bug in its scheduler.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import inspect
import multiprocessing
import os
import pkgutil
import random
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, Final, NamedTuple

import aiohttp
import psutil

from benchmarks.checkpoints import make_checkpoint
from benchmarks.live_flight import ENVIRONMENT, Server, Turn
from scripted.api import write_test
from scripted.core.adapters import adapter_named
from scripted.core.mutant import Mutant, read_mutants
from scripted.core.schedule import Schedule
from scripted.sdk.as_schedule import schedule_of_flight
from scripted.sdk.flight.live import flight_of
from scripted.sdk.flight.reader import Flight, read_flight
from scripted.sdk.flight.recorder import OPTIONS_VARIABLE, SUFFIX
from scripted.sdk.flight.replay import FlightOutcome, replay_flight
from scripted.search.shrinking import forms_of, shrink
from scripted.search.windows import cut_to_window

_SHAPE: Final = "S"
_OPTIONS: Final = "steps=1000000 mib=1024 stall_s=10"
# Memory and batches that its clients fill.
_WORDS: Final = ("--num-gpu-blocks-override", "48", "--max-num-batched-tokens", "128", "--max-num-seqs", "16")
_ANSWERED_S: Final = 60.0
_LOOK_S: Final = 0.2
# Of process time; schedules of a server have many events of large numbers.
_SHRINK_S: Final = 20.0
_BLOCK: Final = 32
_PARTS: Final = 6
_LONGEST_TEXT: Final = 100
_REQUESTS: Final = re.compile(r"cmpl-[-0-9a-f]+(?:, cmpl-[-0-9a-f]+)*")
_FORK: Final = multiprocessing.get_context("fork")
_COLUMNS: Final = (
    *("bug", "load s", "written at", "plans", "replayed", "without the bug", "the promise", "events", "shrunk to"),
    *("replay s", "shrink s", "test s", "s to the test", "CPU s to the test", "the test"),
)


def bugs() -> dict[str, Mutant]:
    return {bug.name: bug for bug in read_mutants(Path(__file__).with_name("planted_flights.toml"))}


class _Forked:
    """A forked process in its own session."""

    def __init__(self, target: Callable[..., None], *given: object) -> None:
        self._process = _FORK.Process(target=target, args=given)
        self._process.start()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None, "it has been started"
        return pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process.name), timeout or 0.0)
        return self._process.exitcode


def _serve(words: Sequence[str], environment: Mapping[str, str], log: Path, bug: Mutant, witnesses: Path) -> None:
    """Run vLLM's own server with the bug in it. Each process that it forks reports whether it has the bug."""
    os.setsid()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    # Only its CPU platform asks for new processes, which would import vLLM again and lack the bug.
    importlib.import_module("vllm.envs").environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    healthy = _code_of(bug)
    os.register_at_fork(after_in_child=lambda: _witness(bug, healthy, witnesses))
    sys.argv = list(words)
    with bug.switched_on():
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _code_of(bug: Mutant) -> CodeType:
    function: Any = inspect.unwrap(pkgutil.resolve_name(bug.target))
    code: CodeType = function.__code__
    return code


def _witness(bug: Mutant, healthy: CodeType, witnesses: Path) -> None:
    if _code_of(bug) is not healthy:
        (witnesses / f"{bug.name}-{os.getpid()}").touch()


class Planted(Server):
    """A server with a bug in its scheduler. Its clients' prompts share blocks behind different beginnings.

    It is forked, as its engine is, so that vLLM is imported once.
    """

    hangs_up = 0.5

    def __init__(self, bug: Mutant, there: Path, port: int) -> None:
        self._bug = bug
        self._flights = there / bug.name
        self._witnesses = there / "witnesses"
        self._witnesses.mkdir(exist_ok=True)
        # The second is the route that flushes the prefix cache.
        environment = {OPTIONS_VARIABLE: _OPTIONS, "VLLM_SERVER_DEV_MODE": "1"}
        super().__init__("vllm", there / _SHAPE, port, self._flights, _WORDS, environment)

    def launch(self, words: Sequence[str], environment: Mapping[str, str]) -> _Forked:
        return _Forked(_serve, words, environment, self.log, self._bug, self._witnesses)

    def body(self, chance: random.Random) -> dict[str, Any]:
        body = super().body(chance)
        parts = [range(40 + 9 * one, 40 + 9 * one + _BLOCK) for one in chance.choices(range(_PARTS), k=2)]
        body["prompt"] = [token for part in parts for token in part] + body["prompt"]
        return body

    def flight(self) -> Path:
        """Return the first flight, or ask for one. A dying server writes its ring once more, without its crash."""
        written = sorted(self._flights.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        return written[0] if written else flight_of(self._flights)

    def has_planted(self, flight: Path) -> bool:
        """Whether the process that wrote the flight found the bug in its scheduler."""
        return (self._witnesses / f"{self._bug.name}-{flight.stem.split('-')[1]}").exists()

    def stop(self) -> None:
        """End the engine's processes too, which leave the session of the server."""
        super().stop()
        for witness in self._witnesses.glob(f"{self._bug.name}-*"):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(witness.name.rpartition("-")[2]))
                if process.create_time() <= witness.stat().st_mtime:
                    process.kill()

    def load_to_the_end(self, clients: int, seconds: float) -> float:
        """Load the server until its recorder writes or everything requested in time is answered; return the seconds."""
        begun = time.monotonic()
        asyncio.run(self._load(clients, begun + seconds))
        return time.monotonic() - begun

    @property
    def _has_ended(self) -> bool:
        return self.process.poll() is not None or any(self._flights.glob(f"*{SUFFIX}"))

    async def _load(self, clients: int, until: float) -> None:
        turn = Turn(0)

        async def client(number: int) -> None:
            chance = random.Random(number)  # noqa: S311 - a load that can be repeated
            # A server that dies closes its connections.
            with contextlib.suppress(aiohttp.ClientError, OSError):
                while time.monotonic() < until:
                    await self.ask(session, chance, turn)

        async def flush() -> None:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                while time.monotonic() < until:
                    await asyncio.sleep(1)
                    (await session.post(self.url + "/reset_prefix_cache")).release()

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            tasks = [asyncio.create_task(one) for one in (flush(), *map(client, range(clients)))]
            # A request that never ends makes a stall once the others are answered.
            deadline = until + _ANSWERED_S
            while time.monotonic() < deadline and not self._has_ended and not all(task.done() for task in tasks):
                await asyncio.sleep(_LOOK_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


# -- from a flight to a test --


class Diagnosis(NamedTuple):
    """The cells of a row from the replay on."""

    replayed: str
    without: str = ""
    promise: str = "none breaks"
    events: int | str = ""
    left: int | str = ""
    replay_s: float | str = ""
    shrink_s: float | str = ""
    test_s: float | str = ""
    all_s: float | str = ""
    cpu_s: float | str = ""
    test: str = "none"


def _judge(bug: Mutant, path: Path, loaded_s: float, rows: Path, keep: Path) -> None:
    """Replay, shrink and write the test of a flight; append the row."""
    flight, before = read_flight(path), _cpu_s()
    diagnosis = diagnose(bug, flight, keep / f"test_{bug.name.replace('-', '_')}.py")
    diagnosis = diagnosis._replace(cpu_s=_cpu_s() - before)
    why = "" if flight.end is None else flight.end.why
    cells = [f"`{bug.name}`: {bug.bug}", loaded_s, why, flight.plans, *diagnosis]
    cells = [f"{one:.1f}" if isinstance(one, float) else one for one in cells]
    _append(rows, f"| {' | '.join(map(str, cells))} |")


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of the ones that it has waited for."""
    return sum(os.times()[:4])


def diagnose(bug: Mutant, flight: Flight, test: Path) -> Diagnosis:
    """Replay a flight with the bug and without it, shrink it, and write the test."""
    adapter: Any = adapter_named("vllm")
    control = replay_flight(adapter, flight)
    begun = time.monotonic()
    with bug.switched_on():
        outcome = replay_flight(adapter, flight)
    diagnosis = Diagnosis(
        "yes" if outcome.differs is None else f"to step {outcome.differs.plan}",
        _control_of(control),
        replay_s=time.monotonic() - begun,
    )
    if outcome.breaks is None:
        return diagnosis
    return _shrunk(bug, flight, outcome, diagnosis._replace(promise=_promise_of(outcome.breaks)), test)


def _shrunk(bug: Mutant, flight: Flight, outcome: FlightOutcome, diagnosis: Diagnosis, test: Path) -> Diagnosis:
    """Cut and shrink a flight's run, and write the test."""
    adapter: Any = adapter_named("vllm")
    config = adapter.read_config({name: str(value) for name, value in flight.header.config.items()})
    begun = time.monotonic()
    with bug.switched_on():
        schedule = schedule_of_flight(adapter, config, flight, outcome).schedule
        small = shrink(cut_to_window(schedule), budget_s=_SHRINK_S)
    shrunk = time.monotonic()
    diagnosis = diagnosis._replace(events=len(schedule.placed), shrink_s=shrunk - begun, left="not as a schedule")
    if not small.fails:
        return diagnosis
    # The writer switches the bug on and off itself: the test is red with it and green without.
    adapter.mutants = {**adapter.mutants, bug.name: bug}
    forms = _Noted(forms_of(small.schedule, bug.name, budget_s=_SHRINK_S))
    written = write_test(forms, name=bug.name, mutant=bug.name)
    sys.stderr.write(f"{bug.name}: {forms.last}\n{bug.name}: {'; '.join(written.said)}\n")
    if written.text is not None:
        test.write_text(written.text, encoding="ascii")
    now = time.monotonic()
    return diagnosis._replace(
        left=len(forms.last.placed),
        test_s=now - shrunk,
        all_s=float(diagnosis.replay_s or 0) + now - begun,
        test="none" if written.text is None else "red with the bug, green without",
    )


class _Noted:
    """Schedules that remember the ``last`` one requested."""

    last: Schedule

    def __init__(self, forms: Iterator[Schedule]) -> None:
        self._forms = forms

    def __iter__(self) -> Iterator[Schedule]:
        for form in self._forms:
            self.last = form
            yield form


def _promise_of(breaks: str) -> str:
    """Return the first sentence without its details; vLLM's request names are long."""
    first = breaks.partition("; ")[0].replace("|", "/")
    return ": ".join(_REQUESTS.sub("R", first).split(": ")[:2])[:_LONGEST_TEXT].strip(": ")


def _control_of(outcome: FlightOutcome) -> str:
    if outcome.differs is not None:
        return f"differs at step {outcome.differs.plan}"
    return "the same" if outcome.breaks is None else "the same promise"


# -- all --


def _append(rows: Path, text: str) -> None:
    with rows.open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def _miss(rows: Path, bug: Mutant, why: str) -> None:
    text = why[-_LONGEST_TEXT:].replace("|", "/").replace("\n", " ")
    _append(rows, f"| `{bug.name}`: {bug.bug} | | missed: {text} |{' |' * (len(_COLUMNS) - 3)}")


def hit(bug: Mutant, there: Path, options: argparse.Namespace) -> _Forked | None:
    """Serve with the bug and load to the end; return the process that judges the flight, None if there is none."""
    server = Planted(bug, there, options.port)
    try:
        server.await_ready()
        sys.stderr.write(f"{bug.name}: ready at {time.monotonic():.0f}\n")
        loaded_s = server.load_to_the_end(options.clients, options.seconds)
        path = server.flight()
    except Exception as exc:  # noqa: BLE001 - the other bugs still have their turns
        _miss(options.rows, bug, repr(exc))
        return None
    finally:
        server.stop()
    if not server.has_planted(path):
        _miss(options.rows, bug, f"the process of {path.name} has no bug in its scheduler")
        return None
    kept = options.keep / f"{bug.name}{SUFFIX}"
    kept.write_bytes(path.read_bytes())
    return _Forked(_judge, bug, kept, loaded_s, options.rows, options.keep)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="planted bugs; default: all")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=90.0, help="of a load that meets no end (default: 90)")
    parser.add_argument("--port", type=int, default=30490)
    parser.add_argument("--rows", type=Path, help="a file to append the rows to as they come")
    parser.add_argument("--keep", type=Path, help="a folder for flights and tests; default: they are removed")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    # Every server and judge is forked from a process that has imported everything and done nothing.
    importlib.import_module("vllm.entrypoints.openai.api_server")
    importlib.import_module("vllm.v1.engine.core")
    importlib.import_module("vllm.v1.core.sched.async_scheduler")
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        options.rows = options.rows or there / "rows"
        options.keep = options.keep or there / "kept"
        options.keep.mkdir(parents=True, exist_ok=True)
        _Forked(make_checkpoint, there / _SHAPE, "float32", _SHAPE).wait()
        _append(options.rows, f"| {' | '.join(_COLUMNS)} |")
        _append(options.rows, f"|{' --- |' * len(_COLUMNS)}")
        known = bugs()
        judges = {name: hit(known[name], there, options) for name in options.names or known}
        for name, judge in judges.items():
            if judge is not None and judge.wait():
                _miss(options.rows, known[name], f"the replay ended with status {judge.poll()}")
        sys.stdout.write(options.rows.read_text())


if __name__ == "__main__":
    main()
