"""A real server survives failing steps, requests that fail every step, devices without memory, and late stages.

Who is told what, who goes on, and that nothing of it is left. Deaths are in the tests of the real server.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from thinned import thinned

from engine.process.death import read_death_report
from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent, ServerProcess
from tests.unit.frontend.real_servers import info_of

START_BOUND_S = 60.0
END_BOUND_S = 30.0
IDLE_BOUND_S = 30.0
CLIENT_TIMEOUT_S = 60.0
# How often the counters are read while a stage is stopped; each look is a step of the scheduler.
LOOKS_AT_A_STANDSTILL = 30
# Room for small allocations beyond what a process has mapped, but not for those of a prompt of thousands of tokens.
HEADROOM_BYTES = 8 * 2**20
LONG_TOKENS, MEDIUM_TOKENS = 7500, 1500
GREEDY = {"temperature": 0, "max_new_tokens": 8}
LISTENED = GREEDY | {"max_new_tokens": 120}


class LiveServer:
    """A running server and plain calls to it."""

    def __init__(self, process: ServerProcess, folder: Path) -> None:
        self.process = process
        self.folder = folder
        serving = process.wait_ready(START_BOUND_S)
        self.pids = serving.pids
        self.http = httpx.Client(base_url=serving.base_url, timeout=CLIENT_TIMEOUT_S)

    def ask(self, text: str = "hello", *, sampling: dict[str, Any] = GREEDY, **fields: Any) -> httpx.Response:
        return self.http.post("/generate", json={"text": text, "sampling_params": sampling} | fields)

    def call(self, path: str, **body: Any) -> None:
        assert self.http.post(path, json=body).status_code == 200

    def stats(self) -> dict[str, Any]:
        return info_of(self.http)["stats"]

    def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        deadline = time.monotonic() + IDLE_BOUND_S
        while not condition(stats := self.stats()):
            assert time.monotonic() < deadline, stats

    def assert_whole_and_idle(self) -> None:
        """B11: after any failure, everything was freed, once."""
        self.wait_for(lambda stats: not (stats["running"] or stats["in_flight"] or stats["waiting"]))
        stats = self.stats()
        assert (stats["pages_held"], stats["rows_free"]) == (0, stats["rows_total"])
        self.call("/flush_cache")
        assert self.stats()["pages_free"] == stats["pages_total"]
        self.process.drain()
        assert self.process.wait(END_BOUND_S) == 0


class Listener:
    """A long stream that is read in the background."""

    def __init__(self, server: LiveServer, pool: ThreadPoolExecutor, **fields: Any) -> None:
        body = {"text": "listen", "stream": True, "sampling_params": LISTENED} | fields
        self._stream = server.http.stream("POST", "/generate", json=body)
        self._response = self._stream.__enter__()
        assert self._response.status_code == 200, self._response.read()
        self._lines = (line.removeprefix("data: ") for line in self._response.iter_lines() if line)
        self.first = next(self._lines)
        self._rest = pool.submit(self._read)

    def _read(self) -> list[str]:
        try:
            return [self.first, *self._lines]
        finally:
            self._stream.__exit__(None, None, None)

    def events(self) -> list[dict[str, Any]]:
        """All events; the stream must have been closed in order."""
        *events, done = self._rest.result(CLIENT_TIMEOUT_S)
        assert done == "[DONE]"
        return [json.loads(event) for event in events]

    def output_ids(self) -> list[int]:
        return [token for event in self.events() for token in event["output_ids"]]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as started:
        yield started


@pytest.fixture
def launch(parent: PreloadedParent, tmp_path: Path) -> Iterator[Callable[..., LiveServer]]:
    servers: list[LiveServer] = []
    processes: list[ServerProcess] = []

    def start(**settings: Any) -> LiveServer:
        processes.append(parent.serve(ServerSettings(**{"port": 0, **settings}), tmp_path, tmp_path / "log"))
        servers.append(LiveServer(processes[-1], tmp_path))
        return servers[-1]

    yield start
    for server in servers:
        server.http.close()
    for process in processes:
        process.kill()
        process.wait(END_BOUND_S)
        process.close()


@pytest.mark.parametrize(
    ("pp_size", "kinds"),
    [(1, ["OutOfMemoryError", "OutOfMemoryError", "MemoryError", "IndexError"]), (4, ["0", "2", "2"])],
)
def test_a_poisoned_request_fails_alone(launch, pool: ThreadPoolExecutor, pp_size: int, kinds: list[str]) -> None:
    """A05: each time it is computed its forward raises; a stream beside it says what it says undisturbed."""
    server = launch(pp_size=pp_size, gate="failing_gates:failing_gate", mixed_chunk=False)
    alone = server.ask("listen", sampling=LISTENED).json()["output_ids"]
    beside = Listener(server, pool)
    for kind in kinds:
        response = server.ask(rid=f"poison-{kind}")
        assert response.status_code == 500
        stage, error = (kind, "StepFailedError") if kind.isdigit() else ("0", kind)
        message = response.json()["error"]["message"]
        assert f"stage {stage} failed in microbatch " in message
        assert f": {error}: " in message
    assert server.http.get("/health").status_code == 200
    assert beside.output_ids() == alone
    assert server.ask().status_code == 200
    server.assert_whole_and_idle()


@pytest.mark.parametrize(("pp_size", "kind"), thinned([(4, "1"), (1, "OutOfMemoryError")], one_in=2))
def test_a_failed_step_fails_its_own_microbatch(launch, pool: ThreadPoolExecutor, pp_size: int, kind: str) -> None:
    """A05: requests in the failed microbatch get the reason and can be retried; all others continue."""
    server = launch(pp_size=pp_size, gate="failing_gates:failing_gate", mixed_chunk=False)
    undisturbed = server.ask().json()["output_ids"]
    outside = Listener(server, pool)
    server.call("/pause_generation", mode="in_place")
    companions = [pool.submit(server.ask, rid=rid) for rid in (f"poison-{kind}.x", "companion")]
    server.wait_for(lambda stats: stats["waiting"] == 2)
    server.call("/continue_generation")
    errors = [companion.result(CLIENT_TIMEOUT_S) for companion in companions]
    assert [error.status_code for error in errors] == [500, 500]
    told = [error.json()["error"] for error in errors]
    assert told[0].pop("request_id") != told[1].pop("request_id")
    assert told[0] == told[1]
    assert "failed in microbatch" in errors[1].json()["error"]["message"]
    assert server.ask(rid="companion").json()["output_ids"] == undisturbed
    assert len(outside.output_ids()) == LISTENED["max_new_tokens"]
    server.assert_whole_and_idle()


@pytest.mark.skipif(sys.platform != "linux", reason="only there a running process's memory can be limited")
@pytest.mark.parametrize(("pp_size", "process"), thinned([(4, "stage-2"), (1, "scheduler")], one_in=2))
def test_a_step_without_memory_fails_alone(launch, pp_size: int, process: str) -> None:
    """A05: a real one: the process may map no more, a long prompt needs more, a short one does not."""
    server = launch(pp_size=pp_size, chunked_prefill_size=8192)
    short = server.ask().json()["output_ids"]
    # Whatever a first long message starts once, such as the thread that frees sent buffers, is there afterwards.
    assert server.ask("w" * MEDIUM_TOKENS).status_code == 200
    computing = psutil.Process(server.pids[process])
    before = computing.rlimit(resource.RLIMIT_AS)
    computing.rlimit(resource.RLIMIT_AS, (computing.memory_info().vms + HEADROOM_BYTES, before[1]))
    for letter in "xy":
        refused = server.ask(letter * LONG_TOKENS)
        assert refused.status_code == 500
        assert "allocate memory" in refused.json()["error"]["message"]
        assert server.ask().json()["output_ids"] == short
    computing.rlimit(resource.RLIMIT_AS, before)
    assert server.ask("x" * MEDIUM_TOKENS).status_code == 200
    server.assert_whole_and_idle()


def test_a_late_stage_loses_nothing(launch, pool: ThreadPoolExecutor) -> None:
    """A06, B12: a stopped stage is late, not dead: streams wait, aborts and calls are answered, and all goes on."""
    server = launch(pp_size=4)
    alone = server.ask("listen", sampling=LISTENED).json()["output_ids"]
    server.call("/flush_cache")
    streams = [Listener(server, pool, rid=f"stream-{number}") for number in range(2)]
    os.kill(server.pids["stage-2"], signal.SIGSTOP)
    late = pool.submit(server.ask, "late")
    still = _wait_for_standstill(server)
    assert still["in_flight"] > 0
    assert server.http.get("/health").status_code == 200
    assert server.http.post("/flush_cache").status_code == 400
    server.call("/abort_request", rid="stream-1")
    assert streams[1].events()[-1]["meta_info"]["finish_reason"] == "abort"
    assert not late.done()
    os.kill(server.pids["stage-2"], signal.SIGCONT)
    assert streams[0].output_ids() == alone
    assert late.result(CLIENT_TIMEOUT_S).status_code == 200
    server.assert_whole_and_idle()


def _wait_for_standstill(server: LiveServer) -> dict[str, Any]:
    """The counters when no microbatch was launched or came back for a good while."""
    seen: dict[str, Any] = {}
    looks = 0
    deadline = time.monotonic() + IDLE_BOUND_S
    while looks < LOOKS_AT_A_STANDSTILL:
        stats = server.stats()
        same = all(stats[name] == seen.get(name) for name in ("forward_ct", "in_flight", "generated_tokens"))
        looks, seen = (looks + 1 if same else 0), stats
        assert time.monotonic() < deadline, stats
    return seen


def test_extreme_sampling_parameters_poison_no_other_request(launch, pool: ThreadPoolExecutor) -> None:
    """A05: what a client may ask for never fails a step: neither its own nor its neighbours'."""
    server = launch(mixed_chunk=True)
    alone = server.ask("listen", sampling=LISTENED).json()["output_ids"]
    beside = Listener(server, pool)
    extremes: list[dict[str, Any]] = [
        {"temperature": 5e-324, "top_k": 2},
        {"temperature": 1e308},
        {"temperature": 1, "repetition_penalty": 5e-324},
        {"temperature": 1, "top_p": 5e-324, "min_p": 1},
        {"temperature": 1, "min_new_tokens": 4, "stop_token_ids": list(range(8, 264))},
    ]
    for extreme in extremes:
        response = server.ask(sampling={"max_new_tokens": 4} | extreme, return_logprob=True, top_logprobs_num=20)
        assert response.status_code == 200, (extreme, response.text)
        assert all(0 <= token < 264 for token in response.json()["output_ids"])
    assert beside.output_ids() == alone
    server.assert_whole_and_idle()


@pytest.mark.parametrize(
    ("number", "why"),
    [(signal.SIGKILL, "it closed its socket"), (signal.SIGSTOP, "it was stopped by a signal and did not continue")],
)
def test_the_report_of_a_death_names_the_reader_and_not_the_front_end_that_it_ended(
    launch, number: signal.Signals, why: str
) -> None:
    """A06: the supervisor sees the front end end, which says whose death that is."""
    server = launch(step_timeout_s=1.0)
    (reader,) = psutil.Process(server.pids["frontend"]).children()
    reader.send_signal(number)
    assert server.process.wait(END_BOUND_S) == 1
    report = read_death_report(server.folder)
    assert report is not None
    assert (report.process, report.exit_code) == ("reader", None)
    assert report.cause.startswith(why)
    assert "the reader process died and the server with it" in (server.folder / "log").read_text()
