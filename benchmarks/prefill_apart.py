"""Streams beside long prompts: one engine on two cores against a prefill and a decode engine on one core each.

Each setup gets the same streams and the same prompts at the same times, alternating. Run: ``python -m
benchmarks.prefill_apart``, with ``--one-engine`` for only one engine, of ``--stages`` stages.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from rich.table import Table

from benchmarks.checkpoints import checkpoint, vocabulary_of
from benchmarks.machine import print_with_machine
from benchmarks.measurement import in_turn
from benchmarks.processes import Family, engine_process, free_port
from lockstep.interruption import interruptible

REQUEST_S: Final = 300.0
# The arguments of each way. An engine has all cores that it is not denied.
APART: Final = "prefill and decode apart"
ONE: Final = {
    f"one engine, parts of {size}{words}": ("--chunked-prefill-size", str(size), flag)
    for size in (512, 128)
    for words, flag in (("", "--no-mixed-chunk"), (" beside decodes", "--mixed-chunk"))
}


@dataclass
class Seen:
    """The clients' measurements: gaps of running streams and first tokens of long prompts in ms, tokens a second.

    ``cpu`` is, for each round, the CPU time of all processes involved per token of prompts and answers.
    """

    gaps: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


async def _stream(client: httpx.AsyncClient, ids: Sequence[int], tokens: int, ticks: list[float]) -> None:
    """Note the arrival of each token of an answer."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": list(ids), "stream": True, "sampling_params": sampling}
    async with client.stream("POST", "/generate", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                ticks.append(time.monotonic())  # noqa: PERF401 - seen while it grows


async def _play(url: str, families: Sequence[Family], arguments: argparse.Namespace, seed: int, seen: Seen) -> None:
    """Run streams, and after a second send long prompts, one every ``every_s`` seconds."""
    draw = random.Random(seed)  # noqa: S311 - a workload is no secret
    words = range(1, vocabulary_of("S") - 1)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S, limits=limits, trust_env=False) as client:
        running: list[list[float]] = [[] for _ in range(arguments.streams)]
        tasks = [
            asyncio.create_task(_stream(client, draw.choices(words, k=32), arguments.stream_tokens, ticks))
            for ticks in running
        ]
        while not all(running):
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)
        begun, asked, before_s = time.monotonic(), [], sum(family.cpu_s() for family in families)
        for number in range(arguments.prompts):
            await asyncio.sleep(begun + number * arguments.every_s - time.monotonic())
            asked.append(asyncio.create_task(_first_ms(client, draw.choices(words, k=arguments.prompt_tokens))))
        seen.first += await asyncio.gather(*asked)
        ended = time.monotonic()
        # A stalled stream counts until its next token, however late that is.
        while any(ticks[-1] <= ended for ticks in running):
            await asyncio.sleep(0.01)
        spent_s = sum(family.cpu_s() for family in families) - before_s
        answered = sum(tick >= begun for ticks in running for tick in ticks)
        seen.cpu.append(spent_s * 1e3 / (answered + arguments.prompts * arguments.prompt_tokens))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for ticks in running:
            if len(ticks) == arguments.stream_tokens:
                raise SystemExit("error: a stream ended before the prompts; raise --stream-tokens")
            gaps = [(before, after) for before, after in pairwise(ticks) if after >= begun and before <= ended]
            seen.gaps += [(after - before) * 1e3 for before, after in gaps]
            seen.rates.append(sum(begun <= tick <= ended for tick in ticks) / (ended - begun))


async def _first_ms(client: httpx.AsyncClient, ids: Sequence[int]) -> float:
    begun, ticks = time.monotonic(), list[float]()
    await _stream(client, ids, 1, ticks)
    return (ticks[0] - begun) * 1e3


@contextlib.contextmanager
def _served(
    way: str, folder: Path, cores: Sequence[int], arguments: argparse.Namespace
) -> Iterator[tuple[str, list[Family]]]:
    """Yield the URL of the server for this setup, and its processes."""
    threads = arguments.threads
    common: tuple[str, ...] = ("serve", "--model", str(folder), "--device", "cpu", "--backend", "torch")
    common += ("--max-total-tokens", "30000")
    common = (*common, "--no-radix-cache") if way in ONE else common
    first, second = free_port(), free_port()
    url, other = f"http://127.0.0.1:{first}", f"http://127.0.0.1:{second}"
    with contextlib.ExitStack() as stack:
        if way in ONE:
            words = (*common, *ONE[way], "--port", str(first), "--threads", str(threads))
            words += ("--pp-size", str(arguments.stages))
            families = [stack.enter_context(engine_process(*words, cores=cores, threads=threads))]
        else:
            prefill = (*common, "--role", "prefill", "--port", str(second), "--chunked-prefill-size", "512")
            families = [stack.enter_context(engine_process(*prefill, "--threads", "1", cores=cores[:1]))]
            families[0].wait_for(other)
            decode = (*common, "--role", "decode", "--port", str(first), "--prefill-engines", other)
            families.append(stack.enter_context(engine_process(*decode, "--threads", "1", cores=cores[1:])))
        families[-1].wait_for(url)
        yield url, families


def _came_from_the_other(url: str) -> int:
    """Return the number of pages that a decode engine has received."""
    stats: dict[str, Any] = httpx.get(f"{url}/server_info", trust_env=False).json()["stats"]
    return int(stats["pages_received"])


def main() -> None:
    """Print a row for each setup: percentiles of the gaps, tokens a second of a stream, first tokens of prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each setup is measured, alternating")
    parser.add_argument("--streams", type=int, default=4, help="running streams")
    parser.add_argument(
        "--stream-tokens", type=int, default=7000, help="tokens per stream; more than fit before the prompts end"
    )
    parser.add_argument("--prompts", type=int, default=8, help="long prompts per round")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--every-s", type=float, default=2.5, help="seconds between two long prompts")
    parser.add_argument("--threads", type=int, default=2, help="threads of the engine that has both cores")
    parser.add_argument("--one-engine", action="store_true", help="measure only one engine")
    parser.add_argument("--stages", type=int, default=1, help="stages of the one engine")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("error: two cores are needed, one for each engine")
    seen = {way: Seen() for way in (ONE if arguments.one_engine else (*ONE, APART))}
    with checkpoint("float32") as folder, contextlib.ExitStack() as stack:
        # An engine without requests takes no time from the others.
        served = {way: stack.enter_context(_served(way, folder, cores, arguments)) for way in seen}
        for number in range(arguments.rounds):
            for way in in_turn([*seen], number):
                asyncio.run(_play(*served[way], arguments, arguments.seed + number, seen[way]))
        if not arguments.one_engine and not _came_from_the_other(served[APART][0]):
            raise SystemExit("error: no KV came from the prefill engine; its log above says why")
    heads = ("gap p50", "p99", "longest", "tokens/s of a stream", "first token p50", "p99", "CPU of a token")
    table = Table("way", *heads)
    for way, one in seen.items():
        gaps = np.percentile(one.gaps, (50, 99, 100))
        first = np.percentile(one.first, (50, 99))
        rate = f"{np.mean(one.rates):,.1f}"
        ms = [*(f"{gap:,.1f} ms" for gap in gaps), rate, *(f"{value:,.0f} ms" for value in first)]
        table.add_row(way, *ms, f"{np.median(one.cpu):.2f} ms")
    print_with_machine(table)


if __name__ == "__main__":
    with interruptible("benchmarks.prefill_apart"):
        main()
