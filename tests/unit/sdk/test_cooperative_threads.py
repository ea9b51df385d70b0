"""``Threads``: one thread runs at a time, in the order of their start, on the machine's time; all of them end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from scripted.core.refusals import HarnessError
from scripted.core.violation import Violation
from scripted.sdk.cooperative import Threads, baton


def engine_module() -> Any:
    """A module as an engine's is: it imports the modules, and some of their parts by name."""
    module = ModuleType("an_engine")
    vars(module).update(
        threading=threading, queue=queue, time=time, Condition=threading.Condition, Queue=queue.Queue, sleep=time.sleep
    )
    return module


@pytest.fixture
def engine() -> Any:
    return engine_module()


@pytest.fixture
def threads(engine: Any) -> Iterator[Threads]:
    before = threading.active_count()
    made = Threads(engine)
    with made:
        yield made
    made.close()
    for _ in range(100):
        # A thread hands the baton back before it is gone.
        if threading.active_count() == before:
            return
        time.sleep(0.01)
    raise AssertionError("a thread is left")


def started(engine: Any, *functions: Callable[[], object]) -> None:
    for number, function in enumerate(functions):
        engine.threading.Thread(target=function, name=f"worker-{number}").start()


def test_the_parts_that_wait_are_stand_ins_while_it_is_entered(engine: Any) -> None:
    real = engine.Condition, engine.Queue, engine.sleep, engine.threading, engine.queue.Empty
    with Threads(engine):
        assert engine.Condition is not real[0]
        assert engine.threading.Thread is not threading.Thread
        assert engine.time.monotonic() == 0.0
        assert engine.queue.Empty is queue.Empty
    assert (engine.Condition, engine.Queue, engine.sleep, engine.threading, engine.queue.Empty) == real
    assert threading.Thread.__module__ == "threading"


def test_threads_take_turns_in_the_order_of_their_start(engine: Any, threads: Threads) -> None:
    said: list[str] = []
    inbox = engine.Queue()

    def work(name: str) -> Callable[[], None]:
        def body() -> None:
            while True:
                said.append(f"{name}{inbox.get()}")

        return body

    started(engine, work("a"), work("b"))
    for number in range(4):
        inbox.put(number)
    threads.run(0.0)
    assert said == ["a0", "a1", "a2", "a3"]
    inbox.put(4)
    inbox.put(5)
    threads.run(0.0)
    assert said[4:] == ["a4", "a5"]


def test_a_condition_wakes_who_waits_and_forgets_who_does_not(engine: Any, threads: Threads) -> None:
    condition, woken = engine.Condition(), []

    def work() -> None:
        with condition:
            condition.wait()
            woken.append(1)
            assert condition.wait_for(lambda: len(woken) > 1, timeout=5.0)
            woken.append(3)

    with condition:
        condition.notify()
    started(engine, work)
    threads.run(0.0)
    assert woken == []
    with condition:
        condition.notify_all()
    threads.run(0.0)
    assert woken == [1]
    woken.append(2)
    with condition:
        condition.notify()
    threads.run(0.0)
    assert woken == [1, 2, 3]


def test_time_is_the_machines_and_a_short_wait_is_a_poll(engine: Any, threads: Threads) -> None:
    said: list[object] = []

    def long() -> None:
        engine.time.sleep(5.0)
        said.append(engine.time.monotonic())

    def polling() -> None:
        for _ in range(2):
            with pytest.raises(queue.Empty):
                engine.Queue().get(timeout=0.01)
            said.append("poll")
        said.append(engine.threading.Event().wait(3.0))

    started(engine, long, polling)
    threads.run(0.0)
    assert (said, threads.is_polling, threads.deadline) == ([], True, 5.0)
    threads.run(0.0)
    threads.run(0.0)
    assert (said, threads.is_polling, threads.deadline) == (["poll", "poll"], False, 3.0)
    threads.run(4.0)
    threads.run(6.0)
    assert said[2:] == [False, 6.0]
    assert not threads.waits


def test_locks_and_semaphores_keep_others_out(engine: Any, threads: Threads) -> None:
    lock, again, gate, said = engine.threading.Lock(), engine.threading.RLock(), engine.threading.Semaphore(0), []

    def first() -> None:
        with lock, again, again:
            said.append("in")
            gate.acquire()
            said.append("out")

    def second() -> None:
        with again, lock:
            said.append("second")

    started(engine, first, second)
    threads.run(0.0)
    assert said == ["in"]
    assert not lock.acquire(blocking=False)
    assert set(threads.waits.values()) == {"a semaphore", "a lock"}
    gate.release()
    threads.run(0.0)
    assert said == ["in", "out", "second"]


def test_a_stalled_thread_stands_between_two_of_its_actions(engine: Any, threads: Threads) -> None:
    """A wake-up that comes between the look and the wait is lost, and only so."""
    condition, waiting = engine.Condition(), []

    def careless() -> None:
        while not waiting:
            if not waiting:
                with condition:
                    condition.wait()

    started(engine, careless)
    threads.stall(after=0)
    threads.run(0.0)
    assert threads.is_stalled
    waiting.append("a")
    with condition:
        condition.notify()
    threads.run(0.0)
    assert threads.waits == {"worker-0": "a condition"}


def test_a_call_from_outside_that_waits_for_ever_is_a_violation(engine: Any, threads: Threads) -> None:
    lock = engine.threading.Lock()

    def keep() -> None:
        lock.acquire()
        engine.threading.Event().wait()

    started(engine, keep)
    threads.run(0.0)
    with pytest.raises(
        Violation, match="a call from outside waits for a lock forever; the threads: worker-0: an event"
    ):
        lock.acquire()


def test_an_exception_of_a_thread_is_raised_by_the_step(engine: Any, threads: Threads) -> None:
    def fail() -> None:
        raise KeyError("no such request")

    started(engine, fail)
    with pytest.raises(KeyError, match="no such request"):
        threads.run(0.0)
    threads.run(0.0)


def test_threads_that_go_round_are_a_violation(engine: Any, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton, "TURNS_LIMIT", 100)
    ping, pong = engine.Queue(), engine.Queue()

    def work(mine: Any, other: Any) -> Callable[[], None]:
        def body() -> None:
            while True:
                other.put(mine.get())

        return body

    started(engine, work(ping, pong), work(pong, ping))
    ping.put(None)
    with pytest.raises(Violation, match=r"the threads never all wait: they took 100 turns in one step"):
        threads.run(0.0)


def test_what_has_no_stand_in_is_refused(engine: Any, threads: Threads) -> None:
    with pytest.raises(HarnessError, match=r"Threads has no stand-in for threading\.Timer"):
        engine.threading.Timer(1.0, print)
