"""``engine route`` before two real engines: prefixes, a kill in the middle of a stream, and a second life."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.server.launch.preload import PreloadedParent
from tests.unit.frontend.real_servers import RealServer, running

# On a busy machine: an engine asks its partners, and they answer, in many turns.
PATIENCE_S = 120.0
PROMPT = list(range(1, 82))


@contextmanager
def router_before(*urls: str) -> Iterator[httpx.Client]:
    """The command as users run it, on a free port; ended by SIGTERM."""
    command = [sys.executable, "-m", "engine", "route", *urls, "--port", "0", "--period-s", "0.2", "--patience-s", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline().decode()
            assert said.startswith(f"routing to {', '.join(urls)} at http://127.0.0.1:"), said
            with httpx.Client(base_url=said.split()[-1], timeout=PATIENCE_S, trust_env=False) as client:
                yield client
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0


def free_port() -> int:
    """A port that can be listened on again after a kill, as one that the system chose cannot."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"this did not become true within {PATIENCE_S:g} s"
        time.sleep(0.02)


class Routed:
    """Two engines and the router before them."""

    def __init__(self, parent: PreloadedParent, folder: Path, stack: ExitStack) -> None:
        self._parent, self._folder, self._stack = parent, folder, stack
        self.engines = {server.url: server for server in (self.start(1, free_port()), self.start(2, free_port()))}
        self.client = stack.enter_context(router_before(*self.engines))
        until(lambda: all(one["cache"] == "right" for one in self.health().values()))

    def start(self, number: int, port: int) -> RealServer:
        folder = self._folder / str(number)
        folder.mkdir(exist_ok=True)
        endpoints = {"kv_events_endpoint": f"ipc://{folder}/live", "kv_events_replay_endpoint": f"ipc://{folder}/again"}
        return self._stack.enter_context(running(self._parent, folder, port=port, kv_events=True, **endpoints))

    def health(self) -> dict[str, Any]:
        return {one["name"]: one for one in self.client.get("/health").json()["engines"]}

    def asked(self, tokens: int = 4) -> tuple[str, dict[str, Any]]:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": tokens, "temperature": 0}}
        answer = self.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-engine"], answer.json()


@pytest.fixture(scope="module")
def routed(parent: PreloadedParent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    """For both tests in their order: the second one ends an engine."""
    with ExitStack() as stack:
        yield Routed(parent, tmp_path_factory.mktemp("r"), stack)


def test_operators_calls_are_of_both_engines_or_of_none(routed: Routed, tmp_path: Path) -> None:
    servers = first, second = tuple(routed.engines.values())

    def states() -> list[tuple[str | None, str]]:
        infos = [server.info() for server in servers]
        return [(info["stats"]["paused"], info["weights"]) for info in infos]

    def told(path: str, body: Any = None) -> tuple[int, str]:
        answer = routed.client.post(path, json=body)
        return answer.status_code, answer.text

    before = routed.asked(6)[1]["output_ids"]
    assert told("/pause_generation", {"mode": "in_place"}) == (200, "pause done by 2 engines")
    assert states() == [("in_place", "embedded")] * 2
    assert told("/continue_generation") == (200, "continue done by 2 engines")
    update = "/update_weights_from_disk"
    assert told(update, {"model_path": "embedded:2"}) == (200, "weight update done by 2 engines")
    assert states() == [(None, "embedded:2")] * 2
    assert routed.asked(6)[1]["output_ids"] != before
    assert told(update, {"model_path": str(tmp_path / "none")})[0] == 400
    assert states() == [(None, "embedded:2")] * 2
    assert told(update, {"model_path": "embedded"}) == (200, "weight update done by 2 engines")
    assert routed.asked(6)[1]["output_ids"] == before
    assert told("/flush_cache") == (200, "flush done by 2 engines")
    os.kill(second.serving.pids["scheduler"], signal.SIGSTOP)
    try:
        slow, words = told("/pause_generation", {"mode": "in_place"})
    finally:
        os.kill(second.serving.pids["scheduler"], signal.SIGCONT)
    assert slow == 503
    assert second.url in words
    assert first.url not in words
    assert states()[0] == (None, "embedded")
    # The slow one is put back too, and takes requests again.
    until(lambda: states()[1] == (None, "embedded"))
    until(lambda: told("/flush_cache")[0] == 200)


def test_two_engines_and_a_kill(routed: Routed) -> None:
    routed.client.post("/flush_cache").raise_for_status()
    until(lambda: all(not one["cached_pages"] for one in routed.health().values()))
    first, alone = routed.asked()
    until(lambda: routed.health()[first]["cached_pages"] >= 5)
    # The other one had no request for longer; what is cached decides.
    again, second = routed.asked()
    assert (again, second["meta_info"]["cached_tokens"]) == (first, 80)
    assert second["output_ids"] == alone["output_ids"]

    body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    with routed.client.stream("POST", "/generate", json=body) as stream:
        assert stream.headers["x-engine"] == first
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        for pid in routed.engines[first].serving.pids.values():
            with contextlib.suppress(ProcessLookupError):  # One that dies may take the others along.
                os.kill(pid, signal.SIGKILL)
        # The client's patience is half a minute; no time of the router's is over in it.
        *_, last = lines
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_unavailable"

    other, answer = routed.asked()
    assert other != first
    assert answer["output_ids"] == alone["output_ids"]
    until(lambda: routed.health()[first]["why_not"] is not None)
    routed.engines[first].process.kill()
    routed.engines[first].process.wait(PATIENCE_S)
    number = 1 + [*routed.engines].index(first)
    routed.start(number, port=int(first.rpartition(":")[2]))
    until(lambda: routed.health()[first]["why_not"] is None and routed.health()[first]["cache"] == "right")
    assert routed.health()[first]["cached_pages"] == 0, "a mirror of an earlier life is used"
    assert routed.asked()[0] == other
