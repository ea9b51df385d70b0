"""Optional protocols of adapters that the commands check for with ``isinstance``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from scripted.core.mutant import Mutant


@runtime_checkable
class HasExamples(Protocol):
    """An adapter with a first test, and with settings that show something in that test and in the shell."""

    example_settings: Mapping[str, str]

    def first_test(self, name: str, settings: Mapping[str, str]) -> str:
        """Return a file with a passing test ``test_<name>``. Raises the errors of ``read_config``."""
        ...


@runtime_checkable
class HasDemo(Protocol):
    """An adapter that can show a race."""

    def run_demo(self, page: Path) -> bool:
        """Print the race and write its timeline to ``page``; True if the race appeared as expected."""
        ...


@runtime_checkable
class HasGallery(Protocol):
    """An adapter whose mutants have tests that show them."""

    mutants: Mapping[str, Mutant]

    def mutant_named(self, name: str) -> Mutant:
        """Return the mutant with this name. Raises ScriptDefinitionError, with the nearest name, if there is none."""
        ...
