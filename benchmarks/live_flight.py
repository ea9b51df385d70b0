"""A live vLLM or SGLang under load, recorded: the recorder's cost, and whether every plan of the replay is equal.

`.venv-vllm/bin/python -m benchmarks.live_flight [--engine sglang] [--clients 64] [--seconds 20]` starts a server of
checkpoint S on this machine's CPU, with a recorder. Clients load it: they send a request after each answer, and
sometimes hang up. Then the flight is replayed in this process. `--turns 30` replays nothing and measures the recorder's
cost: it is off and on in turn on one server, because two servers differ by more than it costs.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp
import msgspec
import psutil

from benchmarks.checkpoints import make_checkpoint, vocabulary_of
from scripted.core.adapters import adapter_named
from scripted.sdk.flight.frames import Planned
from scripted.sdk.flight.live import flight_of
from scripted.sdk.flight.reader import read_flight
from scripted.sdk.flight.recorder import FOLDER_VARIABLE, OPTIONS_VARIABLE
from scripted.sdk.flight.replay import ReplaysFlights, replay_flight

_SHAPE: Final = "S"
_CONTEXT: Final = 1024
_READY_S: Final = 900.0
_WARM_UP_S: Final = 3.0
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_NO_USAGE_STATS": "1",
}


class Turn(msgspec.Struct):
    """The measurements of one turn of one server."""

    seconds: float
    tokens: int = 0
    requests: int = 0
    aborts: int = 0
    # CPU time of the server and its processes, which other load disturbs less than wall time.
    cpu_s: dict[str, float] = {}
    gaps: list[float] = []

    @property
    def tokens_a_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_ms_a_token(self) -> float:
        return sum(self.cpu_s.values()) / self.tokens * 1e3

    def cpu_of(self, process: str) -> float:
        """Return the milliseconds of a process for each token."""
        return self.cpu_s.get(process, 0.0) / self.tokens * 1e3

    @property
    def p99_ms(self) -> float:
        return statistics.quantiles(self.gaps, n=100)[-1] * 1e3


class Process(Protocol):
    """A server's process, as subprocess has it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int:
        """Raises subprocess.TimeoutExpired."""
        ...


