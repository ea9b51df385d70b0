"""The same scheduler with priorities, and with preemption by swap: blocks go to host memory and come back.

``scripted explore --adapter examples/your_scheduler/swapping.py --corpus``
"""

from collections import deque

from adapter import Config, Machine
from fixed import FixedScheduler

from scripted.sdk import Add, Batch, Capabilities, Copier, Limits, SchedulerAdapter


class SwapConfig(Config, frozen=True):
    """With blocks in host memory. The pool is small enough that requests are swapped every day."""

    blocks: int = 9
    host_blocks: int = 16


class SwappingScheduler(FixedScheduler):
    """The least urgent request gives way. What it has computed waits in host blocks."""

    def __init__(self, blocks, host_blocks, *sizes):
        super().__init__(blocks, *sizes)
        self.host_free = deque(range(blocks, blocks + host_blocks))
        # Of each request that was swapped out: its host blocks, and how much of it is computed in them.
        self.swapped = {}
        self.priority = {}
        self.copies = []

    def schedule(self):
        self._order()
        self._swap_in()
        return super().schedule()

    def take_copies(self):
        """Take the copies to make before the batch is computed."""
        copies, self.copies = self.copies, []
        return tuple(copies)

    def _order(self):
        urgency = sorted(self.waiting, key=lambda request: -self.priority[request.id])
        self.waiting = deque(urgency)

    def _preempt(self):
        idle = [one for one in self.running if not one.in_flight]
        if not idle:
            return False
        victim = min(reversed(idle), key=lambda request: self.priority[request.id])
        if len(victim.blocks) > len(self.host_free):
            return super()._preempt()
        host = [self.host_free.popleft() for _ in victim.blocks]
        self.copies += zip(victim.blocks, host, strict=True)
        computed = victim.computed
        self.running.remove(victim)
        self._give_back(victim)
        self.swapped[victim.id] = (host, computed)
        self.waiting.appendleft(victim)
        return True

    def _swap_in(self):
        """The most urgent request goes on where it was, once there is room for it."""
        while self.waiting and self.waiting[0].id in self.swapped:
            request = self.waiting[0]
            host, computed = self.swapped[request.id]
            # Room for all that it has yet to compute, or it would go out again at once.
            if len(self.free) * self.block_size < len(request.tokens):
                return
            self._leave_host(request)
            self._grow(request, len(host) * self.block_size)
            self.copies += zip(host, request.blocks, strict=True)
            request.computed = computed
            self.running.append(self.waiting.popleft())

    def _grow(self, request, tokens):
        """Not what is swapped out: it goes on where it was, or waits."""
        return request.id not in self.swapped and super()._grow(request, tokens)

    def reset_cache(self):
        """Nothing that was computed before a flush is read after it: not what was swapped out either."""
        return not self.swapped and super().reset_cache()

    def _leave_host(self, request):
        host, _ = self.swapped.pop(request.id, ((), 0))
        self.host_free.extend(host)

    def _end(self, request):
        # It may end before the batch that would have copied its blocks.
        theirs = {*request.blocks, *self.swapped.get(request.id, ((), 0))[0]}
        self.copies = [(source, target) for source, target in self.copies if target not in theirs]
        self._leave_host(request)
        del self.priority[request.id]
        super()._end(request)


class SwappingMachine(Machine):
    """Hands priorities in and copies out."""

    def __init__(self, config):
        super().__init__(config)
        sizes = (config.block_size, config.batch_tokens, config.batch_requests)
        self.scheduler = SwappingScheduler(config.blocks, config.host_blocks, *sizes)

    def counts(self):
        return super().counts() | {"host_free": len(self.scheduler.host_free)}

    def _take(self, event):
        yield from super()._take(event)
        if isinstance(event, Add) and event.rid in self.scheduler.requests:
            self.scheduler.priority[event.rid] = event.priority

    def _launch(self, batch):
        launched = super()._launch(batch)
        return Batch(id=launched.id, shares=launched.shares, copies=self.scheduler.take_copies())


ADAPTER = SchedulerAdapter(
    "swapping",
    config=SwapConfig,
    machine=SwappingMachine,
    limits=lambda config: Limits(
        block_size=config.block_size,
        blocks=config.blocks,
        batch_tokens=config.batch_tokens,
        batch_requests=config.batch_requests,
        context_tokens=config.blocks * config.block_size,
        depth=SwappingMachine.depth,
    ),
    can=lambda _: Capabilities(flush=True, chunked=True, preemption=True, priority=True),
    copier=Copier(),
)
