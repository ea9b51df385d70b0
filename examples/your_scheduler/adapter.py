"""The adapter: the scheduler beside this file as an adapter of the search.

``scripted explore --adapter examples/your_scheduler/adapter.py --corpus``
"""

import msgspec
from scheduler import Request, Scheduler, Work

from scripted.sdk import (
    Abort,
    Add,
    Answer,
    Batch,
    BatchResult,
    Capabilities,
    Copier,
    FlushCache,
    Limits,
    Refused,
    SchedulerAdapter,
    Share,
    Stepped,
    Tokens,
)


class Config(msgspec.Struct, frozen=True):
    """The settings that a schedule can set: ``block_size=4 blocks=12; 1 start a prompt=20``."""

    blocks: int = 12
    block_size: int = 4
    batch_tokens: int = 16
    batch_requests: int = 4


class Machine:
    """The scheduler, and the batches whose results are not back."""

    depth = 2

    def __init__(self, config: Config):
        self.scheduler = Scheduler(config.blocks, config.block_size, config.batch_tokens, config.batch_requests)
        self.in_flight: dict[int, list[Work]] = {}
        self.launched = 0

    def step(self, events, now):  # noqa: ARG002 - it has no use for the time
        replies = [reply for event in events for reply in self._take(event)]
        batch = self.scheduler.schedule() if len(self.in_flight) < self.depth else []
        preempted = tuple(self.scheduler.preempted) if len(self.in_flight) < self.depth else ()
        return Stepped(
            microbatch=self._launch(batch) if batch else None,
            replies=tuple(replies),
            preempted=preempted,
            again=bool(batch or preempted),
        )

    @property
    def is_idle(self):
        return not self.scheduler.requests and not self.in_flight

    def counts(self):
        scheduler = self.scheduler
        return {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "in_flight": len(self.in_flight),
            "blocks_free": len(scheduler.free),
        }

    def _take(self, event):
        match event:
            case Add():
                request = Request(event.rid, list(event.prompt_ids), event.max_new_tokens, event.stop_token_ids)
                if not self.scheduler.add(request):
                    yield Refused(rid=event.rid, reason="it does not fit")
            case Abort():
                if self.scheduler.abort(event.rid):
                    yield Tokens(rid=event.rid, finish_reason="abort")
            case FlushCache():
                yield Answer(call_id=event.call_id, ok=self.scheduler.reset_cache())
            case BatchResult():
                sampled = [ids[0] if ids else None for ids in event.token_ids]
                for request, token in self.scheduler.done(self.in_flight.pop(event.batch_id), sampled):
                    yield Tokens(rid=request.id, token_ids=(token,), finish_reason=self._reason(request, token))

    def _reason(self, request, token):
        if not self.scheduler.is_over(request):
            return None
        return "stop" if token in request.stop_token_ids else "length"

    def _launch(self, batch):
        self.launched += 1
        self.in_flight[self.launched] = batch
        shares = [
            Share(rid=work.request.id, start=work.start, count=work.count, block_ids=work.blocks) for work in batch
        ]
        return Batch(id=self.launched, shares=tuple(shares))


def adapter_of(name, machine):
    """Declare the adapter of a machine."""
    return SchedulerAdapter(
        name,
        config=Config,
        machine=machine,
        limits=lambda config: Limits(
            block_size=config.block_size,
            blocks=config.blocks,
            batch_tokens=config.batch_tokens,
            batch_requests=config.batch_requests,
            context_tokens=config.blocks * config.block_size,
            depth=machine.depth,
        ),
        can=lambda _: Capabilities(flush=True, chunked=True, preemption=True),
        copier=Copier(),
    )


ADAPTER = adapter_of("your-scheduler", Machine)
