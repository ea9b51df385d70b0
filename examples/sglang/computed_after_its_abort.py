"""A request is aborted, and a pause in the mode ``retract`` comes before its next result: it is computed once more.

The turns are those of ``event_loop_normal``; the forward pass is left out, because no token depends on it. Exit status
1 where the prompt is computed from its beginning after the abort.
"""

# ruff: noqa: T201 - it prints what it sees.

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from one_scheduler import new_scheduler, request
from sglang.srt.managers.io_struct import AbortReq, ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.managers.utils import GenerationBatchResult


def forward(batch: Any, **_: Any) -> GenerationBatchResult:
    tokens = torch.full((len(batch.reqs),), 7)
    return GenerationBatchResult(logits_output=None, next_token_ids=tokens, can_run_cuda_graph=False)


def turn(scheduler: Any, *messages: Any) -> list[int]:
    """One of the loop; returns how many tokens of each request it computes."""
    scheduler.process_input_requests(list(messages))
    plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
    scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
    if batch:
        scheduler.process_batch_result(batch, scheduler.run_batch(batch))
    scheduler.last_batch = batch
    return [] if batch is None else list(batch.extend_lens or [1] * len(batch.reqs))


def main() -> int:
    with torch.no_grad():
        scheduler = new_scheduler(disable_overlap_schedule=True, chunked_prefill_size=8)
        scheduler.model_worker = SimpleNamespace(forward_batch_generation=forward)
        before = turn(scheduler, request("a", 24))
        pause, go_on = PauseGenerationReqInput(mode="retract"), ContinueGenerationReqInput()
        after = turn(scheduler, AbortReq(rid="a"), pause, go_on)
        while computed := turn(scheduler):
            after += computed
    print(f"computed of a: {before}; then it was aborted, and computed were {after}", flush=True)
    return 1 if sum(after) >= 24 else 0


if __name__ == "__main__":
    os._exit(main())  # The threads of a scheduler wait for a server.
