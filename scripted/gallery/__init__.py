"""The gallery: real scheduler races of real serving engines, each with a mutant that puts its bug back."""

from scripted.gallery.contracts import CONTRACTS
from scripted.gallery.escapes import ESCAPES
from scripted.gallery.mutants import MUTANTS, RACES, UnknownMutant, mutant_named
from scripted.subject.mutant import Mutant

__all__ = ["CONTRACTS", "ESCAPES", "MUTANTS", "RACES", "Mutant", "UnknownMutant", "mutant_named"]
