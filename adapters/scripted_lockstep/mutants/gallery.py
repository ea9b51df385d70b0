"""The gallery's table: all mutants to list and to search for, and the lookup by name.

Each file of mutants covers one part of the engine. ``RACES`` are bugs of real engines, in the order of their races; the
escapes follow. ``CONTRACTS`` are not races, but bugs that the core test suite must notice. ``PAIRS`` need two added
events each; ``KEPT_NUMBERS`` and ``RECENT``, races reported in 2026, are shown by a schedule.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from scripted.core.mutant import Mutant, read_mutants
from scripted.core.refusals import ScriptDefinitionError
from scripted_lockstep.mutants.fresh import fresh_mutant

_CHECKS: Final = ("scripted_lockstep.oracle.", "scripted_lockstep.specification.")


class UnknownMutant(ScriptDefinitionError, ValueError):
    """No mutant has this name."""


def _of(*areas: str) -> tuple[Mutant, ...]:
    return tuple(mutant for area in areas for mutant in read_mutants(Path(__file__).with_name(f"{area}.toml")))


RACES = _of(
    "flushing",
    "ending",
    "retracting",
    "planning",
    "memory",
    "faults",
    "drafting",
    "prompt_logprobs",
    "limits_and_load",
    "queue_policies",
    "grammars",
    "loras",
    "salts",
    "kv_events",
    "host_tier",
    "planned_ahead",
    "sleeping",
    "transfers",
)
ESCAPES = _of("escapes")
MUTANTS = (*RACES, *ESCAPES)
CONTRACTS = _of("contracts", "step_contracts", "memory_contracts", "window_layers", "shared_prompts")
PAIRS = _of("pairs")
KEPT_NUMBERS = _of("kept_numbers")
# Races reported in 2026, each with a schedule that shows it.
RECENT = _of("recent")


def mutant_named(name: str) -> Mutant:
    """Return the mutant, contract or fresh mutant of this name. Raises UnknownMutant with the nearest names."""
    fresh = fresh_mutant(name)
    if fresh is not None:
        return fresh
    every = {mutant.name: mutant for mutant in (*MUTANTS, *CONTRACTS, *PAIRS, *KEPT_NUMBERS, *RECENT)}
    if name in every:
        return every[name]
    near = difflib.get_close_matches(name, every, n=1)
    raise UnknownMutant(
        f"no mutant is called {name!r}; "
        + (f"did you mean {near[0]!r}?" if near else "`scripted gallery list` shows them")
    )


@contextmanager
def switched_on(mutant: str | None) -> Iterator[None]:
    """Switch the gallery's mutant of this name on, or none, while the context is open. Raises UnknownMutant.

    The cached results of checks are cleared before and after.
    """
    if mutant is None:
        yield
        return
    with mutant_named(mutant).switched_on():
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.startswith(_CHECKS)]:
        for value in vars(sys.modules[name]).values():
            if isinstance(value, functools._lru_cache_wrapper):  # noqa: SLF001 - the type has no other name
                value.cache_clear()
