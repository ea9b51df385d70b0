"""A pause in the mode ``abort`` that comes during a pause in place waits for ever, and nothing can end either of them.

The pauses are those of SGLang's front end, over its scheduler, which takes a turn each time it is told to abort. Exit
status 1 where the pause has not ended after some of them, and ``continue_generation`` has not either.
"""

# ruff: noqa: T201 - it prints what it sees.

from __future__ import annotations

import asyncio
import os
from typing import Any

import torch
from one_scheduler import new_scheduler, request, turn, without_a_model
from sglang.srt.managers.io_struct import AbortReq, ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.aio_rwlock import RWLock


class FrontEnd(TokenizerManager):
    """Its ``pause_generation`` and ``continue_generation``, and one request ``a`` that a client waits for."""

    is_pause = False

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.is_pause_cond = asyncio.Condition()
        self.model_update_lock = RWLock()

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.scheduler.process_input_requests([AbortReq(rid=rid, abort_all=abort_all)])
        # As the event loops do it.
        if not self.scheduler._engine_paused:  # noqa: SLF001 - as they ask it
            turn(self.scheduler)

    async def _async_dispatch_to_scheduler(self, message: Any) -> None:
        self.scheduler.process_input_requests([message])

    async def generate(self) -> None:
        async with self.model_update_lock.reader_lock:
            turn(self.scheduler, request("a", 4))
            while self.scheduler.collect_inflight_reqs():
                await asyncio.sleep(0.1)


async def run(scheduler: Any) -> int:
    front_end = FrontEnd(scheduler)
    client = asyncio.create_task(front_end.generate())
    await asyncio.sleep(0)
    await front_end.pause_generation(PauseGenerationReqInput(mode="in_place"))
    pause = asyncio.create_task(front_end.pause_generation(PauseGenerationReqInput(mode="abort")))
    await asyncio.sleep(0.5)
    go_on = asyncio.create_task(front_end.continue_generation(ContinueGenerationReqInput()))
    await asyncio.wait([client, pause, go_on], timeout=4)
    ended = [name for name, task in (("a", client), ("the pause", pause), ("continue", go_on)) if task.done()]
    print(f"after both pauses and a continue ended: {', '.join(ended) or 'nothing'}", flush=True)
    return 0 if len(ended) == 3 else 1


if __name__ == "__main__":
    with torch.no_grad():
        status = asyncio.run(asyncio.wait_for(run(without_a_model(new_scheduler(disable_overlap_schedule=True))), 60))
    os._exit(status)  # The threads of a scheduler wait for a server.
