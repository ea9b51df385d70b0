"""The machines of engines with a loop of their own: the part that all adapters of this folder share.

The engine calls ``forward`` in place of its model, and waits there until the result comes with an event.
"""

from types import ModuleType

import msgspec
from paged_requests import Pool, Request, Work

from scripted import sdk
from scripted.sdk.cooperative import EventLoop, Stall, Threads


class Config(msgspec.Struct, frozen=True):
    """The settings that a schedule can set."""

    blocks: int = 12
    block_size: int = 4
    batch_tokens: int = 16
    batch_requests: int = 4

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.blocks, self.block_size, self.batch_tokens, self.batch_requests


def share_of(work: Work) -> sdk.Share:
    return sdk.Share(rid=work.request.id, start=work.start, count=work.count, block_ids=work.blocks)


class EngineMachine:
    """A subclass makes the ``engine``, lets it run, and says how a request begins and is aborted."""

    depth = 1
    engine = None

    def __init__(self, config: Config):
        self.config = config
        self.requests: dict[str, Request] = {}
        self.replies: list[object] = []
        self.batch: sdk.Batch | None = None
        self.launched = self.landed = 0

    def step(self, events, now):
        is_unfinished = self.run(events, now)
        batch, self.batch = self.batch, None
        replies, self.replies = tuple(self.replies), []
        return sdk.Stepped(microbatch=batch, replies=replies, again=batch is not None or is_unfinished)

    @property
    def is_idle(self):
        return not self.requests and self.launched == self.landed

    def counts(self):
        waiting = sum(not request.blocks for request in self.requests.values())
        return {
            "waiting": waiting,
            "running": len(self.requests) - waiting,
            "in_flight": self.launched - self.landed,
            "blocks_free": len(self.pool.free),
        }

    # -- events --

    def take(self, event):
        match event:
            case sdk.Add():
                request = Request(event.rid, list(event.prompt_ids), event.max_new_tokens, event.stop_token_ids)
                if not event.prompt_ids or self.pool.blocks_of(request.most_tokens) > self.pool.blocks:
                    self.replies.append(sdk.Refused(rid=event.rid, reason="it has no prompt, or does not fit"))
                else:
                    self.requests[event.rid] = request
                    self.add(request)
            case sdk.Abort() if event.rid in self.requests:
                self.abort(event.rid)
            case sdk.BatchResult():
                self.landed += 1
                self.land([ids[0] if ids else -1 for ids in event.token_ids])

    # -- what the engine calls --

    def launch(self, batch: list[Work]) -> None:
        """Begin to compute a batch."""
        self.launched += 1
        self.batch = sdk.Batch(id=self.launched, shares=tuple(map(share_of, batch)))

    def tell(self, request: Request, token: int | None, reason: str = "") -> None:
        """A client hears of a token, or of the end of its request."""
        ids = () if token is None else (token,)
        self.replies.append(sdk.Tokens(rid=request.id, token_ids=ids, finish_reason=reason or None))
        if reason:
            self.requests.pop(request.id, None)

    # -- for each engine --

    @property
    def pool(self) -> Pool:
        return self.engine.pool

    def add(self, request: Request) -> None:
        self.engine.add(request)

    def abort(self, rid: str) -> None:
        self.engine.abort(self.requests[rid])


class ThreadMachine(EngineMachine):
    """Of an engine with threads, which are in ``modules``; ``make`` makes it and starts them."""

    def __init__(self, config: Config, *modules: ModuleType):
        super().__init__(config)
        self.threads = Threads(*modules)
        self.results = self.threads.queue()
        with self.threads:
            self.engine = self.make()
            # To where they wait first.
            self.threads.run(0.0)

    def run(self, events, now):
        with self.threads:
            for event in events:
                self.take(event)
            self.threads.run(now)
        # Who polls goes on in the next step; while a batch is computed, there is nothing to do in it.
        polls = self.threads.is_polling and bool(self.requests) and self.launched == self.landed
        return self.threads.is_stalled or polls

    def take(self, event):
        if isinstance(event, sdk.Signal):
            self.threads.stall(event.value)
        super().take(event)

    def land(self, tokens):
        self.results.put(tokens)

    def forward(self, batch: list[Work]) -> list[int]:
        """Compute a batch: the engine's thread waits here."""
        self.launch(batch)
        return self.results.get()

    def close(self):
        self.threads.close()


class LoopMachine(EngineMachine):
    """Of an engine with an asyncio loop."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.loop = EventLoop()

    def run(self, events, now):
        # Whoever leaves in the step of a result has left before it.
        for event in sorted(events, key=lambda event: isinstance(event, sdk.BatchResult)):
            self.loop.call_soon(self.take, event)
        self.loop.run(now)
        return False

    def land(self, tokens):
        self.result.set_result(tokens)

    async def forward(self, batch: list[Work]) -> list[int]:
        """Compute a batch: the engine's task waits here."""
        self.launch(batch)
        self.result = self.loop.create_future()
        return await self.result

    def close(self):
        self.loop.close()


def _all_blocks(config: Config) -> int:
    return config.blocks


def adapter_of(name, machine, *mutants, config=Config, context_blocks=_all_blocks, stalls=False, may_grow=()):
    """Declare the adapter of a machine of this folder. A request has ``context_blocks`` at most."""
    return sdk.SchedulerAdapter(
        name,
        config=config,
        machine=machine,
        limits=lambda config: sdk.Limits(
            block_size=config.block_size,
            blocks=config.blocks,
            batch_tokens=config.batch_tokens,
            batch_requests=config.batch_requests,
            context_tokens=context_blocks(config) * config.block_size,
        ),
        can=lambda _: sdk.Capabilities(flush=False, preemption=False),
        actions={Stall: {}} if stalls else {},
        mutants=mutants,
        may_grow=may_grow,
    )