class Server:
    """A server in its own process group; ``folder`` receives its recorder's files, None without a recorder."""

    # The share of requests whose client hangs up.
    hangs_up = 0.15

    def __init__(
        self,
        engine: str,
        model: Path,
        port: int,
        folder: Path | None,
        more_words: Sequence[str] = (),
        more_environment: Mapping[str, str] | None = None,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._path = "/generate" if engine == "sglang" else "/v1/completions"
        environment = os.environ | ENVIRONMENT
        if folder is not None:
            environment |= {FOLDER_VARIABLE: str(folder), OPTIONS_VARIABLE: "steps=1000000 mib=1024"}
        environment |= more_environment or {}
        common = ["--host", "127.0.0.1", "--port", str(port)]
        words = _SGLANG if engine == "sglang" else _VLLM
        place = "--model-path" if engine == "sglang" else "--model"
        self.log = model.parent / f"{engine}-{port}.log"
        self.process = self.launch([*words, place, str(model), *common, *more_words], environment)

    def launch(self, words: Sequence[str], environment: Mapping[str, str]) -> Process:
        """Start the module and its arguments in a session of its own."""
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", *words]
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)  # noqa: S603

    def await_ready(self) -> None:
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server has ended: {self.log.read_text()[-3000:]}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()  # noqa: S310 - of this machine
            except (OSError, urllib.error.URLError):
                time.sleep(0.5)
            else:
                return
        raise RuntimeError(f"the server is not ready after {_READY_S:g} s: {self.log.read_text()[-3000:]}")

    def body(self, chance: random.Random) -> dict[str, Any]:
        prompt = [chance.randrange(2, vocabulary_of(_SHAPE) - 1) for _ in range(chance.randrange(20, 200))]
        new = chance.randrange(8, 96)
        if self._path == "/generate":
            return {"input_ids": prompt, "stream": True, "sampling_params": {"temperature": 0, "max_new_tokens": new}}
        return {"model": "S", "prompt": prompt, "stream": True, "temperature": 0, "max_tokens": new}

    async def ask(self, session: aiohttp.ClientSession, chance: random.Random, turn: Turn) -> None:
        most = chance.randrange(1, 20) if chance.random() < self.hangs_up else 1 << 30
        said, before = 0, 0.0
        async with session.post(self.url + self._path, json=self.body(chance)) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                if before:
                    turn.gaps.append(now - before)
                said, before = said + 1, now
                if said >= most:
                    turn.aborts += 1
                    break
        turn.tokens += said
        turn.requests += 1

    async def load(self, clients: int, seconds: float, seed: int) -> Turn:
        turn, until = Turn(seconds), time.monotonic() + seconds

        async def client(number: int) -> None:
            chance = random.Random(f"{seed}-{number}")  # noqa: S311 - a load that can be repeated
            while time.monotonic() < until:
                await self.ask(session, chance, turn)

        begun, cpu_s = time.monotonic(), self.cpu_s()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*[client(number) for number in range(clients)])
        turn.seconds = time.monotonic() - begun
        turn.cpu_s = {name: now - cpu_s.get(name, 0.0) for name, now in self.cpu_s().items()}
        return turn

    def cpu_s(self) -> dict[str, float]:
        """Return the process time of the server and its processes, by the names that they give themselves."""
        root = psutil.Process(self.process.pid)
        times: dict[str, float] = {}
        for one in (root, *root.children(recursive=True)):
            name, used = one.name() if one != root else "server", one.cpu_times()
            times[name] = times.get(name, 0.0) + used.user + used.system
        return times

    def stop(self) -> None:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, kind)
            except ProcessLookupError:
                break
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                continue


