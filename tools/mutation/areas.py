"""What is mutated, and who may notice it: the pure core, or what is around it. An area is sources, tests and suites.

Owns the lists; runs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from tools.mutation.suites import Suite

__all__ = ["AREAS", "Area"]


class Area(msgspec.Struct, frozen=True, kw_only=True):
    """``sources`` and ``unit_tests`` are folders or files; ``suites`` are those that can notice anything in them."""

    name: str
    sources: tuple[str, ...]
    unit_tests: tuple[str, ...]
    suites: tuple[Suite, ...]

    def files(self) -> list[str]:
        """The source files, in a fixed order."""
        found: list[str] = []
        for source in map(Path, self.sources):
            found += [str(source)] if source.is_file() else [str(path) for path in sorted(source.rglob("*.py"))]
        return found


AREAS: Final = {
    area.name: area
    for area in (
        Area(
            name="core",
            sources=("engine/scheduler", "engine/memory", "engine/instruments", "engine/integrity"),
            unit_tests=("tests/unit/scheduler", "tests/unit/memory", "tests/unit/instruments", "tests/unit/integrity"),
            suites=tuple(Suite),
        ),
        # The search and the scripts in the simulated tier run next to nothing of these.
        Area(
            name="around",
            sources=(
                "engine/frontend",
                "engine/pipeline",
                "engine/model/sampling.py",
                "engine/model/slot_record.py",
            ),
            unit_tests=(
                "tests/unit/frontend",
                "tests/unit/pipeline",
                "tests/unit/model/test_sampling.py",
                "tests/unit/model/test_runner.py",
                "tests/unit/model/test_slot_record.py",
            ),
            suites=(Suite.UNIT,),
        ),
    )
}
