"""An engine with two forward passes a step: first the prompts, then one token of each request that decodes.

Its step runs in a thread; clients add and abort at any time, also between the two passes.
"""

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
        self.has_work = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self.serve, name="engine", daemon=True).start()

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.has_work.set()

    def abort(self, request: Request) -> None:
        request.ended = "abort"
        (self.running if request in self.running else self.waiting).remove(request)
        self.pool.give_back(request)
        self.tell(request, None, "abort")

    def serve(self) -> None:
        while True:
            self.has_work.wait()
            self.step()
            if not self.waiting and not self.running:
                self.has_work.clear()

    def step(self) -> None:
        while self.waiting and len(self.running) < self.batch_requests and self.pool.take(self.waiting[0]):
            self.running.append(self.waiting.pop(0))
        self.compute(self.prompts())
        self.compute(self.decodes())

    def prompts(self) -> list[Work]:
        """The next part of each prompt, within the budget of a batch."""
        batch: list[Work] = []
        budget = self.batch_tokens
        for request in self.running:
            if budget and request.computed < request.prompt_tokens:
                batch.append(work_of(request, budget))
                budget -= batch[-1].count
        return batch

    def decodes(self) -> list[Work]:
        return [work_of(request, 1) for request in self.running if request.computed >= request.prompt_tokens]

    def compute(self, batch: list[Work]) -> None:
        if not batch:
            return
        for work, token in zip(batch, self.model(batch), strict=True):
            request = work.request
            request.computed += work.count
            if request.ended or request.computed < len(request.tokens):
                continue
            reason = request.say(token)
            if reason:
                self.running.remove(request)
                self.pool.give_back(request)
            self.tell(request, token, reason)
