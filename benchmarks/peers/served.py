"""Peers that serve over HTTP: starts, loads with the client of ``engine bench``, observes and stops them.

All run at the same time, and only one of them has load.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.peers.results import FIRST_TOKENS, PeerResult
from benchmarks.processes import Family, free_port
from engine.cli.bench.goodput import find_goodput
from engine.cli.bench.plan import Arrivals, BenchPlan
from engine.cli.bench.results import Summary
from engine.cli.bench.run import run_bench

__all__ = ["Served", "ServedPeer", "Workload", "started"]

PROMPT_WORDS: Final = 127
LONG_PROMPT_WORDS: Final = 511
LONG_REQUESTS: Final = 3
_START_TIMEOUT_S: Final = 900.0
_MEMORY_INTERVAL_S: Final = 0.5
_IDLE_S: Final = 3.0
_WARM_UP_CLIENTS: Final = 8
_WARM_UP_TOKENS: Final = 8
_FIRST_WORDS: Final = 8
_CONVERSATIONS: Final = 4
_TURNS: Final = 4
_WARM_UP_SEED: Final = 7_777
# With many clients a load is long enough without second requests. With fewer than four a client at 32, the last ones
# run in small batches for a good part of the time, where requests that started apart end apart.
_MOST_REQUESTS: Final = 128
# A server that cannot keep the bounds at a quarter of the rate of one client keeps them nowhere.
_MOST_HALVINGS: Final = 2


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens of a request, and the number of requests that each client sends in sequence.

    Many clients send one each.
    """

    output_tokens: int
    requests_a_client: int


class Workload(Load, frozen=True, kw_only=True):
    """The load, and what is measured with arrivals.

    ``equal_requests`` requests arrive at a rate that every server keeps up with. Goodput is searched with the bounds
    ``slo_first_ms`` and ``slo_gap_ms``.
    """

    equal_requests: int
    slo_first_ms: float
    slo_gap_ms: float


