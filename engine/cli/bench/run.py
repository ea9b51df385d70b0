"""Runs a benchmark: the warm-up, every conversation at its time or when a client is free, the summary.

Owns the order, and a request's times as its client sees them: it notes the time of each event and distinguishes
failures. A reply that did not end properly is an error, whatever came before.
"""

from __future__ import annotations

import asyncio
import itertools
import platform
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import httpx
import msgspec

from engine import __version__
from engine.cli.bench.plan import BenchPlan, BenchRequest, conversations_of, requests_of
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


class Exchange(NamedTuple):
    """A turn of a conversation."""

    prompt: str | list[int]
    answer: str


Progress = Callable[[Record], None]

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

    async def converse(
        self, conversation: Sequence[BenchRequest], due_s: float | None = None, progress: Progress | None = None
    ) -> list[Record]:
        """Send the turns of a conversation, each after the previous reply. No turn follows a failed one."""
        history: list[Exchange] = []
        records: list[Record] = []
        for turn, request in enumerate(conversation, start=1):
            if turn > 1:
                due_s = self.now_s() + self._plan.think_s
                await asyncio.sleep(self._plan.think_s)
            if len(history) < turn - 1:
                record = Record(due_s=self.now_s(), sent_s=self.now_s(), error="an earlier turn failed")
            else:
                record = await self.send(request, due_s, history)
            record.turn = turn
            records.append(record)
            if progress is not None:
                progress(record)
        return records

    async def send(
        self, request: BenchRequest, due_s: float | None = None, history: list[Exchange] | None = None
    ) -> Record:
        """Send a request now and read its reply to the end. ``due_s`` is the time at which it should have been sent.

        It continues ``history``, to which a complete reply is added.
        """
        history = [] if history is None else history
        sent_s = self.now_s()
        record = Record(due_s=sent_s if due_s is None else due_s, sent_s=sent_s)
        path = "/v1/chat/completions" if self._plan.chat else "/v1/completions"
        try:
            async with self._client.stream("POST", path, json=self._body(request, history)) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    record.error = f"HTTP {response.status_code}: {text}"[:MAX_ERROR_CHARS]
                else:
                    answer = await self._read(response.aiter_lines(), record)
                    if record.error is None:
                        history.append(Exchange(request.prompt, answer))
        except (httpx.HTTPError, msgspec.DecodeError) as exc:
            record.error = f"{type(exc).__name__}: {exc}"[:MAX_ERROR_CHARS]
        return record

    async def _read(self, lines: AsyncIterator[str], record: Record) -> str:
        """Note the times of the events, and return the text without the reasoning."""
        answer: list[str] = []
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
                return ""
            now_s = self.now_s()
            if event.usage is not None:
                record.prompt_tokens, record.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
                record.counted_by_usage = True
            if not any(map(_has_text, event.choices)):
                continue
            answer += [choice.text or (choice.delta and choice.delta.content) or "" for choice in event.choices]
            if last_s is None:
                record.first_s = now_s
            else:
                record.gaps_s.append(now_s - last_s)
            last_s = now_s
        self._close(record, last_s, done)
        return "".join(answer)

    def _close(self, record: Record, last_s: float | None, done: bool) -> None:
        if not done:
            record.error = "the stream ended without [DONE]"
        elif last_s is None:
            record.error = "the answer has no text"
        else:
            record.end_s = last_s
            # A server that reports no usage is assumed to send one token an event.
            record.output_tokens = record.output_tokens or len(record.gaps_s) + 1

    def _body(self, request: BenchRequest, history: Sequence[Exchange]) -> dict[str, Any]:
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
            said = [text for exchange in history for text in exchange]
            roles = itertools.cycle(("user", "assistant"))
            messages = [{"role": next(roles), "content": text} for text in (*said, request.prompt)]
            return body | {"messages": messages}
        return body | {"prompt": _continued(history, request.prompt)}


def _continued(history: Sequence[Exchange], prompt: str | list[int]) -> str | list[int]:
    """Return a whole conversation as one text, with a space before each reply unless it begins with one.

    Token ids are from recordings, which have no later turns.
    """
    if isinstance(prompt, list):
        return prompt
    said = [f"{asked}{'' if answer[:1].isspace() else ' '}{answer}" for asked, answer in history]
    return " ".join([*said, prompt])


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    return bool(choice.text or (delta is not None and (delta.content or delta.reasoning_content)))


CONNECT_TIMEOUT_S = 10.0
# Routes at which servers report their version.
VERSION_PATHS = ("/server_info", "/version")


class BenchError(EngineError):
    """The benchmark could not run: the server is not OpenAI-compatible, or does not answer."""


async def run_bench(plan: BenchPlan, api_key: str | None = None, progress: Progress | None = None) -> BenchResult:
    """Run a benchmark. ``progress`` is called with each record of the measured part.

    Raises ConfigError for an unusable recording, BenchError if the server cannot be reached.
    """
    warmup, measured = requests_of(plan)
    async with _client(plan, api_key) as client:
        model = plan.model or await _served_model(client, plan.url)
        warm = conversations_of(plan, warmup)
        await _in_closed_loop(RequestSender(plan, model, client, time.perf_counter()), warm, plan.clients or 1, None)
        conversations = conversations_of(plan, measured)
        began_at = time.time()
        sender = RequestSender(plan, model, client, time.perf_counter())
        if plan.clients is not None:
            records = await _in_closed_loop(sender, conversations, plan.clients, progress)
        else:
            records = await _on_schedule(sender, conversations, progress)
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
        # No limit, because the schedule bounds the number of open requests.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
    )


async def _on_schedule(
    sender: RequestSender, conversations: Sequence[Sequence[BenchRequest]], progress: Progress | None
) -> list[Record]:
    """Begin each conversation at its time, no matter how many are open."""
    async with asyncio.TaskGroup() as tasks:
        begun = [
            tasks.create_task(sender.converse(one, one[0].at_s, progress)) async for one in _due(sender, conversations)
        ]
    return [record for task in begun for record in task.result()]


async def _due(
    sender: RequestSender, conversations: Sequence[Sequence[BenchRequest]]
) -> AsyncIterator[Sequence[BenchRequest]]:
    for conversation in conversations:
        # Sleep until an absolute time: a late request does not delay the next ones.
        await asyncio.sleep(max(0.0, (conversation[0].at_s or 0.0) - sender.now_s()))
        yield conversation


async def _in_closed_loop(
    sender: RequestSender, conversations: Sequence[Sequence[BenchRequest]], clients: int, progress: Progress | None
) -> list[Record]:
    """Run ``clients`` clients, each of which begins its next conversation after the last reply."""
    left = iter(conversations)
    records: list[Record] = []

    async def client() -> None:
        for conversation in left:
            records.extend(await sender.converse(conversation, None, progress))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
    return sorted(records, key=lambda record: record.sent_s)


async def _served_model(client: httpx.AsyncClient, url: str) -> str:
    try:
        response = (await client.get("/v1/models")).raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as exc:
        raise BenchError(f"url must be an OpenAI-compatible server, got {url}: {exc}; is it running?") from exc


async def _server_version(client: httpx.AsyncClient) -> str:
    for path in VERSION_PATHS:
        try:
            response = (await client.get(path)).raise_for_status()
            return str(response.json()["version"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            continue
    return "unknown"
