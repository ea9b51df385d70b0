"""A benchmark's result as a file: the plan, the versions, the numbers and every record, as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.bench.measured_request import Record
from engine.bench.measures import Summary
from engine.bench.plan import BenchPlan
from engine.errors import ConfigError
from lockstep.output_files import write_output


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """``began_at`` is in seconds since the epoch. ``versions`` are those of client and server."""

    plan: BenchPlan
    model: str
    began_at: float
    versions: dict[str, str]
    summary: Summary
    records: list[Record]


def write_result(result: BenchResult, path: Path) -> None:
    write_output(path, msgspec.json.format(msgspec.json.encode(result)) + b"\n")


def read_result(path: Path) -> BenchResult:
    """Read a result. Raises ConfigError for a file that is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchResult)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} must be a result that `engine bench --json` wrote, but: {exc}") from exc
