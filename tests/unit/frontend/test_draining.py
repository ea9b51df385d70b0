"""Draining and back-pressure on real servers: what is live ends well, what comes is refused, and there is a bound."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from real_servers import RealServer, running

from engine.server.launch.preload import PreloadedParent

END_BOUND_S = 30.0
# Far more than any wait here may take: a drain that ends by its bound would be noticed.
LONG_S = 300.0


class Live:
    """A long stream whose first event is there."""

    def __init__(self, server: RealServer, tokens: int) -> None:
        body = {"text": "hello", "stream": True, "sampling_params": {"max_new_tokens": tokens}}
        self._stream = server.http.stream("POST", "/generate", json=body)
        self._lines = (line for line in self._stream.__enter__().iter_lines() if line)
        self.first = next(self._lines)

    def rest(self) -> list[str]:
        lines = list(self._lines)
        self._stream.__exit__(None, None, None)
        return lines


def _wait_for_refusal(server: RealServer) -> None:
    deadline = time.monotonic() + END_BOUND_S
    while server.http.get("/health").status_code != 503:
        assert time.monotonic() < deadline


def test_sigterm_refuses_the_new_and_finishes_the_live(parent: PreloadedParent, tmp_path: Path) -> None:
    """C07: 503 while draining; the stream that was there gets its whole answer.

    A service manager's signal, a terminal's Ctrl-C and its end reach every process of the server.
    """
    with running(parent, tmp_path, drain_timeout_s=LONG_S, pp_size=2) as server:
        live = Live(server, tokens=300)
        for process in psutil.Process(server.process.pid).children(recursive=True):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                process.send_signal(number)
        server.process.drain()
        _wait_for_refusal(server)
        refused = server.http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_unavailable")
        assert "draining" in refused.json()["error"]["message"]
        *_, last, done = live.rest()
        assert done == "data: [DONE]"
        meta = json.loads(last.removeprefix("data: "))["meta_info"]
        assert (meta["finish_reason"], meta["completion_tokens"]) == ("length", 300)
        assert server.process.wait(END_BOUND_S) == 0
        assert server.log == ""


@pytest.mark.parametrize("second", ["drain", "terminate"])
def test_second_signal_ends_at_once(parent: PreloadedParent, tmp_path: Path, second: str) -> None:
    """A full or draining engine refuses at once, and keeps nothing (C07).

    An end signals before it waits, within a bound; what failed never says that it is ready (A07).
    """
    with running(parent, tmp_path, drain_timeout_s=LONG_S) as server:
        live = Live(server, tokens=8000)
        server.process.drain()
        _wait_for_refusal(server)
        getattr(server.process, second)()
        assert server.process.wait(END_BOUND_S) == 0
        assert "shutting down" in json.loads(live.rest()[-1].removeprefix("data: "))["error"]["message"]


def test_drain_has_a_bound(parent: PreloadedParent, tmp_path: Path) -> None:
    """C07, A08: a request that is still live then ends with an error, and the log says so."""
    with running(parent, tmp_path, drain_timeout_s=0.1) as server:
        assert server.http.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        with httpx.Client(base_url=server.url, timeout=20) as other, ThreadPoolExecutor(1) as pool:
            stuck = pool.submit(other.post, "/generate", json={"text": "x"})
            while server.info()["open_requests"] == 0:
                continue
            server.process.drain()
            assert server.process.wait(END_BOUND_S) == 0
            assert stuck.result().status_code == 503
        assert "drain_timeout_s=0.1" in server.log


def test_queue_limit_plus_one_is_429_and_leaves_nothing(parent: PreloadedParent, tmp_path: Path) -> None:
    """C07: for every protocol, streaming or not."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"text": "x"}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ]
    with running(parent, tmp_path, max_queued_requests=1) as server, ThreadPoolExecutor(1) as pool:
        server.http.post("/pause_generation").raise_for_status()
        waits = pool.submit(httpx.post, f"{server.url}/generate", json={"text": "x"}, timeout=20)
        while server.stats()["waiting"] == 0:
            continue
        for path, body in bodies:
            for stream in (False, True):
                response = server.http.post(path, json=body | {"stream": stream})
                assert response.status_code == 429
                assert "max_queued_requests is 1" in response.json()["error"]["message"]
        assert server.info()["open_requests"] == 1
        server.http.post("/continue_generation").raise_for_status()
        assert waits.result().status_code == 200
        stats = server.stats()
        assert (stats["waiting"], stats["requests_refused"], stats["requests_finished"]) == (0, 6, 1)
        assert stats["rows_free"] == stats["rows_total"]
