"""This server beside others on one checkpoint: throughput at 1, 8 and 32 clients, first tokens, start, idleness.

All servers run at the same time, idle but for the one that is asked; they take turns, round by round, and `engine
bench`'s client asks them. Peers come from environments of their own; transformers' own loop is beside them without a
server. Run: ``python -m benchmarks.peers --help``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx
import msgspec
import psutil
import torch
import transformers
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.live_loop import process_cpu_s
from benchmarks.model_step import VOCABULARY, make_checkpoint
from engine.bench.measures import Summary
from engine.bench.plan import BenchPlan
from engine.bench.run import run_bench
from engine.bench.workload import WORDS

__all__ = ["Peer", "PeerResult", "main"]

CLIENTS: Final = (1, 8, 32)
REQUESTS_A_CLIENT: Final = 2
WARMUP_REQUESTS: Final = 2
PROMPT_WORDS: Final = 127
OUTPUT_TOKENS: Final = 64
LONG_PROMPT_WORDS: Final = 511
LONG_REQUESTS: Final = 3
CONTEXT_TOKENS: Final = 2048
START_TIMEOUT_S: Final = 300.0
LOOK_INTERVAL_S: Final = 0.1
LOOK_TIMEOUT_S: Final = 2.0
IDLE_S: Final = 3.0
LOG_LINES: Final = 40
# All run at once: none may take what is free of the machine's memory for itself.
OWN_KV_TOKENS: Final = 131_072
VLLM_KV_GIB: Final = 2
END_TIMEOUT_S: Final = 20.0
# The module has no main of its own.
_TRANSFORMERS: Final = "from transformers.cli.transformers import main; main()"
RESULTS: Final = Path("out/peers.json")


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A server to start: its name, its command without the port, its environment, whether it takes ``ignore_eos``."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = {}
    ignore_eos: bool = True


class PeerResult(msgspec.Struct, kw_only=True):
    """What was measured of one server. Lists have a value a round."""

    name: str
    start_s: float = 0.0
    idle_cpu_percent: float = 0.0
    tokens_per_s: dict[int, list[float]] = {}
    ttft_ms: dict[str, list[float]] = {}
    failed: int = 0


class Running:
    """A started server and what has been measured of it so far."""

    def __init__(self, peer: Peer, folder: Path, log: Path) -> None:
        self.peer, self._folder = peer, folder
        self.result = PeerResult(name=peer.name)
        self._port = _free_port()
        began = time.monotonic()
        with log.open("wb") as output:
            command = [*peer.command, "--port", str(self._port)]
            self._process = subprocess.Popen(  # noqa: S603 - the user's servers
                command, stdout=output, stderr=output, env={**os.environ, **peer.environment}
            )
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() - began > START_TIMEOUT_S:
                self.stop()
                lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                raise SystemExit(f"{peer.name} did not start:\n" + "\n".join(lines))
            time.sleep(LOOK_INTERVAL_S)
        self.result.start_s = time.monotonic() - began

    def ask(self, *, clients: int, requests: int, words: int, tokens: int, seed: int, warmup: int = 0) -> Summary:
        """Load the server; failures are counted."""
        plan = BenchPlan(
            url=self._url,
            model=str(self._folder),
            clients=clients,
            requests=requests,
            warmup=warmup,
            input_words=words,
            output_tokens=tokens,
            ignore_eos=self.peer.ignore_eos,
            seed=seed,
        )
        summary = asyncio.run(run_bench(plan)).summary
        self.result.failed += summary.failed
        return summary

    def throughput(self, clients: int, seed: int) -> None:
        """Tokens a second of ``clients`` clients."""
        summary = self.ask(
            clients=clients,
            requests=clients * REQUESTS_A_CLIENT,
            words=PROMPT_WORDS,
            tokens=OUTPUT_TOKENS,
            seed=seed,
            warmup=WARMUP_REQUESTS,
        )
        self.result.tokens_per_s.setdefault(clients, []).append(summary.output_tokens_per_s)

    def first_tokens(self, seed: int) -> None:
        """The first token of a long prompt, then of the same prompt again."""
        for name in ("cold", "again"):
            summary = self.ask(clients=1, requests=LONG_REQUESTS, words=LONG_PROMPT_WORDS, tokens=2, seed=seed)
            if summary.ttft_ms is not None:
                self.result.ttft_ms.setdefault(name, []).append(summary.ttft_ms.p50)

    def idle(self) -> None:
        """CPU of all its processes while no request is alive."""
        before = self._cpu_s()
        time.sleep(IDLE_S)
        self.result.idle_cpu_percent = (self._cpu_s() - before) / IDLE_S * 100

    def stop(self) -> None:
        """End the server and what it has started."""
        if self._process.poll() is not None:
            return
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for child in psutil.wait_procs(family, timeout=END_TIMEOUT_S)[1]:
            child.kill()

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self._url}/health", timeout=LOOK_TIMEOUT_S).is_success
        except httpx.TransportError:
            return False

    def _cpu_s(self) -> float:
        parent = psutil.Process(self._process.pid)
        return sum(process_cpu_s(process) for process in [parent, *parent.children(recursive=True)])


class TransformersGenerate:
    """``transformers.generate`` in this process, a static batch, no server: one request a client, all at once."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        self.result = PeerResult(name="transformers.generate, no server")

    def throughput(self, clients: int, seed: int) -> None:
        """Tokens a second of one batch."""
        seconds = self._seconds(clients, PROMPT_WORDS + 1, OUTPUT_TOKENS, seed)
        self.result.tokens_per_s.setdefault(clients, []).append(clients * OUTPUT_TOKENS / seconds)

    def first_tokens(self, seed: int) -> None:
        """One token of a long prompt; it keeps no prefixes."""
        for name in ("cold", "again"):
            times = [self._seconds(1, LONG_PROMPT_WORDS + 1, 1, seed) * 1e3 for _ in range(LONG_REQUESTS)]
            self.result.ttft_ms.setdefault(name, []).append(statistics.median(times))

    def _seconds(self, rows: int, prompt: int, tokens: int, seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, VOCABULARY - 2, (rows, prompt), generator=generator)
        began = time.monotonic()
        self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        return time.monotonic() - began


