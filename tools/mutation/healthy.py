"""The healthy run: how long each unit takes without a mutant, and which lines of the core it runs.

A unit that never runs a mutant's line cannot notice it: what it does is determined by what went in.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec

from tools.mutation.children import run_children
from tools.mutation.operators import MODULE, Mutant
from tools.mutation.suites import Unit

__all__ = ["Healthy", "fingerprint", "measure", "runs"]

_SOURCES: Final = ("engine", "scripted", "tests", "tools/mutation")


class Healthy(msgspec.Struct, frozen=True):
    """One unit by itself. ``lines`` are those that it ran, by file; ``seconds`` of processor time, without tracing."""

    unit: str
    seconds: float
    lines: dict[str, list[int]]
    failure: str | None = None


def runs(healthy: Healthy, mutant: Mutant) -> bool:
    """Whether this unit comes to a mutant."""
    if mutant.function == MODULE:
        return True
    lines = healthy.lines.get(mutant.file, ())
    return any(mutant.first_line <= line <= mutant.last_line for line in lines)


def fingerprint() -> str:
    """Of all that a result depends on: an equal one means that earlier results still hold."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in _SOURCES:
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(f"{path}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def measure(units: Sequence[Unit], files: Iterable[str], jobs: int) -> list[Healthy]:
    """Run each unit in a child of its own, twice: once for the time, once for the lines."""
    paths = {str(Path(file).resolve()): file for file in files}

    def tasks() -> Iterator[Callable[[Callable[[bytes], None]], None]]:
        for unit in units:
            yield lambda say, unit=unit: say(msgspec.json.encode(_look(unit, paths)))  # type: ignore[misc]

    found: dict[int, Healthy] = {}
    for number, ended in run_children(tasks(), jobs):
        if not ended.said:
            raise RuntimeError(f"{units[number].name} ended without a result, by signal {ended.signal}")
        found[number] = msgspec.json.decode(ended.said, type=Healthy)
    return [found[number] for number in range(len(units))]


def _look(unit: Unit, paths: dict[str, str]) -> Healthy:
    seen: dict[str, set[int]] = {}

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        del event, argument
        file = paths.get(frame.f_code.co_filename)
        if file is None:
            return None
        lines = seen.setdefault(file, set())
        lines.add(frame.f_code.co_firstlineno)

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            del event, argument
            lines.add(frame.f_lineno)
            return line

        return line

    # First with tracing: what is computed once a process is seen only then.
    sys.settrace(enter)
    failure = unit.run()
    sys.settrace(None)
    started = time.process_time()
    failure = unit.run() or failure
    seconds = time.process_time() - started
    return Healthy(unit.name, seconds, {file: sorted(lines) for file, lines in seen.items()}, failure)
