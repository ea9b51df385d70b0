"""The clients of a load run: each sends one request after the other and does to it what its behaviour says.

Owns the HTTP side: reading answers and streams, aborting, going away. Judges nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
from outcome import Outcome
from workload import Ask, Behaviour, Workload


class Client:
    """One client. ``outcomes`` has every request that it sent, in order."""

    def __init__(self, http: httpx.AsyncClient, workload: Workload) -> None:
        self._http = http
        self._workload = workload
        self.outcomes: list[Outcome] = []

    async def run(self, deadline: float) -> None:
        """Ask until the deadline has passed or the server is gone; what was asked is waited for."""
        while time.monotonic() < deadline:
            outcome = Outcome(self._workload.next_ask(), started=time.monotonic())
            self.outcomes.append(outcome)
            try:
                await self._ask(outcome)
            except httpx.TransportError as exc:
                outcome.cut = f"{type(exc).__name__}: {exc}"
            finally:
                outcome.ended = time.monotonic()
            if outcome.cut or outcome.status == 503:
                return
            if pause_s := self._workload.pause_s(refused=outcome.status == 429):
                await asyncio.sleep(pause_s)

    async def _ask(self, outcome: Outcome) -> None:
        ask = outcome.ask
        if not ask.streams:
            response = await self._http.post(ask.path, content=ask.body)
            outcome.status = response.status_code
            _take(outcome, response.json())
            return
        async with self._http.stream("POST", ask.path, content=ask.body) as response:
            outcome.status = response.status_code
            if response.status_code != 200:
                await response.aread()
                _take(outcome, response.json())
                return
            await self._read(outcome, response)

    async def _read(self, outcome: Outcome, response: httpx.Response) -> None:
        ask = outcome.ask
        acts = ask.behaviour in (Behaviour.ABORT, Behaviour.DISCONNECT, Behaviour.DUPLICATE)
        side: list[asyncio.Task[None]] = []
        try:
            async for event in _events(response):
                if event == "[DONE]":
                    outcome.closed_in_order = True
                    continue
                outcome.first_event = outcome.first_event or time.monotonic()
                _take(outcome, json.loads(event))
                if acts and outcome.events > ask.act_after and not outcome.finish_reasons:
                    acts = False
                    if ask.behaviour is Behaviour.DISCONNECT:
                        outcome.left = True
                        return
                    side.append(asyncio.create_task(self._act(outcome)))
        finally:
            outcome.ended = time.monotonic()
            await asyncio.gather(*side, return_exceptions=True)

    async def _act(self, outcome: Outcome) -> None:
        """Abort a stream while it is read, or send its rid again."""
        if outcome.ask.behaviour is Behaviour.ABORT:
            outcome.abort_sent = True
            await self._http.post("/abort_request", json={"rid": outcome.ask.rid})
            return
        twin = await self._http.post(outcome.ask.path, content=_whole(outcome.ask))
        outcome.twin_status, outcome.twin_ended = twin.status_code, time.monotonic()


def _whole(ask: Ask) -> bytes:
    """The same request, not as a stream, and a short one in case that the rid is free by now."""
    return json.dumps(ask.fields | {"stream": False, "sampling_params": {"max_new_tokens": 1}}).encode()


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line:
            yield line.removeprefix("data: ")


def _take(outcome: Outcome, piece: dict[str, Any]) -> None:
    """Add one piece of an answer, of either protocol, or its error."""
    if "error" in piece:
        outcome.error = piece["error"]["message"]
        return
    outcome.events += 1
    if "choices" in piece:
        for choice in piece["choices"]:
            _take_text(outcome, choice["index"], choice["text"], choice["finish_reason"])
        return
    meta = piece["meta_info"]
    outcome.output_ids += piece["output_ids"]
    outcome.completion_tokens = meta["completion_tokens"]
    outcome.matched_stop = meta.get("matched_stop")
    _take_text(outcome, 0, piece["text"], meta["finish_reason"])


def _take_text(outcome: Outcome, index: int, text: str, reason: str | None) -> None:
    outcome.texts[index] = outcome.texts.get(index, "") + text
    if reason is not None:
        outcome.finish_reasons.append(reason)
