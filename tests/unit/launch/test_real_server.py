"""Real servers of the embedded model, forked from a preloaded parent: streams, bad input, ends of all kinds.

The whole file starts the parent once; a server takes a fraction of a second after that.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from thinned import thinned

from engine.core.errors import StartupError
from engine.process.control import Serving
from engine.process.death import read_death_report
from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent, ServerProcess
from tests.unit.frontend.real_servers import info_of

# The bar is 2 s from a death to the exit of everything; starting may be slow on a busy machine.
END_BOUND_S = 30.0
START_BOUND_S = 60.0
CLIENT_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 1.0


class Server:
    """A running server and its client."""

    def __init__(self, process: ServerProcess, folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.serving: Serving | None = None

    def wait_ready(self) -> Server:
        self.serving = self.process.wait_ready(START_BOUND_S)
        self.http = httpx.Client(base_url=self.serving.base_url, timeout=CLIENT_TIMEOUT_S)
        return self

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def generate(self, **body: Any) -> dict[str, Any]:
        return self.http.post("/generate", json=body).raise_for_status().json()

    def assert_all_gone(self) -> None:
        """No process and no port is left."""
        deadline = time.monotonic() + END_BOUND_S
        while left := [name for name, pid in self.serving.pids.items() if _is_running(pid)]:
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.005)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{self.serving.base_url}/health")


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def launch(parent: PreloadedParent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(**settings: Any) -> Server:
        folder = tmp_path_factory.mktemp("s")
        process = parent.serve(ServerSettings(**{"port": 0, **settings}), folder, folder / "log")
        servers.append(Server(process, folder))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait(END_BOUND_S)
        server.process.close()
        if server.serving is not None:
            server.http.close()


class OpenStream:
    """A stream that has begun: a long request whose first event is there."""

    def __init__(self, server: Server) -> None:
        body = {"text": "hello", "stream": True, "sampling_params": {"max_new_tokens": 6000}}
        self._stream = server.http.stream("POST", "/generate", json=body)
        self._response = self._stream.__enter__()
        assert self._response.status_code == 200
        self._lines = (line for line in self._response.iter_lines() if line)
        self.first = json.loads(next(self._lines).removeprefix("data: "))

    def last_event(self) -> str:
        """Read to the end; the last line, or the error that cut the connection."""
        last = ""
        try:
            for line in self._lines:
                last = line
        except httpx.RemoteProtocolError as exc:
            return f"cut: {exc}"
        finally:
            self._stream.__exit__(None, None, None)
        return last

    def drop(self) -> None:
        self._stream.__exit__(None, None, None)


def test_parent_has_one_thread_after_its_imports(parent: PreloadedParent, launch) -> None:
    """A lock that another thread holds at the fork would stay locked forever in the server."""
    launch().wait_ready()
    assert psutil.Process(parent.pid).num_threads() == 1


@pytest.mark.parametrize("pp_size", [1, 4])
def test_stream_and_whole_answer_say_the_same_and_the_end_leaves_nothing(launch, pp_size: int) -> None:
    """C01, A07: one server a number of stages, from the first token to SIGINT."""
    server = launch(pp_size=pp_size, pp_async_depth=pp_size // 2).wait_ready()
    body = {"text": "hello \u20ac", "sampling_params": {"max_new_tokens": 24, "temperature": 0}}
    whole = server.generate(**body)
    assert whole["meta_info"] | {"id": ""} == {
        "id": "",
        "finish_reason": "length",
        "prompt_tokens": 9,
        "completion_tokens": 24,
        "cached_tokens": 0,
        "cached_tokens_details": {"device": 0, "host": 0},
    }
    with server.http.stream("POST", "/generate", json=body | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    assert "".join(event["text"] for event in events) == whole["text"]
    assert [token_id for event in events for token_id in event["output_ids"]] == whole["output_ids"]

    os.kill(server.process.pid, signal.SIGINT)
    os.kill(server.process.pid, signal.SIGINT)
    assert server.process.wait(END_BOUND_S) == 0
    server.assert_all_gone()
    assert [path.name for path in server.folder.iterdir()] == ["log"]
    assert server.log == ""


def test_administration_and_bad_input_on_a_live_server(launch) -> None:
    """Operators see and do what the routes promise (C06)."""
    server = launch().wait_ready()
    assert server.http.get("/health").text == "ok"
    assert server.http.get("/model_info").json()["vocab_size"] == 264
    info = info_of(server.http)
    assert info["processes"] == server.serving.pids
    assert info["stats"]["waiting"] == 0
    assert server.http.post("/flush_cache").status_code == 200
    stream = OpenStream(server)
    refused = server.http.post("/flush_cache")
    assert refused.status_code == 400
    assert "running" in refused.text
    assert server.http.post("/abort_request", json={"rid": stream.first["meta_info"]["id"]}).status_code == 200
    assert stream.last_event() == "data: [DONE]"
    too_long = "context_length_exceeded"
    for body, code in (({"text": ""}, 400), ({"text": "x" * 9000}, too_long), ({"txt": "x"}, 400), ({"text": 1}, 400)):
        response = server.http.post("/generate", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)
    greedy = {"temperature": 0, "max_new_tokens": 200}
    stopped = server.generate(text="hello", sampling_params=greedy)
    stop = stopped["text"][5:8]
    again = server.generate(text="hello", sampling_params=greedy | {"stop": stop})
    assert again["text"] == stopped["text"][: stopped["text"].index(stop)]
    assert again["meta_info"]["finish_reason"] == "stop"


def test_client_that_goes_away_stops_costing_steps(launch) -> None:
    """A client that leaves costs no more steps, and a live rid is refused (C05)."""
    server = launch().wait_ready()
    OpenStream(server).drop()
    deadline = time.monotonic() + END_BOUND_S
    while (info := info_of(server.http))["open_requests"]:
        assert time.monotonic() < deadline, info
    assert (info["stats"]["running"], info["stats"]["requests_aborted"]) == (0, 1)


@pytest.mark.parametrize(
    ("pp_size", "victim"),
    thinned(
        [(1, "scheduler"), (1, "frontend"), (4, "stage-3"), (4, "scheduler"), (4, "frontend"), (4, "stage-0")], one_in=2
    ),
)
def test_killed_process_ends_everything_with_its_name(launch, pp_size: int, victim: str) -> None:
    """A06, G23, G28: no stream ends normally or in silence, and the report names the one that was killed."""
    server = launch(pp_size=pp_size).wait_ready()
    stream = OpenStream(server)
    os.kill(server.serving.pids[victim], signal.SIGKILL)
    assert server.process.wait(END_BOUND_S) == 1
    last = stream.last_event()
    if victim == "frontend":
        assert last.startswith("cut: ")
    else:
        assert f"the {victim} process died" in json.loads(last.removeprefix("data: "))["error"]["message"]
    server.assert_all_gone()
    report = read_death_report(server.folder)
    assert (report.process, report.signal) == (victim, signal.SIGKILL)
    assert f"the {victim} process" in server.log


def test_killed_supervisor_takes_everything_along(launch) -> None:
    """A dead or late stage ends every stream with an error (A06)."""
    server = launch(pp_size=4).wait_ready()
    stream = OpenStream(server)
    server.process.kill()
    assert server.process.wait(END_BOUND_S) == -signal.SIGKILL
    assert "the supervisor process died" in stream.last_event()
    server.assert_all_gone()
    assert read_death_report(server.folder).process == "supervisor"
    assert "error: the supervisor process died and the server with it" in server.log
    assert sorted(path.name for path in server.folder.iterdir()) == ["death.json", "log"]


@pytest.mark.parametrize(("pp_size", "victim"), thinned([(4, "stage-2"), (4, "scheduler"), (1, "frontend")], one_in=2))
def test_a_stopped_process_is_named_and_every_stream_ends(launch, pp_size: int, victim: str) -> None:
    """A05, A06: it takes step_timeout_s, and then no longer than a death."""
    server = launch(pp_size=pp_size, step_timeout_s=STEP_TIMEOUT_S).wait_ready()
    stream = OpenStream(server)
    os.kill(server.serving.pids[victim], signal.SIGSTOP)
    assert server.process.wait(END_BOUND_S) == 1
    last = stream.last_event()
    if victim == "frontend":
        assert last.startswith("cut: ")
    else:
        message = json.loads(last.removeprefix("data: "))["error"]["message"]
        assert f"the {victim} process died" in message
    server.assert_all_gone()
    report = read_death_report(server.folder)
    assert (report.process, "(step_timeout_s)" in report.cause) == (victim, True)
    assert f"the {victim} process" in server.log


def test_a_process_that_goes_on_in_time_is_no_death(launch) -> None:
    """A06: and an idle server under a step limit stays as it is."""
    server = launch(pp_size=2, step_timeout_s=STEP_TIMEOUT_S).wait_ready()
    for name in ("stage-1", "scheduler"):
        os.kill(server.serving.pids[name], signal.SIGSTOP)
        # No longer than it takes: a busy machine makes a second of a quarter.
        while psutil.Process(server.serving.pids[name]).status() != psutil.STATUS_STOPPED:
            time.sleep(0.005)
        os.kill(server.serving.pids[name], signal.SIGCONT)
    time.sleep(STEP_TIMEOUT_S * 1.5)
    assert server.generate(text="x", sampling_params={"max_new_tokens": 4})["output_ids"]
    assert server.log == ""


def test_a_folder_for_flight_records_that_cannot_be_written_is_refused(launch) -> None:
    """An end signals before it waits, within a bound; what failed never says that it is ready (A07)."""
    server = launch(flight_dir="/proc/x")
    with pytest.raises(StartupError, match="flight_dir must be writable paths, got /proc/x: No such file"):
        server.process.wait_ready(START_BOUND_S)


def test_stopped_stage_does_not_hold_up_the_end(launch) -> None:
    """An end signals before it waits, within a bound; what failed never says that it is ready (A07)."""
    server = launch(pp_size=4).wait_ready()
    os.kill(server.serving.pids["stage-1"], signal.SIGSTOP)
    server.process.terminate()
    assert server.process.wait(END_BOUND_S) == 0
    server.assert_all_gone()


def test_exception_in_a_step_is_the_cause(launch) -> None:
    """A06: the traceback goes to the report and the log; clients, and the probe, which needs no key, get a sentence."""
    server = launch(gate="broken_gates:BreakingGate").wait_ready()
    assert server.generate(text="x", sampling_params={"max_new_tokens": 1})["output_ids"]
    response = server.http.post("/generate", json={"text": "x", "priority": 13})
    assert response.status_code == 503
    told = "the server is going down because the scheduler process died; the server's log says why"
    assert response.json()["error"]["message"] == told
    with contextlib.suppress(httpx.TransportError):  # The server may be gone already.
        assert server.http.get("/health").json()["error"]["message"] == told
    assert server.process.wait(END_BOUND_S) == 1
    report = read_death_report(server.folder)
    assert (report.process, report.exit_code) == ("scheduler", 1)
    assert "broken_gates.py" in report.cause
    assert "ZeroDivisionError: thirteen" in server.log


@pytest.mark.parametrize(
    ("settings", "process", "cause"),
    [
        ({"gate": "broken_gates:stillborn_gate"}, "scheduler", "gate_options_are"),
        ({"gate": "broken_gates:NoSuchGate"}, "scheduler", "gate must be an importable"),
        ({"model": "/no/such/folder"}, "supervisor", "/no/such/folder"),
        ({"pp_size": 5}, "supervisor", "pp_size must be <= 4, the layers of model 'embedded', got 5"),
        ({"start_timeout_s": 0.001}, "supervisor", "these were not: scheduler, frontend"),
    ],
)
def test_failed_start_says_why_and_was_never_ready(launch, settings: dict[str, Any], process: str, cause: str) -> None:
    """An end signals before it waits, within a bound; what failed never says that it is ready (A07)."""
    server = launch(**settings)
    with pytest.raises(StartupError, match="before it was ready") as caught:
        server.process.wait_ready(START_BOUND_S)
    assert cause in str(caught.value)
    assert server.process.wait(END_BOUND_S) == 1
    assert read_death_report(server.folder).process == process
    assert cause in server.log
    # What the engine has words for is no death.
    assert ("died and" in server.log) == (cause == "gate_options_are")


def test_port_in_use(launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = launch(port=port)
        with pytest.raises(StartupError, match=f"free port, got .*:{port}.*port 0"):
            server.process.wait_ready(START_BOUND_S)


def test_parent_takes_its_servers_along(tmp_path: Path) -> None:
    """A preloaded parent whose client is gone leaves no server, and one that is gone is named."""
    parent = PreloadedParent.start()
    process = parent.serve(ServerSettings(port=0), tmp_path, tmp_path / "log")
    server = Server(process, tmp_path).wait_ready()
    parent.close()
    assert process.wait(END_BOUND_S) == 0
    server.assert_all_gone()
    server.http.close()
    process.close()
    with pytest.raises(StartupError, match="must live to fork a server"):
        parent.serve(ServerSettings(port=0), tmp_path, tmp_path / "log")


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder whose path leaves room for sockets: pytest's own is too long for them on an xdist worker."""
    with tempfile.TemporaryDirectory(prefix="tmp-") as path:
        yield Path(path)


