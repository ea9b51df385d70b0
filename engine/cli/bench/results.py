"""Results: latency percentiles, throughput, and errors, which are counted but never timed; their file and tables.

TTFT: from due to the first text. ITL: between events with text. TPOT: from the first to the last text, per token. E2E:
from due to the last text. Lateness: from due to sent, which is the load generator's own fault.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from engine.cli.bench.plan import BenchPlan
from engine.core.errors import ConfigError
from lockstep.output_files import write_output


class Record(msgspec.Struct, kw_only=True):
    """The outcome of a request; times are in seconds from the benchmark's start.

    ``due_s`` is the time at which it should have been sent, from which latencies count. ``gaps_s`` are between events
    with text. ``turn`` is its index in its conversation, from 1. With ``error`` set no other field is a measurement.
    """

    due_s: float
    sent_s: float
    first_s: float | None = None
    end_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted_by_usage: bool = False
    gaps_s: list[float] = []
    turn: int = 1
    error: str | None = None


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of ``count`` values in milliseconds."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Distribution | None:
        """Summarize values in seconds; None if there are none."""
        if not values_s:
            return None
        values = sorted(value * 1000 for value in values_s)
        return cls(
            count=len(values),
            mean=math.fsum(values) / len(values),
            p50=percentile(values, 50),
            p95=percentile(values, 95),
            p99=percentile(values, 99),
            max=values[-1],
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a benchmark. Rates count successes, from the first due request to the last text.

    ``later_ttft_ms`` covers only second and later turns; None without them.
    """

    succeeded: int
    failed: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    counted_by_usage: bool
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    lateness_ms: Distribution | None
    later_ttft_ms: Distribution | None = None


def summarize(records: Sequence[Record]) -> Summary:
    good = [record for record in records if record.error is None]
    times = [(record.due_s, record.first_s, record.end_s) for record in good]
    whole = [(due, first, end) for due, first, end in times if first is not None and end is not None]
    assert len(whole) == len(good), "a record without an error has all its times"
    duration_s = max((end for _, _, end in whole), default=0.0) - min((due for due, _, _ in whole), default=0.0)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Summary(
        succeeded=len(good),
        failed=len(records) - len(good),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        duration_s=duration_s,
        requests_per_s=len(good) * per_s,
        output_tokens_per_s=output_tokens * per_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) * per_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        counted_by_usage=all(record.counted_by_usage for record in good),
        ttft_ms=Distribution.of([first - due for due, first, _ in whole]),
        itl_ms=Distribution.of([gap for record in good for gap in record.gaps_s]),
        tpot_ms=Distribution.of(
            [
                (end - first) / (record.output_tokens - 1)
                for record, (_, first, end) in zip(good, whole, strict=True)
                if record.output_tokens > 1
            ]
        ),
        e2e_ms=Distribution.of([end - due for due, _, end in whole]),
        lateness_ms=Distribution.of([record.sent_s - record.due_s for record in good]),
        later_ttft_ms=Distribution.of(
            [first - due for record, (due, first, _) in zip(good, whole, strict=True) if record.turn > 1]
        ),
    )


def kept_share(records: Sequence[Record], first_ms: float | None, gap_ms: float | None) -> float:
    """Return the share of requests that kept the bounds for first token and gaps; a bound of None always holds.

    A request keeps them if its first token and all of its gaps do. A request that ended in an error does not.
    """
    first_s, gap_s = (math.inf if bound is None else bound / 1000 for bound in (first_ms, gap_ms))
    kept = [
        record.error is None
        and record.first_s is not None
        and record.first_s - record.due_s <= first_s
        and max(record.gaps_s, default=0.0) <= gap_s
        for record in records
    ]
    return sum(kept) / len(kept)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the value at a percentile of ordered values, interpolated between neighbours."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark's result, as its JSON file stores it.

    ``began_at`` is in seconds since the epoch. ``versions`` are the client's and the server's.
    """

    plan: BenchPlan
    model: str
    began_at: float
    versions: dict[str, str]
    summary: Summary
    records: list[Record]


def write_result(result: BenchResult, path: Path) -> None:
    write_output(path, msgspec.json.format(msgspec.json.encode(result)) + b"\n")


def read_result(path: Path) -> BenchResult:
    """Read a result. Raises ConfigError for any other file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchResult)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} must be a result that `engine bench --json` wrote, but: {exc}") from exc


