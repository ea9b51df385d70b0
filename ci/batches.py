"""Cuts the targets of a command into batches: one dispatched run each, on one runner, under a time limit.

Pure. Stands between the resolved specs and the dispatch.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ci.errors import CommandRefusedError
from ci.registration import Registration
from ci.selection import expected_seconds
from ci.specs import SpecTarget
from ci.suites import Hardware
from ci.times import MeasuredTimes

BATCH_LIMIT_S = 30 * 60.0
JOB_LIMIT_S = 3 * 3600.0
BATCHES_MAX = 16
BATCH_TARGETS_MAX = 100  # Keeps the request below the largest workflow input.
INSTALL_ALLOWANCE_MINUTES = 15
SLOWNESS_ALLOWANCE = 3.0  # A flake is often a slow run: the job's limit must not hide it.


@dataclass(frozen=True)
class Batch:
    """Targets for one run on one runner; `seconds` is the expected time of all rounds."""

    runner: str
    targets: tuple[SpecTarget, ...]
    seconds: float

    @property
    def timeout_minutes(self) -> int:
        return INSTALL_ALLOWANCE_MINUTES + math.ceil(self.seconds * SLOWNESS_ALLOWANCE / 60)


@dataclass(frozen=True)
class Cut:
    """The batches, and the targets left out because they are disabled or cannot run there, with reasons."""

    batches: tuple[Batch, ...]
    disabled: tuple[tuple[str, str], ...]


def cut_batches(
    targets: Iterable[SpecTarget],
    times: MeasuredTimes,
    *,
    repeat: int = 1,
    hardware: Hardware | None = None,
    apart: Mapping[str, str] = MappingProxyType({}),
) -> Cut:
    """Group by runner and fill batches in path order. Without `hardware` a file goes to the CPU if it can.

    `apart` maps each suite whose environment no runner has to the command that runs it.
    """
    disabled: list[tuple[str, str]] = []
    by_runner: dict[str, list[tuple[SpecTarget, float]]] = {}
    for target in targets:
        entry = _registration(target, hardware)
        if entry.disabled is not None:
            disabled.append((str(target), entry.disabled))
            continue
        if entry.group in apart:
            disabled.append((str(target), f"{entry.group} has an environment of its own: {apart[entry.group]}"))
            continue
        seconds = expected_seconds(target.file, entry, times) * repeat
        if seconds > JOB_LIMIT_S:
            raise CommandRefusedError(
                f"{target} {repeat} times takes about {seconds / 60:.0f} minutes, more than {JOB_LIMIT_S / 60:.0f}; "
                "lower --repeat"
            )
        by_runner.setdefault(entry.runner, []).append((target, seconds))
    batches = [batch for runner in sorted(by_runner) for batch in _fill(runner, by_runner[runner])]
    if len(batches) > BATCHES_MAX:
        raise CommandRefusedError(
            f"that is {len(batches)} runs, more than {BATCHES_MAX}; name fewer tests or lower --repeat"
        )
    if not batches:
        listed = "; ".join(f"{path}: {reason}" for path, reason in disabled)
        raise CommandRefusedError(f"no test named can run: {listed}")
    return Cut(tuple(batches), tuple(disabled))


def _registration(target: SpecTarget, hardware: Hardware | None) -> Registration:
    entries = target.file.registrations
    if hardware is None:
        return min(entries, key=lambda entry: (entry.disabled is not None, entry.hardware is not Hardware.CPU))
    entry = target.file.registration_for(hardware)
    if entry is None:
        known = ", ".join(sorted({entry.hardware for entry in entries}))
        raise CommandRefusedError(f"{target} is not registered for {hardware}; it is for {known}")
    return entry


def _fill(runner: str, timed: list[tuple[SpecTarget, float]]) -> Iterable[Batch]:
    batch: list[SpecTarget] = []
    total = 0.0
    for target, seconds in sorted(timed, key=lambda pair: str(pair[0])):
        if batch and (total + seconds > BATCH_LIMIT_S or len(batch) == BATCH_TARGETS_MAX):
            yield Batch(runner, tuple(batch), total)
            batch, total = [], 0.0
        batch.append(target)
        total += seconds
    yield Batch(runner, tuple(batch), total)
