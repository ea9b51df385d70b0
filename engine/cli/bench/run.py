"""Runs a benchmark: the warm-up, every request at its time or as clients become free, the summary.

Owns the order, and a request's times as its client sees them: it notes the time of each event and tells all failures
apart. An answer that did not end in order is an error, whatever came before.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import msgspec

from engine import __version__
from engine.cli.bench.plan import BenchPlan, BenchRequest, requests_of
from engine.cli.bench.results import BenchResult, Record, summarize
from engine.core.errors import EngineError

MAX_ERROR_CHARS = 200


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class RequestSender:
    def __init__(self, plan: BenchPlan, model: str, client: httpx.AsyncClient, started_s: float) -> None:
        self._plan = plan
        self._model = model
        self._client = client
        self._started_s = started_s

    def now_s(self) -> float:
        """Return the seconds since the benchmark's start."""
        return time.perf_counter() - self._started_s

    async def send(self, request: BenchRequest, due_s: float | None = None) -> Record:
        """Send a request now and read its answer to the end. ``due_s``: when it should have been sent."""
        sent_s = self.now_s()
        record = Record(due_s=sent_s if due_s is None else due_s, sent_s=sent_s)
        path = "/v1/chat/completions" if self._plan.chat else "/v1/completions"
        try:
            async with self._client.stream("POST", path, json=self._body(request)) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    record.error = f"HTTP {response.status_code}: {text}"[:MAX_ERROR_CHARS]
                else:
                    await self._read(response.aiter_lines(), record)
        except (httpx.HTTPError, msgspec.DecodeError) as exc:
            record.error = f"{type(exc).__name__}: {exc}"[:MAX_ERROR_CHARS]
        return record

    async def _read(self, lines: AsyncIterator[str], record: Record) -> None:
        last_s: float | None = None
        done = False
        async for line in lines:
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                done = True
                continue
            event = _decode_event(data)
            if event.error is not None:
                record.error = f"the stream broke: {event.error}"[:MAX_ERROR_CHARS]
                return
            now_s = self.now_s()
            if event.usage is not None:
                record.prompt_tokens, record.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
                record.counted_by_usage = True
            if not any(map(_has_text, event.choices)):
                continue
            if last_s is None:
                record.first_s = now_s
            else:
                record.gaps_s.append(now_s - last_s)
            last_s = now_s
        self._close(record, last_s, done)

    def _close(self, record: Record, last_s: float | None, done: bool) -> None:
        if not done:
            record.error = "the stream ended without [DONE]"
        elif last_s is None:
            record.error = "the answer has no text"
        else:
            record.end_s = last_s
            # A server that reports no usage is assumed to send one token an event.
            record.output_tokens = record.output_tokens or len(record.gaps_s) + 1

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": self._plan.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._plan.ignore_eos:
            body["ignore_eos"] = True
        if self._plan.chat:
            return body | {"messages": [{"role": "user", "content": request.prompt}]}
        return body | {"prompt": request.prompt}


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    return bool(choice.text or (delta is not None and (delta.content or delta.reasoning_content)))


CONNECT_TIMEOUT_S = 10.0
# Routes at which servers report their version.
VERSION_PATHS = ("/server_info", "/version")

Progress = Callable[[Record], None]


class BenchError(EngineError):
    """The benchmark could not run: the server does not answer in the OpenAI protocol, or not at all."""


async def run_bench(plan: BenchPlan, api_key: str | None = None, progress: Progress | None = None) -> BenchResult:
    """Run a benchmark. ``progress`` is called with each record of the measured part.

    Raises ConfigError for an unusable recording, BenchError if the server cannot be reached.
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
        # The schedule bounds the number of open requests, never the client's pool.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
    )


async def _on_schedule(
    sender: RequestSender, requests: Sequence[BenchRequest], progress: Progress | None
) -> list[Record]:
    """Send each request at its time, however many are open by then."""

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
        # Sleep until an absolute time: a late request does not delay the next ones.
        await asyncio.sleep(max(0.0, (request.at_s or 0.0) - sender.now_s()))
        yield request


async def _in_closed_loop(
    sender: RequestSender, requests: Sequence[BenchRequest], clients: int, progress: Progress | None
) -> list[Record]:
    """Run ``clients`` clients, each of which sends its next request after the last answer."""
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
