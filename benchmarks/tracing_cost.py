"""The cost of spans: the front end's CPU time to note, make and encode the spans of one request.

Needs the extra ``tracing``. A server without a collector's address imports and does nothing of this.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.measurement import Measurement
from engine.core.messages import FinishReason, Generate, RequestTrace, SamplingParams
from engine.process.clock import MonotonicClock

__all__ = ["measure"]

ROUNDS: Final = 15
REQUESTS: Final = 400
STAGES: Final = 4


def measure() -> Iterator[Measurement]:
    """Measure a request's spans with ``STAGES`` stages: itself, its queue, its prefill with each stage, its decode."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    from engine.frontend.http.tracing import Tracing

    sent: list[int] = []

    class Encoder(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            sent.append(len(encode_spans(spans).SerializeToString()))
            return SpanExportResult.SUCCESS

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Encoder(), max_queue_size=100_000))
    tracing = Tracing(provider, "m", MonotonicClock())
    costs = []
    for _ in range(ROUNDS):
        begun_s = time.process_time()
        for number in range(REQUESTS):
            rid = f"cmpl-{number}"
            tracing.sent(Generate(rid=rid, prompt_ids=(1,), sampling=SamplingParams(max_new_tokens=64)))
            tracing.ended(_trace(rid, float(number)))
        provider.force_flush()
        costs.append((time.process_time() - begun_s) / REQUESTS)
    provider.shutdown()
    values = sorted(cost * 1e6 for cost in costs)
    spread = f"median of {ROUNDS} rounds, {values[0]:.0f} to {values[-1]:.0f}"
    yield Measurement(name="spans of a request", value=statistics.median(values), unit="us of CPU", spread=spread)
    yield Measurement(name="spans of a request, sent", value=sum(sent) / (ROUNDS * REQUESTS), unit="bytes")


def _trace(rid: str, at_s: float) -> RequestTrace:
    return RequestTrace(
        rid=rid,
        arrived_s=at_s,
        arrival_step=1,
        launched_s=at_s + 0.1,
        launch_step=2,
        first_token_s=at_s + 0.2,
        ended_s=at_s + 0.9,
        end_step=66,
        first_microbatch=1,
        prompt_microbatch=1,
        last_microbatch=64,
        microbatches=64,
        stages=tuple((at_s + stage / 100, at_s + (stage + 1) / 100) for stage in range(STAGES)),
        finish_reason=FinishReason.LENGTH,
        prompt_tokens=128,
        completion_tokens=64,
    )
