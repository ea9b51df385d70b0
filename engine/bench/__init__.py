"""A load generator for any server of the OpenAI protocol: plans, runs, measures and compares.

Never imports the engine that it measures: all that it knows of a server comes over HTTP.
"""

from __future__ import annotations

from engine.bench.measures import Distribution, Summary, summarize
from engine.bench.plan import Arrivals, BenchPlan
from engine.bench.results import BenchResult, read_result, write_result
from engine.bench.run import run_bench
from engine.bench.tables import comparison_table, result_tables

__all__ = [
    "Arrivals",
    "BenchPlan",
    "BenchResult",
    "Distribution",
    "Summary",
    "comparison_table",
    "read_result",
    "result_tables",
    "run_bench",
    "summarize",
    "write_result",
]
