"""The adapter of an engine whose runner owns the KV: it replaces the model below the runner, where block tables are.

``scripted explore --adapter examples/engines/runner_kv.py --corpus``
"""

import runner_kv_engine
from engine_machine import Config, ThreadMachine, adapter_of
from paged_requests import Pool, Work

from scripted.sdk import Mutant


class SlotConfig(Config, frozen=True):
    """With fewer and larger slots."""

    batch_requests: int = 2

    @property
    def slot_blocks(self) -> int:
        return self.blocks // self.batch_requests


class RunnerKvMachine(ThreadMachine):
    """The blocks of a request are those of its slot."""

    def __init__(self, config):
        # As much as one request can have: none is taken from it.
        self.slot = Pool(config.slot_blocks, config.block_size)
        super().__init__(config, runner_kv_engine)

    def make(self):
        config = self.config
        sizes = (config.batch_requests, config.slot_blocks, config.batch_tokens)
        engine = runner_kv_engine.Engine(self.compute, self.tell, *sizes)
        engine.start()
        return engine

    def compute(self, batch):
        return self.forward([Work(*work) for work in batch])

    @property
    def pool(self):
        return self.slot


ADAPTER = adapter_of(
    "runner-kv",
    RunnerKvMachine,
    Mutant(
        name="a-prompt-that-is-wholly-there",
        origin="written for this example",
        bug="a prompt whose KV is in a slot leaves nothing to compute, so nothing says its first token",
        signature="computes 0 positions",
        test="",
        target="runner_kv_engine:Runner.common",
        cut="tokens[:-1]",
        becomes="tokens",
    ),
    config=SlotConfig,
    context_blocks=lambda config: config.slot_blocks,
    # Free slots keep their tokens.
    may_grow=("runner.tokens",),
)
