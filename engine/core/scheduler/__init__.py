"""The pure core: events in, at most one microbatch and replies out; and the gate that drives it.

Imports no torch, sockets, threads or clock, here or below.
"""

from engine.core.scheduler.books import Books, Launched
from engine.core.scheduler.loop import carry_out, run_loop
from engine.core.scheduler.ports import Gate, Outbox, Step, StepRecord, StepResult
from engine.core.scheduler.request import Place, Request
from engine.core.scheduler.scheduler import Scheduler

__all__ = [
    "Books",
    "Gate",
    "Launched",
    "Outbox",
    "Place",
    "Request",
    "Scheduler",
    "Step",
    "StepRecord",
    "StepResult",
    "carry_out",
    "run_loop",
]
