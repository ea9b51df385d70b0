"""The gallery: real scheduler races of real serving engines, each with a mutant that puts its bug back."""

from scripted.core.mutant import Mutant
from scripted_lockstep.mutants.gallery import (
    CONTRACTS,
    ESCAPES,
    KEPT_NUMBERS,
    MUTANTS,
    PAIRS,
    RACES,
    RECENT,
    UnknownMutant,
    mutant_named,
)

__all__ = [
    "CONTRACTS",
    "ESCAPES",
    "KEPT_NUMBERS",
    "MUTANTS",
    "PAIRS",
    "RACES",
    "RECENT",
    "Mutant",
    "UnknownMutant",
    "mutant_named",
]
