"""An engine with two memory pools: one for the layers that attend to everything, one for those with a window.

A request has room for all of its tokens in the first pool. In the second it has a ring of blocks, as many as a batch
and the window behind it can touch. A request begins when both pools have room.
"""

from paged_requests import Pool, Request, Work, work_of


class Engine:
    """``window`` is the number of positions that a position of the second kind of layers attends to."""

    def __init__(self, tell, sizes: tuple[int, int, int, int], window_blocks: int, window: int):
        blocks, block_size, self.batch_tokens, self.batch_requests = sizes
        self.tell = tell
        self.pool = Pool(blocks, block_size)
        # Free blocks of the second pool; the device numbers them behind those of the first.
        self.window_free = list(range(blocks, blocks + window_blocks))
        self.most_window_blocks = (self.batch_tokens + window - 3) // block_size + 2
        self.rings: dict[Request, list[int]] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.batch: list[Work] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """A request in a batch ends with the batch's result."""
        request.ended = "abort"
        if all(work.request is not request for work in self.batch):
            self.end(request)
            self.tell(request, None, "abort")

    def end(self, request: Request) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        self.pool.give_back(request)
        self.window_free += self.rings.pop(request, [])

    def ring_blocks(self, tokens: int) -> int:
        return min(self.pool.blocks_of(tokens), self.most_window_blocks)

    def begin(self, request: Request) -> bool:
        """Take blocks of both pools, or of neither."""
        count = self.ring_blocks(request.most_tokens)
        free = self.window_free
        if count > len(free) or not self.pool.take(request):
            return False
        self.rings[request] = [free.pop(0) for _ in range(count)]
        return True

    def window_table(self, work: Work) -> tuple[int, ...]:
        """The block of each position in the second pool; a block is used again once the window has left it."""
        ring = self.rings[work.request]
        return tuple([ring[index % len(ring)] for index in range(self.pool.blocks_of(work.start + work.count))])

    def plan(self) -> list[Work]:
        while self.waiting and len(self.running) < self.batch_requests and self.begin(self.waiting[0]):
            self.running.append(self.waiting.pop(0))
        budget = self.batch_tokens
        for request in self.running:
            if budget:
                self.batch.append(work_of(request, budget))
                budget -= self.batch[-1].count
        return self.batch

    def land(self, tokens: list[int]) -> None:
        batch, self.batch = self.batch, []
        for work, token in zip(batch, tokens, strict=True):
            request = work.request
            request.computed += work.count
            if request.ended:
                self.end(request)
                self.tell(request, None, "abort")
            elif request.computed == len(request.tokens):
                reason = request.say(token)
                if reason:
                    self.end(request)
                self.tell(request, token, reason)