def main() -> None:
    """Start what was named, measure it in turns, print the table and who is ahead, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--vllm-python", type=Path, help="the python of an environment with vLLM for CPUs")
    parser.add_argument("--transformers-python", type=Path, help="the python of one with transformers[serving]")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the numbers go")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch) / "model"
        make_checkpoint(folder, arguments.dtype)
        _save_tokenizer(folder)
        running = []
        for peer in _peers(folder, arguments):
            console.print(f"starting: {peer.name}")
            running.append(stack.enter_context(_started(peer, folder, Path(scratch))))
        for server in running:
            server.idle()
        asked = [*running, TransformersGenerate(folder)]
        results = [one.result for one in asked]
        for _ in _rounds(asked, arguments.rounds, console):
            # After every round: a run that is broken off keeps what it has.
            _write(results, arguments.json)
    console.print(_table(results, arguments.dtype))
    for line in _ahead(results):
        console.print(line)


def _peers(folder: Path, arguments: argparse.Namespace) -> Iterator[Peer]:
    own: tuple[str, ...] = (
        sys.executable,
        "-m",
        "engine",
        "serve",
        "--model",
        str(folder),
        "--max-total-tokens",
        str(OWN_KV_TOKENS),
    )
    if importlib.util.find_spec("openvino") is not None:
        yield Peer(name="lockstep, OpenVINO", command=(*own, "--backend", "openvino"))
    yield Peer(name="lockstep, torch", command=(*own, "--backend", "torch"))
    yield Peer(name="lockstep, torch --compile", command=(*own, "--backend", "torch", "--compile"))
    if arguments.vllm_python is not None:
        server = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", arguments.dtype)
        limits = ("--max-model-len", str(CONTEXT_TOKENS))
        space = {"VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB)}
        yield Peer(name="vLLM", command=(str(arguments.vllm_python), *server, *limits), environment=space)
    if arguments.transformers_python is not None:
        server = ("-c", _TRANSFORMERS, "serve", str(folder), "--continuous-batching")
        yield Peer(name="transformers serve", command=(str(arguments.transformers_python), *server), ignore_eos=False)


@contextmanager
def _started(peer: Peer, folder: Path, scratch: Path) -> Iterator[Running]:
    server = Running(peer, folder, scratch / f"{peer.name}.log")
    try:
        yield server
    finally:
        server.stop()


def _rounds(asked: Sequence[Running | TransformersGenerate], rounds: int, console: Console) -> Iterator[int]:
    """All in turns; yields after each round. What one round asks, no other round has asked before."""
    for number in range(rounds):
        console.print(f"round {number + 1} of {rounds}")
        for clients in CLIENTS:
            for server in asked:
                server.throughput(clients, seed=1000 * number + clients)
        for server in asked:
            server.first_tokens(seed=1000 * number + 999)
        yield number


def _write(results: Sequence[PeerResult], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")


def _save_tokenizer(folder: Path) -> None:
    """A word is a token, so that all servers count alike; ids without a word of the workload have one of their own."""
    unknown, end = "<unk>", "<eos>"
    words = [*WORDS, *[f"w{number}" for number in range(VOCABULARY - len(WORDS) - 2)], unknown, end]
    known = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=unknown)
    tokenizer = Tokenizer(known)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, eos_token=end)
    saved.save_pretrained(folder)


def _table(results: Sequence[PeerResult], dtype: str) -> Table:
    table = Table(title=f"{dtype}, {PROMPT_WORDS + 1} prompt and {OUTPUT_TOKENS} new tokens, medians of rounds")
    counts = [f"{clients} clients, tok/s" for clients in CLIENTS]
    for column in ("server", *counts, "512 cold, ms", "512 again, ms", "start, s", "idle CPU, %", "failed"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for result in results:
        rates = [f"{statistics.median(result.tokens_per_s[clients]):,.0f}" for clients in CLIENTS]
        first = [f"{statistics.median(result.ttft_ms[name]):.0f}" for name in ("cold", "again")]
        served = [f"{result.start_s:.1f}", f"{result.idle_cpu_percent:.1f}", str(result.failed)]
        table.add_row(result.name, *rates, *first, *(served if result.start_s else ["", "", ""]))
    return table


def _ahead(results: Sequence[PeerResult]) -> Iterator[str]:
    """A line for each number in which another is better than the first, which is what 'auto' takes here."""
    own, *others = results
    for other in others:
        for clients in CLIENTS:
            theirs, ours = (statistics.median(result.tokens_per_s[clients]) for result in (other, own))
            if theirs > ours:
                yield f"{other.name} is ahead at {clients} clients: {theirs / ours:.2f} times the tokens a second"
        for name in ("cold", "again"):
            theirs, ours = (statistics.median(result.ttft_ms[name]) for result in (other, own))
            if theirs < ours:
                yield f"{other.name} is ahead at a 512-token prompt, {name}: {theirs / ours:.2f} of the time"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
