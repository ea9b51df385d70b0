"""OpenTelemetry spans of requests, made when a request has ended: its wait, its prefill with the stages, its decode.

Owns their names and attributes: the semantic conventions for generative AI, and under ``lockstep.`` the rids and the
numbers of steps and microbatches that recordings and timelines use. No request waits for the exporter, whose queue is
bounded: spans that do not fit, or find no collector, are lost. Imported only by a server that traces.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine import __version__
from engine.core.messages import FAILURES, Generate, RequestTrace
from engine.frontend.http.request_log import current_record
from engine.process.clock import Clock

PROVIDER: Final = "lockstep"
CHAT, TEXT_COMPLETION = "chat", "text_completion"
CHAT_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages"})
# The time limit for exporting the last spans when the server ends.
LAST_EXPORT_S: Final = 0.3
NS_A_SECOND: Final = 1_000_000_000

logger = logging.getLogger(__name__)
_parents = TraceContextTextMapPropagator()


@dataclass(frozen=True)
class _Sent:
    """The front end's part of an engine request's span."""

    parent: Context
    begun_s: float | None
    operation: str
    attributes: Mapping[str, Any]


class Tracing:
    """Makes spans from the requests sent to the scheduler and the traces that return."""

    def __init__(self, provider: TracerProvider, model: str, clock: Clock) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(PROVIDER, __version__)
        self._model = model
        self._epoch_ns = time.time_ns() - int(clock.now() * NS_A_SECOND)
        # By rid, oldest first.
        self._sent: dict[str, deque[_Sent]] = {}

    def sent(self, message: Generate) -> None:
        """Note a request that is sent, with the HTTP request that is being handled."""
        record, sampling = current_record(), message.sampling
        path = "" if record is None else record.path
        attributes: dict[str, Any] = {
            "gen_ai.request.max_tokens": sampling.max_new_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.response.id": message.rid,
            "lockstep.rid": message.rid,
        }
        if record is not None:
            attributes |= {"lockstep.request_id": record.request_id, "http.route": path}
        parent = _parents.extract({} if record is None else record.trace_headers)
        operation = CHAT if path in CHAT_PATHS else TEXT_COMPLETION
        begun_s = None if record is None else record.begun_s
        self._sent.setdefault(message.rid, deque()).append(_Sent(parent, begun_s, operation, attributes))

    def ended(self, trace: RequestTrace) -> None:
        """Make the spans of a request."""
        waiting = self._sent.get(trace.rid)
        if waiting is None:  # a script sent it, not the front end
            return
        # A request before it may be a script's.
        place = min(trace.behind, len(waiting) - 1)
        sent = waiting[place]
        del waiting[place]
        if not waiting:
            del self._sent[trace.rid]
        span = self._tracer.start_span(
            f"{sent.operation} {self._model}",
            sent.parent,
            SpanKind.SERVER,
            {**self._attributes(sent, trace), **sent.attributes},
            start_time=self._ns(trace.arrived_s if sent.begun_s is None else sent.begun_s),
        )
        if span.is_recording():
            if (failure := _failure(trace)) is not None:
                span.set_attribute("error.type", failure)
                span.set_status(Status(StatusCode.ERROR, trace.error))
            self._add_parts(set_span_in_context(span), trace)
        span.end(self._ns(trace.ended_s))

    def close(self) -> None:
        """Export the remaining spans within LAST_EXPORT_S."""
        # On its own the library would wait up to half a minute for a missing collector.
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(LAST_EXPORT_S)

    def _attributes(self, sent: _Sent, trace: RequestTrace) -> dict[str, Any]:
        reason = trace.finish_reason
        return {
            "gen_ai.operation.name": sent.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [] if reason is None else [reason.value],
            "gen_ai.usage.input_tokens": trace.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": trace.cached_tokens,
            "gen_ai.usage.output_tokens": trace.completion_tokens,
            "lockstep.arrival_step": trace.arrival_step,
            "lockstep.end_step": trace.end_step,
            "lockstep.microbatches": trace.microbatches,
        }

    def _add_parts(self, within: Context, trace: RequestTrace) -> None:
        for name, begun_s, ended_s, attributes in _parts(trace):
            part = self._tracer.start_span(name, within, attributes=attributes, start_time=self._ns(begun_s))
            if name == "prefill":
                for stage, (stage_begun_s, stage_ended_s) in enumerate(trace.stages):
                    inside = {"lockstep.stage": stage, "lockstep.microbatch": trace.prompt_microbatch}
                    at = set_span_in_context(part, within)
                    self._tracer.start_span(
                        f"stage {stage}", at, attributes=inside, start_time=self._ns(stage_begun_s)
                    ).end(self._ns(stage_ended_s))
            part.end(self._ns(ended_s))

    def _ns(self, at_s: float) -> int:
        """Convert a time of the monotonic clock to nanoseconds since the epoch."""
        return self._epoch_ns + int(at_s * NS_A_SECOND)


def _parts(trace: RequestTrace) -> Iterator[tuple[str, float, float, Mapping[str, Any]]]:
    """Yield name, begin, end and attributes of each phase that a request reached."""
    if trace.refusal is not None:
        return
    launched_s = trace.ended_s if trace.launched_s is None else trace.launched_s
    yield "queue", trace.arrived_s, launched_s, {"lockstep.step": trace.arrival_step}
    if trace.launched_s is None:
        return
    numbers = {"lockstep.step": trace.launch_step, "lockstep.microbatch": trace.first_microbatch}
    first_token_s = trace.ended_s if trace.first_token_s is None else trace.first_token_s
    yield "prefill", trace.launched_s, first_token_s, numbers
    if trace.first_token_s is not None and trace.ended_s > trace.first_token_s:
        numbers = {"lockstep.step": trace.end_step, "lockstep.microbatch": trace.last_microbatch}
        yield "decode", trace.first_token_s, trace.ended_s, numbers


def _failure(trace: RequestTrace) -> str | None:
    if trace.refusal is not None:
        return trace.refusal.value
    return trace.finish_reason.value if trace.finish_reason in FAILURES else None


def open_tracing(endpoint: str, model: str, clock: Clock) -> Tracing:
    """Export spans to a collector. The library's own variables OTEL_... configure the rest."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    log = logging.getLogger("opentelemetry")
    log.addHandler(FirstWarning(endpoint))
    log.propagate = False
    is_named = "OTEL_SERVICE_NAME" in os.environ or SERVICE_NAME in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if is_named else {SERVICE_NAME: PROVIDER})
    # Its thread starts here, after the last fork of this process.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider, model, clock)


class FirstWarning(logging.Handler):
    """Logs only the library's first warning, which it would repeat all day for a dead collector."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(logging.WARNING)
        self._endpoint = endpoint
        self._is_said = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_said:
            self._is_said = True
            logger.warning(
                "spans may be lost (reported once): %s; check the collector at %s", record.getMessage(), self._endpoint
            )
