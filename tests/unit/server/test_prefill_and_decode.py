"""Prefill and decode engines as real servers: answers equal a single engine's, through any failure of either side."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from thinned import thinned

from engine.server.launch.preload import PreloadedParent
from tests.unit.frontend.real_servers import RealServer
from tests.unit.router.test_router_on_servers import router_before
from tests.unit.server.fleets import (
    Answer,
    Fleet,
    fleet_of,
    free_port,
    is_asked,
    left,
    metric,
    nothing_is_left,
    signal_all,
    until,
    until_asked,
)

# Longer than a test waits for anything: what is noticed in time is not noticed by this.
NEVER_S = 600.0
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
SEEDED: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.9, "top_p": 0.9, "seed": 7, "ignore_eos": True}


def prompt(first: int, tokens: int = 300) -> list[int]:
    return [first, *((first * 7 + place * 13) % 200 + 1 for place in range(tokens - 1))]


def body(first: int, tokens: int = 300, **fields: Any) -> dict[str, Any]:
    return {"input_ids": prompt(first, tokens), "sampling_params": GREEDY} | fields


BODIES: dict[str, dict[str, Any]] = {
    "greedy": body(1),
    "long": body(2, 3000),
    "full pages": body(3, 16 * 20),
    "a token more": body(4, 16 * 20 + 1),
    "short": body(5, 9),
    "a page and a token": body(6, 17),
    "seeded": body(7, sampling_params=SEEDED),
    "penalties": body(8, sampling_params=SEEDED | {"frequency_penalty": 1.5, "repetition_penalty": 1.3}),
    "grammar": body(9, sampling_params={"max_new_tokens": 24, "regex": "[a-f]{8}(yes|no)", "seed": 3}),
    "logprobs": body(10, return_logprob=True, top_logprobs_num=3),
    "prompt logprobs": body(11, return_logprob=True, logprob_start_len=5),
    "choices": body(12, sampling_params=SEEDED | {"n": 3}),
    "salt": body(13, cache_salt="s"),
    "lora": body(14, lora_path="x"),
    "priority": body(15, priority=5),
    "text": {"text": "The scheduler of an engine. " * 30, "sampling_params": GREEDY | {"stop": ["x"]}},
}


@pytest.fixture(scope="module")
def fleet(parent: PreloadedParent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("f")
    with fleet_of(parent, folder, lora="x=embedded-lora:1", max_loras=1, prefill_timeout_s=NEVER_S) as one:
        yield one


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> tuple[RealServer, RealServer, RealServer]:
    """Start a standalone engine, a prefill engine and a decode engine."""
    alone, prefill = fleet.serve(), fleet.prefill()
    decode = fleet.decode()
    until_asked(decode)
    return alone, prefill, decode


def shown(answer: Any) -> Any:
    """An answer without its id, its cached tokens, and the last digits of numbers."""
    if isinstance(answer, list):
        return [shown(one) for one in answer]
    if isinstance(answer, dict):
        left_out = ("id", "cached_tokens", "cached_tokens_details")
        return {name: shown(one) for name, one in answer.items() if name not in left_out}
    return pytest.approx(answer, abs=1e-3) if isinstance(answer, float) else answer


@pytest.mark.parametrize("name", thinned(BODIES, one_in=3))
def test_an_answer_is_that_of_one_engine(engines: tuple[RealServer, ...], name: str) -> None:
    alone, prefill, decode = engines
    sent = BODIES[name]
    expected, answer = (server.http.post("/generate", json=sent) for server in (alone, decode))
    assert (expected.status_code, answer.status_code) == (200, 200), answer.text
    assert shown(answer.json()) == shown(expected.json())
    nothing_is_left(prefill, decode)


@pytest.mark.parametrize("name", thinned(["greedy", "choices", "grammar", "text"], one_in=2))
def test_a_stream_is_that_of_one_engine(engines: tuple[RealServer, ...], name: str) -> None:
    texts = []
    for server in (engines[0], engines[2]):
        stream = Answer(server.url, BODIES[name] | {"stream": True})
        stream.join()
        assert stream.lines[-1] == "data: [DONE]"
        parts: dict[int, str] = {}
        for line in stream.lines[:-1]:
            piece = json.loads(line.removeprefix("data: "))
            parts[piece.get("index", 0)] = parts.get(piece.get("index", 0), "") + piece["text"]
        texts.append(parts)
    assert texts[0] == texts[1]


def test_pages_come_from_the_prefill_engine_and_prefixes_are_found_on_both_sides(
    engines: tuple[RealServer, ...],
) -> None:
    _, prefill, decode = engines
    base = prompt(20, 640)
    until(lambda: not prefill.stats()["open_transfers"], "earlier transfers are counted")
    before = {server.url: server.stats() for server in (prefill, decode)}
    first = decode.http.post("/generate", json=body(20, 640)).json()
    assert first["meta_info"]["cached_tokens"] == 0
    received = decode.stats()["pages_received"] - before[decode.url]["pages_received"]
    assert received == (640 - 1) // 16
    # The prefill engine counts a transfer when its stages have ended it, which may be after the answer.
    until(
        lambda: prefill.stats()["pages_sent"] - before[prefill.url]["pages_sent"] == received, "all pages are counted"
    )
    again = decode.http.post("/generate", json=body(20, 640)).json()
    assert again["meta_info"]["cached_tokens"] == 624
    longer = {"input_ids": [*base, *prompt(21, 160)], "sampling_params": GREEDY}
    assert decode.http.post("/generate", json=longer).json()["meta_info"]["cached_tokens"] >= 640
    nothing_is_left(prefill, decode)
    sent = prefill.stats()["pages_sent"] - before[prefill.url]["pages_sent"]
    assert received < sent <= received + 160 // 16, "only what is new"
    decode.http.post("/flush_cache").raise_for_status()
    hits = prefill.stats()["cached_tokens"]
    assert decode.http.post("/generate", json=body(20, 640)).json()["output_ids"] == first["output_ids"]
    nothing_is_left(prefill, decode)
    assert prefill.stats()["cached_tokens"] - hits >= 608, "the prefill engine has all but the last page"


@pytest.mark.nightly
def test_many_at_once_are_each_as_alone(engines: tuple[RealServer, ...]) -> None:
    alone, prefill, decode = engines
    bodies = [body(number % 3, 100 + 37 * number, sampling_params=SEEDED | {"seed": number}) for number in range(24)]
    answers = [[Answer(server.url, one) for one in bodies] for server in (decode, alone)]
    told = [[shown(answer.json()) for answer in some] for some in answers]
    assert told[0] == told[1]
    nothing_is_left(prefill, decode)


def _held(prefill: RealServer, decode: RealServer, sent: dict[str, Any]) -> Answer:
    """A request whose prompt the prefill engine has, and does not compute."""
    prefill.http.post("/pause_generation", json={"mode": "in_place"}).raise_for_status()
    answer = Answer(decode.url, sent)
    until(lambda: prefill.stats()["alive"], "the prefill engine has the prompt")
    return answer


def _go_on(*servers: RealServer) -> None:
    for server in servers:
        server.http.post("/continue_generation").raise_for_status()


def test_a_client_that_leaves_ends_its_prompt_on_both_sides(engines: tuple[RealServer, ...]) -> None:
    _, prefill, decode = engines
    dropped = metric(decode, "prefills_dropped_total")
    answer = _held(prefill, decode, body(30, 2000))
    answer.leave()
    until(lambda: not prefill.stats()["alive"], "a paused engine has dropped the prompt")
    _go_on(prefill)
    nothing_is_left(prefill, decode)
    assert metric(decode, "prefills_dropped_total") == dropped + 1
    assert is_asked(decode)


def test_an_abort_of_the_request_ends_its_prompt(engines: tuple[RealServer, ...]) -> None:
    _, prefill, decode = engines
    answer = _held(prefill, decode, body(31, 2000, rid="held"))
    decode.http.post("/abort_request", json={"rid": "held"}).raise_for_status()
    assert answer.json()["meta_info"]["finish_reason"] == "abort"
    _go_on(prefill)
    nothing_is_left(prefill, decode)


def _abort_prompts(prefill: RealServer, decode: RealServer) -> None:
    del decode
    prefill.http.post("/abort_request", json={"abort_all": True}).raise_for_status()


def _flush_prefill(prefill: RealServer, decode: RealServer) -> None:
    del decode
    prefill.http.post("/flush_cache")


def _flush_decode(prefill: RealServer, decode: RealServer) -> None:
    del prefill
    refused = decode.http.post("/flush_cache")
    assert refused.status_code == 400, refused.text
    assert "transferring=1" in refused.text


def _pause_decode(prefill: RealServer, decode: RealServer) -> None:
    """Paused in every mode but the one that ends requests: what receives goes back to the queue, or stays."""
    decode.http.post("/pause_generation", json={"mode": "in_place"}).raise_for_status()
    _go_on(prefill)
    _go_on(decode)


def _retract_decode(prefill: RealServer, decode: RealServer) -> None:
    decode.http.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
    _go_on(prefill)
    _go_on(decode)


def _sleep_prefill(prefill: RealServer, decode: RealServer) -> None:
    del decode
    prefill.http.post("/sleep").raise_for_status()
    prefill.http.post("/wake").raise_for_status()


def _sleep_decode(prefill: RealServer, decode: RealServer) -> None:
    del prefill
    decode.http.post("/sleep").raise_for_status()
    decode.http.post("/wake").raise_for_status()


@pytest.mark.parametrize(
    ("number", "act"),
    [
        (0, _abort_prompts),
        (1, _flush_prefill),
        (2, _flush_decode),
        (3, _pause_decode),
        (4, _retract_decode),
        (5, _sleep_prefill),
        (6, _sleep_decode),
    ],
)
def test_an_operator_in_the_middle_costs_no_answer(
    engines: tuple[RealServer, ...], number: int, act: Callable[[RealServer, RealServer], None]
) -> None:
    alone, prefill, decode = engines
    until_asked(decode)
    sent = body(40 + number, 1200)
    answer = _held(prefill, decode, sent)
    act(prefill, decode)
    _go_on(prefill)
    assert answer.json()["output_ids"] == alone.http.post("/generate", json=sent).json()["output_ids"]
    nothing_is_left(prefill, decode)


def test_other_weights_are_not_mixed(engines: tuple[RealServer, ...]) -> None:
    """The prefill engine refuses while it has others; with the same it is asked again."""
    alone, prefill, decode = engines
    sent = body(50)

    def update(server: RealServer, path: str) -> None:
        server.http.post("/update_weights_from_disk", json={"model_path": path, "timeout": 5}).raise_for_status()

    try:
        update(alone, "embedded:3")
        update(decode, "embedded:3")
        until(lambda: is_asked(decode) is False, every_s=0.2)
        other = decode.http.post("/generate", json=sent).json()["output_ids"]
        assert other == alone.http.post("/generate", json=sent).json()["output_ids"]
        update(prefill, "embedded:3")
        until_asked(decode)
        sent = body(51)
        other = decode.http.post("/generate", json=sent).json()["output_ids"]
        assert other == alone.http.post("/generate", json=sent).json()["output_ids"]
    finally:
        for server in engines:
            update(server, "embedded")
    until_asked(decode)
    nothing_is_left(prefill, decode)


def test_a_prefill_engine_that_dies_in_the_middle_costs_no_answer(parent: PreloadedParent, tmp_path: Path) -> None:
    """Nor one that is not there yet; when it is there again it is asked. One of a single stage dies behind a router."""
    with fleet_of(parent, tmp_path, pp_size=2, chunked_prefill_size=16) as fleet:
        port = free_port()
        fleet.prefill_ports.append(port)
        alone, decode = fleet.serve(), fleet.decode()
        sent = body(60, 3000)
        expected = alone.http.post("/generate", json=sent).json()["output_ids"]
        assert decode.http.post("/generate", json=sent).json()["output_ids"] == expected
        assert metric(decode, "prefills_unasked_total") == 1
        decode.http.post("/flush_cache").raise_for_status()
        prefill = fleet.prefill(port)
        until_asked(decode)
        running = Answer(decode.url, body(61, 20, stream=True, sampling_params=GREEDY | {"max_new_tokens": 400}))
        answer = Answer(decode.url, sent)
        until(lambda: prefill.stats()["pages_sent"] > 20, "some of it was sent")
        signal_all(prefill, signal.SIGKILL)
        assert answer.json()["output_ids"] == expected
        running.join()
        assert running.lines[-1] == "data: [DONE]"
        nothing_is_left(decode)
        assert metric(decode, "prefills_failed_total") >= 1
        prefill.process.kill()
        prefill.process.wait(30)
        again = fleet.prefill(port)
        until_asked(decode)
        nothing_is_left(decode, again)


def test_a_prefill_engine_that_stops_is_waited_for_no_longer_than_its_time(
    parent: PreloadedParent, tmp_path: Path
) -> None:
    with fleet_of(parent, tmp_path) as fleet:
        alone, prefill = fleet.serve(), fleet.prefill()
        decode = fleet.decode(prefill_timeout_s=1.5)
        until_asked(decode)
        sent = body(70, 2000)
        expected = alone.http.post("/generate", json=sent).json()["output_ids"]
        signal_all(prefill, signal.SIGSTOP)
        try:
            assert Answer(decode.url, sent).json()["output_ids"] == expected
            unasked = metric(decode, "prefills_unasked_total")
            until(lambda: not is_asked(decode) and metric(decode, "prefills_unasked_total") > unasked, "not asked")
            nothing_is_left(decode)
        finally:
            signal_all(prefill, signal.SIGCONT)
        until_asked(decode)
        nothing_is_left(prefill, decode)


def test_a_decode_engine_that_dies_leaves_nothing_on_the_prefill_engine(
    parent: PreloadedParent, tmp_path: Path
) -> None:
    with fleet_of(parent, tmp_path, chunked_prefill_size=16) as fleet:
        prefill = fleet.prefill()
        decode = fleet.decode()
        until_asked(decode)
        sent = prefill.stats()["pages_sent"]
        # So long that on a busy machine none ends before the kill.
        long = GREEDY | {"max_new_tokens": 1000, "ignore_eos": True}
        answers = [Answer(decode.url, body(80 + n, 3000, stream=True, sampling_params=long)) for n in range(4)]
        until(lambda: prefill.stats()["pages_sent"] > sent + 20, "some of it was sent")
        os.kill(decode.serving.pids["scheduler"], signal.SIGKILL)
        for answer in answers:
            answer.join()
            assert answer.status == 503 or "error" in answer.lines[-1]
        nothing_is_left(prefill)


@pytest.mark.nightly
def test_two_of_each_behind_a_router(engines: tuple[RealServer, ...], parent: PreloadedParent, tmp_path: Path) -> None:
    """A prefill engine and a decode engine die under load: every answer is right, or ends with its cause in time."""
    alone = engines[0]
    with fleet_of(parent, tmp_path) as fleet:
        prefills = [fleet.prefill() for _ in range(2)]
        decodes = [fleet.decode() for _ in range(2)]
        for decode in decodes:
            until_asked(decode)
        bodies = [body(90 + number, 200 + 97 * number) for number in range(8)]
        expected = [alone.http.post("/generate", json=one).json()["output_ids"] for one in bodies]
        with router_before(*(decode.url for decode in decodes)) as client:
            url = str(client.base_url).rstrip("/")
            until(lambda: all(not one["why_not"] for one in client.get("/health").json()["engines"]))
            assert [Answer(url, one).json()["output_ids"] for one in bodies] == expected
            until(lambda: all(prefill.stats()["pages_sent"] for prefill in prefills), "both engines have sent pages")
            answers = [Answer(url, one) for one in bodies]
            signal_all(prefills[0], signal.SIGKILL)
            assert [answer.json()["output_ids"] for answer in answers] == expected
            long = {"sampling_params": GREEDY | {"max_new_tokens": 200}, "stream": True}
            streams = [Answer(url, one | long) for one in bodies]
            until(lambda: all(stream.lines for stream in streams), "all have begun")
            signal_all(decodes[0], signal.SIGKILL)
            cut = []
            for stream in streams:
                stream.join()
                if stream.lines[-1] != "data: [DONE]":
                    assert "error" in stream.lines[-1], stream.lines[-1]
                    cut.append(stream)
            assert 0 < len(cut) < len(streams)
            assert [Answer(url, one).json()["output_ids"] for one in bodies] == expected
        nothing_is_left(prefills[1], decodes[1])
        assert not left(prefills[1])


@pytest.mark.parametrize("is_right", [True, False])
def test_kv_over_tcp_needs_the_secret(parent: PreloadedParent, tmp_path: Path, is_right: bool) -> None:
    """A prefill engine with another one is refused, and the prompt computed where it was asked."""
    secrets = [tmp_path / name for name in ("mine", "other")]
    for number, secret in enumerate(secrets):
        secret.write_text(str(number) * 32)
        secret.chmod(0o600)
    with fleet_of(parent, tmp_path) as fleet:
        alone = fleet.serve()
        prefill = fleet.prefill(kv_secret_file=str(secrets[0 if is_right else 1]))
        decode = fleet.decode(kv_listen=f"127.0.0.1:{free_port()}", kv_secret_file=str(secrets[0]))
        until(lambda: metric(decode, "prefills_asked_total") or is_asked(decode), every_s=0.2)
        sent = body(100, 1000)
        answer = decode.http.post("/generate", json=sent).json()
        assert answer["output_ids"] == alone.http.post("/generate", json=sent).json()["output_ids"]
        assert bool(decode.stats()["pages_received"]) is is_right
        assert bool(metric(decode, "prefills_failed_total")) is not is_right
        nothing_is_left(prefill, decode)
        assert ("did not prove" in prefill.log + decode.log or "secret" in prefill.log + decode.log) is not is_right


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": "embedded:9"}, "must have the model and weights of this engine, "),
        ({"page_size": 32}, "must have page_size=16 as this engine, got 32; give both the same"),
    ],
)
def test_a_partner_of_another_model_is_named_and_costs_no_answer(
    engines: tuple[RealServer, ...], parent: PreloadedParent, tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    """Its KV has the same shape, and would make every token wrong."""
    with fleet_of(parent, tmp_path) as fleet:
        fleet.prefill(**values)
        decode = fleet.decode()
        sent = body(110, 1000)
        expected = engines[0].http.post("/generate", json=sent).json()["output_ids"]

        def is_told() -> bool:
            assert decode.http.post("/generate", json=sent).json()["output_ids"] == expected
            decode.http.post("/flush_cache")
            return words in decode.log

        until(is_told, "the log names the partner and what differs", every_s=0.2)
        # It is told before any prompt is sent there.
        assert not metric(decode, "prefills_failed_total")
        assert decode.stats()["pages_received"] == 0
