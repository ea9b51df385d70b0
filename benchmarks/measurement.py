"""One measured number with its target, and how a list of them is shown and stored.

Owns table and file format. Never measures anything, never hides a target that was missed.
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

# How often a median is taken of values drawn again.
_RESAMPLES = 2000
_LIBRARIES = ("torch", "transformers", "pyzmq", "msgspec")

T = TypeVar("T")


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """A number. ``target`` is in the same unit; ``at_least`` says on which side of it the number should be.

    ``spread`` says in words how far the number can be trusted: best of how many, a percentile, an interval.
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
    """Everything that was measured in one run, and on what."""

    python: str
    machine: str
    cores: int
    load_before: float
    libraries: dict[str, str]
    measurements: tuple[Measurement, ...]

    @property
    def busy(self) -> bool:
        """Whether other processes wanted more than half of the machine."""
        return self.load_before > self.cores / 2

    @classmethod
    def of(cls, measurements: Sequence[Measurement], load_before: float) -> MeasurementReport:
        """The report of this machine. ``load_before`` is its load average before the first measurement."""
        return cls(
            python=platform.python_version(),
            machine=f"{platform.system()} {platform.machine()}",
            cores=os.cpu_count() or 1,
            load_before=load_before,
            libraries={name: version(name) for name in _LIBRARIES},
            measurements=tuple(measurements),
        )


def as_table(report: MeasurementReport) -> Table:
    """The report as a table for a terminal."""
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
    """The type of an option that names the file of results: refused before the measurements, not after them."""
    path = Path(text)
    try:
        require_writable("it", path)
    except UnwritableFileError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return path


def output_folder(text: str) -> Path:
    """The same for a folder of results, which need not be there yet."""
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
    """The order of a round: every other one goes the other way round, so that it helps nobody to be first."""
    return things[:: -1 if number % 2 else 1]


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that ``percent`` of at least two values are not above, interpolated."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by drawing values again and again; the same ones give the same."""
    draw = random.Random(0)  # noqa: S311 - resampling, not secrets
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    cut = int(0.025 * _RESAMPLES)
    return medians[cut], medians[-cut - 1]
