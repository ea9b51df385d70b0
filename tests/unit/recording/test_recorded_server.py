"""Recordings of real servers under load: replayed without model and sockets, up to the assertion that they died of."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from thinned import thinned

from engine.core.messages import Generate
from engine.core.recording import read_recording
from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent, ServerProcess
from engine.server.scheduler_process.main import flight_path
from scripted.core.refusals import ScriptDefinitionError
from scripted.reruns import rerun, stands_in

START_BOUND_S = 60.0
END_BOUND_S = 30.0
CLIENT_TIMEOUT_S = 30.0
MOST_FLUSHES = 2000


@pytest.fixture
def launch(parent: PreloadedParent, tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    processes: list[ServerProcess] = []

    def start(**settings: Any) -> ServerProcess:
        given = {"port": 0, "chunked_prefill_size": 64, "record": str(tmp_path / "run.rec")} | settings
        processes.append(parent.serve(ServerSettings(**given), tmp_path, tmp_path / "log"))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait(END_BOUND_S)
        process.close()


def ask(url: str, number: int) -> int:
    """One request of a mixed load; 0 when the server is gone."""
    body = {
        "input_ids": [65 + number % 3] * 40 + [32 + (number * k) % 90 for k in range(1, 30 * (number % 4) + 2)],
        "sampling_params": {"max_new_tokens": 2 + number % 5, "temperature": number % 2},
    }
    return post(f"{url}/generate", body)


def post(url: str, body: dict[str, Any]) -> int:
    try:
        return httpx.post(url, json=body, timeout=CLIENT_TIMEOUT_S).status_code
    except httpx.HTTPError:
        return 0


def test_a_running_server_is_asked_which_requests_are_stuck(
    launch: Callable[..., ServerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B12: by its URL, again and again, while it serves; one without a key, or without steps, says what is missing."""
    flights = tmp_path / "flights"
    url = launch(record="", flight_dir=str(flights), api_key="secret").wait_ready(START_BOUND_S).base_url
    with pytest.raises(ScriptDefinitionError, match="wants a key; set ENGINE_API_KEY"):
        stands_in(url)
    monkeypatch.setenv("ENGINE_API_KEY", "secret")
    for tokens in (3, 5):
        body = {"text": "x", "sampling_params": {"max_new_tokens": tokens}}
        httpx.post(f"{url}/generate", json=body, headers={"authorization": "Bearer secret"}).raise_for_status()
        path, stands, _ = stands_in(f"{url}/")
        assert path.parent == flights
        assert not stands
        asked = [event for step in read_recording(path).steps for event in step.events if isinstance(event, Generate)]
        assert asked[-1].sampling.max_new_tokens == tokens
    forgetful = launch(flight_dir="").wait_ready(START_BOUND_S).base_url
    with pytest.raises(ScriptDefinitionError, match="keeps no steps; start it with --flight-dir FOLDER"):
        stands_in(forgetful)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}", "GET /server_info gave 404"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n" + b"[" * 200_000, "no server of this engine"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (1 << 21), "no server of this engine"),
        (b"\0" * 99, "does not answer"),
        (
            b'HTTP/1.1 200 OK\r\n\r\n{"settings":{"flight_dir":"/"},"processes":{"scheduler":1,"frontend":1}}',
            "is not on this machine",
        ),
    ],
    ids=["another server", "brackets", "endless", "no HTTP", "the pids of another machine"],
)
def test_a_stranger_is_asked_and_sent_no_signal(answer: bytes, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: signals.append(pid))
    with answering(answer) as url, pytest.raises(ScriptDefinitionError, match=why):
        stands_in(url)
    assert not signals


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Listen in this process, and give one client this answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def reply() -> None:
            with listener.accept()[0] as client, contextlib.suppress(OSError):
                client.recv(65536)
                client.sendall(answer)

        pool.submit(reply)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("dies", ["before the signal", "of the signal", "never lived", "no number of a process"])
