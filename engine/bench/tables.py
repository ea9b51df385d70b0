"""Results as tables: one benchmark's numbers, or two benchmarks side by side with the change."""

from __future__ import annotations

import msgspec
from rich.table import Table

from engine.bench.measures import Distribution, Summary
from engine.bench.results import BenchResult

LATENCIES = {
    "ttft_ms": "time to first token",
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
    """The tables of one benchmark: latencies, totals, and errors if there were any."""
    return [_latencies(result), _totals(result), *([_errors(result.summary)] if result.summary.failed else [])]


def comparison_table(first: BenchResult, second: BenchResult, names: tuple[str, str]) -> Table:
    """Two results and the change from the first to the second; what differs between the plans is in the caption."""
    table = Table("", *names, "change", title="Benchmarks compared", caption=_differences(first, second))
    for column in table.columns[1:]:
        column.justify = "right"
    for field, label in RATES.items():
        _add_change(table, label, getattr(first.summary, field), getattr(second.summary, field))
    for field, label in LATENCIES.items():
        for percent in PERCENTILES:
            values = [_value(getattr(result.summary, field), percent) for result in (first, second)]
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
