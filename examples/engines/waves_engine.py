"""Data-parallel ranks with waves: while any rank has work, all of them step; when none has, all of them sleep.

A coordinator wakes all ranks when one gets a request. All ranks must enter the same collectives in the same order.
"""

import queue
import threading

from paged_requests import Pool, Request, Work, work_of


class Coordinator:
    """Knows which wave it is, and whether the ranks run."""

    def __init__(self, inboxes: list[queue.Queue]):
        self.inbox: queue.Queue = queue.Queue()
        self.inboxes = inboxes
        self.wave = 0
        self.is_running = False

    def serve(self) -> None:
        while True:
            self.take(*self.inbox.get())

    def take(self, kind: str, wave: int) -> None:
        if kind == "wake" and wave >= self.wave and not self.is_running:
            self.wave = wave
            for inbox in self.inboxes:
                inbox.put(("start", wave))
        elif kind == "started" and wave == self.wave:
            self.is_running = True
        elif kind == "ended":
            self.wave = wave + 1
            self.is_running = False


class Rank:
    """One engine of the group. ``model`` computes a batch of each rank; ``agree`` gathers a value of each."""

    def __init__(self, number: int, model, agree, tell, sizes: tuple[int, int, int, int]):
        blocks, block_size, self.batch_tokens, self.batch_requests = sizes
        self.number = number
        self.model = model
        self.agree = agree
        self.tell = tell
        self.pool = Pool(blocks, block_size)
        self.inbox: queue.Queue = queue.Queue()
        self.coordinator: queue.Queue | None = None
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.wave = 0
        self.is_running = False
        self.is_paused = False

    def serve(self) -> None:
        while True:
            self.take_messages()
            if self.is_running:
                self.step()

    def step(self) -> None:
        states = self.agree(self.number, "state", (bool(self.waiting or self.running), self.is_paused))
        if any(is_paused for _, is_paused in states):
            # All of them stop here, and each goes on when it hears so.
            self.is_paused = True
        elif any(has_work for has_work, _ in states):
            batch = self.plan()
            self.take_results(batch, self.model(self.number, batch))
        else:
            self.is_running = False
            self.wave += 1
            if self.number == 0:
                self.coordinator.put(("ended", self.wave - 1))

    # -- messages --

    def take_messages(self) -> None:
        """All that there are; a rank that sleeps or is paused blocks until there is one."""
        while not self.inbox.empty() or not self.is_running or self.is_paused:
            self.take(*self.inbox.get())

    def take(self, kind: str, what) -> None:
        match kind:
            case "add":
                self.waiting.append(what)
                self.wake_all()
            case "abort":
                self.end_aborted([request for request in (*self.waiting, *self.running) if request is what])
            case "start" if what >= self.wave and not self.is_paused:
                self.wave, self.is_running = what, True
                self.coordinator.put(("started", what))
            case "pause":
                self.is_paused = True
                if what:
                    self.end_aborted(self.finish_requests())
            case "resume":
                self.is_paused = False
                if self.waiting:
                    self.wake_all()

    def wake_all(self) -> None:
        if not self.is_running:
            self.coordinator.put(("wake", self.wave))

    def finish_requests(self) -> list[Request]:
        """The requests that end because of a pause: their clients are told."""
        return [*self.waiting, *self.running]

    def end_aborted(self, requests: list[Request]) -> None:
        for request in requests:
            self.end(request, "abort")
            self.tell(request, None, "abort")

    # -- batches --

    def end(self, request: Request, reason: str) -> None:
        request.ended = reason
        (self.running if request in self.running else self.waiting).remove(request)
        self.pool.give_back(request)

    def plan(self) -> list[Work]:
        """A batch of this rank, which is empty where only others have work."""
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
            if request.computed < len(request.tokens):
                continue
            reason = request.say(token)
            if reason:
                self.end(request, reason)
            self.tell(request, token, reason)


class Group:
    """The coordinator and its ranks, each in a thread of its own. Requests go to one rank after the other."""

    def __init__(self, ranks: int, model, agree, tell, sizes: tuple[int, int, int, int]):
        self.ranks = [Rank(number, model, agree, tell, sizes) for number in range(ranks)]
        self.coordinator = Coordinator([rank.inbox for rank in self.ranks])
        self.home: dict[Request, Rank] = {}

    def start(self) -> None:
        threading.Thread(target=self.coordinator.serve, name="coordinator", daemon=True).start()
        for rank in self.ranks:
            rank.coordinator = self.coordinator.inbox
            threading.Thread(target=rank.serve, name=f"rank-{rank.number}", daemon=True).start()

    def add(self, request: Request, rank: int) -> None:
        self.home[request] = self.ranks[rank]
        self.home[request].inbox.put(("add", request))

    def abort(self, request: Request) -> None:
        self.home[request].inbox.put(("abort", request))

    def tell_all(self, kind: str, what: bool = False) -> None:
        for rank in self.ranks:
            rank.inbox.put((kind, what))