def test_command_line_from_start_to_ctrl_c(short_folder: Path) -> None:
    """The command itself: what it serves when ready, nothing on stderr, nothing left in the temporary folder."""
    command = [sys.executable, "-m", "engine", "serve", "--port", "0"]
    environment = os.environ | {"TMPDIR": str(short_folder)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("Serving embedded with 1 stage on http://127.0.0.1:")
            said = dict(process.stdout.readline().split(None, 1) for _ in ("model", "dtype", "device"))
            assert (said["model"], said["dtype"]) == ("embedded\n", "float32\n")
            assert said["device"].startswith(("cpu", "cuda"))
            # A terminal sends Ctrl-C to every process of the group.
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=END_BOUND_S)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")
    assert list(short_folder.glob("engine-*")) == []


@pytest.mark.parametrize("most", [16, 64])
def test_too_few_files_are_refused_before_anything_is_started(most: int) -> None:
    """An end signals before it waits, within a bound; what failed never says that it is ready (A07)."""
    command = ["sh", "-c", f"ulimit -n {most}; exec {sys.executable} -m engine serve --port 0"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_BOUND_S)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: a server of 1 stages must be able to open 66 files in each process")
    assert f"the limit is {most}; raise it, with `ulimit -n 66`" in ended.stderr


def test_stages_over_torch_distributed_say_the_same(launch) -> None:
    """Hidden states by gloo, as between machines, change nothing; a death ends the stages that wait in it."""
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    by_socket = launch(pp_size=2, hidden_transport="socket").wait_ready().generate(**body)
    server = launch(pp_size=2, hidden_transport="gloo").wait_ready()
    assert server.generate(**body)["output_ids"] == by_socket["output_ids"]
    os.kill(server.serving.pids["scheduler"], signal.SIGKILL)
    assert server.process.wait(END_BOUND_S) != 0
    server.assert_all_gone()
