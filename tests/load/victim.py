"""A client that does nothing but read its streams, and notes how long the server kept it waiting for each event.

Owns the measure of how an attack slows other clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

BODY = {"text": "v", "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "priority": 9}
RETRY_S = 0.02
# Two readings of the thread's times without a wait between them are far closer.
MOST_APART_S = 0.001


class Victim:
    """Reads one stream after the other until it is cancelled. ``broken`` are streams that did not end in order."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._gaps: list[tuple[float, float]] = []
        self.events = 0
        self.broken: list[str] = []

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Read for the length of a block."""
        task = asyncio.create_task(self._read())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def worst_stall_s(self, since: float) -> float:
        """The longest idle wait for an event that ended after a moment, in seconds."""
        return max((gap for ended, gap in self._gaps if ended >= since), default=0.0)

    async def _read(self) -> None:
        while True:
            async with self._http.stream("POST", "/generate", json=BODY) as response:
                last, busy_s = None, 0.0
                text = ""
                async for text in response.aiter_lines():
                    if not text:
                        continue
                    before_s = busy_s
                    now, busy_s = _moment()
                    if last is not None:
                        self._gaps.append((now, now - last - (busy_s - before_s)))
                    last = now
                    self.events += 1
                if response.status_code != 200:
                    self.broken.append(f"{response.status_code}: {text[:200]}")
                    await asyncio.sleep(RETRY_S)


def _moment() -> tuple[float, float]:
    """The time, and the seconds computed and waited until then.

    Taken again when this thread lost its core between the two: that wait would be taken from the wrong gap.
    """
    busy_s = _busy_s()
    while True:
        now, before_s, busy_s = time.monotonic(), busy_s, _busy_s()
        if busy_s - before_s < MOST_APART_S:
            return now, busy_s


def _busy_s() -> float:
    """The seconds that this thread has computed, or waited for a CPU: the attack's own, not the server's."""
    computed, waited, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    return (int(computed) + int(waited)) / 1e9
