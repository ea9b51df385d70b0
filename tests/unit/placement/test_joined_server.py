"""A whole server whose stages have joined by TCP: the tokens of one process, peers that prove nothing, and deaths."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import psutil
import pytest
from joined_server import END_BOUND_S, STAGES, JoinedServer
from scripted_lockstep.demo.race import flush_race
from scripted_lockstep.tiers.server.runner import EngineServer
from thinned import thinned

from engine.process.death import read_death_report
from engine.process.links.connection import LinkAddress
from engine.process.links.listener import MAX_UNPROVED
from engine.process.links.proof import Claim, LinkError, Role
from engine.process.links.secret import Secret, read_secret
from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent
from scripted.report.failure import ScriptError
from scripted.script.decorator import spec_of

PROMPTS: Final = ("hello", "a longer prompt " * 60, "x")
TOKENS: Final = 20
HEARTBEAT_S: Final = 1.0
# Longer than a test waits for anything: a death that is noticed in time is not noticed by silence.
NEVER_S: Final = 600.0


def started(parent: PreloadedParent, **settings: object) -> JoinedServer:
    joined = JoinedServer(parent, **settings)
    try:
        for _ in range(STAGES):
            joined.join()
        joined.wait_ready()
    except BaseException:
        joined.__exit__()
        raise
    return joined


@pytest.fixture(scope="module")
def joined(parent: PreloadedParent) -> Iterator[JoinedServer]:
    with started(parent) as server:
        yield server


def test_its_tokens_are_those_of_one_process(joined: JoinedServer, parent: PreloadedParent, tmp_path: Path) -> None:
    """Whether hidden states go by sockets or by a process group, which meets over TCP."""
    alone = parent.serve(ServerSettings(port=0), tmp_path, tmp_path / "log")
    url = alone.wait_ready(END_BOUND_S * 10).base_url
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(lambda prompt: joined.output_ids(prompt, TOKENS), PROMPTS))
    joined.http.base_url = url
    expected = [joined.output_ids(prompt, TOKENS) for prompt in PROMPTS]
    joined.http.base_url = joined.url
    with started(parent, hidden_transport="gloo") as grouped:
        assert [grouped.output_ids(prompt, TOKENS) for prompt in PROMPTS] == expected
    alone.kill()
    alone.wait(END_BOUND_S)
    alone.close()
    assert found == expected


def test_a_peer_without_the_secret_disturbs_nothing(joined: JoinedServer) -> None:
    """A05: dropped for any input, with one line a minute in the log, which never has the secret.

    131 connections of one byte ended the whole server: one that had given way to a later one was heard.
    """
    endpoint = joined.gathering.join
    for sent in (b"GET / HTTP/1.1\r\n\r\n" + bytes(200), b"\xff" * 200, b""):
        # What it sends too much resets the connection, at once or a moment later.
        with socket.create_connection((endpoint.host, endpoint.port)) as peer, contextlib.suppress(OSError):
            peer.sendall(sent)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(100):
                pass
    with contextlib.ExitStack() as many:
        for _ in range(2 * MAX_UNPROVED + 3):
            many.enter_context(socket.create_connection((endpoint.host, endpoint.port))).sendall(b"L")
    with pytest.raises(LinkError, match="did not accept the proof; give both sides the same secret file"):
        LinkAddress(endpoint, Secret.new(), Claim(Role.PLANS, 1), 1.0).connect()
    secret = Path(joined.gathering.secret_file)
    # A peer of the run that asks for what a stage has is dropped too.
    again = LinkAddress(endpoint, read_secret(secret), Claim(Role.PLANS, 1), 1.0).connect()
    assert again.recv(1) == b""
    again.close()
    huge = LinkAddress(endpoint, read_secret(secret), Claim(Role.CONTROL, -1), 1.0).connect()
    huge.sendall(b"\xff\xff\xff\xff more than any message")
    assert huge.recv(1) == b""
    huge.close()
    assert joined.output_ids("hello", 3)
    log = joined.server_log()
    for why in (
        "it does not speak this protocol",
        "dropped an unexpected connection",
        "a message must have at most 1048576 bytes, one of 4294967295 was announced",
    ):
        assert why in log
    assert log.count("which did not prove that it belongs to this run") == 1
    text = secret.read_text().strip()
    assert len(text) == 64
    assert secret.stat().st_mode & 0o077 == 0
    assert text not in log


def test_a_stage_too_many_is_told_so(joined: JoinedServer) -> None:
    agent = joined.join()
    assert agent.wait(END_BOUND_S) == 1
    why = "the server already has all of its 4 stages"
    assert f"refused this stage: {why}" in joined.log(len(joined.agents) - 1).read_text()
    joined.agents.pop()
    joined.await_log(why)


@pytest.mark.parametrize("mutant", [None, "flush-ignores-in-flight"])
def test_the_flush_race_is_the_same_on_joined_stages(parent: PreloadedParent, mutant: str | None) -> None:
    """Its script passes, and fails with its bug; its stages were children of agents."""
    test = spec_of(flush_race)
    with EngineServer.start(test.config, parent=parent, placement="join", mutant=mutant) as server:
        assert server.serving is not None
        parents = {psutil.Process(server.serving.pids[f"stage-{stage}"]).ppid() for stage in range(STAGES)}
        assert len(parents) == STAGES
        red = pytest.raises(ScriptError, match="holds the node from another tree") if mutant else nullcontext()
        with red:
            server.run(test.script, options=test.options)


@pytest.mark.parametrize("victim", thinned(["stage", "agent", "silent agent", "supervisor"], one_in=2))
def test_nothing_is_left_after_a_death(parent: PreloadedParent, victim: str) -> None:
    """A06: every stream ends with an error, silence noticed by its time alone; the log names machine and process."""
    heartbeat_s = HEARTBEAT_S if victim == "silent agent" else NEVER_S
    with started(parent, heartbeat_timeout_s=heartbeat_s) as joined, ThreadPoolExecutor(1) as pool:
        stage, agent, processes = joined.pids["stage-2"], joined.agent_of(2), joined.processes()
        body = {"text": "a", "stream": True, "sampling_params": {"temperature": 0, "max_new_tokens": 8000}}
        with joined.http.stream("POST", "/generate", json=body) as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            next(lines)
            rest = pool.submit(list, lines)
            match victim:
                case "stage":
                    os.kill(stage, signal.SIGKILL)
                case "agent":
                    os.kill(agent.pid, signal.SIGKILL)
                case "silent agent":
                    os.kill(agent.pid, signal.SIGSTOP)
                case _:
                    joined.server.kill()
            *_, last = rest.result(END_BOUND_S)
        message = json.loads(last)["error"]["message"]
        if victim == "silent agent":
            # The rest of the engine is over without it. It finds the server gone when it goes on.
            assert joined.server.wait(END_BOUND_S) == 1
            os.kill(agent.pid, signal.SIGCONT)
        assert [one.wait(END_BOUND_S) for one in joined.agents] == [
            -signal.SIGKILL if victim == "agent" and one is agent else 1 for one in joined.agents
        ]
        assert joined.server.wait(END_BOUND_S) == (-signal.SIGKILL if victim == "supervisor" else 1)
        gone, left = psutil.wait_procs(processes, END_BOUND_S)
        assert left == [], gone
        if victim == "supervisor":
            return
        where = f"{platform.node()} (127.0.0.1:"
        cause = {
            "stage": "it was killed by signal 9 (SIGKILL)",
            "agent": "its agent was ended, or its machine is gone",
            "silent agent": f"it was silent for {heartbeat_s} s: its machine is gone or the network path is cut",
        }[victim]
        # A client is told which process on which machine, and of what; addresses and pids are for the operator alone.
        assert f"the stage-2 process died: on {platform.node()}: " in message
        assert message.endswith(cause)
        assert "127.0.0.1" not in message
        report = read_death_report(joined.folder)
        assert report is not None
        assert (report.process, report.pid) == ("stage-2", stage)
        assert (report.node, report.cause.endswith(cause)) == (platform.node(), True)
        assert report.place.startswith(where)
        assert report.place.endswith(f"agent {agent.pid}, pid {stage})")
        assert f"on {report.place}: {report.cause}" in joined.server_log()
