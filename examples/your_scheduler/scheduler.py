"""A small continuous-batching scheduler with a paged prefix cache. It knows nothing of Lockstep.

One bug is in it, of a kind that real engines had. docs/your_scheduler.md leads to it.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass
class Request:
    """``computed`` of its tokens are in its blocks, or will be when what is in flight is done."""

    id: str
    tokens: list[int]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    computed: int = 0
    in_flight: int = 0
    blocks: list[int] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self):
        self.prompt_tokens = len(self.tokens)


@dataclass
class Work:
    """The positions ``start`` to ``start + count - 1`` of a request, in these blocks."""

    request: Request
    start: int
    count: int
    blocks: tuple[int, ...]


class Scheduler:
    """First come, first served; decodes before prompts; the last to come is preempted when blocks run out."""

    def __init__(self, blocks: int, block_size: int, batch_tokens: int, batch_requests: int):
        self.block_size = block_size
        self.batch_tokens = batch_tokens
        self.batch_requests = batch_requests
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.references = [0] * blocks
        # Blocks that no request owns, the least recently used first. They keep what is cached in them.
        self.free: deque[int] = deque(range(blocks))
        self.block_of: dict[tuple[int, ...], int] = {}
        self.prefix_of: dict[int, tuple[int, ...]] = {}
        self.preempted: list[str] = []

    # -- from outside --

    def add(self, request: Request) -> bool:
        most = request.prompt_tokens + request.max_new_tokens
        if -(-most // self.block_size) > len(self.references):
            return False
        self.requests[request.id] = request
        self.waiting.append(request)
        return True

    def abort(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._end(request)
        return True

    def reset_cache(self) -> bool:
        if any(self.references):
            return False
        self.block_of.clear()
        self.prefix_of.clear()
        return True

    # -- one step --

    def schedule(self) -> list[Work]:
        batch: list[Work] = []
        budget = self.batch_tokens
        self.preempted = []
        for request in list(self.running):
            # A decode waits for the token before it; chunks of a prompt follow one another at once.
            count = min(len(request.tokens) - request.computed, budget)
            if count <= 0 or len(batch) == self.batch_requests or request not in self.running:
                continue
            while request in self.running and not self._grow(request, request.computed + count):
                if not self._preempt():
                    break
            else:
                if request in self.running:
                    budget -= self._launch(request, count, batch)
        while self.waiting and budget and len(batch) < self.batch_requests and not self.preempted:
            request = self.waiting[0]
            hits = self._cached(request)
            count = min(len(request.tokens) - len(hits) * self.block_size, budget)
            self._share(hits)
            request.blocks, request.computed = hits, len(hits) * self.block_size
            if not self._grow(request, request.computed + count):
                self._give_back(request)
                break
            self.waiting.popleft()
            self.running.append(request)
            budget -= self._launch(request, count, batch)
        return batch

    def done(self, batch: list[Work], tokens: list[int | None]) -> list[tuple[Request, int]]:
        """The results of a batch, a token for each request that has reached its end: what to tell clients."""
        told = []
        for work, token in zip(batch, tokens, strict=True):
            request = work.request
            request.in_flight -= 1
            self._remember(request, work)
            if request.ended or token is None:
                continue
            request.tokens.append(token)
            told.append((request, token))
            if self.is_over(request):
                self._end(request)
        return told

    def is_over(self, request: Request) -> bool:
        new = len(request.tokens) - request.prompt_tokens
        return new == request.max_new_tokens or (new > 0 and request.tokens[-1] in request.stop_token_ids)

    # -- requests --

    def _launch(self, request: Request, count: int, batch: list[Work]) -> int:
        batch.append(Work(request, request.computed, count, tuple(request.blocks)))
        request.computed += count
        request.in_flight += 1
        return count

    def _preempt(self) -> bool:
        """Take the blocks of the request that came last, unless a batch of it is in flight."""
        for victim in reversed(self.running):
            if not victim.in_flight:
                self.running.remove(victim)
                self._give_back(victim)
                self.waiting.appendleft(victim)
                self.preempted.append(victim.id)
                return True
        return False

    def _end(self, request: Request) -> None:
        request.ended = True
        del self.requests[request.id]
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._give_back(request)

    # -- blocks --

    def _grow(self, request: Request, tokens: int) -> bool:
        needed = -(-tokens // self.block_size) - len(request.blocks)
        if needed > len(self.free):
            return False
        for _ in range(needed):
            block = self.free.popleft()
            self._forget(block)
            self.references[block] = 1
            request.blocks.append(block)
        return True

    def _give_back(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)
        request.blocks, request.computed = [], 0

    def _share(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.references[block]:
                self.free.remove(block)
            self.references[block] += 1

    # -- the prefix cache --

    def _cached(self, request: Request) -> list[int]:
        """The blocks of the longest cached prefix; at least one token is left to compute."""
        blocks, size = [], self.block_size
        for end in range(size, len(request.tokens), size):
            block = self.block_of.get(tuple(request.tokens[:end]))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _remember(self, request: Request, work: Work) -> None:
        """The blocks that this work filled can be shared from here on."""
        size = self.block_size
        for index in range(work.start // size, (work.start + work.count) // size):
            prefix = tuple(request.tokens[: (index + 1) * size])
            if prefix not in self.block_of:
                self._forget(work.blocks[index])
                self.block_of[prefix] = work.blocks[index]
                self.prefix_of[work.blocks[index]] = prefix

    def _forget(self, block: int) -> None:
        prefix = self.prefix_of.pop(block, None)
        if prefix is not None:
            del self.block_of[prefix]
