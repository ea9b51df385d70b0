"""Two requests run, a pause in the mode ``retract`` puts them back into the queue, and one of them is refused there.

At most one request may be queued. Exit status 1 where the pause has ended a request.
"""

# ruff: noqa: T201 - it prints what it sees.

from __future__ import annotations

import os

import torch
from one_scheduler import new_scheduler, request, turn, without_a_model
from sglang.srt.managers.io_struct import PauseGenerationReqInput


def main() -> int:
    with torch.no_grad():
        scheduler = without_a_model(new_scheduler(disable_overlap_schedule=True, max_queued_requests=1))
        turn(scheduler, request("a", 4))
        turn(scheduler, request("b", 4))
        running = sorted(req.rid for req in scheduler.collect_inflight_reqs())
        scheduler.process_input_requests([PauseGenerationReqInput(mode="retract")])
    waiting = sorted(req.rid for req in scheduler.waiting_queue)
    print(f"before the pause ran {running}; after it wait {waiting}", flush=True)
    return 0 if waiting == running else 1


if __name__ == "__main__":
    os._exit(main())  # The threads of a scheduler wait for a server.
