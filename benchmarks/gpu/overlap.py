"""Served: a second microbatch in flight or none, on one stage and on several that share the GPU; planned ahead.

The servers run at the same time, and the client of ``engine bench`` loads them in turns.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.results import Table
from benchmarks.gpu.setting import Setting
from benchmarks.measurement import in_turn
from engine.cli.bench.plan import BenchPlan
from engine.cli.bench.results import Summary
from engine.cli.bench.run import run_bench
from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent

__all__ = ["measure_overlap"]

_START_TIMEOUT_S: Final = 240.0
_STOP_TIMEOUT_S: Final = 10.0
_REQUESTS_A_CLIENT: Final = 2


def measure_overlap(setting: Setting) -> list[Table]:
    """Measure tokens a second and the time between two tokens, by server and number of clients."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        parent = stack.enter_context(PreloadedParent.start())
        urls = {}
        for number, (name, values) in enumerate(_servers(setting)):
            urls[name] = _serve(stack, parent, setting, scratch / str(number), values)
        rates, gaps = _asked_in_turns(urls, setting)
    tables = []
    for title, values in (("Output tokens a second", rates), ("Between two tokens, ms, median", gaps)):
        table = Table(title=title, columns=("server", *[f"{clients} clients" for clients in setting.clients]))
        for name in urls:
            cells = [values[name, clients] for clients in setting.clients]
            table.rows.append((name, *[statistics.median(cell) if cell else None for cell in cells]))
        tables.append(table)
    return tables


def _servers(setting: Setting) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the servers to compare."""
    for stages in setting.stages:
        count = f"{stages} stage{'s' if stages > 1 else ''}"
        for depth in (0, 1):
            yield f"{count}, depth {depth}", {"pp_size": stages, "pp_async_depth": depth}
        if stages == 1:
            yield f"{count}, async_scheduling", {"async_scheduling": True}
            yield f"{count}, async_scheduling, CUDA graphs", {"async_scheduling": True, "cuda_graphs": "auto"}
            yield f"{count}, CUDA graphs", {"cuda_graphs": "auto"}


def _serve(stack: ExitStack, parent: PreloadedParent, setting: Setting, folder: Path, values: dict[str, Any]) -> str:
    folder.mkdir()
    settings = ServerSettings(**setting.engine_values, **values, port=0)
    server = stack.enter_context(closing(parent.serve(settings, folder, folder / "log")))
    stack.callback(server.wait, _STOP_TIMEOUT_S)
    stack.callback(server.terminate)
    return server.wait_ready(_START_TIMEOUT_S).base_url


def _asked_in_turns(urls: dict[str, str], setting: Setting) -> tuple[Any, Any]:
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    gaps: dict[tuple[str, int], list[float]] = defaultdict(list)
    for name, url in urls.items():
        _ask(url, setting, max(setting.clients), seed=7_777, what=name)
    for number in range(setting.rounds):
        for clients in setting.clients:
            for name, url in in_turn([*urls.items()], number):
                summary = _ask(url, setting, clients, seed=1000 * number + clients, what=name)
                rates[name, clients].append(summary.output_tokens_per_s)
                if summary.itl_ms is not None:
                    gaps[name, clients].append(summary.itl_ms.p50)
    return rates, gaps


def _ask(url: str, setting: Setting, clients: int, *, seed: int, what: str) -> Summary:
    """Raises RuntimeError if a request fails, which would spoil the measurement."""
    plan = BenchPlan(
        url=url,
        model=str(setting.folder),
        clients=clients,
        requests=clients * _REQUESTS_A_CLIENT,
        warmup=0,
        input_words=setting.prompt_tokens - 1,
        output_tokens=setting.new_tokens,
        seed=seed,
    )
    summary = asyncio.run(run_bench(plan)).summary
    if summary.failed:
        raise RuntimeError(f"{what} must answer every request, but: {summary.errors}")
    return summary
