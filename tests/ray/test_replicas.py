"""``serve run engine.cluster.serve_app:build`` with two engines: streams, prefixes, refusals, a drain and a death.

Goal: several engines keep the guarantees of one; the end of one engine ends its own streams alone.
Method: the openai client and plain HTTP against Serve's proxy; engines are ended by the signals that end them outside
of tests. Origin: the replicas of an application; A06, C05. Mutant: none; Ray is not the project's to break.
"""

from __future__ import annotations

import contextlib
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
# The tokens of streams that leave before they end.
LONGER = 3000


@pytest.fixture(scope="module")
def app() -> Iterator[ServedApp]:
    limits = (f"max_running_requests={ROWS}", f"max_queued_requests={QUEUED}", "drain_timeout_s=240")
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
    leave: threading.Event = field(default_factory=threading.Event)
    status: int = 0

    def read(self) -> None:
        body = {"text": self.prompt, "stream": True, "sampling_params": sampling(self.tokens)}
        with httpx.stream("POST", f"{self.url}/generate", json=body, timeout=BOUND_S) as answer:
            self.status = answer.status_code
            for line in answer.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
                if self.leave.is_set():
                    break

    @property
    def is_whole(self) -> bool:
        return bool(self.events) and self.events[-1] == "[DONE]"

    @property
    def error(self) -> Any:
        return json.loads(self.events[-1]).get("error") if self.events and not self.is_whole else None


def sampling(tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}


class Crowd:
    """Clients with streams of about ``tokens`` tokens, whose prompts share nothing, so that both engines have some."""

    def __init__(self, app: ServedApp, tokens: int) -> None:
        self._app = app
        self._tokens = tokens
        self._threads: list[threading.Thread] = []
        self.streams: list[Stream] = []

    def keep(self, count: int) -> None:
        """Let streams begin until this many are open: on a busy machine some have ended, or were refused."""
        for _ in range(count - len(self.open)):
            number = len(self.streams)
            # Of different lengths, so that not all of an engine end in one step.
            self.streams.append(Stream(self._app.url, f"{number} " * 200, self._tokens + 17 * (number % 8)))
            self._threads.append(threading.Thread(target=self.streams[-1].read))
            self._threads[-1].start()

    @property
    def open(self) -> list[Stream]:
        return [stream for stream, thread in zip(self.streams, self._threads, strict=True) if thread.is_alive()]

    @property
    def begun(self) -> list[Stream]:
        """The open streams with a token."""
        return [stream for stream in self.open if stream.events]

    def leave(self) -> None:
        for stream in self.streams:
            stream.leave.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(BOUND_S)


@contextlib.contextmanager
def crowd(app: ServedApp, tokens: int) -> Iterator[Crowd]:
    """Nobody of it is left after the block."""
    clients = Crowd(app, tokens)
    try:
        yield clients
    finally:
        clients.leave()
        clients.join()


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
    body = {"text": "leave", "stream": True, "sampling_params": sampling(LONGER)}
    with httpx.stream("POST", f"{app.url}/generate", json=body, timeout=BOUND_S) as answer:
        lines = answer.iter_lines()  # Kept: httpx closes the answer with it.
        next(lines)
        app.wait(lambda: sum(load["num_reqs"] for load in app.loads()) == 1, "the request")
    left = time.monotonic()
    app.wait(lambda: at_rest(app), "the end of the request")
    print(f"its engine was at rest {time.monotonic() - left:.2f} s after the client left")  # noqa: T201 - a figure


def test_full_engines_refuse_with_the_time_to_come_back(app: ServedApp, client: openai.OpenAI) -> None:
    app.wait(lambda: at_rest(app), "rest")
    with crowd(app, LONGER) as clients:

        def are_full() -> bool:
            clients.keep(2 * (ROWS + QUEUED))
            return [load["num_reqs"] for load in app.loads()] == [ROWS + QUEUED] * 2

        app.wait(are_full, "full engines")
        body = {"text": "full", "sampling_params": sampling(4)}
        with ThreadPoolExecutor(8) as pool, httpx.Client(timeout=BOUND_S) as http:
            asked = [pool.submit(http.post, f"{app.url}/generate", json=body) for _ in range(8)]
            answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [429] * 8
    for answer in answers:
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "server_busy"
        assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
    assert {stream.status for stream in clients.streams} <= {200, 429}
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
    with crowd(app, LONG) as clients:

        def are_at_work() -> bool:
            # All rows of both engines have streams with a token, and others wait in both queues.
            clients.keep(CLIENTS)
            waiting = [load["num_waiting_reqs"] for load in app.loads()]
            return len(waiting) == 2 and all(waiting) and len(clients.begun) >= 2 * ROWS

        app.wait(are_at_work, "the first tokens")
        begun = clients.begun
        victim.kill()
        killed = time.monotonic()
        app.wait(lambda: any(stream.error for stream in clients.streams), "a final message")
        final_message_s = time.monotonic() - killed
        during = httpx.post(f"{app.url}/generate", json={"text": "on", "sampling_params": sampling(2)}, timeout=BOUND_S)
        clients.join()
    cut = [stream for stream in clients.streams if not stream.is_whole]
    assert cut
    for stream in cut:
        assert stream.error["type"] == "server_unavailable"
        assert "its replica is gone" in stream.error["message"]
        # What had not begun was asked for again, of the engine that is left.
        assert len(stream.events) > 1
    # One of the victim's rows may have been free for the next one already.
    assert len([stream for stream in begun if stream.is_whole]) >= ROWS - 1
    assert during.status_code == 200
    assert other.is_running()
    _, left = psutil.wait_procs(its_processes, timeout=10)
    assert not left
    app.wait_ready(2)
    print(f"a cut stream had its final message {final_message_s:.2f} s after the kill")  # noqa: T201 - a figure to look at


def test_engines_that_drain_finish_what_they_have_and_refuse_the_rest(app: ServedApp) -> None:
    """Both are drained, as an operator drains one: streams end in order, and new requests get Retry-After.

    Streams that leave once a request was refused keep both engines until then.
    """
    app.wait(lambda: at_rest(app), "rest")
    with crowd(app, LONGER) as holders, crowd(app, 300) as clients:

        def are_at_work() -> bool:
            holders.keep(4)
            clients.keep(4)
            return len(holders.begun) == len(clients.begun) == 4 and all(load["num_reqs"] for load in app.loads())

        app.wait(are_at_work, "streams of both engines")
        draining = clients.begun
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
        holders.leave()
        clients.join()
    error = refused[-1].json()["error"]
    assert error["type"] == "server_unavailable"
    assert all(stream.is_whole for stream in draining), [stream.events[-1][:200] for stream in draining]
