"""The load generator without a server: plans, schedules, workloads, records and what is made of them."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from engine.cli.bench.plan import Arrivals, BenchPlan, BenchRequest, arrival_times, requests_of
from engine.cli.bench.results import (
    BenchResult,
    Record,
    comparison_table,
    percentile,
    read_result,
    result_tables,
    summarize,
    write_result,
)
from engine.cli.bench.run import RequestSender
from engine.core.errors import ConfigError

URL = "http://server"


def _plan(**changes: Any) -> BenchPlan:
    return BenchPlan(**{"url": URL, "clients": 2} | changes)


def _good(due_s: float, sent_s: float, first_s: float, end_s: float, tokens: int) -> Record:
    gaps = [(end_s - first_s) / (tokens - 1)] * (tokens - 1)
    return Record(
        due_s=due_s, sent_s=sent_s, first_s=first_s, end_s=end_s, gaps_s=gaps, output_tokens=tokens, prompt_tokens=10
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "server"}, "url must begin with http"),
        ({"requests": 0}, "requests must be from 1"),
        ({"clients": None}, "clients must be >= 1 for closed"),
        ({"clients": 0}, "clients must be >= 1 for closed"),
        ({"rate_per_s": 2.0}, "rate_per_s must be unset for closed"),
        ({"arrivals": Arrivals.POISSON}, "rate_per_s must be > 0 for poisson"),
        ({"arrivals": Arrivals.POISSON, "rate_per_s": 1.0}, "clients must be unset for poisson"),
        ({"arrivals": Arrivals.RECORDED, "clients": None}, "recording must name a file"),
        ({"output_tokens": 0}, "output_tokens must be >= 1"),
        ({"temperature": -1.0}, "temperature must be >= 0"),
        ({"request_timeout_s": 0.0}, "request_timeout_s must be > 0"),
    ],
)
def test_plan_is_checked_before_anything_is_sent(changes: dict[str, Any], message: str) -> None:
    """A benchmark holds its schedule and times no error as a success (C10)."""
    with pytest.raises(ConfigError, match=message):
        _plan(**changes)


def test_schedules_are_absolute_and_repeat() -> None:
    """C10: equal plans give equal times, independently of the server; the mean rate is the requested one."""
    even = _plan(clients=None, arrivals=Arrivals.CONSTANT, rate_per_s=4.0)
    assert arrival_times(even, 4) == [0, 0.25, 0.5, 0.75]
    chance = _plan(clients=None, arrivals=Arrivals.POISSON, rate_per_s=4.0)
    times = arrival_times(chance, 4000)
    assert times == arrival_times(chance, 4000)
    assert times == sorted(times)
    assert 3.8 < 4000 / times[-1] < 4.2
    assert arrival_times(_plan(clients=None, arrivals=Arrivals.POISSON, rate_per_s=4.0, seed=1), 4000) != times


def test_synthetic_prompts_repeat_and_share_only_their_prefix() -> None:
    """A benchmark holds its schedule and times no error as a success (C10)."""
    plan = _plan(requests=5, warmup=2, prefix_words=3, input_words=6)
    warmup, measured = requests_of(plan)
    assert (warmup, measured) == requests_of(plan)
    words = [request.prompt.split() for request in [*warmup, *measured]]
    assert {tuple(prompt[:3]) for prompt in words} == {tuple(words[0][:3])}
    assert len({prompt[3] for prompt in words}) == 7
    assert all(len(prompt) == 3 + 1 + 6 for prompt in words)


def test_recording_with_its_own_times(tmp_path: Path) -> None:
    """A benchmark holds its schedule and times no error as a success (C10)."""
    path = tmp_path / "recording.jsonl"
    lines = [{"prompt": "b", "max_tokens": 2, "at_s": 0.5}, {"prompt": [1, 2], "max_tokens": 3, "at_s": 0.0}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = _plan(clients=None, arrivals=Arrivals.RECORDED, recording=str(path), warmup=0)
    assert requests_of(plan)[1] == [
        BenchRequest(prompt=[1, 2], max_tokens=3, at_s=0.0),
        BenchRequest(prompt="b", max_tokens=2, at_s=0.5),
    ]
    again = _plan(recording=str(path), requests=3)
    assert [request.prompt for request in requests_of(again)[1]] == ["b", [1, 2], "b"]
    with pytest.raises(ConfigError, match="chat needs prompts of text"):
        requests_of(_plan(recording=str(path), chat=True))
    path.write_text('{"prompt": "x"}\n')
    with pytest.raises(ConfigError, match=r"recording.jsonl:1 must be a request"):
        requests_of(again)


def test_percentiles_lie_between_neighbours() -> None:
    """A benchmark holds its schedule and times no error as a success (C10)."""
    values = [float(number) for number in range(1, 102)]
    assert [percentile(values, percent) for percent in (0, 50, 95, 99, 100)] == [1, 51, 96, 100, 101]
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([3.0], 99) == 3.0


def test_latencies_are_counted_from_when_a_request_was_due() -> None:
    """C10: a load generator that is late shows it, and does not hide the server's queue."""
    summary = summarize([_good(1.0, 1.5, 2.0, 3.0, tokens=5), _good(2.0, 2.0, 3.0, 5.0, tokens=3)])
    assert (summary.ttft_ms.p50, summary.ttft_ms.max) == (1000, 1000)
    assert (summary.e2e_ms.p50, summary.e2e_ms.max) == (2500, 3000)
    assert (summary.tpot_ms.p50, summary.tpot_ms.count) == (625, 2)
    assert (summary.itl_ms.max, summary.itl_ms.count) == (1000, 6)
    assert summary.lateness_ms.max == 500
    assert (summary.duration_s, summary.requests_per_s, summary.output_tokens_per_s) == (4, 0.5, 2)