LATENCIES = {
    "ttft_ms": "time to first token",
    "later_ttft_ms": "of these, later turns",
    "itl_ms": "inter-token latency",
    "tpot_ms": "time per output token",
    "e2e_ms": "end to end",
    "lateness_ms": "sent late by",
}
RATES = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "tokens/s in and out",
}
PERCENTILES = ("p50", "p95", "p99")


def result_tables(result: BenchResult) -> list[Table]:
    """Make the tables of one benchmark: latencies, totals, and any errors."""
    return [_latencies(result), _totals(result), *([_errors(result.summary)] if result.summary.failed else [])]


def comparison_table(first: BenchResult, second: BenchResult, names: tuple[str, str]) -> Table:
    """Make a table of two results and the change between them; the caption lists the plans' differences."""
    table = Table("", *names, "change", title="Benchmarks compared", caption=_differences(first, second))
    for column in table.columns[1:]:
        column.justify = "right"
    for field, label in RATES.items():
        _add_change(table, label, getattr(first.summary, field), getattr(second.summary, field))
    for field, label in LATENCIES.items():
        for percent in PERCENTILES:
            values = [_value(getattr(result.summary, field), percent) for result in (first, second)]
            if field == "later_ttft_ms" and values == [None, None]:
                continue
            _add_change(table, f"{label} {percent}, ms", *values)
    table.add_row("errors", str(first.summary.failed), str(second.summary.failed), "")
    return table


def _latencies(result: BenchResult) -> Table:
    table = Table("latency, ms", "mean", *PERCENTILES, "max", "samples", title=f"{result.model} at {result.plan.url}")
    for column in table.columns[1:]:
        column.justify = "right"
    for field, label in LATENCIES.items():
        found: Distribution | None = getattr(result.summary, field)
        if found is not None:
            values = (found.mean, found.p50, found.p95, found.p99, found.max)
            table.add_row(label, *(f"{value:.2f}" for value in values), str(found.count))
    return table


def _totals(result: BenchResult) -> Table:
    summary = result.summary
    counted = "by the server" if summary.counted_by_usage else "as events of the streams"
    table = Table("total", "", show_header=False)
    table.add_row("requests", f"{summary.succeeded} succeeded, {summary.failed} failed")
    table.add_row("duration", f"{summary.duration_s:.2f} s")
    for field, label in RATES.items():
        table.add_row(label, f"{getattr(summary, field):.1f}")
    plan = result.plan
    bounds = [("first token", plan.slo_first_ms), ("gaps", plan.slo_gap_ms)]
    if asked := [f"{what} <= {bound:g} ms" for what, bound in bounds if bound is not None]:
        share = kept_share(result.records, plan.slo_first_ms, plan.slo_gap_ms)
        table.add_row("kept " + ", ".join(asked), f"{100 * share:.1f} %")
    table.add_row("tokens", f"{summary.prompt_tokens} in, {summary.output_tokens} out, counted {counted}")
    return table


def _errors(summary: Summary) -> Table:
    table = Table("error (not timed)", "times", style="red")
    for error, times in sorted(summary.errors.items(), key=lambda item: -item[1]):
        table.add_row(error, str(times))
    return table


def _add_change(table: Table, label: str, first: float | None, second: float | None) -> None:
    shown = ["-" if value is None else f"{value:.2f}" for value in (first, second)]
    change = f"{(second / first - 1) * 100:+.1f} %" if first and second is not None else ""
    table.add_row(label, *shown, change)


def _value(found: Distribution | None, percent: str) -> float | None:
    return None if found is None else float(getattr(found, percent))


def _differences(first: BenchResult, second: BenchResult) -> str:
    pairs = zip(msgspec.structs.asdict(first.plan).items(), msgspec.structs.asdict(second.plan).values(), strict=True)
    different = [
        f"{name}: {msgspec.to_builtins(one)!r} and {msgspec.to_builtins(other)!r}"
        for (name, one), other in pairs
        if one != other
    ]
    return "the plans are equal" if not different else "the plans differ in " + ", ".join(different)
