"""A live SGLang that admits nobody, and the report of ``scripted stuck`` on it: an abort leaves ``batch_is_full`` set.

`.venv-sglang/bin/python -m benchmarks.live_hang_sglang` starts SGLang's server with a small KV pool: the defect "An
abort of the request that waits for room lets nobody in" of benchmarks/tables/defects.md. A long answer runs, a prompt
that does not fit beside it is aborted, and a short one, which fits, waits behind it. `scripted stuck` is asked for the
running server's folder.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Final

import aiohttp

from benchmarks.checkpoints import vocabulary_of
from benchmarks.live_flight import Server
from benchmarks.live_stuck import SHAPE, lines_of_stuck, print_stuck
from scripted.core.adapters import adapter_named
from scripted.sdk.flight.recorder import OPTIONS_VARIABLE

_POOL: Final = 1000
_LONG_NEW: Final = 700
_LOOK_S: Final = 0.05


class _Clients:
    """Clients of one server; ``heard`` counts the tokens of each."""

    def __init__(self, server: Server, session: aiohttp.ClientSession) -> None:
        self.heard: Counter[str] = Counter()
        self._url = server.url
        self._session = session

    async def ask(self, rid: str, prompt: int, new: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        # Another first token for each: a shared prefix would need less room.
        tokens = [40 + (len(rid) + one) % (vocabulary_of(SHAPE) - 60) for one in range(prompt)]
        body = {"rid": rid, "input_ids": tokens, "stream": True, "sampling_params": sampling}
        async with self._session.post(f"{self._url}/generate", json=body) as answer:
            async for line in answer.content:
                self.heard[rid] += line.startswith(b"data: {")

    async def abort(self, rid: str) -> None:
        (await self._session.post(f"{self._url}/abort_request", json={"rid": rid})).release()

    async def hear(self, rid: str, more: int) -> None:
        """Wait until a client has received this many more tokens."""
        until = self.heard[rid] + more
        while self.heard[rid] < until:
            await asyncio.sleep(_LOOK_S)


async def stuck(server: Server, folder: Path) -> list[str]:
    """Return the report while the short request waits beside the long answer."""
    async with aiohttp.ClientSession() as session:
        clients = _Clients(server, session)
        asked = [asyncio.create_task(clients.ask("long", 20, _LONG_NEW))]
        await clients.hear("long", 4)
        asked.append(asyncio.create_task(clients.ask("large", _POOL - 60, 4)))
        await clients.hear("long", 8)
        asked.append(asyncio.create_task(clients.ask("short", 5, 4)))
        await clients.hear("long", 8)
        await clients.abort("large")
        await clients.hear("long", 60)
        lines = await lines_of_stuck(folder)
        heard = dict(clients.heard)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return [*lines, f"tokens heard: {heard}"]


def main() -> None:
    # Importing it takes longer than the long answer.
    adapter_named("sglang")
    print_stuck("sglang", 30494, stuck, ("--max-total-tokens", str(_POOL)), {OPTIONS_VARIABLE: "all=1"})


if __name__ == "__main__":
    main()