class ToggledServer(Server):
    """A server whose recorder can be turned off and on while it has no request."""

    def launch(self, words: Sequence[str], environment: Mapping[str, str]) -> Process:
        return super().launch(["benchmarks.toggled_flight", *words], environment)

    def toggle(self) -> None:
        """Turn the recorder off, or on again. Raises RuntimeError without a scheduler's process."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        schedulers = [child for child in children if child.name().startswith(_SCHEDULERS)]
        if not schedulers:
            raise RuntimeError(f"no process of {[child.name() for child in children]} is named {_SCHEDULERS}")
        for scheduler in schedulers:
            scheduler.send_signal(signal.SIGUSR1)


# The processes with a scheduler, by the names that they give themselves, cut to 15 characters.
_SCHEDULERS: Final = ("VLLM::EngineCor", "sglang::schedul")
_VLLM: Final = (
    *("vllm.entrypoints.openai.api_server", "--served-model-name", "S", "--enforce-eager", "--dtype", "float32"),
    *("--max-model-len", str(_CONTEXT), "--max-num-seqs", "48", "--num-gpu-blocks-override", "160"),
    *("--block-size", "32", "--disable-log-stats"),
)
_SGLANG: Final = (
    *("scripted_sglang.live.serve", "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--skip-server-warmup", "--random-seed", "0"),
    *("--max-total-tokens", "5120", "--max-running-requests", "48", "--context-length", str(_CONTEXT)),
    *("--chunked-prefill-size", "512", "--schedule-conservativeness", "0.3"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a turn (default: 20)")
    parser.add_argument("--turns", type=int, default=0, help="with and without the recorder (default: a recorded load)")
    parser.add_argument("--port", type=int, default=30480)
    parser.add_argument("--keep", type=Path, help="a folder for the flight; default: it is removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as there:
        folder = options.keep or Path(there) / "flights"
        model = Path(there) / _SHAPE
        make_checkpoint(model, "float32", _SHAPE)
        kind = ToggledServer if options.turns else Server
        server = kind(options.engine, model, options.port, folder)
        try:
            server.await_ready()
            if isinstance(server, ToggledServer):
                said = compared(*in_turns(server, options.clients, options.seconds, options.turns))
                # A recorder that an error ended would cost nothing.
                flight_of(folder)
            else:
                turn = asyncio.run(server.load(options.clients, options.seconds, 0))
                said = report(options, turn, flight_of(folder))
        finally:
            server.stop()
        sys.stdout.write(json.dumps(said, indent=1) + "\n")


def in_turns(server: ToggledServer, clients: int, seconds: float, count: int) -> tuple[list[Turn], list[Turn]]:
    """Load the server in pairs of turns, without and with the recorder; the order alternates. Return both lists."""
    turns: dict[bool, list[Turn]] = {False: [], True: []}
    asyncio.run(server.load(clients, _WARM_UP_S, 0))
    is_on = True
    for number in range(count):
        for wanted in (False, True) if number % 2 else (True, False):
            if wanted is not is_on:
                server.toggle()
                is_on = wanted
            turns[wanted].append(asyncio.run(server.load(clients, seconds, 2 * number + wanted + 1)))
    if not is_on:
        server.toggle()
    return turns[False], turns[True]


def compared(without: list[Turn], with_it: list[Turn]) -> dict[str, object]:
    """Return throughputs, CPU and gaps with and without a recorder."""
    pairs = list(zip(without, with_it, strict=True))

    def ratio(number_of: Callable[[Turn], float]) -> str:
        return _shown([number_of(b) / max(number_of(a), 1e-9) for a, b in pairs])

    return {
        "tokens a second without": [round(turn.tokens_a_second) for turn in without],
        "tokens a second with": [round(turn.tokens_a_second) for turn in with_it],
        "cpu ms a token without": [round(turn.cpu_ms_a_token, 2) for turn in without],
        "p99 gap without, ms": [round(turn.p99_ms) for turn in without],
        "with to without, median (95 % interval of the median)": {
            "throughput": ratio(lambda turn: turn.tokens_a_second),
            "p99 gap": ratio(lambda turn: turn.p99_ms),
            "cpu a token": ratio(lambda turn: turn.cpu_ms_a_token),
            **{
                f"cpu a token of {name}": ratio(functools.partial(Turn.cpu_of, process=name))
                for name, used in without[0].cpu_s.items()
                if used
            },
        },
    }


def _shown(values: list[float]) -> str:
    """Return the median with the order statistics that have it between them in 95 % of the cases."""
    ordered = sorted(values)
    aside = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
    return f"{statistics.median(ordered):.3f} ({ordered[aside]:.3f} to {ordered[-1 - aside]:.3f})"


def report(options: argparse.Namespace, turn: Turn, path: Path) -> dict[str, object]:
    """Return the load's measurements and the replay's verdict."""
    flight = read_flight(path)
    shares = [len(frame.shares) for frame in flight.frames if isinstance(frame, Planned) and frame.shares]
    began = time.process_time()
    adapter = adapter_named(options.engine)
    if not isinstance(adapter, ReplaysFlights):
        raise TypeError(f"the adapter {options.engine} must replay flights")
    outcome = replay_flight(adapter, flight)
    return {
        "engine": options.engine,
        "version": flight.header.version,
        "clients": options.clients,
        "seconds": round(turn.seconds),
        "requests": turn.requests,
        "hung up": turn.aborts,
        "tokens a second": round(turn.tokens_a_second),
        "plans": flight.plans,
        "requests a plan": round(statistics.mean(shares), 1),
        "MiB a million plans": round(path.stat().st_size / max(1, flight.plans) * 1e6 / (1 << 20)),
        "notes": flight.header.notes,
        "replay s": round(time.process_time() - began, 1),
        "first plan that differs": None if outcome.differs is None else outcome.differs._asdict(),
        "breaks": outcome.breaks,
    }


if __name__ == "__main__":
    main()
