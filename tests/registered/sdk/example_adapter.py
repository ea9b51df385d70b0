"""The example scheduler with its bug fixed, and mutants that put bugs into it: the planted one and seven others."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/your_scheduler"))

from adapter import Config
from fixed import FixedMachine

from scripted.sdk import Capabilities, Copier, Limits, Mutant, SchedulerAdapter

TEST = "tests/registered/sdk/test_example_scripts.py"


def _preempt_in_flight(scheduler: Any) -> bool:
    for victim in reversed(scheduler.running):
        scheduler.running.remove(victim)
        scheduler._give_back(victim)
        scheduler.waiting.appendleft(victim)
        return True
    return False


_of = functools.partial(Mutant, origin="examples/your_scheduler", test=TEST)

MUTANTS = (
    _of(
        name="ended-request-is-remembered",
        bug="a result that comes after the end of its request is put into the prefix cache",
        signature="which was written before",
        target="fixed:FixedScheduler._remember",
        cut="if not request.ended:",
        becomes="if True:",
    ),
    _of(
        name="only-the-first-block-comes-back",
        bug="an end gives one block back",
        signature="blocks_free is",
        target="scheduler:Scheduler._give_back",
        cut="reversed(request.blocks)",
        becomes="request.blocks[:1]",
    ),
    _of(
        name="preemption-says-nothing",
        bug="a preemption takes blocks that a batch in flight reads, and is not told",
        signature="again",
        target="scheduler:Scheduler._preempt",
        replacement=_preempt_in_flight,
    ),
    _of(
        name="what-cannot-fit-is-taken",
        bug="a request that is larger than all blocks waits forever",
        signature="waits forever",
        target="scheduler:Scheduler.add",
        cut="if -(-most // self.block_size) > len(self.references):",
        becomes="if False:",
    ),
    _of(
        name="half-of-the-budget",
        bug="a batch is half as large as it may be",
        signature="== ('running', True, 16)",
        target="scheduler:Scheduler.schedule",
        cut="budget = self.batch_tokens",
        becomes="budget = self.batch_tokens // 2",
    ),
    _of(
        name="prefixes-are-never-hit",
        bug="a cached prefix is computed again",
        signature="== [8, 9, 10, 11]",
        target="scheduler:Scheduler._cached",
        cut="if block is None:",
        becomes="if True:",
    ),
    _of(
        name="aborts-end-nothing",
        bug="an abort is answered, and its request goes on",
        signature="but has ended",
        target="scheduler:Scheduler.abort",
        cut="self._end(request)",
        becomes="pass",
    ),
    _of(
        name="stop-tokens-are-ignored",
        bug="a request goes on after a token that should have stopped it",
        signature="but alone it says",
        target="scheduler:Scheduler.is_over",
        cut=" or (new > 0 and request.tokens[-1] in request.stop_token_ids)",
    ),
)

ADAPTER = SchedulerAdapter(
    "example",
    config=Config,
    machine=FixedMachine,
    limits=lambda config: Limits(
        block_size=config.block_size,
        blocks=config.blocks,
        batch_tokens=config.batch_tokens,
        batch_requests=config.batch_requests,
        context_tokens=config.blocks * config.block_size,
        depth=FixedMachine.depth,
    ),
    can=lambda _: Capabilities(),
    workloads={"too-large": "default; 1 start a prompt=60; 2 start b prompt=4"},
    mutants=MUTANTS,
    copier=Copier(),
)
