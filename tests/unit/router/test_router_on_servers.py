"""``engine route`` before two real engines: prefixes, a kill in the middle of a stream, and a second life."""

from __future__ import annotations

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

from engine.launch.preload import PreloadedParent
from tests.unit.frontend.real_servers import RealServer, running

PATIENCE_S = 30.0
LAST_WORD_S = 2.0
PROMPT = list(range(1, 82))


@contextmanager
def router_before(*urls: str) -> Iterator[httpx.Client]:
    """The command as users run it, on a free port; ended by SIGTERM."""
    command = [sys.executable, "-m", "engine", "route", *urls, "--port", "0", "--period-s", "0.2", "--patience-s", "2"]
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


def test_two_engines_and_a_kill(parent: PreloadedParent, tmp_path: Path) -> None:
    def engine(number: int, stack: ExitStack, port: int) -> RealServer:
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        endpoints = {
            "kv_events_endpoint": f"ipc://{folder}/live",
            "kv_events_replay_endpoint": f"ipc://{folder}/again",
        }
        return stack.enter_context(running(parent, folder, port=port, kv_events=True, **endpoints))

    with ExitStack() as stack:
        engines = {server.url: server for server in (engine(1, stack, free_port()), engine(2, stack, free_port()))}
        client = stack.enter_context(router_before(*engines))

        def health() -> dict[str, Any]:
            return {one["name"]: one for one in client.get("/health").json()["engines"]}

        def asked(ids: list[int], **more: int) -> tuple[str, dict[str, Any]]:
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 4, "temperature": 0, **more}}
            answer = client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            return answer.headers["x-engine"], answer.json()

        until(lambda: all(one["cache"] == "right" for one in health().values()))
        first, alone = asked(PROMPT)
        until(lambda: health()[first]["cached_pages"] >= 5)
        # The other one had no request for longer; what is cached decides.
        again, second = asked(PROMPT)
        assert (again, second["meta_info"]["cached_tokens"]) == (first, 80)
        assert second["output_ids"] == alone["output_ids"]

        body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
        with client.stream("POST", "/generate", json=body) as stream:
            assert stream.headers["x-engine"] == first
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            killed = time.monotonic()
            for pid in engines[first].serving.pids.values():
                os.kill(pid, signal.SIGKILL)
            *_, last = lines
            assert time.monotonic() - killed < LAST_WORD_S
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_unavailable"

        other, answer = asked(PROMPT)
        assert other != first
        assert answer["output_ids"] == alone["output_ids"]
        until(lambda: health()[first]["why_not"] is not None)
        engines[first].process.kill()
        engines[first].process.wait(PATIENCE_S)
        number = 1 + [*engines].index(first)
        engine(number, stack, port=int(first.rpartition(":")[2]))
        until(lambda: health()[first]["why_not"] is None and health()[first]["cache"] == "right")
        assert health()[first]["cached_pages"] == 0, "a picture of an earlier life is used"
        assert asked(PROMPT)[0] == other


def test_operators_calls_are_of_both_engines_or_of_none(parent: PreloadedParent, tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = []
        for number in (1, 2):
            folder = tmp_path / str(number)
            folder.mkdir()
            servers.append(stack.enter_context(running(parent, folder, port=free_port())))
        first, second = servers
        client = stack.enter_context(router_before(first.url, second.url))

        def states() -> list[tuple[str | None, str]]:
            infos = [server.http.get("/server_info").json() for server in servers]
            return [(info["stats"]["paused"], info["weights"]) for info in infos]

        def told(path: str, body: Any = None) -> tuple[int, str]:
            answer = client.post(path, json=body)
            return answer.status_code, answer.text

        def tokens() -> tuple[str, list[int]]:
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "temperature": 0}}
            answer = client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            return answer.headers["x-engine"], answer.json()["output_ids"]

        until(lambda: all(one["why_not"] is None for one in client.get("/health").json()["engines"]))
        _, before = tokens()
        assert told("/pause_generation", {"mode": "in_place"}) == (200, "pause done by 2 engines")
        assert states() == [("in_place", "embedded")] * 2
        assert told("/continue_generation") == (200, "continue done by 2 engines")
        update = "/update_weights_from_disk"
        assert told(update, {"model_path": "embedded:2"}) == (200, "weight update done by 2 engines")
        assert states() == [(None, "embedded:2")] * 2
        assert tokens()[1] != before
        assert told(update, {"model_path": str(tmp_path / "none")})[0] == 400
        assert states() == [(None, "embedded:2")] * 2
        assert told(update, {"model_path": "embedded"}) == (200, "weight update done by 2 engines")
        assert tokens()[1] == before
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
