"""In a server too a script that leaves its process changed fails by name, and leaves nothing that runs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from damages import IN_SERVERS, OPTIONS, do, finds_a_whole_engine
from scripted_lockstep.tiers.server.pool import ServerPool

from engine import EngineConfig
from engine.server.launch.preload import PreloadedParent
from scripted import ScriptedServer, ScriptError, ServerDied

SHARED = EngineConfig()


def damages(t, damage):
    yield from finds_a_whole_engine(t)
    do(damage, t=t, SHARED=SHARED)


@pytest.fixture(scope="module")
def pool(parent: PreloadedParent) -> Iterator[ServerPool]:
    with contextlib.closing(ServerPool(parent)) as started:
        yield started


@pytest.mark.parametrize("damage", IN_SERVERS)
def test_in_a_server_too_the_guilty_script_fails_and_the_next_one_finds_nothing(damage: str, pool: ServerPool) -> None:
    """The next one may get another server."""
    with pytest.raises(ScriptError, match=IN_SERVERS[damage]), pool.lend(EngineConfig(), None) as server:
        server.run(damages, damage, options=OPTIONS)
    with pool.lend(EngineConfig(), None) as server:
        server.run(finds_a_whole_engine, options=OPTIONS)


def leaves_a_daemon_and_kills_its_server(t, pid_file):
    yield
    supervisor = os.getppid()
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.setsid()
            if not (os.fork()):
                os.setsid()
                Path(f"{pid_file}.part").write_text(str(os.getpid()))
                Path(f"{pid_file}.part").rename(pid_file)
                signal.pause()
            os._exit(0)
        os._exit(0)
    while not Path(pid_file).exists():
        time.sleep(0.01)
    os.kill(supervisor, signal.SIGKILL)
    while psutil.pid_exists(supervisor):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_daemon_three_levels_deep_ends_with_a_server_that_was_started_by_hand(
    parent: PreloadedParent, tmp_path: Path
) -> None:
    """The script kills the supervisor first, so that nobody is left whose child it is."""
    pid_file = tmp_path / "pid"
    with ScriptedServer.start(EngineConfig(), parent=parent) as server, pytest.raises(ServerDied):
        server.run(leaves_a_daemon_and_kills_its_server, str(pid_file), options=OPTIONS)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid := int(pid_file.read_text())) else [], timeout=5)
    assert not psutil.pid_exists(pid)


def dies_and_leaves_a_process(t, pid_file, leads):
    yield
    if not (child := os.fork()):
        if leads:
            os.setsid()
        signal.pause()
    Path(pid_file).write_text(str(child))
    os._exit(1)


@pytest.mark.parametrize("leads", [False, True], ids=["of the server's session", "of its own session"])
def test_a_process_that_a_script_leaves_ends_with_its_server(pool: ServerPool, tmp_path: Path, leads: bool) -> None:
    """However that ends."""
    pid_file = tmp_path / "pid"
    with (
        pytest.raises(ServerDied, match="dies_and_leaves_a_process"),
        pool.lend(EngineConfig(), None) as server,
    ):
        server.run(dies_and_leaves_a_process, str(pid_file), leads, options=OPTIONS)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid := int(pid_file.read_text())) else [], timeout=5)
    assert not psutil.pid_exists(pid)
