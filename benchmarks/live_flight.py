"""A live vLLM or SGLang under load, recorded: the recorder's cost, and whether every plan of the replay is equal.

`.venv-vllm/bin/python -m benchmarks.live_flight [--engine sglang] [--clients 64] [--seconds 20] [--turns 6]` starts two
servers of checkpoint S on this machine's CPU, one of them with a recorder. Clients load them in turns: they send a
request after each answer, and sometimes hang up. Then the flight is replayed in this process. With `--turns 0` there is
one server, with a recorder, and one load. With `--control` neither server records: the comparison is the noise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp
import msgspec
import psutil

from benchmarks.checkpoints import make_checkpoint, vocabulary_of
from scripted.core.adapters import adapter_named
from scripted.sdk.flight.live import flight_of
from scripted.sdk.flight.reader import read_flight
from scripted.sdk.flight.recorder import FOLDER_VARIABLE, OPTIONS_VARIABLE
from scripted.sdk.flight.replay import replay_flight

_SHAPE: Final = "S"
_CONTEXT: Final = 1024
_READY_S: Final = 900.0
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
    parser.add_argument("--turns", type=int, default=6, help="of each server (default: 6)")
    parser.add_argument("--port", type=int, default=30480)
    parser.add_argument("--control", action="store_true", help="neither server records")
    parser.add_argument("--keep", type=Path, help="a folder for the flight; default: it is removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as there:
        folder = options.keep or Path(there) / "flights"
        model = Path(there) / _SHAPE
        make_checkpoint(model, "float32", _SHAPE)
        recorders: tuple[Path | None, ...] = (None, folder) if options.turns else (folder,)
        if options.control:
            recorders = (None, None)
        servers = [Server(options.engine, model, options.port + number, one) for number, one in enumerate(recorders)]
        try:
            for server in servers:
                server.await_ready()
            turns = in_turns(servers, options.clients, options.seconds, options.turns)
            flight = None if options.control else flight_of(folder)
        finally:
            for server in servers:
                server.stop()
        if flight is None:
            sys.stdout.write(json.dumps(compared(*turns), indent=1) + "\n")
        else:
            report(options, turns, flight)


def in_turns(servers: list[Server], clients: int, seconds: float, count: int) -> list[list[Turn]]:
    """Load the servers in turns; return the turns of each, without the first one if there are others."""
    turns: list[list[Turn]] = [[] for _ in servers]
    for number in range(count + 1):
        long = seconds if number or not count else 3.0
        for place in range(len(servers))[:: 1 if number % 2 else -1]:
            turns[place].append(asyncio.run(servers[place].load(clients, long, number)))
    return [of_server[1:] or of_server for of_server in turns]


def compared(without: list[Turn], with_it: list[Turn]) -> dict[str, object]:
    """Return throughputs and gaps with and without a recorder."""
    pairs = list(zip(without, with_it, strict=True))
    by_process = {
        name: round(statistics.median([b.cpu_of(name) / max(a.cpu_of(name), 1e-9) for a, b in pairs]), 3)
        for name in without[0].cpu_s
    }
    return {
        "tokens a second without": [round(turn.tokens_a_second) for turn in without],
        "tokens a second with": [round(turn.tokens_a_second) for turn in with_it],
        "throughput, median of ratios": round(
            statistics.median([b.tokens_a_second / a.tokens_a_second for a, b in pairs]), 3
        ),
        "cpu ms a token without": [round(turn.cpu_ms_a_token, 2) for turn in without],
        "cpu ms a token, median of ratios": round(
            statistics.median([b.cpu_ms_a_token / a.cpu_ms_a_token for a, b in pairs]), 3
        ),
        "cpu ms a token of each process, without": {
            name: round(statistics.median([turn.cpu_of(name) for turn in without]), 3) for name in by_process
        },
        "cpu ms a token of each process, median of ratios": by_process,
        "p99 gap without, ms": [round(turn.p99_ms) for turn in without],
        "p99 gap, median of ratios": round(statistics.median([b.p99_ms / a.p99_ms for a, b in pairs]), 3),
    }


def report(options: argparse.Namespace, turns: list[list[Turn]], path: Path) -> None:
    """Print the turns' measurements and the replay's verdict."""
    flight = read_flight(path)
    shares = [len(frame.shares) for frame in flight.frames if getattr(frame, "shares", ())]
    began = time.process_time()
    adapter: Any = adapter_named(options.engine)
    outcome = replay_flight(adapter, flight)
    said = {
        "engine": options.engine,
        "version": flight.header.version,
        "clients": options.clients,
        "seconds of a turn": options.seconds,
        "turns": options.turns,
        "requests": sum([turn.requests for turn in turns[-1]]),
        "hung up": sum([turn.aborts for turn in turns[-1]]),
        "tokens a second": round(statistics.median([turn.tokens_a_second for turn in turns[-1]])),
        **(compared(*turns) if len(turns) > 1 else {}),
        "plans": flight.plans,
        "requests a plan": round(statistics.mean(shares), 1),
        "MiB a million plans": round(path.stat().st_size / max(1, flight.plans) * 1e6 / (1 << 20)),
        "notes": flight.header.notes,
        "replay s": round(time.process_time() - began, 1),
        "first plan that differs": None if outcome.differs is None else outcome.differs._asdict(),
        "breaks": outcome.breaks,
    }
    sys.stdout.write(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
