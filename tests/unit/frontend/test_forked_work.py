"""Work in processes of its own: what comes back, what a worker's end costs, and that no process is left."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from engine.frontend.forked_work import WORKERS_AT_ONCE, ForkedWork, WorkLostError

PATIENCE_S = 10.0
LARGE = 5_000_000


def work(data: bytes) -> bytes:
    """What a test asks a worker for."""
    match data:
        case b"pid":
            return str(os.getpid()).encode()
        case b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"raise":
            raise SystemExit
        case b"wait":
            time.sleep(PATIENCE_S * 10)
        case b"gc":
            return str(gc.isenabled()).encode()
    return data[::-1]


@contextmanager
def working() -> Iterator[ForkedWork]:
    forked = ForkedWork.start("test", work)
    try:
        yield forked
    finally:
        forked.close()


def run(scene: Callable[[ForkedWork], object]) -> None:
    async def bounded(forked: ForkedWork) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scene(forked)

    with working() as forked:
        asyncio.run(bounded(forked))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


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
        with pytest.raises(WorkLostError, match="without an answer"):
            await forked.run(end)
        assert await beside == b"cba"
        assert await forked.run(b"abc") == b"cba"

    run(scene)
    assert ("SystemExit" in capfd.readouterr().err) == (end == b"raise")


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
    """By kill -9 too, in the middle of a piece: nothing is orphaned."""
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
