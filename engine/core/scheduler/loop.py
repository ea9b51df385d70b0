"""The event loop of the scheduler: one loop for every gate, pipeline and number of stages.

It has no state and makes no decision. In each step the gate supplies events, the scheduler decides, the pipeline gets
orders and a microbatch, and the outbox gets replies and cache events.
"""

from __future__ import annotations

from engine.core.scheduler.ports import Gate, Outbox, Pipeline, StepResult
from engine.core.scheduler.scheduler import Scheduler


def run_loop(gate: Gate, scheduler: Scheduler, pipeline: Pipeline, outbox: Outbox) -> None:
    """Run steps until the gate ends the loop. An exception ends it too, and the gate's ``__exit__`` gets it."""
    result: StepResult | None = None
    with gate:
        while (step := gate.next_step(result)) is not None:
            result = scheduler.step(step.events, step.now)
            carry_out(result, pipeline, outbox)


def carry_out(result: StepResult, pipeline: Pipeline, outbox: Outbox) -> None:
    """Pass a step's orders and microbatch to the pipeline, its replies and cache events to the outbox."""
    for order in result.grammars:
        pipeline.order_grammar(order)
    for lora in result.loras:
        pipeline.order_lora(lora)
    for transfer in result.transfers:
        pipeline.order_transfer(transfer)
    if result.microbatch is not None:
        pipeline.launch(result.microbatch)
    if result.replies:
        outbox.send(result.replies)
    if result.cache_events:
        outbox.publish(result.cache_events)
