"""Selects the registered files of one suite, with the expected seconds for each.

Stands between the registry and a run; sorts files with equal engine configurations next to each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ci.registration import Registration
from ci.registry import RegisteredFile, Registry
from ci.suites import Hardware
from ci.times import MeasuredTimes


@dataclass(frozen=True)
class Selector:
    """The files to run. None means all groups except those in `apart`; `nightly` adds the files of the nightly run."""

    hardware: Hardware
    group: str | None = None
    runner: str | None = None
    nightly: bool = False
    apart: frozenset[str] = frozenset()

    def takes(self, entry: Registration) -> bool:
        """Whether a registration matches, disabled or not."""
        return (
            entry.hardware is self.hardware
            and (entry.group not in self.apart if self.group is None else entry.group == self.group)
            and self.runner in (None, entry.runner)
            and (self.nightly or not entry.nightly)
        )


@dataclass(frozen=True)
class SelectedFile:
    """One file of a run. `seconds` is the measured time, or the estimate if there is none."""

    path: str
    seconds: float
    engine_key: str


def select(registry: Registry, times: MeasuredTimes, selector: Selector) -> tuple[SelectedFile, ...]:
    """Return the files to run, by engine configuration and then by path."""
    chosen = [
        SelectedFile(file.path, expected_seconds(file, entry, times), file.engine_key)
        for file, entry in _matches(registry, selector)
        if entry.disabled is None
    ]
    return tuple(sorted(chosen, key=lambda file: (file.engine_key, file.path)))


def expected_seconds(file: RegisteredFile, entry: Registration, times: MeasuredTimes) -> float:
    """Return the measured time of the file on the registration's hardware, or its estimate."""
    measured = times.get(entry.hardware, file.path)
    return entry.est_time_s if measured is None else measured


def disabled_files(registry: Registry, selector: Selector) -> tuple[tuple[str, str], ...]:
    """Return path and reason for each file that would run here if it were not disabled."""
    return tuple((file.path, entry.disabled) for file, entry in _matches(registry, selector) if entry.disabled)


def parts_of(files: tuple[SelectedFile, ...], parts: int) -> tuple[tuple[SelectedFile, ...], ...]:
    """Cut the files into parts, each again with equal engine configurations side by side.

    Longest processing time first (Graham 1969): equal times go by path, equal loads to the part with fewer files. The
    result depends only on the files, never on their order, so that every machine of a matrix cuts alike.
    """
    if parts < 1:
        raise ValueError(f"parts must be >= 1, got {parts}; use 1 for no partition")
    cut: list[list[SelectedFile]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for file in sorted(files, key=lambda file: (-file.seconds, file.path)):
        index = min(range(parts), key=lambda index: (loads[index], len(cut[index])))
        cut[index].append(file)
        loads[index] += file.seconds
    return tuple(tuple(sorted(part, key=lambda file: (file.engine_key, file.path))) for part in cut)


def _matches(registry: Registry, selector: Selector) -> Iterator[tuple[RegisteredFile, Registration]]:
    for file in registry.files:
        entries = [entry for entry in file.registrations if selector.takes(entry)]
        if entries:
            yield file, min(entries, key=lambda entry: entry.disabled is not None)
