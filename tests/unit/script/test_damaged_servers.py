"""A server whose process a script has changed is replaced and named; nothing that the script started goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from damages import DESCRIPTORS, IN_SERVERS, OPTIONS, do, finds_a_whole_engine
from scripted_lockstep.tiers.server.pool import EngineServers
from scripted_lockstep.tiers.server.runner import EngineServer
from thinned import thinned

from engine import EngineConfig
from engine.server.launch.preload import PreloadedParent
from scripted import ScriptError, ServerDied

SHARED = EngineConfig()


def damages(t, damage):
    yield from finds_a_whole_engine(t)
    do(damage, t=t, SHARED=SHARED)


@pytest.fixture(scope="module")
def pool(parent: PreloadedParent) -> Iterator[EngineServers]:
    with contextlib.closing(EngineServers(parent)) as started:
        yield started


@pytest.mark.parametrize("damage", thinned(IN_SERVERS, one_in=3))
def test_a_changed_server_is_replaced_and_the_next_script_finds_nothing(damage: str, pool: EngineServers) -> None:
    with pool.lend(EngineConfig()) as server:
        passed = server.run(damages, damage, options=OPTIONS)
    assert re.search(f"servers that were replaced, .*{IN_SERVERS[damage]}", " ".join(passed.loose_ends))
    with pool.lend(EngineConfig()) as other:
        assert other is not server
        other.run(finds_a_whole_engine, options=OPTIONS)


def test_a_server_in_which_no_engine_can_be_made_any_more_is_replaced(pool: EngineServers) -> None:
    """At the end of each script an engine is restored from a checkpoint, so this one fails by what it has done."""
    with pytest.raises(ScriptError, match="KeyError: 'fcfs'"), pool.lend(EngineConfig()) as server:
        server.run(damages, "policy._POLICIES.clear()", options=OPTIONS)
    with pool.lend(EngineConfig()) as other:
        assert other is not server
        other.run(finds_a_whole_engine, options=OPTIONS)


@pytest.mark.usefixtures("settles_soon")
def test_a_server_whose_files_a_script_leaves_open_is_replaced(pool: EngineServers) -> None:
    damage = "DESCRIPTORS.extend(os.open(os.devnull, 0) for _ in range(100))"
    with (
        pytest.raises(ScriptError, match=r"it has grown: scheduler has .* open descriptors"),
        pool.lend(EngineConfig()) as server,
    ):
        server.run(damages, damage, options=OPTIONS)
    with pool.lend(EngineConfig()) as server:
        server.run(finds_a_whole_engine, options=OPTIONS)


def fails_with_open_files(t):
    yield
    DESCRIPTORS.extend(os.open(os.devnull, 0) for _ in range(3))
    assert not DESCRIPTORS, "of another reason"


def fails_in_the_middle(t):
    r = t.start_req(prompt_len=40, max_new_tokens=30)
    yield
    with Path(os.devnull).open():
        yield
        assert r.finished, "of another reason"


@pytest.mark.usefixtures("settles_soon")
def test_the_script_after_one_that_failed_with_open_files_is_not_blamed(pool: EngineServers) -> None:
    """The report of the first names them, and its server is replaced."""
    with pytest.raises(ScriptError, match="of another reason") as caught, pool.lend(EngineConfig()) as server:
        server.run(fails_with_open_files, options=OPTIONS)
    first, _, left = caught.value.report.error.partition("\nthe script has left files open: scheduler has ")
    assert first.startswith("of another reason")
    assert re.fullmatch(r"\d+ open descriptors, at first \d+; the server is replaced", left)
    with pool.lend(EngineConfig()) as other:
        assert other is not server
        other.run(finds_a_whole_engine, options=OPTIONS)


def test_a_server_whose_script_failed_in_the_middle_is_used_again(pool: EngineServers) -> None:
    with pytest.raises(ScriptError) as caught, pool.lend(EngineConfig()) as server:
        server.run(fails_in_the_middle, options=OPTIONS)
    assert "open descriptors" not in caught.value.report.error
    with pool.lend(EngineConfig()) as other:
        assert other is server
        other.run(finds_a_whole_engine, options=OPTIONS)


def is_innocent(t):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
    assert asyncio.run(asyncio.to_thread(int)) == 0
    yield from finds_a_whole_engine(t)


def test_threads_of_a_pool_are_no_change(pool: EngineServers) -> None:
    with pool.lend(EngineConfig()) as server:
        server.run(finds_a_whole_engine, options=OPTIONS)
        passed = server.run(is_innocent, options=OPTIONS)
    assert not [name for name in passed.loose_ends if "replaced" in name]


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
    with EngineServer.start(EngineConfig(), parent=parent) as server, pytest.raises(ServerDied):
        server.run(leaves_a_daemon_and_kills_its_server, str(pid_file), options=OPTIONS)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid := int(pid_file.read_text())) else [], timeout=30)
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
def test_a_process_that_a_script_leaves_ends_with_its_server(pool: EngineServers, tmp_path: Path, leads: bool) -> None:
    """However that ends."""
    pid_file = tmp_path / "pid"
    with pytest.raises(ServerDied, match="dies_and_leaves_a_process"), pool.lend(EngineConfig()) as server:
        server.run(dies_and_leaves_a_process, str(pid_file), leads, options=OPTIONS)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid := int(pid_file.read_text())) else [], timeout=30)
    assert not psutil.pid_exists(pid)
