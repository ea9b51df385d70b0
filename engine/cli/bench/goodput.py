"""Goodput: the highest rate of arrivals at which a server keeps the plan's bounds for 99 % of its requests.

Owns the choice of the next rate: doubled until one fails, then between the last that passed and the first that failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from rich.table import Table

from engine.cli.bench.plan import BenchPlan
from engine.cli.bench.results import BenchResult, Distribution, Summary, kept_share
from engine.core.errors import ConfigError

KEPT_SHARE: Final = 0.99
# The search ends when the lowest rate that failed is at most this much above the highest that passed.
PRECISION: Final = 1.1
MOST_PROBES: Final = 16
LEAST_ARRIVALS_S: Final = 10.0
# Bounded, because at ever lower rates a plan takes ever longer.
MOST_HALVINGS: Final = 4


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark at one rate. Requests that ended in an error do not keep the bounds."""

    rate_per_s: float
    kept_share: float
    summary: Summary

    @property
    def has_passed(self) -> bool:
        return self.kept_share >= KEPT_SHARE


class GoodputResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search, as its JSON file has it. ``goodput_per_s`` is 0 if no rate passed."""

    plan: BenchPlan
    model: str
    began_at: float
    versions: dict[str, str]
    goodput_per_s: float
    probes: list[Probe]


def find_goodput(
    plan: BenchPlan, run: Callable[[BenchPlan], BenchResult], *, most_halvings: int = MOST_HALVINGS
) -> GoodputResult:
    """Search from the plan's rate. Each benchmark has different prompts, so that none hits the cache of another.

    A benchmark has the plan's requests, or those of ``least_arrivals_s`` if that is more. Without a rate that passes,
    the plan's rate is halved at most ``most_halvings`` times. Raises ConfigError for a plan without a rate or without
    bounds.
    """
    if plan.rate_per_s is None:
        raise ConfigError("goodput needs a rate to start from, got none; set --rate")
    if plan.slo_first_ms is None and plan.slo_gap_ms is None:
        raise ConfigError("goodput needs a bound, got none; set --slo-first-ms, --slo-gap-ms or both")
    probes: list[Probe] = []
    results: list[BenchResult] = []
    while (rate := next_rate(probes, plan.rate_per_s, most_halvings)) is not None:
        requests = max(plan.requests, math.ceil(rate * least_arrivals_s(plan)))
        tried = msgspec.structs.replace(plan, rate_per_s=rate, requests=requests, seed=plan.seed + len(probes))
        results.append(run(tried))
        share = kept_share(results[-1].records, plan.slo_first_ms, plan.slo_gap_ms)
        probes.append(Probe(rate_per_s=rate, kept_share=share, summary=results[-1].summary))
    return GoodputResult(
        plan=plan,
        model=results[0].model,
        began_at=results[0].began_at,
        versions=results[0].versions,
        goodput_per_s=goodput_of(probes),
        probes=probes,
    )


def least_arrivals_s(plan: BenchPlan) -> float:
    """Return how many seconds arrivals last at least.

    At a rate that is ``PRECISION`` times a server's throughput, the last request then waits for longer than the bound
    of the first token. In a shorter time a queue would hide that the server doesn't keep up.
    """
    return max(LEAST_ARRIVALS_S, (plan.slo_first_ms or 0.0) / 1e3 * PRECISION / (PRECISION - 1))


def next_rate(probes: Sequence[Probe], first: float, most_halvings: int = MOST_HALVINGS) -> float | None:
    """Return the next rate to try; None if the goodput is known or the search has reached its limit."""
    if not probes:
        return first
    failed = [probe.rate_per_s for probe in probes if not probe.has_passed]
    best = goodput_of(probes)
    if len(probes) >= MOST_PROBES:
        return None
    if not failed:
        return 2 * best
    if not best:
        return min(failed) / 2 if len(failed) <= most_halvings else None
    return math.sqrt(best * min(failed)) if min(failed) > PRECISION * best else None


def goodput_of(probes: Sequence[Probe]) -> float:
    """Return the highest rate that passed below every rate that failed; 0 without one."""
    lowest_failed = min((probe.rate_per_s for probe in probes if not probe.has_passed), default=math.inf)
    passed = [probe.rate_per_s for probe in probes if probe.has_passed and probe.rate_per_s < lowest_failed]
    return max(passed, default=0.0)


def goodput_table(result: GoodputResult) -> Table:
    """Make the table of all rates, in the order of the rate; the caption has the goodput."""
    unit = "conversations" if result.plan.turns > 1 else "requests"
    caption = f"goodput: {result.goodput_per_s:.3g} {unit} a second"
    table = Table(f"{unit}/s", "kept, %", "first token p99, ms", "gap p99, ms", "output tokens/s", caption=caption)
    for column in table.columns:
        column.justify = "right"
    for probe in sorted(result.probes, key=lambda one: one.rate_per_s):
        summary = probe.summary
        tails = (_p99(summary.ttft_ms), _p99(summary.itl_ms), f"{summary.output_tokens_per_s:.1f}")
        table.add_row(f"{probe.rate_per_s:.3g}", f"{100 * probe.kept_share:.1f}", *tails)
    return table


def _p99(found: Distribution | None) -> str:
    return "-" if found is None else f"{found.p99:.2f}"