def test_errors_are_counted_and_never_timed() -> None:
    """A benchmark holds its schedule and times no error as a success (C10)."""
    failed = Record(due_s=0.0, sent_s=0.0, first_s=0.001, end_s=0.002, output_tokens=9, error="HTTP 429: full")
    summary = summarize([failed, failed, _good(1.0, 1.0, 2.0, 3.0, tokens=2)])
    assert (summary.succeeded, summary.failed, summary.errors) == (1, 2, {"HTTP 429: full": 2})
    assert (summary.ttft_ms.count, summary.ttft_ms.p50, summary.output_tokens) == (1, 1000, 2)
    nothing = summarize([failed])
    assert (nothing.ttft_ms, nothing.requests_per_s) == (None, 0)


EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("status", "content", "error"),
    [
        (200, EVENT * 2 + USAGE + DONE, None),
        (200, EVENT + b'data: {"choices": [{"delta": {"content": "b"}}]}\n\n' + DONE, None),
        (429, b"full", "HTTP 429: full"),
        (200, EVENT * 2, "the stream ended without [DONE]"),
        (200, EVENT + b'data: {"error": {"message": "dead"}}\n\n', "the stream broke: {'message': 'dead'}"),
        (200, USAGE + DONE, "the answer has no text"),
        (200, b"data: nonsense\n\n", "DecodeError: "),
    ],
)
def test_every_way_to_fail_is_an_error(status: int, content: bytes, error: str | None) -> None:
    """C10: only an answer that ended in order is a success."""

    async def scene() -> Record:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, content=content))
        async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
            return await RequestSender(_plan(), "m", client, 0.0).send(BenchRequest(prompt="x", max_tokens=2))

    record = asyncio.run(scene())
    if error is None:
        assert (record.error, record.output_tokens, len(record.gaps_s)) == (None, 2, 1)
        assert record.sent_s <= record.first_s <= record.end_s
    else:
        assert record.error.startswith(error)


def test_request_that_cannot_connect_is_an_error() -> None:
    """A benchmark holds its schedule and times no error as a success (C10)."""

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async def scene() -> Record:
        async with httpx.AsyncClient(transport=httpx.MockTransport(refuse), base_url=URL) as client:
            return await RequestSender(_plan(), "m", client, 0.0).send(BenchRequest(prompt="x", max_tokens=2))

    assert asyncio.run(scene()).error == "ConnectError: refused"


def _result(scale: float, **changes: Any) -> BenchResult:
    records = [_good(0.0, 0.0, scale, 2 * scale, tokens=3)]
    versions = {"lockstep": "1"}
    return BenchResult(
        plan=_plan(**changes), model="m", began_at=0, versions=versions, summary=summarize(records), records=records
    )


def test_result_survives_its_file_and_a_wrong_file_is_named(tmp_path: Path) -> None:
    """A benchmark holds its schedule and times no error as a success (C10)."""
    path = tmp_path / "a.json"
    write_result(_result(1.0), path)
    assert read_result(path) == _result(1.0)
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"a.json must be a result"):
        read_result(path)


def test_tables_show_the_numbers_and_the_change() -> None:
    """A benchmark holds its schedule and times no error as a success (C10)."""
    console = Console(width=160, file=io.StringIO())
    console.print(comparison_table(_result(1.0), _result(1.5, clients=4), ("a.json", "b.json")))
    for table in result_tables(_result(1.0)):
        console.print(table)
    text = console.file.getvalue()
    assert "time to first token p50, ms" in text
    assert "1000.00" in text
    assert "1500.00" in text
    assert "+50.0 %" in text
    assert "the plans differ in clients: 2 and 4" in text
