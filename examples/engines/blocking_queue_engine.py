"""An engine behind a blocking queue: its thread takes one message after the other, and blocks when it has no work."""

import queue
import threading

from paged_requests import Pool, Request, Work, work_of


class Engine:
    """``model`` takes a list of ``Work`` and returns a token for each; ``tell`` gets tokens and ends."""

    def __init__(self, model, tell, blocks: int, block_size: int, batch_tokens: int, batch_requests: int):
        self.model = model
        self.tell = tell
        self.pool = Pool(blocks, block_size)
        self.batch_tokens = batch_tokens
        self.batch_requests = batch_requests
        self.messages: queue.Queue = queue.Queue()
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def start(self) -> None:
        threading.Thread(target=self.serve, name="engine", daemon=True).start()

    # -- on the threads of clients --

    def add(self, request: Request) -> None:
        self.messages.put(("add", request))

    def abort(self, request: Request) -> None:
        self.messages.put(("abort", request.id))

    # -- on the engine's thread --

    def serve(self) -> None:
        while True:
            self.take_messages()
            batch = self.plan()
            if batch:
                self.take_results(batch, self.model(batch))

    def take_messages(self) -> None:
        """All that is there; where there is no work, block until there is one."""
        while True:
            try:
                kind, what = self.messages.get(block=not (self.waiting or self.running))
            except queue.Empty:
                return
            if kind == "add":
                self.waiting.append(what)
            else:
                self.end_aborted(what)

    def end_aborted(self, request_id: str) -> None:
        for request in (*self.waiting, *self.running):
            if request.id == request_id:
                self.end(request, "abort")
                self.tell(request, None, "abort")

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
            self.tell(request, token, reason)
