"""The adapter of an engine with two memory pools, which it declares as ``pools``.

``scripted explore --adapter examples/engines/window_pool.py --corpus``
"""

from engine_machine import Config, EngineMachine
from window_pool_engine import Engine

from scripted import sdk


class WindowConfig(Config, frozen=True):
    """With a second pool, for layers with a window."""

    window_blocks: int = 12
    window: int = 5


class WindowPoolMachine(EngineMachine):
    """A step plans a batch once the last one has come back."""

    def __init__(self, config):
        super().__init__(config)
        self.engine = Engine(self.tell, config.sizes, config.window_blocks, config.window)

    def run(self, events, now):  # noqa: ARG002 - it has no use for the time
        for event in events:
            self.take(event)
        if self.launched == self.landed and (batch := self.engine.plan()):
            self.launched += 1
            self.batch = sdk.Batch(id=self.launched, shares=tuple(map(self.share_of, batch)))
        return False

    def take(self, event):
        if isinstance(event, sdk.Add):
            blocks = self.engine.ring_blocks(len(event.prompt_ids) + event.max_new_tokens)
            if blocks > self.config.window_blocks:
                self.replies.append(sdk.Refused(rid=event.rid, reason="its ring does not fit"))
                return
        super().take(event)

    def share_of(self, work):
        window = sdk.Window(block_ids=self.engine.window_table(work), tokens=self.config.window)
        return sdk.Share(
            rid=work.request.id, start=work.start, count=work.count, block_ids=work.blocks, windows=(window,)
        )

    def land(self, tokens):
        self.engine.land(tokens)


ADAPTER = sdk.SchedulerAdapter(
    "window-pool",
    config=WindowConfig,
    machine=WindowPoolMachine,
    limits=lambda config: sdk.Limits(
        block_size=config.block_size,
        blocks=config.blocks + config.window_blocks,
        pools=(config.blocks, config.window_blocks),
        batch_tokens=config.batch_tokens,
        batch_requests=config.batch_requests,
        context_tokens=config.blocks * config.block_size,
    ),
    can=lambda _: sdk.Capabilities(flush=False, preemption=False),
    mutants=(
        sdk.Mutant(
            name="the-other-pool-has-room",
            origin="written for this example",
            bug="what the second pool lacks is taken from the first one",
            signature="has table 1 in pool 0",
            test="",
            target="window_pool_engine:Engine.begin",
            cut="free = self.window_free",
            becomes="""free = self.window_free
        if len(free) < count <= len(self.pool.free) - self.pool.blocks_of(request.most_tokens):
            free = self.pool.free""",
        ),
        sdk.Mutant(
            name="a-ring-without-its-window",
            origin="written for this example",
            bug="a ring has room for a batch, but not for the window behind it",
            signature="reads the wrong KV",
            test="",
            target="window_pool_engine:Engine.ring_blocks",
            cut="self.most_window_blocks",
            becomes="self.pool.blocks_of(self.batch_tokens)",
        ),
    ),
)
