"""An engine that computes inside ``step``: it plans, calls the model, waits, and returns what was said."""

from paged_requests import Pool, Request, Work, work_of


class Engine:
    """``model`` takes a list of ``Work`` and returns a token for each; it returns when they are computed."""

    def __init__(self, model, blocks: int, block_size: int, batch_tokens: int, batch_requests: int):
        self.model = model
        self.pool = Pool(blocks, block_size)
        self.batch_tokens = batch_tokens
        self.batch_requests = batch_requests
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        for queue in (self.waiting, self.running):
            for request in queue:
                if request.id == request_id:
                    queue.remove(request)
                    self.pool.give_back(request)
                    return True
        return False

    def step(self) -> list[tuple[Request, int]]:
        """One batch: the requests that said something, with what they said."""
        batch = self.plan()
        tokens = self.model(batch)
        said = []
        for work, token in zip(batch, tokens, strict=True):
            request = work.request
            request.computed += work.count
            if request.computed < len(request.tokens):
                continue
            if request.say(token):
                self.running.remove(request)
                self.pool.give_back(request)
            said.append((request, token))
        return said

    def plan(self) -> list[Work]:
        """Running requests first; then waiting ones, while there is room."""
        batch: list[Work] = []
        budget = self.batch_tokens
        while self.waiting and len(self.running) < self.batch_requests and self.pool.take(self.waiting[0]):
            self.running.append(self.waiting.pop(0))
        for request in self.running:
            if budget:
                batch.append(work_of(request, budget))
                budget -= batch[-1].count
        return batch
