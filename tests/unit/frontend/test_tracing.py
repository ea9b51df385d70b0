"""Spans of requests: from the steps of a scheduler to what an exporter gets, and nothing that a request waits for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from scripted_lockstep.simulated.pipeline import SimulatedPipeline

from engine import EngineConfig
from engine.core.errors import ConfigError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Abort, Event, Generate, RequestTrace, SamplingParams, decode_replies, encode
from engine.core.scheduler import Scheduler
from engine.core.scheduler.loop import run_loop
from engine.core.scheduler.ports import Step, StepResult
from engine.frontend.http import request_log
from engine.frontend.http.request_log import RequestRecord
from engine.frontend.http.tracing import NS_A_SECOND, FirstWarning, Tracing
from engine.pipeline.progress import _KEPT, Phase, StageProgress
from engine.process.settings import ServerSettings
from engine.process.settings_sources import trace_settings
from engine.server.launch.resolution import refuse_early
from engine.server.scheduler_process.traced_gate import TracedGate
from scripted.core.clock import VirtualClock

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STEPS = 12
STAGES = ((2.25, 2.5), (2.5, 2.75))


class _Gate(nullcontext[Any]):
    """Steps a second apart: what is due, and every completion that is there."""

    def __init__(self, pipeline: SimulatedPipeline, events: Mapping[int, Sequence[Event]]) -> None:
        super().__init__(self)
        self._pipeline, self._events, self._number = pipeline, events, 0

    def next_step(self, previous: StepResult | None) -> Step | None:
        self._number += 1
        done = self._pipeline.next_completion(0)
        events = (*([] if done is None else [done]), *self._events.get(self._number, ()))
        return Step(events, float(self._number)) if self._number <= STEPS else None


class _Outbox:
    def send(self, replies: Sequence[object]) -> None:
        """Nobody listens to the answers."""


def generate(rid: str, prompt: int = 20, new: int = 3) -> Generate:
    return Generate(rid=rid, prompt_ids=tuple(range(prompt)), sampling=SamplingParams(max_new_tokens=new))


def traces_of(events: Mapping[int, Sequence[Event]], **config: Any) -> list[RequestTrace]:
    limits = Limits.of(EngineConfig(**config), EMBEDDED_FACTS)
    pipeline, told = SimulatedPipeline(limits), list[RequestTrace]()
    gate = TracedGate(_Gate(pipeline, events), told.extend, lambda _: STAGES)
    run_loop(gate, Scheduler(limits), pipeline, _Outbox())
    assert not gate._lives
    return [decode_replies(encode((trace,)))[0] for trace in told]  # type: ignore[misc]


def spans_of(
    traces: Sequence[RequestTrace], messages: Sequence[Generate], record: RequestRecord | None = None
) -> list[ReadableSpan]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider, "m", VirtualClock())
    tracing._epoch_ns = 0
    token = request_log._current.set(record)
    for message in messages:
        tracing.sent(message)
    request_log._current.reset(token)
    for trace in traces:
        tracing.ended(trace)
    assert not tracing._sent
    return list(exporter.get_finished_spans())


def test_a_request_is_a_span_with_its_wait_prefill_stages_and_decode() -> None:
    """C06: in the trace of its client, with the times and numbers that a recording has."""
    first = generate("a")
    record = RequestRecord("id-1", 0.5, "/v1/chat/completions", {"traceparent": PARENT})
    spans = spans_of(traces_of({1: [first]}, chunked_prefill_size=16), [first], record)
    by_name = {span.name: span for span in spans}
    assert list(by_name) == ["queue", "stage 0", "stage 1", "prefill", "decode", "chat m"]
    whole = by_name["chat m"]
    assert {f"{whole.context.trace_id:032x}", f"{whole.parent.span_id:016x}"} == set(PARENT.split("-")[1:3])
    parents = {name: ("stage" in name and "prefill") or "chat m" for name in by_name if name != "chat m"}
    assert {name: by_name[parent].context.span_id for name, parent in parents.items()} == {
        name: by_name[name].parent.span_id for name in parents
    }
    times = {name: (span.start_time / NS_A_SECOND, span.end_time / NS_A_SECOND) for name, span in by_name.items()}
    # Chunks of 16 and 4 tokens in steps 1 and 2, a token in each of steps 3, 4 and 5.
    assert times == {
        "chat m": (0.5, 5.0),
        "queue": (1.0, 1.0),
        "prefill": (1.0, 3.0),
        "decode": (3.0, 5.0),
        "stage 0": STAGES[0],
        "stage 1": STAGES[1],
    }
    assert by_name["prefill"].attributes == {"lockstep.step": 1, "lockstep.microbatch": 0}
    assert by_name["decode"].attributes == {"lockstep.step": 5, "lockstep.microbatch": 3}
    assert by_name["stage 1"].attributes == {"lockstep.stage": 1, "lockstep.microbatch": 1}
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.request.max_tokens": 3,
        "lockstep.rid": "a",
        "lockstep.request_id": "id-1",
        "lockstep.microbatches": 4,
    }
    assert {name: whole.attributes[name] for name in expected} == expected


def test_lives_of_one_rid_are_told_apart_and_a_refused_one_is_an_error() -> None:
    """A rid that is live is refused; one that ends in a step may be used again in it."""
    lives = [generate("a", new=9), generate("a", prompt=7), generate("a", prompt=5, new=1)]
    told = traces_of({1: lives[:1], 2: [lives[1]], 3: [Abort(rid="a"), lives[2]]})
    assert [(trace.refusal, trace.finish_reason, trace.prompt_tokens) for trace in told] == [
        ("duplicate", None, 0),
        (None, "abort", 20),
        (None, "length", 5),
    ]
    spans = [span for trace, life in zip(told, [lives[1], lives[0], lives[2]], strict=True)
             for span in spans_of([trace], [life])]  # fmt: skip
    whole = [span for span in spans if span.name == "text_completion m"]
    assert [span.attributes["gen_ai.request.max_tokens"] for span in whole] == [3, 9, 1]
    assert [span.status.status_code for span in whole] == [StatusCode.ERROR, StatusCode.UNSET, StatusCode.UNSET]
    assert whole[0].attributes["error.type"] == "duplicate"
    assert [span.name for span in spans_of(told[:1], lives[1:2])] == ["text_completion m"]


def test_of_two_in_one_step_the_refused_one_is_the_error() -> None:
    """The earlier one asks for a LoRA that is not there, and is called off in the step that admits the later one."""
    lives = [msgspec.structs.replace(generate("a"), lora="x"), generate("a", prompt=7, new=1)]
    told = traces_of({1: [lives[0], Abort(rid="a"), lives[1]]})
    assert [(trace.refusal, trace.prompt_tokens) for trace in told] == [("not_found", 0), (None, 7)]
    whole = [span for span in spans_of(told, lives) if span.name == "text_completion m"]
    assert [span.attributes["gen_ai.request.max_tokens"] for span in whole] == [3, 1]


def test_one_that_never_ran_has_waited_to_its_end() -> None:
    events = {1: [generate("a", new=9), generate("b")], 4: [Abort(rid="b")]}
    aborted = next(trace for trace in traces_of(events, max_running_requests=1) if trace.rid == "b")
    queue, whole = spans_of([aborted], [generate("b")])
    assert (queue.name, queue.start_time, queue.end_time) == ("queue", NS_A_SECOND, 4 * NS_A_SECOND)
    assert whole.attributes["lockstep.microbatches"] == 0


def test_what_a_script_sent_by_itself_has_no_span() -> None:
    assert spans_of(traces_of({1: [generate("a")]}), []) == []


def test_stages_say_when_they_were_at_work(tmp_path: Path) -> None:
    stages = [StageProgress(tmp_path, 2) for _ in range(2)]
    reader = StageProgress(tmp_path, 2)
    for stage, progress in enumerate(stages):
        assert reader.times(3) == ()
        for phase in (Phase.COMPUTING, Phase.HANDING_ON, Phase.DONE):
            progress.note(stage, 3, phase)
    (begun, ended), (later, last) = reader.times(3)
    assert begun <= ended <= later <= last
    assert reader.times(3 + _KEPT) == ()
    for progress in (*stages, reader):
        progress.close()


def test_a_dead_collector_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.Logger("opentelemetry.of_a_test")
    log.addHandler(FirstWarning("http://c:1/v1/traces"))
    for number in range(3):
        log.error("try %d failed", number)
    (said,) = caplog.messages
    assert "try 0 failed; check the collector at http://c:1/v1/traces" in said


def test_tracing_is_off_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """C09: by the flag, or by the variable that all programs read; without its packages the start is refused."""
    url, name = "http://c:1/v1/traces", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    assert not trace_settings({}, {}).settings.otlp_traces_endpoint
    traced = trace_settings({}, {name: url})
    assert (traced.settings.otlp_traces_endpoint, traced.origins["otlp_traces_endpoint"]) == (url, name)
    assert trace_settings({"otlp_traces_endpoint": "http://d"}, {name: url}).settings.otlp_traces_endpoint == "http://d"
    with pytest.raises(ConfigError, match=f"{name} must be such as 'http://localhost:4318/v1/traces', got 'c:1'"):
        trace_settings({}, {name: "c:1"})
    monkeypatch.setattr("engine.server.launch.resolution.is_importable", lambda module: "telemetry" not in module)
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint needs .* 'lockstep-engine\[tracing\]"):
        refuse_early(ServerSettings(otlp_traces_endpoint=url))
