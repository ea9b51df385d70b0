"""The gallery's table: every mutant that is listed and searched for, and how one is found by name.

``RACES`` are bugs of real engines, in the order of the races that they put back; the escapes follow them.
"""

from __future__ import annotations

import difflib
from contextlib import AbstractContextManager, nullcontext

from scripted.adapters.lockstep.bugs.contracts import CONTRACTS
from scripted.adapters.lockstep.bugs.drafting import DRAFTING
from scripted.adapters.lockstep.bugs.ending import ENDING
from scripted.adapters.lockstep.bugs.escapes import ESCAPES
from scripted.adapters.lockstep.bugs.faults import FAULTS
from scripted.adapters.lockstep.bugs.flushing import FLUSHING
from scripted.adapters.lockstep.bugs.grammars import GRAMMARS
from scripted.adapters.lockstep.bugs.host_tier import HOST_TIER
from scripted.adapters.lockstep.bugs.limits_and_load import LIMITS_AND_LOAD
from scripted.adapters.lockstep.bugs.loras import LORAS
from scripted.adapters.lockstep.bugs.memory import MEMORY
from scripted.adapters.lockstep.bugs.planned_ahead import PLANNED_AHEAD
from scripted.adapters.lockstep.bugs.planning import PLANNING
from scripted.adapters.lockstep.bugs.prompt_logprobs import PROMPT_LOGPROBS
from scripted.adapters.lockstep.bugs.queue_policies import QUEUE_POLICIES
from scripted.adapters.lockstep.bugs.retracting import RETRACTING
from scripted.core.mutant import Mutant

__all__ = ["MUTANTS", "RACES", "UnknownMutant", "mutant_named", "switched_on"]


class UnknownMutant(ValueError):
    """No mutant has this name."""


RACES: tuple[Mutant, ...] = (
    *FLUSHING,
    *ENDING,
    *RETRACTING,
    *PLANNING,
    *MEMORY,
    *FAULTS,
    *DRAFTING,
    *PROMPT_LOGPROBS,
    *LIMITS_AND_LOAD,
    *QUEUE_POLICIES,
    *GRAMMARS,
    *LORAS,
    *HOST_TIER,
    *PLANNED_AHEAD,
)
MUTANTS: tuple[Mutant, ...] = (*RACES, *ESCAPES)


def mutant_named(name: str) -> Mutant:
    """The mutant of this name, a contract's included. Raises UnknownMutant with the nearest names."""
    every = (*MUTANTS, *CONTRACTS)
    for mutant in every:
        if mutant.name == name:
            return mutant
    known = [mutant.name for mutant in every]
    near = difflib.get_close_matches(name, known, n=1)
    raise UnknownMutant(
        f"no mutant is called {name!r}; "
        + (f"did you mean {near[0]!r}?" if near else "`scripted gallery list` shows them")
    )


def switched_on(mutant: str | None) -> AbstractContextManager[None]:
    """The gallery's mutant of this name, or nothing at all, for as long as this is open. Raises UnknownMutant."""
    return nullcontext() if mutant is None else mutant_named(mutant).switched_on()
