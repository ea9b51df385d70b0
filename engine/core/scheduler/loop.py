"""The event loop of the scheduler: one loop for every gate, pipeline and number of stages.

It holds no state and takes no decision. A request passes here once a step: gate, scheduler, pipeline, outbox.
"""

from __future__ import annotations

from engine.core.scheduler.ports import Gate, Outbox, Pipeline, StepResult
from engine.core.scheduler.scheduler import Scheduler


def run_loop(gate: Gate, scheduler: Scheduler, pipeline: Pipeline, outbox: Outbox) -> None:
    """Run steps until the gate says that there are no more.

    An exception of a step ends the loop and is the gate's to see.
    """
    result: StepResult | None = None
    with gate:
        while (step := gate.next_step(result)) is not None:
            result = scheduler.step(step.events, step.now)
            carry_out(result, pipeline, outbox)


def carry_out(result: StepResult, pipeline: Pipeline, outbox: Outbox) -> None:
    """Hand on what a step has ordered, launched and said."""
    for order in result.grammars:
        pipeline.order_grammar(order)
    for transfer in result.transfers:
        pipeline.order_transfer(transfer)
    if result.microbatch is not None:
        pipeline.launch(result.microbatch)
    if result.replies:
        outbox.send(result.replies)
    if result.cache_events:
        outbox.publish(result.cache_events)
