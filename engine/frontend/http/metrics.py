"""The metrics for Prometheus: latencies as clients see them, and the scheduler's counters.

Owns names, units and buckets, which follow common practice under the prefix ``engine_``. Only observes: no request
waits for a metric, and finished requests leave no state.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.messages import FAILURES, FinishReason, TokenOutput
from engine.core.routing.prefills import PrefillCounts
from engine.core.stats import EngineStats
from engine.frontend.http.request_log import RequestRecord, current_record
from engine.process.clock import Clock

PREFIX = "engine_"
TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
REQUEST_BUCKETS_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
CHECK_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
LENGTH_BUCKETS_TOKENS = tuple(2**power for power in range(18))


class Metrics:
    """Every metric of one server, in its own registry."""

    def __init__(self, model: str, clock: Clock, prefills: PrefillCounts | None = None) -> None:
        """Take the counts of a decode engine's ``prefills``, if it is one."""
        self._clock = clock
        self._registry = CollectorRegistry()
        self._scheduler = _SchedulerCollector(model, prefills or PrefillCounts())
        self._registry.register(self._scheduler)
        self._model = model
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", TTFT_BUCKETS_S
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between two outputs of a request, per token.", TOKEN_BUCKETS_S
        )
        timed = "From the request's arrival to a normal end; aborts and errors are not timed."
        self.request = self._histogram("e2e_request_latency_seconds", timed, REQUEST_BUCKETS_S)
        self.prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request with a normal end.", LENGTH_BUCKETS_TOKENS
        )
        self.generated = self._histogram(
            "request_generation_tokens", "Output tokens of a request with a normal end.", LENGTH_BUCKETS_TOKENS
        )
        self.grammar_check = self._histogram(
            "grammar_check_seconds", "The front end's check of a grammar that it had not seen.", CHECK_BUCKETS_S
        )
        self.prefill = self._histogram(
            "prefill_seconds", "From the call of a prefill engine until all KV has arrived.", TTFT_BUCKETS_S
        )
        ends = "Requests that ended, by `finished_reason`: stop, length, abort, timeout."
        self._ended = self._counter("request_success", ends, "finished_reason")
        self._failed = self._counter("request_failure", "Requests that ended with an error.")
        self._calls = self._counter("tool_calls", "Tool calls in answers, by `end`: whole, cut.", "end")
        for end in ("whole", "cut"):
            self._calls.labels(model, end)

    def begin(self) -> RequestTimes:
        return RequestTimes(self, self._clock, current_record())

    def count_end(self, reason: FinishReason) -> None:
        if reason in FAILURES:
            self._failed.labels(self._model).inc()
        else:
            self._ended.labels(self._model, reason.value).inc()

    def count_call(self, whole: bool) -> None:
        self._calls.labels(self._model, "whole" if whole else "cut").inc()

    def text(self, stats: EngineStats | None) -> bytes:
        """Write all metrics in Prometheus' text format; ``stats`` is None if the scheduler did not answer."""
        self._scheduler.stats = stats
        return generate_latest(self._registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(PREFIX + name, help_text, ("model_name",), registry=self._registry, buckets=buckets)
        return histogram.labels(self._model)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help_text, ("model_name", *labels), registry=self._registry)


class RequestTimes:
    """The times of one request from its arrival to its end, for the metrics and the request's record."""

    def __init__(self, metrics: Metrics, clock: Clock, record: RequestRecord | None) -> None:
        self._metrics = metrics
        self._record = record
        self._clock = clock
        self._begun_s = clock.now()
        self._last_s: float | None = None

    def note(self, output: TokenOutput) -> None:
        now_s = self._clock.now()
        if self._record is not None:
            self._record.note(output, now_s)
        if output.token_ids:
            self._note_tokens(len(output.token_ids), now_s)
        if output.finish_reason is None:
            return
        self._metrics.count_end(output.finish_reason)
        # The time of an aborted or failed request says nothing about latency.
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._metrics.request.observe(now_s - self._begun_s)
            self._metrics.prompt.observe(output.prompt_tokens)
            self._metrics.generated.observe(output.completion_tokens)

    def _note_tokens(self, count: int, now_s: float) -> None:
        if self._last_s is None:
            self._metrics.first_token.observe(now_s - self._begun_s)
        else:
            for _ in range(count):
                self._metrics.inter_token.observe((now_s - self._last_s) / count)
        self._last_s = now_s


