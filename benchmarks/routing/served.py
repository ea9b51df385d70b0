"""Two real engines behind ``engine route``: hit rate and tail latency by prefix and by turns, on one trace.

Engines and routers are processes of this machine; each policy begins with empty caches and gets the same requests at
the same times. Run: ``python -m benchmarks.routing.served``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import msgspec
import numpy as np
from rich.table import Table

from benchmarks.checkpoints import checkpoint, vocabulary_of
from benchmarks.machine import print_with_machine
from benchmarks.measurement import in_turn
from benchmarks.processes import engine_process, free_port
from lockstep.interruption import interruptible

POLICIES: Final = ("round-robin", "prefix")
REQUEST_S: Final = 120.0
PAGE_TOKENS: Final = 16
ZIPF: Final = 0.8


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of the trace: when it is sent, in seconds after the first, and its prompt."""

    at_s: float
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """The outcome of a request: seconds to its first and last token, and its cached tokens."""

    first_s: float
    last_s: float
    prompt_tokens: int
    cached_tokens: int


def trace(arguments: argparse.Namespace, seed: int) -> list[Asked]:
    """Prompts that begin with one of several system prompts of unequal popularity, at Poisson times."""
    draw = random.Random(seed)  # noqa: S311 - a trace is no secret
    words = range(1, vocabulary_of("S") - 1)
    systems = [tuple(draw.choices(words, k=arguments.system_tokens)) for _ in range(arguments.systems)]
    weights = [1 / (number + 1) ** ZIPF for number in range(arguments.systems)]
    now, asked = 0.0, []
    for _ in range(arguments.requests):
        (system,) = draw.choices(systems, weights)
        asked.append(Asked(now, (*system, *draw.choices(words, k=arguments.own_tokens))))
        now += draw.expovariate(arguments.rate)
    return asked


async def _answer(client: httpx.AsyncClient, asked: Asked, output_tokens: int) -> Answered:
    await asyncio.sleep(asked.at_s)
    sampling = {"max_new_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": asked.ids, "stream": True, "sampling_params": sampling}
    begun, first_s, last = time.monotonic(), 0.0, b""
    async with client.stream("POST", "/generate", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.monotonic() - begun
                last = line.removeprefix("data: ").encode()
    meta = msgspec.json.decode(last)["meta_info"]
    return Answered(first_s, time.monotonic() - begun, meta["prompt_tokens"], meta["cached_tokens"])


async def _answers(url: str, asked: Sequence[Asked], output_tokens: int) -> list[Answered]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S, limits=limits, trust_env=False) as client:
        return await asyncio.gather(*(_answer(client, one, output_tokens) for one in asked))


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, list[Answered]]:
    """The answers under each policy."""
    answered: dict[str, list[Answered]] = {policy: [] for policy in POLICIES}
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(arguments.engines)]
    with contextlib.ExitStack() as stack:
        engines = []
        for number, url in enumerate(urls):
            events = (f"ipc://{folder}/live{number}", f"ipc://{folder}/again{number}")
            words = (
                *("serve", "--model", str(folder), "--port", url.rpartition(":")[2], "--device", "cpu"),
                *("--max-total-tokens", str(arguments.cache_tokens), "--page-size", str(PAGE_TOKENS)),
                *("--kv-events", "--kv-events-endpoint", events[0], "--kv-events-replay-endpoint", events[1]),
            )
            engines.append(stack.enter_context(engine_process(*words)))
        for url, engine in zip(urls, engines, strict=True):
            engine.wait_for(url)
        # Each begins as often as the other, because the engines are slower at first.
        turns = [(turn, policy) for turn in range(arguments.rounds) for policy in in_turn(POLICIES, turn)]
        for number, policy in turns:
            for url in urls:
                httpx.post(f"{url}/flush_cache", timeout=REQUEST_S, trust_env=False).raise_for_status()
            port = free_port()
            with engine_process("route", *urls, "--port", str(port), "--policy", policy) as router:
                router.wait_for(f"http://127.0.0.1:{port}")
                asked = trace(arguments, arguments.seed + number)
                answered[policy] += asyncio.run(_answers(f"http://127.0.0.1:{port}", asked, arguments.output_tokens))
    return answered


def main() -> None:
    """Print a row for each policy: the part of all prompt tokens that was cached, and percentiles of the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="traces; each policy is first in every other one")
    parser.add_argument("--requests", type=int, default=160, help="requests of a trace")
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--systems", type=int, default=24, help="system prompts")
    parser.add_argument("--system-tokens", type=int, default=1024)
    parser.add_argument("--own-tokens", type=int, default=64, help="tokens of a prompt after its system prompt")
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--cache-tokens", type=int, default=20_000, help="KV cache of each engine")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with checkpoint("float32") as folder:
        answered = measure(folder, arguments)
    table = Table("policy", "hit rate", "first token p50", "p90", "p99", "last token p50", "p99")
    for policy, answers in answered.items():
        hits = sum(one.cached_tokens for one in answers) / sum(one.prompt_tokens for one in answers)
        first = np.percentile([one.first_s * 1e3 for one in answers], (50, 90, 99))
        last = np.percentile([one.last_s * 1e3 for one in answers], (50, 99))
        table.add_row(policy, f"{hits:.1%}", *(f"{value:,.0f} ms" for value in (*first, *last)))
    print_with_machine(table)


if __name__ == "__main__":
    with interruptible("benchmarks.routing.served"):
        main()
