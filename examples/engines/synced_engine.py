"""Data-parallel ranks in step: in each iteration all ranks learn the messages and the sizes of all batches.

A rank without work computes an empty batch beside the others. Results are taken one iteration after their batch, and
the end of a request is told one more after that, as in a loop that overlaps. When no rank is alive, rank 0 blocks for
messages, and the others wait for it.
"""

import queue
import threading

from paged_requests import Pool, Request, Work, work_of


class Rank:
    """One engine of the group. ``model`` computes a batch of each rank; ``agree`` gathers a value of each."""

    def __init__(self, number: int, inbox: queue.Queue, model, agree, tell, sizes: tuple[int, int, int, int]):
        blocks, block_size, self.batch_tokens, self.batch_requests = sizes
        self.number = number
        self.inbox = inbox
        self.model = model
        self.agree = agree
        self.tell = tell
        self.pool = Pool(blocks, block_size)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        # The last batch and its tokens, which are taken in the next iteration.
        self.last: tuple[list[Work], list[int]] | None = None
        # Requests with all of their tokens, and the last one, which is told in the next iteration.
        self.done: list[tuple[Request, int]] = []
        self.someone_is_live = False

    @property
    def is_live(self) -> bool:
        """Whether it has anything to compute or to tell."""
        return bool(self.waiting or self.running or self.last or self.done)

    def serve(self) -> None:
        while True:
            self.iterate()

    def iterate(self) -> None:
        fetched = self.fetch() if self.number == 0 else None
        for rank, kind, request in self.agree(self.number, "messages", fetched)[0]:
            if rank == self.number:
                self.take(kind, request)
        self.tell_done()
        if self.last:
            self.take_results(*self.last)
            self.last = None
        batch = self.plan()
        states = self.agree(self.number, "batches", (len(batch), self.is_live))
        self.someone_is_live = any(is_live for _, is_live in states)
        if any(count for count, _ in states):
            self.last = batch, self.model(self.number, batch)

    def fetch(self) -> list[tuple[int, str, Request]]:
        """All messages that there are; where nobody is alive, block until there is one."""
        messages = [] if self.someone_is_live else [self.inbox.get()]
        while not self.inbox.empty():
            messages.append(self.inbox.get())
        return messages

    def take(self, kind: str, request: Request) -> None:
        if kind == "add":
            self.waiting.append(request)
        elif not request.ended:
            self.end(request, "abort")
            self.tell(request, None, "abort")

    def tell_done(self) -> None:
        for request, token in self.done:
            self.tell(request, token, request.ended)
        self.done.clear()

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
                self.done.append((request, token))
            else:
                self.tell(request, token)


class Group:
    """All ranks, each in a thread of its own. Requests go to one rank after the other."""

    def __init__(self, ranks: int, model, agree, tell, sizes: tuple[int, int, int, int]):
        self.inbox: queue.Queue = queue.Queue()
        self.ranks = [Rank(number, self.inbox, model, agree, tell, sizes) for number in range(ranks)]
        self.home: dict[Request, int] = {}

    def start(self) -> None:
        for rank in self.ranks:
            threading.Thread(target=rank.serve, name=f"rank-{rank.number}", daemon=True).start()

    def add(self, request: Request, rank: int) -> None:
        self.home[request] = rank
        self.inbox.put((rank, "add", request))

    def abort(self, request: Request) -> None:
        self.inbox.put((self.home[request], "abort", request))
