"""A request is aborted, and a pause in the mode ``retract`` comes before its next result: it is computed once more.

Exit status 1 where the prompt is computed from its beginning after the abort.
"""

# ruff: noqa: T201 - it prints what it sees.

from __future__ import annotations

import os

import torch
from one_scheduler import new_scheduler, request, turn, without_a_model
from sglang.srt.managers.io_struct import AbortReq, ContinueGenerationReqInput, PauseGenerationReqInput


def main() -> int:
    with torch.no_grad():
        scheduler = without_a_model(new_scheduler(disable_overlap_schedule=True, chunked_prefill_size=8))
        before = turn(scheduler, request("a", 24))
        pause, go_on = PauseGenerationReqInput(mode="retract"), ContinueGenerationReqInput()
        after = turn(scheduler, AbortReq(rid="a"), pause, go_on)
        while computed := turn(scheduler):
            after += computed
    print(f"computed of a: {before}; then it was aborted, and computed were {after}", flush=True)
    return 1 if sum(after) >= 24 else 0


if __name__ == "__main__":
    os._exit(main())  # The threads of a scheduler wait for a server.
