"""``EventLoop``: each step runs it until every task waits, on the machine's time; nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from scripted.core.violation import Violation
from scripted.sdk.cooperative import EventLoop


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop(allowed=(ConnectionError,))
    yield made
    made.close()
    assert made.is_closed()


def test_tasks_run_until_all_wait(loop: EventLoop) -> None:
    said: list[int] = []
    inbox: asyncio.Queue[int] = asyncio.Queue()

    async def work(sign: int) -> None:
        while True:
            said.append(sign * await inbox.get())

    loop.start(work(1))
    loop.start(work(-1))
    loop.run(0.0)
    for number in (1, 2, 3):
        loop.call(inbox.put_nowait, number)
    assert [abs(number) for number in said] == [1, 2, 3]


def test_time_is_the_machines_and_a_short_sleep_is_a_poll(loop: EventLoop) -> None:
    said: list[object] = []

    async def work() -> None:
        await asyncio.sleep(0.01)
        said.append("poll")
        await asyncio.sleep(2.0)
        said.append(loop.time())

    loop.start(work())
    loop.run(0.0)
    assert (said, loop.is_polling, loop.deadline) == ([], True, None)
    loop.run(0.0)
    assert (said, loop.is_polling, loop.deadline) == (["poll"], False, pytest.approx(2.0, abs=1e-4))
    loop.run(1.0)
    assert said == ["poll"]
    loop.run(2.5)
    assert said == ["poll", 2.5]


def test_a_loop_that_polls_has_the_deadline_of_its_longer_waits(loop: EventLoop) -> None:
    """A worker that polls beside a batching delay: the delay was unknown, and some polls were taken for a deadline."""
    polls: list[float] = []

    async def poll() -> None:
        while True:
            await asyncio.sleep(0.02)
            polls.append(loop.time())

    async def collect(inbox: asyncio.Queue[int]) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(inbox.get(), 0.25)

    loop.start(poll())
    collecting = loop.start(collect(asyncio.Queue()))
    for number in range(40):
        loop.run(0.0)
        assert (len(polls), loop.is_polling, loop.deadline) == (number, True, 0.25)
    loop.run(0.25)
    assert collecting.done()
    assert (loop.is_polling, loop.deadline) == (True, None)


def test_a_cancelled_wait_has_no_deadline(loop: EventLoop) -> None:
    async def collect(inbox: asyncio.Queue[int]) -> None:
        await asyncio.wait_for(inbox.get(), 0.25)

    inbox: asyncio.Queue[int] = asyncio.Queue()
    loop.start(collect(inbox))
    loop.run(0.0)
    assert loop.deadline == 0.25
    loop.call(inbox.put_nowait, 1)
    assert loop.deadline is None


def test_what_ends_a_task_is_raised_unless_it_is_allowed(loop: EventLoop) -> None:
    async def fail(error: Exception) -> None:
        raise error

    loop.start(fail(ConnectionError("it left")))
    loop.run(0.0)
    loop.start(fail(KeyError("no such request")))
    with pytest.raises(KeyError, match="no such request"):
        loop.run(0.0)
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 / 0)


def test_tasks_that_never_wait_are_a_violation(loop: EventLoop) -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    loop.start(spin())
    with pytest.raises(Violation, match="the tasks never all wait: they took 10000 rounds in one step"):
        loop.run(0.0)


def test_an_executor_computes_at_once_and_closing_ends_tasks_in_their_own_way(loop: EventLoop) -> None:
    said: list[object] = []

    async def work() -> None:
        said.append(await asyncio.to_thread(lambda: 6 * 7))
        try:
            await asyncio.Event().wait()
        finally:
            said.append("closed")

    loop.start(work())
    loop.run(0.0)
    assert said == [42]
    loop.close()
    assert said == [42, "closed"]
