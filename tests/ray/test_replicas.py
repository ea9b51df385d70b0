"""``serve run engine.cluster.serve_app:build`` with two engines: streams, prefixes, refusals, a drain and a death.

Goal: several engines keep the guarantees of one; the end of one engine ends its own streams alone.
Method: the openai client and plain HTTP against Serve's proxy; engines are ended by the signals that end them outside
of tests. Origin: the replicas of an application; A06, C05. Mutant: none; Ray is not the project's to break.
"""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import psutil
import pytest
from served_app import BOUND_S, ServedApp, served

from ci.register import register_cpu_ci

register_cpu_ci(est_time=180, suite="ray-cpu")

ROWS, QUEUED = 4, 12
CLIENTS = 16
# An engine decodes some hundred tokens a second here, so these last long enough to be found at work.
LONG = 1000
# Those of streams that leave before they end.
LONGER = 3000


@pytest.fixture(scope="module")
def app() -> Iterator[ServedApp]:
    limits = (f"max_running_requests={ROWS}", f"max_queued_requests={QUEUED}", "drain_timeout_s=60")
    with served("replicas=2", "cpus=1", "load_period_s=0.5", "health_period_s=1", *limits) as running:
        running.wait_ready(2)
        yield running


@pytest.fixture
def client(app: ServedApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=BOUND_S) as made:
        yield made


@dataclass
class Stream:
    """One client's stream, read in a thread of its own."""

    url: str
    prompt: str
    tokens: int
    events: list[str] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    leave: threading.Event = field(default_factory=threading.Event)
    status: int = 0

    def read(self) -> None:
        body = {"text": self.prompt, "stream": True, "sampling_params": sampling(self.tokens)}
        try:
            with httpx.stream("POST", f"{self.url}/generate", json=body, timeout=BOUND_S) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
                        self.begun.set()
                    if self.leave.is_set():
                        break
        finally:
            self.begun.set()

    @property
    def is_whole(self) -> bool:
        return bool(self.events) and self.events[-1] == "[DONE]"

    @property
    def error(self) -> Any:
        return json.loads(self.events[-1]).get("error") if self.events and not self.is_whole else None


def sampling(tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}


def begin(app: ServedApp, count: int, tokens: int) -> tuple[list[Stream], list[threading.Thread]]:
    """Clients with prompts that share nothing, so that both engines have some."""
    streams = [Stream(app.url, f"{number} " * 200, tokens) for number in range(count)]
    threads = [threading.Thread(target=stream.read) for stream in streams]
    for thread in threads:
        thread.start()
    return streams, threads


def at_rest(app: ServedApp) -> bool:
    return [load["num_reqs"] for load in app.loads()] == [0, 0]


def test_the_openai_client_streams(client: openai.OpenAI) -> None:
    """Token by token, with the same text as an answer in one."""
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is a replica?"}]
    options: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**options, stream=True)]
    assert "".join(parts) == whole.choices[0].message.content
    assert len([part for part in parts if part]) > 4


def test_a_conversation_stays_where_its_prefix_is(app: ServedApp) -> None:
    """Every turn finds what was said before it, and the conversations are on both engines.

    Of two idle engines the one with more free pages takes the next: it may be chosen again until it has reported.
    """
    conversations = itertools.count()

    def talk() -> None:
        said, before = f"conversation {next(conversations)} " * 60, 0
        for turn in range(3):
            body = {"text": said, "sampling_params": sampling(4)}
            answer = httpx.post(f"{app.url}/generate", json=body, timeout=BOUND_S).json()
            # All but the part of a page at the end.
            assert answer["meta_info"]["cached_tokens"] >= before - 16
            before = answer["meta_info"]["prompt_tokens"]
            said += f"turn {turn} " * 40

    def are_on_both() -> bool:
        talk()
        return all(load["cached_pages"] > 100 for load in app.loads())

    for _ in range(5):
        talk()
    app.wait(are_on_both, "conversations on both engines")
    print(f"{next(conversations)} conversations until both engines had some")  # noqa: T201 - a figure


def test_a_prompt_is_found_by_its_tokens_where_it_was_a_text(app: ServedApp) -> None:
    """By the engines' KV events: the bodies have no text in common, and the other engine is idle."""
    numbers = itertools.count()

    def cached() -> int:
        text = f"known {next(numbers)} " * 40
        ids = httpx.post(f"{app.url}/tokenize", json={"prompt": text}, timeout=BOUND_S).json()["tokens"]
        long = {"text": text, "stream": True, "sampling_params": sampling(LONG)}
        with httpx.stream("POST", f"{app.url}/generate", json=long, timeout=BOUND_S) as stream:
            lines = stream.iter_lines()  # Kept: httpx closes the answer with it.
            next(lines)
            body = {"input_ids": ids, "sampling_params": sampling(2)}
            answer = httpx.post(f"{app.url}/generate", json=body, timeout=BOUND_S).json()
        app.wait(lambda: at_rest(app), "rest")
        return int(answer["meta_info"]["cached_tokens"])

    app.wait(lambda: all(cached() > 100 for _ in range(3)), "prompts that are known by their tokens")


