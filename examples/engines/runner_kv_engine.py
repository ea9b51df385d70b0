"""An engine whose runner owns the KV: the scheduler knows slots, the runner which tokens each slot still has.

A slot keeps its KV when its request ends; a request whose prompt begins as a free slot's tokens do goes on there.
"""

import queue
import threading

from paged_requests import Request


class Runner:
    """Slots of ``slot_blocks`` blocks each. ``model`` computes positions of slots and returns a token for each."""

    def __init__(self, model, slots: int, slot_blocks: int):
        self.model = model
        # The tokens whose KV is in each slot.
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        self.slot_blocks = slot_blocks

    def blocks_of(self, slot: int) -> tuple[int, ...]:
        return tuple(range(slot * self.slot_blocks, (slot + 1) * self.slot_blocks))

    def common(self, slot: int, tokens: list[int]) -> int:
        """How many leading tokens need not be computed again; the last one is, for its output."""
        count = 0
        for one, other in zip(self.tokens[slot], tokens[:-1], strict=False):
            if one != other:
                break
            count += 1
        return count

    def compute(self, batch: list[tuple[int, Request, int, int]]) -> list[int]:
        """Compute positions of the requests in these slots: slot, request, first position, count."""
        tokens = self.model([(request, start, count, self.blocks_of(slot)) for slot, request, start, count in batch])
        for slot, request, start, count in batch:
            self.tokens[slot][start:] = request.tokens[start : start + count]
        return tokens


class Engine:
    """One request a slot; a batch has the next tokens of each."""

    def __init__(self, model, tell, slots: int, slot_blocks: int, batch_tokens: int):
        self.runner = Runner(model, slots, slot_blocks)
        self.tell = tell
        self.batch_tokens = batch_tokens
        self.slots: list[Request | None] = [None] * slots
        self.waiting: list[Request] = []
        self.aborted: set[str] = set()
        self.wake: queue.Queue = queue.Queue()

    def start(self) -> None:
        threading.Thread(target=self.serve, name="engine", daemon=True).start()

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.wake.put(None)

    def abort(self, request: Request) -> None:
        self.aborted.add(request.id)
        self.wake.put(None)

    def serve(self) -> None:
        while True:
            while not self.wake.empty() or not (self.waiting or self.aborted or any(self.slots)):
                self.wake.get()
            self.end_aborted()
            batch = self.plan()
            if batch:
                self.take_results(batch, self.runner.compute(batch))

    def end_aborted(self) -> None:
        for request in [*self.waiting, *filter(None, self.slots)]:
            if request.id in self.aborted:
                self.end(request)
                self.tell(request, None, "abort")
        self.aborted.clear()

    def end(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.slots[self.slots.index(request)] = None

    def plan(self) -> list[tuple[int, Request, int, int]]:
        while self.waiting and None in self.slots:
            request = self.waiting.pop(0)
            free = [slot for slot, taken in enumerate(self.slots) if taken is None]
            slot = max(free, key=lambda one: self.runner.common(one, request.tokens))
            request.computed = self.runner.common(slot, request.tokens)
            self.slots[slot] = request
        batch, budget = [], self.batch_tokens
        for slot, request in enumerate(self.slots):
            if request is not None and budget:
                count = min(len(request.tokens) - request.computed, budget)
                batch.append((slot, request, request.computed, count))
                budget -= count
        return batch

    def take_results(self, batch, tokens: list[int]) -> None:
        for (_, request, _, count), token in zip(batch, tokens, strict=True):
            request.computed += count
            if request.computed < len(request.tokens):
                continue
            reason = request.say(token)
            if reason:
                self.end(request)
            self.tell(request, token, reason)
