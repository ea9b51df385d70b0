"""From records to numbers: latencies at their percentiles, throughput, errors. Errors are counted, never timed.

TTFT: due to first text. ITL: between events with text. TPOT: first to last text over the tokens between. E2E: due to
last text. Lateness: due to sent, which is the load generator's own fault.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from engine.bench.measured_request import Record


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Values in milliseconds; ``count`` of them."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Distribution | None:
        """The distribution of values in seconds; None when there are none."""
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
    """What a benchmark found. Rates are of successes, over the time from the first due request to the last text."""

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
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value at a percentile of ordered values, between its neighbours where it falls between them."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