def test_a_client_that_leaves_ends_its_request(app: ServedApp) -> None:
    """C05: long before its tokens are there."""
    body = {"text": "leave", "stream": True, "sampling_params": sampling(LONG)}
    with httpx.stream("POST", f"{app.url}/generate", json=body, timeout=BOUND_S) as answer:
        lines = answer.iter_lines()  # Kept: httpx closes the answer with it.
        next(lines)
        app.wait(lambda: sum(load["num_reqs"] for load in app.loads()) == 1, "the request")
    left = time.monotonic()
    app.wait(lambda: at_rest(app), "the end of the request")
    print(f"its engine was at rest {time.monotonic() - left:.2f} s after the client left")  # noqa: T201 - a figure


def test_full_engines_refuse_with_the_time_to_come_back(app: ServedApp, client: openai.OpenAI) -> None:
    app.wait(lambda: at_rest(app), "rest")
    streams, threads = begin(app, 2 * (ROWS + QUEUED), LONGER)

    def are_full() -> bool:
        # A stream may have been refused, or have ended, before the last one was taken: another one takes its place.
        more = begin(app, sum(not thread.is_alive() for thread in threads), LONGER)
        threads[:] = [thread for thread in threads if thread.is_alive()]
        streams.extend(more[0])
        threads.extend(more[1])
        return [load["num_reqs"] for load in app.loads()] == [ROWS + QUEUED] * 2

    app.wait(are_full, "full engines")
    body = {"text": "full", "sampling_params": sampling(4)}
    with ThreadPoolExecutor(8) as pool, httpx.Client(timeout=BOUND_S) as http:
        answers = [one.result() for one in [pool.submit(http.post, f"{app.url}/generate", json=body) for _ in range(8)]]
    assert [answer.status_code for answer in answers] == [429] * 8
    for answer in answers:
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "server_busy"
        assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
    for stream in streams:
        stream.leave.set()
    for thread in threads:
        thread.join(BOUND_S)
    assert {stream.status for stream in streams} <= {200, 429}
    app.wait(lambda: at_rest(app), "rest")


def test_errors_have_their_shape_and_operators_their_own_way(app: ServedApp, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="embedded", prompt="x", max_tokens=-1)
    assert refused.value.param == "max_tokens"
    assert refused.value.response.headers["x-request-id"].count(",") == 0
    flush = httpx.post(f"{app.url}/flush_cache", timeout=BOUND_S)
    assert flush.status_code == 404
    assert "about one engine" in flush.json()["error"]["message"]


def test_a_killed_replica_takes_its_own_streams_along_and_no_other(app: ServedApp) -> None:
    """A06: under 16 clients; the streams that it had end with an error, and Serve starts another replica."""
    app.wait(lambda: at_rest(app), "rest")
    victim, other = app.actors()
    its_processes = [victim, *victim.children(recursive=True)]
    streams, threads = begin(app, CLIENTS, LONG)
    app.wait(lambda: sum(load["num_reqs"] for load in app.loads()) == CLIENTS, "all clients")
    # The others wait in the queues of both engines.
    app.wait(lambda: len([stream for stream in streams if stream.begun.is_set()]) == 2 * ROWS, "the first tokens")
    waiting = [stream for stream in streams if not stream.begun.is_set()]
    victim.kill()
    killed = time.monotonic()
    app.wait(lambda: len([stream for stream in streams if stream.error]) == ROWS, "the final messages")
    final_message_s = time.monotonic() - killed
    during = httpx.post(f"{app.url}/generate", json={"text": "on", "sampling_params": sampling(2)}, timeout=BOUND_S)
    for thread in threads:
        thread.join(BOUND_S)
    cut = [stream for stream in streams if not stream.is_whole]
    assert len(cut) == ROWS, [stream.events[-1:] for stream in cut]
    for stream in cut:
        assert stream.error["type"] == "server_unavailable"
        assert "its replica is gone" in stream.error["message"]
    # What had not begun is asked for again, of the engine that is left.
    assert all(stream.is_whole for stream in waiting), [stream.events[-1:] for stream in waiting]
    assert during.status_code == 200
    assert other.is_running()
    _, left = psutil.wait_procs(its_processes, timeout=10)
    assert not left
    app.wait_ready(2)
    print(f"the final message of a cut stream came {final_message_s:.2f} s after the kill")  # noqa: T201 - a figure to look at


def test_engines_that_drain_finish_what_they_have_and_refuse_the_rest(app: ServedApp) -> None:
    """Both are drained, as an operator drains one: streams end in order, and new requests get Retry-After."""
    app.wait(lambda: at_rest(app), "rest")
    streams, threads = begin(app, 4, 600)
    for stream in streams:
        assert stream.begun.wait(BOUND_S)
    for actor in app.actors():
        (parent,) = actor.children()
        (supervisor,) = parent.children()
        supervisor.send_signal(signal.SIGTERM)
    refused: list[httpx.Response] = []

    def is_refused() -> bool:
        body = {"text": "late", "sampling_params": sampling(2)}
        refused.append(httpx.post(f"{app.url}/generate", json=body, timeout=BOUND_S))
        return refused[-1].status_code == 503

    app.wait(is_refused, "the refusal")
    error = refused[-1].json()["error"]
    assert error["type"] == "server_unavailable"
    for thread in threads:
        thread.join(BOUND_S)
    assert all(stream.is_whole for stream in streams), [stream.events[-1][:200] for stream in streams]
