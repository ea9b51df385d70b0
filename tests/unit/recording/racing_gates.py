"""A live gate over a scheduler with the flush race in it."""

from __future__ import annotations

import contextlib

from scripted_lockstep.mutants import mutant_named

from engine.server.scheduler_process.gate_context import GateContext
from engine.server.scheduler_process.live_gate import LiveGate

MUTANT = "flush-ignores-in-flight"
_for_life = contextlib.ExitStack()


def racing_gate(context: GateContext) -> LiveGate:
    """The live gate; the mutant stays on for the life of the process."""
    _for_life.enter_context(mutant_named(MUTANT).switched_on())
    return LiveGate(context)
