"""An asyncio engine: each client reads its request's output from a generator, and one task computes.

A client that leaves cancels its task; the engine notices at the end of the generator.
"""

import asyncio
from collections.abc import AsyncIterator

from paged_requests import Pool, Request, Work, work_of


class Engine:
    """``model`` takes a list of ``Work`` and returns, when it is awaited, a token for each."""

    def __init__(self, model, blocks: int, block_size: int, batch_tokens: int, batch_requests: int):
        self.model = model
        self.pool = Pool(blocks, block_size)
        self.batch_tokens = batch_tokens
        self.batch_requests = batch_requests
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.outputs: dict[Request, asyncio.Queue] = {}
        self.wake = asyncio.Event()

    async def generate(self, request: Request) -> AsyncIterator[tuple[int, str]]:
        """The tokens of a request, each with why it is the last one, or nothing."""
        outputs = self.outputs[request] = asyncio.Queue()
        self.waiting.append(request)
        self.wake.set()
        try:
            while True:
                token, reason = await outputs.get()
                yield token, reason
                if reason:
                    return
        finally:
            if not request.ended:
                self.end(request, "abort")
            del self.outputs[request]

    async def serve(self) -> None:
        """Compute as long as there is work; then wait for more."""
        while True:
            await self.wake.wait()
            self.wake.clear()
            while self.waiting or self.running:
                batch = self.plan()
                self.take_results(batch, await self.model(batch))

    def end(self, request: Request, reason: str) -> None:
        request.ended = reason
        (self.running if request in self.running else self.waiting).remove(request)
        self.pool.give_back(request)

    def plan(self) -> list[Work]:
        while self.waiting and len(self.running) < self.batch_requests and self.pool.take(self.waiting[0]):
            self.running.append(self.waiting.pop(0))
        batch: list[Work] = []
        budget = self.batch_tokens
        for request in self.running:
            if budget:
                batch.append(work_of(request, budget))
                budget -= batch[-1].count
        return batch

    def take_results(self, batch: list[Work], tokens: list[int]) -> None:
        for work, token in zip(batch, tokens, strict=True):
            request = work.request
            request.computed += work.count
            if request.ended or request.computed < len(request.tokens):
                continue
            reason = request.say(token)
            if reason:
                self.end(request, reason)
            if request in self.outputs:
                self.outputs[request].put_nowait((token, reason))