class ServedPeer(msgspec.Struct, frozen=True, kw_only=True):
    """A server to start: its name, its command without the port, its environment, whether it takes ``ignore_eos``.

    With ``keeps`` it keeps data for its next start, which is measured too. ``working_folder`` is its working folder.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = {}
    ignore_eos: bool = True
    keeps: bool = False
    working_folder: Path | None = None


class Served:
    """A server that answers, and its measurements so far."""

    def __init__(self, peer: ServedPeer, folder: Path, log: Path) -> None:
        self.name = peer.name
        self._peer, self._folder = peer, folder
        self.result = PeerResult(name=peer.name)
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._memory: list[float] = []
        began = time.monotonic()
        command = [*peer.command, "--port", str(port)]
        self.family = Family(command, environment=peer.environment, log=log, cwd=peer.working_folder)
        try:
            with self.family.watched(_MEMORY_INTERVAL_S) as memory:
                self.family.wait_for(self._url, _START_TIMEOUT_S)
                self.result.start_s = time.monotonic() - began
                self._ask(clients=1, requests=1, words=_FIRST_WORDS, tokens=1, seed=_WARM_UP_SEED)
                self.result.first_answer_s = time.monotonic() - began
        except BaseException:
            self.family.stop()
            raise
        self.result.start_cpu_s = self.family.cpu_s()
        self.result.load_mib = max(memory)

    def warm_up(self) -> None:
        """Send it several requests at once."""
        self._ask(
            clients=_WARM_UP_CLIENTS,
            requests=_WARM_UP_CLIENTS,
            words=PROMPT_WORDS,
            tokens=_WARM_UP_TOKENS,
            seed=_WARM_UP_SEED,
        )

    def throughput(self, clients: int, work: Load, seed: int) -> None:
        """Measure tokens a second of ``clients`` clients, their tails, and the server's CPU for each token."""
        before = self.family.cpu_s()
        summary = self._ask(
            clients=clients,
            requests=max(clients, min(clients * work.requests_a_client, _MOST_REQUESTS)),
            words=PROMPT_WORDS,
            tokens=work.output_tokens,
            seed=seed,
        )
        cpu_ms = (self.family.cpu_s() - before) * 1e3
        self.result.tokens_per_s.setdefault(clients, []).append(summary.output_tokens_per_s)
        self.result.cpu_ms_per_token.setdefault(clients, []).append(cpu_ms / max(1, summary.output_tokens))
        if summary.ttft_ms is not None:
            self.result.ttft_p99_ms.setdefault(clients, []).append(summary.ttft_ms.p99)
        if summary.itl_ms is not None:
            self.result.gap_p99_ms.setdefault(clients, []).append(summary.itl_ms.p99)
            self.result.longest_gap_ms.setdefault(clients, []).append(summary.itl_ms.max)
        self._note_memory()

    def first_tokens(self, seed: int) -> None:
        """Measure the first token of a long prompt, then of the same prompt again."""
        for kind in FIRST_TOKENS:
            summary = self._ask(clients=1, requests=LONG_REQUESTS, words=LONG_PROMPT_WORDS, tokens=2, seed=seed)
            if summary.ttft_ms is not None:
                self.result.ttft_ms.setdefault(kind, []).append(summary.ttft_ms.p50)
        self._note_memory()

    def conversations(self, work: Load, seed: int) -> None:
        """Measure the first token of the later turns of conversations, each with all turns before it as its prompt."""
        summary = self._ask(
            clients=_CONVERSATIONS,
            requests=_CONVERSATIONS * _TURNS,
            words=PROMPT_WORDS,
            tokens=work.output_tokens,
            seed=seed,
            turns=_TURNS,
        )
        if summary.later_ttft_ms is not None:
            self.result.later_ttft_ms.append(summary.later_ttft_ms.p50)

    def equal_rate(self, work: Workload, rate_per_s: float, seed: int) -> None:
        """Measure tails under Poisson arrivals."""
        plan = self._plan(requests=work.equal_requests, words=PROMPT_WORDS, tokens=work.output_tokens, seed=seed)
        arrivals = msgspec.structs.replace(plan, arrivals=Arrivals.POISSON, rate_per_s=rate_per_s, clients=None)
        summary = self._run(arrivals)
        if summary.ttft_ms is not None:
            self.result.equal_ttft_p99_ms.append(summary.ttft_ms.p99)
        if summary.itl_ms is not None:
            self.result.equal_gap_p99_ms.append(summary.itl_ms.p99)

    def goodput(self, work: Workload, seed: int) -> None:
        """Measure the highest rate of Poisson arrivals at which 99 % of the requests keep the workload's bounds.

        The search begins at the rate of the fewest clients that were measured: a rate far below it takes minutes.
        """
        few_clients = statistics.median(self.result.tokens_per_s[min(self.result.tokens_per_s)]) / work.output_tokens
        plan = msgspec.structs.replace(
            self._plan(requests=1, words=PROMPT_WORDS, tokens=work.output_tokens, seed=seed),
            arrivals=Arrivals.POISSON,
            rate_per_s=few_clients,
            clients=None,
            slo_first_ms=work.slo_first_ms,
            slo_gap_ms=work.slo_gap_ms,
        )
        found = find_goodput(plan, lambda tried: asyncio.run(run_bench(tried)), most_halvings=_MOST_HALVINGS)
        self.result.goodput_per_s.append(found.goodput_per_s)
        self._note_memory()

    def idle(self) -> None:
        """Measure the CPU of all its processes without requests."""
        before = self.family.cpu_s()
        time.sleep(_IDLE_S)
        self.result.idle_cpu_percent = (self.family.cpu_s() - before) / _IDLE_S * 100

    def _note_memory(self) -> None:
        self._memory.append(self.family.memory_mib())
        self.result.serving_mib = max(self._memory)

    def _ask(self, *, clients: int, requests: int, words: int, tokens: int, seed: int, turns: int = 1) -> Summary:
        plan = self._plan(requests=requests, words=words, tokens=tokens, seed=seed)
        return self._run(msgspec.structs.replace(plan, clients=clients, turns=turns))

    def _run(self, plan: BenchPlan) -> Summary:
        """Load the server and count failures."""
        summary = asyncio.run(run_bench(plan)).summary
        self.result.failed += summary.failed
        return summary

    def _plan(self, *, requests: int, words: int, tokens: int, seed: int) -> BenchPlan:
        return BenchPlan(
            url=self._url,
            model=str(self._folder),
            clients=1,
            requests=requests,
            warmup=0,
            input_words=words,
            output_tokens=tokens,
            ignore_eos=self._peer.ignore_eos,
            seed=seed,
        )


def started(peer: ServedPeer, folder: Path, scratch: Path) -> Served:
    """Start the server. A server that keeps data is started twice, the second time with its kept data."""
    log = scratch / f"{peer.name.replace(os.sep, ' ')}.log"
    first = Served(peer, folder, log)
    if not peer.keeps:
        return first
    first.family.stop()
    second = Served(peer, folder, log)
    result = second.result
    result.kept_answer_s, result.kept_cpu_s = result.first_answer_s, result.start_cpu_s
    result.start_s, result.first_answer_s = first.result.start_s, first.result.first_answer_s
    result.start_cpu_s = first.result.start_cpu_s
    result.load_mib = max(first.result.load_mib or 0.0, result.load_mib or 0.0)
    return second
