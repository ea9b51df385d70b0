"""One measured number with its target; lists of such numbers as a table and as a file.

Owns table and file format. Measures nothing, and never hides a missed target.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.table import Table

from lockstep.errors import UnwritableFileError
from lockstep.output_files import require_writable, write_output

__all__ = [
    "Measurement",
    "MeasurementReport",
    "as_table",
    "in_turn",
    "median_interval",
    "output_file",
    "output_folder",
    "percentile",
    "write_report",
]

# The number of resampled medians.
_RESAMPLES = 2000
_LIBRARIES = ("torch", "transformers", "pyzmq", "msgspec")

T = TypeVar("T")


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """A number. ``target`` has the same unit; with ``at_least`` the number should not be below it, otherwise not above.

    ``spread`` describes its reliability: the best of how many, a percentile, an interval.
    """

    name: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = False
    spread: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None without a target."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


class MeasurementReport(msgspec.Struct, frozen=True, kw_only=True):
    """All measurements of one run, and the machine."""

    python: str
    machine: str
    cores: int
    load_before: float
    libraries: dict[str, str]
    measurements: tuple[Measurement, ...]

    @property
    def busy(self) -> bool:
        """Whether other processes used more than half of the machine."""
        return self.load_before > self.cores / 2

    @classmethod
    def of(cls, measurements: Sequence[Measurement], load_before: float) -> MeasurementReport:
        """Make this machine's report. ``load_before`` is its load average before the first measurement."""
        return cls(
            python=platform.python_version(),
            machine=f"{platform.system()} {platform.machine()}",
            cores=os.cpu_count() or 1,
            load_before=load_before,
            libraries={name: version(name) for name in _LIBRARIES},
            measurements=tuple(measurements),
        )


def as_table(report: MeasurementReport) -> Table:
    """Format the report as a table for a terminal."""
    table = Table(
        title=f"{report.cores} cores, {report.machine}, Python {report.python}, load before: {report.load_before:.1f}"
    )
    if report.busy:
        table.caption = "The machine was busy with other work: times are worse than they would be on an idle one."
    for column in ("measured", "value", "target", "met", "how"):
        table.add_column(column, justify="right" if column in ("value", "target") else "left", overflow="fold")
    for measurement in report.measurements:
        table.add_row(*_row(measurement))
    return table


def write_report(path: Path, report: MeasurementReport) -> None:
    """Write the report as JSON."""
    write_output(path, msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def output_file(text: str) -> Path:
    """Parse an option that names the results file, so that a bad one is refused before the measurements."""
    path = Path(text)
    try:
        require_writable("it", path)
    except UnwritableFileError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return path


def output_folder(text: str) -> Path:
    """Parse an option that names a folder of results, which may not exist yet."""
    return output_file(str(Path(text) / "results")).parent


def _row(measurement: Measurement) -> list[str]:
    target = ""
    if measurement.target is not None:
        target = f"{'>=' if measurement.at_least else '<='} {_number(measurement.target)} {measurement.unit}"
    met = {None: "", True: "yes", False: "NO"}[measurement.met]
    return [measurement.name, f"{_number(measurement.value)} {measurement.unit}", target, met, measurement.spread]


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"


def in_turn(things: Sequence[T], number: int) -> Sequence[T]:
    """Return the order of a round: every second one is reversed, so that being first helps nobody."""
    return things[:: -1 if number % 2 else 1]


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the interpolated percentile of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median by resampling, deterministically."""
    draw = random.Random(0)  # noqa: S311 - resampling, not secrets
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    cut = int(0.025 * _RESAMPLES)
    return medians[cut], medians[-cut - 1]
