"""The operators of a load run: they flush, pause, continue, abort everything and look, all at random times.

Each checks that its calls are answered as they may be. They leave the server running: not paused, no flush waiting.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx
from outcome import Window

CALM_S = (0.05, 0.8)
PAUSE_S = (0.005, 0.15)
FLUSH_TIMEOUT_S = (0.0, 0.3)
LOOKS = ("/health", "/server_info", "/model_info", "/v1/models")
COUNTS = ("waiting=", "running=", "in_flight=")


class Operators:
    """``windows`` are the times in which they ended everything; ``complaints`` the answers that must not be."""

    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self._http = http
        self._random = random.Random(f"{seed}/operators")
        self.windows: list[Window] = []
        self.complaints: list[str] = []
        self.calls: Counter[str] = Counter()

    async def run(self, deadline: float) -> None:
        """Disturb until the deadline has passed or the server is gone."""
        await asyncio.gather(*(self._repeat(duty, deadline) for duty in (self._flush, self._pause, self._look)))

    async def _repeat(self, duty: Callable[[], Awaitable[bool]], deadline: float) -> None:
        while time.monotonic() < deadline:
            await asyncio.sleep(self._random.uniform(*CALM_S))
            try:
                if not await duty():
                    return
            except httpx.TransportError as exc:
                self.complaints.append(f"an operator was cut off: {type(exc).__name__}: {exc}")
                return

    async def _flush(self) -> bool:
        deferred = self._random.random() < 0.5
        query = {"timeout": str(self._random.uniform(*FLUSH_TIMEOUT_S))} if deferred else {}
        response = await self._http.post("/flush_cache", params=query)
        what = "deferred flush" if deferred else "flush"
        refused = response.status_code == 400 and all(count in response.text for count in COUNTS)
        return self._count(what, response, right=response.status_code == 200 or refused)

    async def _pause(self) -> bool:
        mode = self._random.choices(("retract", "in_place", "abort"), (8, 8, 1))[0]
        started = time.monotonic()
        response = await self._http.post("/pause_generation", json={"mode": mode})
        if mode == "abort":
            self.windows.append(Window(started, time.monotonic()))
        if not self._count(f"pause {mode}", response, right=response.status_code == 200):
            return False
        await asyncio.sleep(self._random.uniform(*PAUSE_S))
        response = await self._http.post("/continue_generation")
        return self._count("continue", response, right=response.status_code == 200)

    async def _look(self) -> bool:
        if self._random.random() < 0.04:
            started = time.monotonic()
            response = await self._http.post("/abort_request", json={"abort_all": True})
            self.windows.append(Window(started, time.monotonic()))
            return self._count("abort all", response, right=response.status_code == 200)
        response = await self._http.get(self._random.choice(LOOKS))
        return self._count("look", response, right=response.status_code == 200)

    def _count(self, what: str, response: httpx.Response, *, right: bool) -> bool:
        """Note a call; True when the next one makes sense."""
        self.calls[f"{what}: {response.status_code}"] += 1
        if not right:
            self.complaints.append(f"{what} got {response.status_code}: {response.text}")
        return response.status_code != 503
