"""Work in processes of its own: what comes back, what a worker's end costs, and that no process is left."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from engine.frontend.http import forked_work
from engine.frontend.http.forked_work import MEMORY_BYTES, WORKERS_AT_ONCE, ForkedWork, WorkLostError, WorkTooLargeError

PATIENCE_S = 30.0
LARGE = 5_000_000
SHORT_S = 0.3
STUCK_S = 0.6
# For a parent that must go on within it, also on a busy machine.
GOES_ON_S = 3.0
QUESTION = struct.pack("=Q", 5) + b"hello"


def work(data: bytes) -> bytes:
    """The work of a test's worker, by its question."""
    match data:
        case b"pid":
            return str(os.getpid()).encode()
        case b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"raise":
            raise SystemExit
        case b"wait":
            time.sleep(PATIENCE_S * 10)
        case b"grow":
            return str(len(bytearray(MEMORY_BYTES * 2))).encode()
        case b"stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case b"gc":
            return str(gc.isenabled()).encode()
    return data[::-1]


@contextmanager
def working(stuck_s: float = PATIENCE_S) -> Iterator[ForkedWork]:
    forked = ForkedWork.start("test", work, stuck_s=stuck_s)
    try:
        yield forked
    finally:
        forked.close()


def run(scene: Callable[[ForkedWork], object], *, stuck_s: float = PATIENCE_S) -> None:
    async def bounded(forked: ForkedWork) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scene(forked)

    with working(stuck_s) as forked:
        asyncio.run(bounded(forked))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def stop(forked: ForkedWork) -> None:
    """Return as soon as the parent stands still."""
    os.kill(forked.parent_pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(forked.parent_pid).status() == psutil.STATUS_STOPPED)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_each_piece_has_a_process_of_its_own_and_large_ones_pass() -> None:
    async def scene(forked: ForkedWork) -> None:
        pids = {int(await forked.run(b"pid")) for _ in range(3)}
        assert len(pids | {os.getpid()}) == 4
        data = bytes(range(250)) * (LARGE // 250)
        assert await forked.run(data) == data[::-1]
        assert await forked.run(b"") == b""
        assert await forked.run(b"gc") == b"False"

    run(scene)


@pytest.mark.parametrize("end", [b"die", b"raise"])
def test_a_worker_that_ends_loses_its_own_piece_only(end: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    async def scene(forked: ForkedWork) -> None:
        beside = asyncio.create_task(forked.run(b"abc"))
        with pytest.raises(WorkLostError, match="without a result"):
            await forked.run(end)
        assert await beside == b"cba"
        assert await forked.run(b"abc") == b"cba"

    run(scene)
    assert ("SystemExit" in capfd.readouterr().err) == (end == b"raise")


@pytest.mark.parametrize("sent", [b"", QUESTION[:5], QUESTION[:-1]], ids=["nothing", "half a length", "a part"])
def test_a_question_that_its_owner_cut_is_not_worked_on(sent: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """An owner that was silent for too long, or whose client left, closes the socket of a worker that has begun."""
    with working() as forked, socket.socket(fileno=os.dup(forked.fileno())) as orders:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(orders, [b"+"], [theirs.fileno()])
            ours.settimeout(PATIENCE_S)
            assert len(ours.recv(8)) == 8  # the pid of the worker
            ours.sendall(sent)
            ours.shutdown(socket.SHUT_WR)
            assert ours.recv(1) == b""
    assert capfd.readouterr().err == ""


def test_only_so_many_work_at_once() -> None:
    async def scene(forked: ForkedWork) -> None:
        stuck = [asyncio.create_task(forked.run(b"wait")) for _ in range(WORKERS_AT_ONCE)]
        third = asyncio.create_task(forked.run(b"abc"))
        # Its turn comes when one of them is given up, not before.
        done, _ = await asyncio.wait([third], timeout=0.2)
        assert not done
        stuck[0].cancel()
        assert await third == b"cba"
        stuck[1].cancel()
        await asyncio.gather(*stuck, return_exceptions=True)

    run(scene)


def test_the_parents_end_is_noticed_and_every_piece_is_lost() -> None:
    async def scene(forked: ForkedWork) -> None:
        while not (parents := [child for child in psutil.Process().children() if child.name() == "engine-test"]):
            await asyncio.sleep(0.01)
        assert len(parents) == 1
        piece = asyncio.create_task(forked.run(b"wait"))
        while not parents[0].children():
            await asyncio.sleep(0.01)
        parents[0].kill()
        with pytest.raises(WorkLostError):
            await piece
        assert select.select([forked], [], [], PATIENCE_S)[0]
        with pytest.raises(WorkLostError):
            await forked.run(b"abc")

    run(scene)


def test_both_die_with_the_process_that_they_work_for() -> None:
    """Even by kill -9, in the middle of a piece of work: nothing is orphaned."""
    owner = os.fork()
    if owner == 0:
        try:
            with working() as forked:
                asyncio.run(forked.run(b"wait"))
        finally:
            os._exit(0)
    try:
        wait_until(lambda: len(descendants(owner)) == 2)
        left = descendants(owner)
    finally:
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
    _, alive = psutil.wait_procs(left, PATIENCE_S)
    assert alive == []


async def worker_of(forked: ForkedWork) -> psutil.Process:
    """The one that works."""
    parent = psutil.Process(forked.parent_pid)
    while not (workers := parent.children()):
        await asyncio.sleep(0.01)
    return workers[0]


@pytest.mark.parametrize("how", [b"wait", b"stop"])
@pytest.mark.parametrize("limited", [True, False])
def test_a_worker_that_hangs_ends_with_its_time_or_with_who_waits(
    monkeypatch: pytest.MonkeyPatch, how: bytes, limited: bool
) -> None:
    """A05: one that hung at its memory's limit kept 983 MB forever; a grammar's outlived its client."""
    if limited:
        monkeypatch.setattr(forked_work, "WORK_LIMIT_S", SHORT_S)

    async def scene(forked: ForkedWork) -> None:
        piece = asyncio.create_task(forked.run(how))
        worker = await worker_of(forked)
        if limited:
            with pytest.raises(WorkTooLargeError, match=r"did not finish within 0\.3 s"):
                await piece
        else:
            await asyncio.sleep(SHORT_S)
            piece.cancel()
        await asyncio.to_thread(psutil.wait_procs, [worker], PATIENCE_S / 2)
        assert not worker.is_running()
        monkeypatch.setattr(forked_work, "WORK_LIMIT_S", PATIENCE_S)
        assert await forked.run(b"abc") == b"cba"

    run(scene)


def test_a_worker_that_takes_too_much_memory_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    async def scene(forked: ForkedWork) -> None:
        with pytest.raises(WorkTooLargeError, match="without a result"):
            await forked.run(b"grow")
        assert await forked.run(b"abc") == b"cba"

    run(scene)
    assert capfd.readouterr().err == "", "a client could fill the log"


def test_a_parent_that_is_stopped_is_noticed_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A06: long bodies waited 120 s for a 503 without a cause, each again."""
    monkeypatch.setattr(forked_work, "FORK_LIMIT_S", SHORT_S)

    async def scene(forked: ForkedWork) -> None:
        os.kill(forked.parent_pid, signal.SIGSTOP)
        with pytest.raises(WorkLostError, match=r"engine-test did not fork a process within 0\.3 s"):
            await forked.run(b"abc")
        # Its time is over when the parent is ended.
        with pytest.raises(
            WorkLostError, match=r"engine-test (did|could) not fork a process|the process ended before it began"
        ):
            await forked.run(b"abc")
        assert select.select([forked], [], [], PATIENCE_S)[0]
        assert forked.why_lost == "it did not fork a process for 0.6 s (step_timeout_s), and was ended"

    run(scene, stuck_s=STUCK_S)


def test_a_check_waits_for_its_fork_longer_than_for_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that got no CPU for a second answered short bodies with 503."""
    monkeypatch.setattr(forked_work, "QUICK_CHECK_S", SHORT_S / 3)

    async def scene(forked: ForkedWork) -> None:
        os.kill(forked.parent_pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(SHORT_S, os.kill, forked.parent_pid, signal.SIGCONT)
        assert await forked.run(b"abc", is_check=True) == b"cba"

    run(scene)


def test_an_idle_parent_that_is_stopped_is_ended() -> None:
    """Nobody asks it for anything, so that nobody would miss its answer."""

    async def scene(forked: ForkedWork) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, forked.look_at_parent)
        stop(forked)
        os.kill(forked.parent_pid, signal.SIGCONT)
        await asyncio.sleep(STUCK_S)
        # On a busy machine the fork itself may take longer than the time of a stopped parent here.
        forked._stuck_s = PATIENCE_S
        assert await forked.run(b"abc") == b"cba", "it went on in time"
        forked._stuck_s = STUCK_S
        os.kill(forked.parent_pid, signal.SIGSTOP)
        ended = asyncio.Event()
        loop.add_reader(forked.fileno(), ended.set)
        await ended.wait()
        loop.remove_signal_handler(signal.SIGCHLD)
        said = "it was stopped by a signal and did not continue within 0.6 s (step_timeout_s), and was ended"
        assert forked.why_lost == said

    run(scene, stuck_s=STUCK_S)


def test_a_parent_that_goes_on_in_time_is_left_alone() -> None:
    async def scene(forked: ForkedWork) -> None:
        stop(forked)
        piece = asyncio.create_task(forked.run(b"abc"))
        await asyncio.sleep(0)
        os.kill(forked.parent_pid, signal.SIGCONT)
        assert await piece == b"cba"
        await asyncio.sleep(GOES_ON_S)
        assert await forked.run(b"abc") == b"cba"

    run(scene, stuck_s=GOES_ON_S)


def test_small_checks_overtake_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A05: eight grammars of 32 KB kept another client's small regex unanswered for 60 s."""
    monkeypatch.setattr(forked_work, "QUICK_CHECK_S", SHORT_S)
    monkeypatch.setattr(forked_work, "CHECK_LIMIT_S", PATIENCE_S)
    bounded = ForkedWork._bounded
    # On a busy machine a small check may take longer than the large ones have here.
    monkeypatch.setattr(
        ForkedWork, "_bounded", lambda *args: bounded(*args[:2], args[2] if b"wait" in args[1] else PATIENCE_S)
    )

    async def scene(forked: ForkedWork) -> None:
        large = [asyncio.create_task(forked.run(b"wait", is_check=True)) for _ in range(3)]
        await asyncio.sleep(0)
        long = b"x" * 100
        order: list[bytes] = []

        async def noted(data: bytes) -> None:
            answer = await forked.run(data, is_check=True)
            order.append(answer)

        await asyncio.gather(noted(long), noted(b"abc"), noted(b"de"))
        assert order[:2] == [b"ed", b"cba"]
        assert not any(one.done() for one in large), "they have their time"
        # Of the two that still wait for their second turn.
        monkeypatch.setattr(forked_work, "CHECK_LIMIT_S", SHORT_S)
        large[0].cancel()
        ends = await asyncio.gather(*large, return_exceptions=True)
        assert [type(end) for end in ends] == [asyncio.CancelledError, WorkTooLargeError, WorkTooLargeError]
        left = psutil.Process(forked.parent_pid).children()
        assert (await asyncio.to_thread(psutil.wait_procs, left, PATIENCE_S / 2))[1] == []

    run(scene)
