"""Runs a benchmark: warm-up, then every request at its time or as clients become free, then the sum of it.

Owns the order of things and what is known of the server. Measures nothing itself.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import AsyncIterator, Callable, Sequence

import httpx

from engine import __version__
from engine.bench.measured_request import Record, RequestSender
from engine.bench.plan import BenchPlan
from engine.bench.results import BenchResult, summarize
from engine.bench.workload import BenchRequest, requests_of
from engine.errors import EngineError

CONNECT_TIMEOUT_S = 10.0
# Where servers of the field tell their version.
VERSION_PATHS = ("/server_info", "/version")

Progress = Callable[[Record], None]


class BenchError(EngineError):
    """The benchmark could not be run: the server does not answer, or not in the OpenAI protocol."""


async def run_bench(plan: BenchPlan, api_key: str | None = None, progress: Progress | None = None) -> BenchResult:
    """Run a benchmark. ``progress`` is called with each record of the measured part.

    Raises ConfigError for a recording that cannot be used, BenchError when the server cannot be reached at all.
    """
    warmup, measured = requests_of(plan)
    async with _client(plan, api_key) as client:
        model = plan.model or await _served_model(client, plan.url)
        await _in_closed_loop(RequestSender(plan, model, client, time.perf_counter()), warmup, plan.clients or 1, None)
        began_at = time.time()
        sender = RequestSender(plan, model, client, time.perf_counter())
        if plan.clients is not None:
            records = await _in_closed_loop(sender, measured, plan.clients, progress)
        else:
            records = await _on_schedule(sender, measured, progress)
        return BenchResult(
            plan=plan,
            model=model,
            began_at=began_at,
            versions={
                "lockstep": __version__,
                "python": platform.python_version(),
                "httpx": httpx.__version__,
                "platform": platform.platform(),
                "server": await _server_version(client),
            },
            summary=summarize(records),
            records=records,
        )


def _client(plan: BenchPlan, api_key: str | None) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=plan.url.rstrip("/").removesuffix("/v1"),
        timeout=httpx.Timeout(plan.request_timeout_s, connect=CONNECT_TIMEOUT_S),
        # The schedule decides how many requests are open, never the client's pool.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
    )


async def _on_schedule(
    sender: RequestSender, requests: Sequence[BenchRequest], progress: Progress | None
) -> list[Record]:
    """Each request at its time, however many are open by then."""

    async def one(request: BenchRequest) -> Record:
        record = await sender.send(request, request.at_s)
        if progress is not None:
            progress(record)
        return record

    async with asyncio.TaskGroup() as tasks:
        sent = [tasks.create_task(one(request)) async for request in _due(sender, requests)]
    return [task.result() for task in sent]


async def _due(sender: RequestSender, requests: Sequence[BenchRequest]) -> AsyncIterator[BenchRequest]:
    for request in requests:
        # Slept until an absolute time: a late one does not make the next ones late.
        await asyncio.sleep(max(0.0, (request.at_s or 0.0) - sender.now_s()))
        yield request


async def _in_closed_loop(
    sender: RequestSender, requests: Sequence[BenchRequest], clients: int, progress: Progress | None
) -> list[Record]:
    """``clients`` clients, each of which sends its next request when its last one is answered."""
    left = iter(requests)
    records: list[Record] = []

    async def client() -> None:
        for request in left:
            record = await sender.send(request)
            records.append(record)
            if progress is not None:
                progress(record)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
    return sorted(records, key=lambda record: record.sent_s)


async def _served_model(client: httpx.AsyncClient, url: str) -> str:
    try:
        response = (await client.get("/v1/models")).raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as exc:
        raise BenchError(f"url must be of a server of the OpenAI protocol, got {url}: {exc}; is it running?") from exc


async def _server_version(client: httpx.AsyncClient) -> str:
    for path in VERSION_PATHS:
        try:
            response = (await client.get(path)).raise_for_status()
            return str(response.json()["version"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            continue
    return "unknown"
