"""An engine whose worker thread waits at a condition variable for requests and aborts."""

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
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.aborted: list[Request] = []
        self.changed = threading.Condition()

    def start(self) -> None:
        threading.Thread(target=self.serve, name="worker", daemon=True).start()

    # -- on the threads of clients --

    def add(self, request: Request) -> None:
        with self.changed:
            self.waiting.append(request)
            self.changed.notify()

    def abort(self, request: Request) -> None:
        with self.changed:
            self.aborted.append(request)
            self.changed.notify()

    # -- on the worker's thread --

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.aborted)

    def serve(self) -> None:
        while True:
            with self.changed:
                while not self.has_work:
                    self.changed.wait()
                self.end_aborted()
                batch = self.plan()
            if batch:
                self.take(batch, self.model(batch))

    def end_aborted(self) -> None:
        for request in self.aborted:
            if not request.ended:
                self.end(request)
                self.tell(request, None, "abort")
        self.aborted.clear()

    def end(self, request: Request) -> None:
        request.ended = request.ended or "abort"
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

    def take(self, batch: list[Work], tokens: list[int]) -> None:
        for work, token in zip(batch, tokens, strict=True):
            request = work.request
            request.computed += work.count
            if request.computed < len(request.tokens):
                continue
            if request.say(token):
                self.end(request)
            self.tell(request, token, request.ended)
