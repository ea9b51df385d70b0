"""An engine that polls: it launches a batch, looks now and then whether it is done, and sleeps in between."""

import threading
import time

from paged_requests import Pool, Request, Work, work_of

POLL_S = 0.002


class Engine:
    """``launch`` begins a batch and returns an object whose ``tokens`` is None until it is done."""

    def __init__(self, launch, tell, blocks: int, block_size: int, batch_tokens: int, batch_requests: int):
        self.launch = launch
        self.tell = tell
        self.pool = Pool(blocks, block_size)
        self.batch_tokens = batch_tokens
        self.batch_requests = batch_requests
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.in_flight: tuple[list[Work], object] | None = None

    def start(self) -> None:
        threading.Thread(target=self.serve, name="poller", daemon=True).start()

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        if not request.ended:
            self.end(request, "abort")
            self.tell(request, None, "abort")

    def serve(self) -> None:
        while True:
            if not self.poll():
                time.sleep(POLL_S)

    def poll(self) -> bool:
        """Whether anything was done."""
        if self.in_flight is None:
            batch = self.plan()
            if not batch:
                return False
            self.in_flight = batch, self.launch(batch)
            return True
        batch, handle = self.in_flight
        if handle.tokens is None:
            return False
        self.in_flight = None
        self.take_results(batch, handle.tokens)
        return True

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
            if request.ended:
                continue
            request.computed += work.count
            if request.computed < len(request.tokens):
                continue
            reason = request.say(token)
            if reason:
                self.end(request, reason)
            self.tell(request, token, reason)
