"""An abort of a request that a pause holds back is lost: after the pause the request runs to its end.

The front end passes the abort on to a scheduler that has not got the request yet, and takes no other one. Exit status 1
where the request is computed after both aborts.
"""

# ruff: noqa: T201 - it prints what it sees.

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import torch
from one_scheduler import new_scheduler, request, turn, without_a_model
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, GenerateReqInput, PauseGenerationReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.aio_rwlock import RWLock


class FrontEnd(TokenizerManager):
    """Its ``generate_request``, ``abort_request``, ``pause_generation`` and ``continue_generation``; no tokenizer."""

    is_pause = enable_metrics = enable_priority_scheduling = False
    tokenizer = None

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.is_pause_cond = asyncio.Condition()
        self.model_update_lock = RWLock()
        self.rid_to_state = {}
        self.request_logger = SimpleNamespace(log_received_request=lambda *_: None)

    def auto_create_handle_loop(self) -> None: ...

    def _init_req_state(self, obj: Any, request: Any = None) -> None:
        del request
        self.rid_to_state[obj.rid] = SimpleNamespace(abort_sent=False, dispatched=False)

    async def _validate_and_resolve_lora(self, obj: Any) -> None: ...

    async def _tokenize_one_request(self, obj: Any) -> Any:
        return request(obj.rid, len(obj.input_ids))

    async def _send_one_request(self, tokenized_obj: Any) -> None:
        self._dispatch_to_scheduler(tokenized_obj)

    async def _wait_one_response(self, obj: Any, request: Any = None) -> AsyncIterator[str]:
        del request
        yield obj.rid

    async def serve(self, obj: Any) -> list[str]:
        return [answer async for answer in self.generate_request(obj)]

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        self.scheduler.process_input_requests([obj])

    async def _async_dispatch_to_scheduler(self, obj: Any) -> None:
        self._dispatch_to_scheduler(obj)


async def run(scheduler: Any) -> int:
    front_end = FrontEnd(scheduler)
    await front_end.pause_generation(PauseGenerationReqInput(mode="in_place"))
    asked = GenerateReqInput(input_ids=[1, 2, 3, 4], sampling_params={"max_new_tokens": 8}, rid="a")
    client = asyncio.create_task(front_end.serve(asked))
    await asyncio.sleep(0)
    front_end.abort_request("a")
    await front_end.continue_generation(ContinueGenerationReqInput())
    await client
    front_end.abort_request("a")
    computed = sum(bool(turn(scheduler)) for _ in range(12))
    print(f"after an abort during the pause and one after it, {computed} batches of a are computed", flush=True)
    return 1 if computed else 0


if __name__ == "__main__":
    with torch.no_grad():
        status = asyncio.run(asyncio.wait_for(run(without_a_model(new_scheduler(disable_overlap_schedule=True))), 60))
    os._exit(status)  # The threads of a scheduler wait for a server.
