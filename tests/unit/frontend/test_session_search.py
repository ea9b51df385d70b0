"""The front end's sessions under the ordinary search: healthy ones pass, and each mutant is found.

Choices that are sent by parts, readers that lag, clients that leave, operators that abort, batches that fail.
"""

from __future__ import annotations

import pytest
from scripted_lockstep.sessions.adapter import ADAPTER, MUTANTS
from thinned import thinned

from benchmarks.front_end_mutants import read_batches
from scripted.core.mutant import Mutant
from scripted.search.campaign import Campaign
from scripted.search.strategies import StrategyName
from scripted.search.units import SearchPlan

# The slowest mutant needs half of them.
SCHEDULES = 400


def search(mutant: str | None, schedules: int) -> list[str]:
    plan = SearchPlan(
        adapter=ADAPTER.name,
        generated_from=0,
        strategy=StrategyName.RANDOM,
        schedules=schedules,
        mutant=mutant,
        stop_at_first=True,
    )
    return [str(found) for found in Campaign(plan).run().findings.values()]


def test_every_interleaving_tells_the_client_what_the_outputs_say() -> None:
    """C03, C05, C07"""
    assert not search(None, 150)


def test_every_mutant_fits() -> None:
    """By day, before the night runs them all: also the batches that were measured once."""
    for mutant in (*MUTANTS, *read_batches()):
        with mutant.switched_on():
            continue


@pytest.mark.parametrize("mutant", thinned(MUTANTS, one_in=3), ids=lambda mutant: mutant.name)
def test_the_search_finds_a_mutant(mutant: Mutant) -> None:
    assert search(mutant.name, SCHEDULES)
