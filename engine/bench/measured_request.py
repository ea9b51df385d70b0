"""One measured request: sent as a stream, each event's time noted, every way in which it can fail told apart.

Owns the times of a request as its client sees them. An answer that did not end in order is an error, whatever came
before.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from engine.bench.plan import BenchPlan
from engine.bench.workload import BenchRequest

MAX_ERROR_CHARS = 200


class Record(msgspec.Struct, kw_only=True):
    """What came of a request; times are in seconds from the benchmark's start.

    ``due_s`` is when it should have been sent, and what its latencies are counted from. ``gaps_s`` lie between events
    with text. With ``error`` set nothing else is a measurement.
    """

    due_s: float
    sent_s: float
    first_s: float | None = None
    end_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted_by_usage: bool = False
    gaps_s: list[float] = []
    error: str | None = None


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
        """Seconds from the benchmark's start."""
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
            # A server that counts nothing is taken to send a token an event.
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