def test_a_scheduler_that_dies_while_it_is_asked_is_a_sentence(dies: str, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as scheduler:
        pid = {"never lived": 0, "no number of a process": 1 << 80}.get(dies, scheduler.pid)
        if dies != "of the signal":
            scheduler.kill()
            scheduler.wait()
        else:
            # Reaped as by a supervisor: a process that has ended and is not reaped has a number.
            Thread(target=scheduler.wait, daemon=True).start()
        info = {"settings": {"flight_dir": str(tmp_path)}, "processes": {"scheduler": pid, "frontend": os.getpid()}}
        with (
            answering(b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(info).encode()) as url,
            pytest.raises(ScriptDefinitionError, match="has no scheduler that can be asked"),
        ):
            stands_in(url)


def open_to_others(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.stat().st_mode & 0o077]


@pytest.mark.parametrize("redacted", thinned([True, False], one_in=2))
def test_a_loaded_servers_recording_replays(
    launch: Callable[..., ServerProcess], tmp_path: Path, redacted: bool
) -> None:
    """B12, B17: the same plans in every step, by the check sums of each and by the digest of all.

    A weight update is one of the steps, and what comes after it replays as well. C08: every file that the server
    writes is its user's alone, also where a file that all could read was there.
    """
    (tmp_path / "run.rec").touch(0o644)
    flights, traces = str(tmp_path / "new" / "flights"), str(tmp_path / "new" / "traces")
    process = launch(pp_size=2, record_redacted=redacted, flight_dir=flights, profile_dir=traces)
    serving = process.wait_ready(START_BOUND_S)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda number: ask(serving.base_url, number), range(24))) == {200}
    assert post(f"{serving.base_url}/flush_cache", {}) == 200
    update = {"model_path": "embedded:7", "timeout": END_BOUND_S}
    assert post(f"{serving.base_url}/update_weights_from_disk", update) == 200
    assert ask(serving.base_url, 2) == 200
    assert post(f"{serving.base_url}/start_profile", {}) == 200
    assert ask(serving.base_url, 3) == 200
    assert post(f"{serving.base_url}/stop_profile", {}) == 200
    os.kill(serving.pids["scheduler"], signal.SIGUSR2)
    flight = flight_path(flights, serving.pids["scheduler"])
    deadline = time.monotonic() + END_BOUND_S
    while not flight.is_file():
        assert time.monotonic() < deadline, "no flight record was left"
        assert ask(serving.base_url, 1) == 200
    process.drain()
    assert process.wait(END_BOUND_S) == 0
    recording = read_recording(tmp_path / "run.rec")
    assert recording.end is not None
    assert len(recording.steps) > 24
    assert rerun(str(tmp_path / "run.rec")).passed
    assert rerun(str(flight)).passed
    assert len(list((tmp_path / "new" / "traces").rglob("*.json"))) == 2
    assert open_to_others(tmp_path) == []


def test_a_crash_under_load_replays_to_the_same_assertion(launch: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """B15: the flush race of a live server, again on a laptop without the model."""
    process = launch(pp_size=2, gate="racing_gates:racing_gate", flight_dir=str(tmp_path))
    serving = process.wait_ready(START_BOUND_S)
    with ThreadPoolExecutor(3) as pool:
        for number in range(MOST_FLUSHES):
            asked = [pool.submit(ask, serving.base_url, 3 + 4 * number)]
            asked += [pool.submit(post, f"{serving.base_url}/flush_cache", {}) for _ in range(2)]
            if not all(one.result() for one in asked):
                break
    assert process.wait(END_BOUND_S) != 0
    assert (tmp_path / "death.json").is_file()
    assert open_to_others(tmp_path) == []
    recording = read_recording(tmp_path / "run.rec")
    assert recording.end is not None
    assert "This request holds the node from another tree" in str(recording.end.error)
    again = rerun(str(tmp_path / "run.rec"), mutant="flush-ignores-in-flight", last_steps=20)
    assert again.passed
    assert again.error == recording.end.error
    assert rerun(str(flight_path(str(tmp_path), serving.pids["scheduler"])), mutant="flush-ignores-in-flight").passed
    assert not rerun(str(tmp_path / "run.rec")).passed