class _SchedulerCollector(Collector):
    def __init__(self, model: str, prefills: PrefillCounts) -> None:
        self._model = model
        self._prefills = prefills
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield the scheduler's metrics; only ``scheduler_up`` if it does not answer."""
        yield from self._of_prefills(self._prefills)
        stats = self.stats
        yield self._gauge("scheduler_up", "1 when the scheduler answered in time.", float(stats is not None))
        if stats is None:
            return
        yield from self._of_queue(stats)
        yield from self._of_cache(stats)
        yield from self._of_requests(stats)
        yield from self._of_features(stats)
        yield from self._of_host_tier(stats)
        yield self._counter("kv_pages_received", "Pages of KV received from prefill engines.", stats.pages_received)
        yield self._counter("kv_pages_sent", "Pages of KV sent to decode engines.", stats.pages_sent)
        transfers = "Open transfers of KV from or to other engines."
        yield self._gauge("num_kv_transfers", transfers, stats.open_transfers)

    def _of_queue(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests that are being computed.", stats.alive - stats.waiting)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.waiting)
        pending = "Prompt tokens that must still be launched, without cached ones."
        yield self._gauge("num_pending_prefill_tokens", pending, stats.pending_prefill_tokens)
        yield self._gauge("num_microbatches_in_flight", "Microbatches in the pipeline.", stats.in_flight)

    def _of_cache(self, stats: EngineStats) -> Iterator[Metric]:
        total = max(1, stats.pages_total)
        yield self._gauge("kv_pages", "Pages of the KV cache.", stats.pages_total)
        yield self._gauge("kv_pages_free", "Free pages of the KV cache.", stats.pages_free)
        held = "Fraction of the KV cache that requests hold."
        yield self._gauge("kv_cache_usage_perc", held, stats.pages_held / total)
        cached = "Fraction of the KV cache that holds prefixes."
        yield self._gauge("prefix_cache_usage_perc", cached, stats.pages_cached / total)

    def _of_requests(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._counter("prompt_tokens", "Prompt tokens of requests.", stats.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", stats.cached_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens guessed by speculation.", stats.drafted_tokens)
        yield self._counter(
            "spec_decode_num_accepted_tokens", "Guessed tokens that were accepted.", stats.accepted_tokens
        )
        yield self._counter("num_preemptions", "Requests that were retracted.", stats.retractions)
        yield self._counter("num_requests_refused", "Requests that were not admitted.", stats.requests_refused)
        yield self._counter("num_requests_timed_out", "Requests that ended at a time limit.", stats.requests_timed_out)

    def _of_features(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("weights_version", "Number of weight updates.", stats.weights_version)
        sleeps = "0 while the engine is awake; else the level of its sleep, which an update of the weights lowers to 1."
        yield self._gauge("sleep_level", sleeps, stats.sleep_level)
        waiting = "Requests in the queue whose grammar is being compiled."
        yield self._gauge("num_requests_waiting_for_grammar", waiting, stats.waiting_for_grammar)
        yield self._counter("grammars_compiled", "Grammars compiled for the last stage.", stats.grammars_compiled)
        yield self._counter("grammar_hits", "Requests whose grammar was already compiled.", stats.grammar_hits)
        yield self._counter("num_steps", "Microbatches launched.", stats.forward_ct)
        yield self._gauge("lora_adapters_resident", "LoRAs that the stages hold.", stats.loras_resident)
        yield self._counter("lora_adapter_loads", "Number of LoRA loads.", stats.lora_loads)
        yield self._counter("lora_adapter_evictions", "LoRAs that were evicted for others.", stats.lora_evictions)

    def _of_host_tier(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("host_kv_pages", "Pages of KV in host memory.", stats.host_pages_total)
        yield self._gauge("host_kv_pages_free", "Free pages of KV in host memory.", stats.host_pages_free)
        found = "Prompt tokens found in host memory, which count as cached too."
        yield self._counter("prompt_tokens_on_host", found, stats.host_hit_tokens)
        yield self._counter("host_kv_pages_written", "Pages copied to host memory.", stats.host_pages_written)
        yield self._counter("host_kv_pages_loaded", "Pages copied back from host memory.", stats.host_pages_loaded)

    def _of_prefills(self, counts: PrefillCounts) -> Iterator[Metric]:
        yield self._counter("prefills_asked", "Prompts requested from prefill engines.", counts.asked)
        yield self._counter(
            "prefills_failed", "Of these, prompts whose KV did not arrive and that were computed here.", counts.failed
        )
        yield self._counter("prefills_dropped", "Of these, prompts of requests that ended early.", counts.dropped)
        unasked = "Prompts computed here because no prefill engine was available."
        yield self._counter("prefills_unasked", unasked, counts.unasked)

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, help_text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help_text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family
