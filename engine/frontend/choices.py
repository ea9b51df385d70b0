"""Several generations that answer one HTTP request: sent together, read as they come, aborted together.

Owns their merging; each keeps its own text. The request ends when the last of them does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from engine.frontend.detokenizer import Decoder
from engine.frontend.engine_client import EngineClient
from engine.frontend.errors import ApiError
from engine.frontend.generation import Generation, TimedOut
from engine.frontend.metrics import Metrics
from engine.frontend.protocol import GenerateAnswer
from engine.messages import Generate

__all__ = ["TOKENS_A_TURN", "Choices", "IndexedPiece"]

# Prompt tokens that are sent before the event loop turns: 2 ms of them. All choices of a long prompt may take 100 ms.
TOKENS_A_TURN: Final = 262_144

IndexedPiece = tuple[int, GenerateAnswer]


class Choices:
    """The answers of one or more requests, which ``send`` sends."""

    def __init__(self, client: EngineClient, decoder: Decoder, metrics: Metrics) -> None:
        self._client = client
        self._decoder = decoder
        self._metrics = metrics
        self._generations: list[Generation] = []
        self._aborted = False

    async def send(self, messages: Sequence[Generate]) -> bool:
        """Send all in order; the event loop turns in between when prompts are long. False when ``abort`` came first.

        What was sent by then is aborted, and nothing else is sent. Raises ApiError when one is refused: the others are
        aborted.
        """
        tokens = 0
        try:
            for message in messages:
                if tokens >= TOKENS_A_TURN:
                    tokens = 0
                    await asyncio.sleep(0)
                if self._aborted:
                    return False
                generation = Generation(self._client, self._decoder, message, self._metrics.begin())
                self._generations.append(generation)
                tokens += len(message.prompt_ids)
        except (ApiError, asyncio.CancelledError):
            self.abort()
            raise
        return True

    def abort(self) -> None:
        """Ask the scheduler to end all of them; a no-op for those that have ended."""
        self._aborted = True
        for generation in self._generations:
            generation.abort()

    async def pieces(self) -> AsyncGenerator[IndexedPiece, None]:
        """All pieces with the index of their choice, in the order in which they come.

        Raises ApiError when a choice was refused or failed; the others are aborted then. A choice whose time was over
        before its first token fails the answer only if no other choice has a token.
        """
        if len(self._generations) == 1:  # The usual case needs no task and no queue of its own.
            async for piece in self._generations[0].pieces():
                yield 0, piece
            return
        try:
            async with aclosing(_merged(self._generations)) as merged:
                async for indexed in merged:
                    yield indexed
        finally:
            self.abort()

    async def whole(self) -> list[GenerateAnswer]:
        """The answers in one, by index. Raises ApiError as ``pieces`` does."""
        if len(self._generations) == 1:
            return [await self._generations[0].whole()]
        answers = asyncio.gather(*(_whole(generation) for generation in self._generations))
        try:
            return _shown(await answers)
        finally:
            self.abort()


async def _whole(generation: Generation) -> GenerateAnswer | TimedOut:
    try:
        return await generation.whole()
    except TimedOut as exc:
        return exc


def _shown(ends: Sequence[GenerateAnswer | TimedOut]) -> list[GenerateAnswer]:
    """The answers; raises TimedOut when none of them has a token."""
    overdue = [end for end in ends if isinstance(end, TimedOut)]
    if len(overdue) == len(ends):
        raise overdue[0]
    return [end.piece if isinstance(end, TimedOut) else end for end in ends]


async def _merged(generations: Sequence[Generation]) -> AsyncGenerator[IndexedPiece, None]:
    merged: asyncio.Queue[IndexedPiece | tuple[int, TimedOut] | ApiError | None] = asyncio.Queue()

    async def forward(index: int, generation: Generation) -> None:
        try:
            async for piece in generation.pieces():
                merged.put_nowait((index, piece))
            merged.put_nowait(None)
        except TimedOut as exc:
            merged.put_nowait((index, exc))
        except ApiError as exc:
            merged.put_nowait(exc)

    tasks = [asyncio.create_task(forward(index, generation)) for index, generation in enumerate(generations)]
    shown, overdue = False, list[tuple[int, TimedOut]]()
    try:
        left = len(tasks)
        while left:
            item = await merged.get()
            if isinstance(item, ApiError):
                raise item
            if item is None:
                left -= 1
            elif isinstance(item[1], TimedOut):
                left -= 1
                overdue.append((item[0], item[1]))
            else:
                shown = True
                yield item[0], item[1]
            while shown and overdue:
                index, end = overdue.pop(0)
                yield index, end.piece
        if overdue:
            raise overdue[0][1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
