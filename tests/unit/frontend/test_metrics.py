"""Metrics: the names that dashboards know, times that clients meet, and the scheduler's counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from real_servers import RealServer

from engine.core.messages import FinishReason, TokenOutput
from engine.core.stats import EngineStats
from engine.frontend.http.metrics import Metrics
from scripted.core.clock import VirtualClock

GUIDE = Path(__file__).resolve().parents[3] / "benchmarks" / "tables" / "metrics.md"


def _samples(text: str) -> dict[tuple[str, str], float]:
    """Samples by name and by the last label that is not the model's."""
    return {
        (sample.name, "".join(value for label, value in sample.labels.items() if label != "model_name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def metrics(clock: VirtualClock) -> Metrics:
    return Metrics("m", clock)


def test_times_of_a_request(metrics: Metrics, clock: VirtualClock) -> None:
    """C06: first token, each further one, and the whole."""
    times = metrics.begin()
    clock.advance(0.5)
    times.note(TokenOutput(rid="r", token_ids=(1,)))
    clock.advance(0.2)
    times.note(TokenOutput(rid="r", token_ids=(1, 2)))
    clock.advance(0.3)
    end = {"prompt_tokens": 7, "completion_tokens": 3, "finish_reason": FinishReason.STOP}
    times.note(TokenOutput(rid="r", **end))
    samples = _samples(metrics.text(None).decode())
    assert samples["engine_time_to_first_token_seconds_sum", ""] == pytest.approx(0.5)
    assert samples["engine_inter_token_latency_seconds_count", ""] == 2
    assert samples["engine_inter_token_latency_seconds_sum", ""] == pytest.approx(0.2)
    assert samples["engine_e2e_request_latency_seconds_sum", ""] == pytest.approx(1.0)
    assert samples["engine_request_prompt_tokens_sum", ""] == 7
    assert samples["engine_request_generation_tokens_sum", ""] == 3
    assert samples["engine_request_success_total", "stop"] == 1


@pytest.mark.parametrize(
    ("reason", "name", "label"),
    [
        (FinishReason.ERROR, "engine_request_failure_total", ""),
        (FinishReason.ABORT, "engine_request_success_total", "abort"),
    ],
)
def test_request_that_did_not_end_by_itself_is_not_timed(metrics, reason: FinishReason, name: str, label: str) -> None:
    """C06, C10: an error is counted and is no success."""
    metrics.begin().note(TokenOutput(rid="r", finish_reason=reason))
    samples = _samples(metrics.text(None).decode())
    assert samples[name, label] == 1
    assert samples["engine_e2e_request_latency_seconds_count", ""] == 0


def test_silent_scheduler_is_told(metrics: Metrics) -> None:
    """C06: metrics do not need a running loop, and old counts are not shown as new ones."""
    numbers = dict.fromkeys((name for name in EngineStats.__struct_fields__ if name != "paused"), 4)
    stats = EngineStats(paused=None, **(numbers | {"alive": 12}))
    up = _samples(metrics.text(stats).decode())
    assert (up["engine_scheduler_up", ""], up["engine_num_requests_running", ""]) == (1, 8)
    assert up["engine_kv_cache_usage_perc", ""] == 1
    down = _samples(metrics.text(None).decode())
    assert down["engine_scheduler_up", ""] == 0
    assert ("engine_num_requests_running", "") not in down


def test_metrics_of_a_real_server(server: RealServer) -> None:
    """C06: exactly the documented names are there, and a request moves the counts."""
    before = _samples(server.metrics().text)
    body = {"prompt": "hello", "max_tokens": 5, "n": 2}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    response = server.metrics()
    assert response.headers["content-type"].startswith("text/plain")
    after = _samples(response.text)
    served = {name for name, _ in after if not name.endswith(("_created", "_bucket", "_sum"))}
    documented = set(re.findall(r"`(engine_\w+)`", GUIDE.read_text()))
    assert {name.removesuffix("_count") for name in served} | {"engine_request_failure_total"} == documented

    def moved(name: str, label: str = "") -> float:
        return after[name, label] - before.get((name, label), 0)

    assert moved("engine_request_success_total", "length") == 2
    assert moved("engine_generation_tokens_total") == 10
    assert moved("engine_time_to_first_token_seconds_count") == 2
    assert 'model_name="embedded"' in response.text


def test_load_of_a_real_server(server: RealServer) -> None:
    """C06: an idle engine has no work, and what it caches is not free."""
    assert server.http.post("/v1/completions", json={"prompt": "a" * 40, "max_tokens": 1}).status_code == 200
    load = server.load()
    assert (load["num_reqs"], load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0, 0)
    assert (load["num_tokens"], load["num_pending_tokens"]) == (0, 0)
    assert load["cached_pages"] > 0
    assert load["free_pages"] + load["cached_pages"] == load["total_pages"]
