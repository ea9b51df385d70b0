"""The example scheduler with its bug mended, and mutants that put bugs into it: the planted one and three others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/your_scheduler"))

from adapter import Config
from mended import MendedMachine, MendedScheduler
from scheduler import Request, Scheduler, Work

from scripted.sdk import Capabilities, Limits, Mutant, SchedulerAdapter
from scripted.search.forks import Copier

TEST = "tests/registered/sdk/test_example_scripts.py"


def _remember_always(scheduler: Any, request: Request, work: Work) -> None:
    Scheduler._remember(scheduler, request, work)


def _give_back_the_first(scheduler: Any, request: Request) -> None:
    for block in request.blocks[:1]:
        scheduler.references[block] -= 1
        if not scheduler.references[block]:
            scheduler.free.append(block)
    request.blocks, request.computed = [], 0


def _preempt_in_flight(scheduler: Any) -> bool:
    for victim in reversed(scheduler.running):
        scheduler.running.remove(victim)
        scheduler._give_back(victim)
        scheduler.waiting.appendleft(victim)
        return True
    return False


def _add_all(scheduler: Any, request: Request) -> bool:
    scheduler.requests[request.id] = request
    scheduler.waiting.append(request)
    return True


def _mutant(name: str, bug: str, signature: str, owner: type, attribute: str, replacement: Any) -> Mutant:
    return Mutant(
        name=name,
        origin="examples/your_scheduler",
        bug=bug,
        signature=signature,
        test=TEST,
        owner=owner,
        attribute=attribute,
        replacement=replacement,
    )


MUTANTS = (
    _mutant(
        "ended-request-is-remembered",
        "a result that comes after the end of its request is put into the prefix cache",
        "which was written before",
        MendedScheduler,
        "_remember",
        _remember_always,
    ),
    _mutant(
        "only-the-first-block-comes-back",
        "an end gives one block back",
        "blocks_free is",
        Scheduler,
        "_give_back",
        _give_back_the_first,
    ),
    _mutant(
        "preemption-says-nothing",
        "a preemption takes blocks that a batch in flight reads, and is not told",
        "again",
        Scheduler,
        "_preempt",
        _preempt_in_flight,
    ),
    _mutant(
        "what-cannot-fit-is-taken",
        "a request that is larger than all blocks waits for ever",
        "waits for ever",
        Scheduler,
        "add",
        _add_all,
    ),
)

ADAPTER = SchedulerAdapter(
    "example",
    config=Config,
    machine=MendedMachine,
    limits=lambda config: Limits(
        block_size=config.block_size,
        blocks=config.blocks,
        batch_tokens=config.batch_tokens,
        batch_requests=config.batch_requests,
        context_tokens=config.blocks * config.block_size,
        depth=MendedMachine.depth,
    ),
    can=lambda _: Capabilities(),
    workloads={"too-large": "default; 1 start a prompt=60; 2 start b prompt=4"},
    mutants=MUTANTS,
    copier=Copier(),
)
