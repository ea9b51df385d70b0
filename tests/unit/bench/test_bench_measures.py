"""The load generator without a server: plans, schedules, workloads, records and what is made of them."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from engine.cli.bench.goodput import Probe, find_goodput, goodput_of, goodput_table, next_rate
from engine.cli.bench.plan import Arrivals, BenchPlan, BenchRequest, arrival_times, conversations_of, requests_of
from engine.cli.bench.results import (
    BenchResult,
    Record,
    comparison_table,
    kept_share,
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
        *(
            ({"url": url}, "url must be http://HOST:PORT, or begin with https://, got")
            for url in (
                *("server", "ftp://h", "http://", "http://[::1", "http://h:x", "http://h:99999", "http://h:0"),
                *("http://h\x01", "http://exa mple", f"http://{'x' * 70_000}", "http://h\u00e4_.\u00ad"),
            )
        ),
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
        ({"turns": 0}, "turns must be from 1"),
        ({"turns": 2, "recording": "a"}, "turns must be 1 with a recording"),
        ({"think_s": -1.0}, "think_s must be >= 0"),
        ({"long_percent": 101.0}, "long_percent must be from 0 to 100"),
        ({"long_percent": 5.0}, "long_words must be >= 1 with"),
        ({"long_words": 5}, "long_words must be 0 without"),
        ({"slo_gap_ms": 0.0}, "slo_gap_ms must be > 0"),
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
    with pytest.raises(ConfigError, match="chat needs text prompts"):
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


def test_conversations_arrive_whole_and_share_the_system_prompt() -> None:
    """C10: a later turn has no time of its own and repeats nothing; the same seed gives the same load."""
    plan = _plan(clients=None, arrivals=Arrivals.CONSTANT, rate_per_s=2.0, turns=3, requests=8, prefix_words=2)
    _, measured = requests_of(plan)
    talks = conversations_of(plan, measured)
    assert [len(talk) for talk in talks] == [3, 3, 2]
    assert [[turn.at_s for turn in talk] for talk in talks] == [[0, None, None], [0.5, None, None], [1, None]]
    words = [[turn.prompt.split() for turn in talk] for talk in talks]
    shared = words[0][0][:2]
    assert all(talk[0][:2] == shared and len(talk[0]) == 2 + 1 + 128 for talk in words)
    assert all(len(turn) == 1 + 128 for talk in words for turn in talk[1:])


def test_some_first_prompts_are_long() -> None:
    """C10: as many as asked for, drawn from the seed, and no later turn."""
    plan = _plan(requests=4000, turns=2, input_words=3, long_words=9, long_percent=25.0)
    sizes = [len(request.prompt.split()) - 1 for request in requests_of(plan)[1]]
    assert set(sizes[1::2]) == {3}
    assert set(sizes[::2]) == {3, 9}
    assert 450 < sizes[::2].count(9) < 550


def _talk(plan: BenchPlan, answers: list[bytes]) -> tuple[list[Record], list[dict[str, Any]]]:
    """Hold a conversation with a server that gives these answers; returns what it was sent, too."""
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, content=answers[len(bodies) - 1])

    async def scene() -> list[Record]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url=URL) as client:
            talk = [BenchRequest(prompt=text, max_tokens=2) for text in ("one", "two", "three")]
            return await RequestSender(plan, "m", client, 0.0).converse(talk, 0.0)

    return asyncio.run(scene()), bodies


def test_a_turn_continues_all_before_it() -> None:
    """The prefix of a turn is what the server has computed: prompts and answers, without anything between."""
    said = [b'data: {"choices": [{"text": " x"}]}\n\n' + EVENT + DONE, EVENT + DONE, EVENT + DONE]
    records, bodies = _talk(_plan(turns=3), said)
    assert [body["prompt"] for body in bodies] == ["one", "one xa two", "one xa two a three"]
    assert [record.turn for record in records] == [1, 2, 3]
    assert records[1].due_s >= records[0].end_s, "a later turn is due after the answer"
    thought = b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}, {"delta": {"content": "b"}}]}\n\n' + DONE
    _, bodies = _talk(_plan(turns=3, chat=True), [thought] * 3)
    assert [(one["role"], one["content"]) for one in bodies[1]["messages"]] == [
        ("user", "one"),
        ("assistant", "b"),
        ("user", "two"),
    ]


def test_no_turn_follows_one_that_failed() -> None:
    """C10: the turns that were not sent are errors, so that the requests add up."""
    records, bodies = _talk(_plan(turns=3), [EVENT + DONE, EVENT])
    assert len(bodies) == 2
    assert [record.error for record in records] == [None, "the stream ended without [DONE]", "an earlier turn failed"]


def test_first_tokens_of_later_turns_are_shown_apart() -> None:
    later = _good(1.0, 1.0, 1.2, 3.0, tokens=5)
    later.turn = 2
    summary = summarize([_good(0.0, 0.0, 1.0, 2.0, tokens=5), later])
    assert (summary.ttft_ms.count, summary.later_ttft_ms.count) == (2, 1)
    assert summary.later_ttft_ms.p50 == pytest.approx(200)
    assert summarize([_good(0.0, 0.0, 1.0, 2.0, tokens=5)]).later_ttft_ms is None


def test_a_request_keeps_its_bounds_with_every_gap() -> None:
    """A first token counts from when it was due; an error keeps nothing, whatever came before."""
    records = [
        Record(due_s=0.0, sent_s=0.4, first_s=0.5, end_s=0.7, gaps_s=[0.1, 0.1]),
        Record(due_s=0.0, sent_s=0.4, first_s=0.6, end_s=0.6),
        Record(due_s=0.0, sent_s=0.0, first_s=0.1, end_s=0.5, gaps_s=[0.01, 0.3]),
        Record(due_s=0.0, sent_s=0.0, first_s=0.1, end_s=0.1, error="the stream broke"),
    ]
    bounds = [(500, 100), (500, None), (None, 100), (None, None), (1, 1)]
    assert [kept_share(records, *one) for one in bounds] == [0.25, 0.5, 0.5, 0.75, 0]


def _server_of(capacity: float, tried: list[BenchPlan]) -> Callable[[BenchPlan], BenchResult]:
    """A server that keeps the bounds up to a rate."""

    def run(plan: BenchPlan) -> BenchResult:
        tried.append(plan)
        # One of a hundred may miss.
        missed = 1 if plan.rate_per_s <= capacity else 2
        good = _good(0.0, 0.0, 0.1, 0.2, tokens=2)
        late = _good(0.0, 0.0, 0.9, 1.0, tokens=2)
        records = [*[good] * (100 - missed), *[late] * missed]
        versions = {"lockstep": "1"}
        return BenchResult(
            plan=plan, model="m", began_at=0, versions=versions, summary=summarize(records), records=records
        )

    return run


@pytest.mark.parametrize("capacity", [7.3, 0.3, 100.0])
def test_goodput_is_the_highest_rate_that_keeps_the_bounds(capacity: float) -> None:
    """C10: within a tenth, from a first rate above or below; no two benchmarks share prompts."""
    tried: list[BenchPlan] = []
    plan = _plan(clients=None, arrivals=Arrivals.POISSON, rate_per_s=2.0, slo_first_ms=500.0)
    found = find_goodput(plan, _server_of(capacity, tried))
    assert capacity / 1.1 <= found.goodput_per_s <= capacity
    assert found.goodput_per_s == goodput_of(found.probes)
    assert len({one.seed for one in tried}) == len(tried) <= 12
    assert all(one.requests >= plan.requests for one in tried)


def _queue_of(served_per_s: float) -> Callable[[BenchPlan], BenchResult]:
    """A server that answers requests one by one, each in 1 / ``served_per_s`` seconds, after regular arrivals."""

    def run(plan: BenchPlan) -> BenchResult:
        free_s, records = 0.0, []
        for number in range(plan.requests):
            due_s = number / plan.rate_per_s
            free_s = max(free_s, due_s) + 1 / served_per_s
            records.append(_good(due_s, due_s, free_s, free_s, tokens=2))
        summary = summarize(records)
        return BenchResult(
            plan=plan, model="m", began_at=0, versions={"lockstep": "1"}, summary=summary, records=records
        )

    return run


@pytest.mark.parametrize("slo_first_ms", [50.0, 2_500.0, 20_000.0])
@pytest.mark.parametrize("served_per_s", [0.7, 90.0])
def test_no_queue_hides_a_rate_above_the_throughput(served_per_s: float, slo_first_ms: float) -> None:
    """C10: a burst that fits into the queue within the bound of the first token says nothing about a rate."""
    bound_ms = slo_first_ms + 1e3 / served_per_s
    plan = _plan(clients=None, arrivals=Arrivals.POISSON, rate_per_s=served_per_s / 3, slo_first_ms=bound_ms)
    found = find_goodput(plan, _queue_of(served_per_s))
    assert served_per_s / 1.1 <= found.goodput_per_s <= served_per_s * 1.1


def test_a_rate_that_passed_by_luck_above_one_that_failed_does_not_count() -> None:
    summary = summarize([])
    shares = {2.0: 1.0, 4.0: 0.5, 8.0: 1.0}
    probes = [Probe(rate_per_s=rate, kept_share=share, summary=summary) for rate, share in shares.items()]
    assert goodput_of(probes) == 2.0
    assert 2.0 < next_rate(probes, 2.0) < 4.0


def test_a_server_that_keeps_nothing_has_no_goodput_and_is_not_waited_for() -> None:
    tried: list[BenchPlan] = []
    plan = _plan(clients=None, arrivals=Arrivals.POISSON, rate_per_s=8.0, slo_first_ms=500.0)
    found = find_goodput(plan, _server_of(0.0, tried))
    assert (found.goodput_per_s, [one.rate_per_s for one in tried]) == (0, [8, 4, 2, 1, 0.5])
    console = Console(width=120, file=io.StringIO())
    console.print(goodput_table(found))
    assert "goodput: 0 requests a second" in console.file.getvalue()
    tried.clear()
    assert find_goodput(plan, _server_of(0.0, tried), most_halvings=2).goodput_per_s == 0.0
    assert [one.rate_per_s for one in tried] == [8.0, 4.0, 2.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slo_first_ms": 5.0}, "goodput needs a rate to start from"),
        ({"clients": None, "arrivals": Arrivals.POISSON, "rate_per_s": 1.0}, "goodput needs a bound"),
    ],
)
def test_a_search_without_a_rate_or_bounds_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_goodput(_plan(**changes), _server_of(1.0, []))
