"""Stand-ins for the waiting parts of ``threading``, ``queue`` and ``time``: each waits by handing the baton on.

They belong to the ``Threads`` that is entered when they are made. Time is the machine's clock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from heapq import heappop, heappush
from types import ModuleType
from typing import Any, Final, NoReturn, Self

from scripted.core.refusals import HarnessError
from scripted.sdk.cooperative.baton import Baton, Worker

# The batons of the entered machines, innermost last.
_entered: Final[list[Baton]] = []


@contextmanager
def entered(baton: Baton) -> Iterator[None]:
    """Assign the primitives made in this context to this baton."""
    _entered.append(baton)
    try:
        yield
    finally:
        _entered.pop()


def _baton() -> Baton:
    if not _entered:
        raise HarnessError("a stand-in of Threads is used outside of `with threads:`; enter it first")
    return _entered[-1]


class CooperativeThread:
    """``threading.Thread``."""

    def __init__(
        self,
        group: None = None,  # noqa: ARG002 - reserved in threading.Thread too
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._baton = _baton()
        self._target, self._args, self._kwargs = target, args, dict(kwargs or {})
        self._worker: Worker | None = None
        self.name = name or f"Thread-{len(self._baton.workers) + 1}"
        self.daemon = bool(daemon)

    def start(self) -> None:
        if self._worker is not None:
            raise RuntimeError("threads can only be started once")
        self._worker = self._baton.start(self.name, self.run)

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        self._baton.wait(f"the end of {self.name}", lambda: not self.is_alive(), timeout)

    def is_alive(self) -> bool:
        return self._worker is not None and not self._worker.has_ended

    @property
    def ident(self) -> int | None:
        return None if self._worker is None else id(self._worker)


class CooperativeLock:
    """``threading.Lock``."""

    def __init__(self) -> None:
        self._baton = _baton()
        self._is_locked = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._baton.wait("a lock", lambda: not self._is_locked, _limit(blocking, timeout)):
            return False
        self._is_locked = True
        return True

    def release(self) -> None:
        if not self._is_locked and not self._baton.is_closed:
            raise RuntimeError("release unlocked lock")
        self._is_locked = False

    def locked(self) -> bool:
        return self._is_locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class CooperativeRLock(CooperativeLock):
    """``threading.RLock``: its holder may take it again."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: Worker | None = None
        self._times = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not (self._is_locked and self._owner is self._baton.holder):
            if not super().acquire(blocking, timeout):
                return False
            self._owner = self._baton.holder
        self._times += 1
        return True

    def release(self) -> None:
        self._times -= 1
        if self._times <= 0:
            self._times, self._owner = 0, None
            super().release()


class CooperativeCondition:
    """``threading.Condition``."""

    def __init__(self, lock: CooperativeLock | None = None) -> None:
        self._baton = _baton()
        self._lock = CooperativeRLock() if lock is None else lock
        # A list for each waiter, empty until the waiter is notified.
        self._waiters: deque[list[bool]] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._lock.locked():
            raise RuntimeError("cannot wait on un-acquired lock")
        notices: list[bool] = []
        self._waiters.append(notices)
        self._lock.release()
        was_notified = self._baton.wait("a condition", lambda: bool(notices), timeout)
        if not was_notified:
            self._waiters.remove(notices)
        self._lock.acquire()
        return was_notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._baton.now + timeout
        while not (result := predicate()):
            left = None if end is None else end - self._baton.now
            if (left is not None and left <= 0) or not self.wait(left):
                return predicate()
        return result

    def notify(self, n: int = 1) -> None:
        if not self._lock.locked():
            raise RuntimeError("cannot notify on un-acquired lock")
        for _ in range(min(n, len(self._waiters))):
            self._waiters.popleft().append(True)

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class CooperativeEvent:
    """``threading.Event``."""

    def __init__(self) -> None:
        self._baton = _baton()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._baton.wait("an event", lambda: self._is_set, timeout)


class CooperativeSemaphore:
    """``threading.Semaphore`` and ``threading.BoundedSemaphore``, whose bound is not checked."""

    def __init__(self, value: int = 1) -> None:
        self._baton = _baton()
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        limit = _limit(blocking, -1 if timeout is None else timeout)
        if not self._baton.wait("a semaphore", lambda: self._value > 0, limit):
            return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class CooperativeQueue:
    """``queue.Queue`` and ``queue.SimpleQueue``."""

    def __init__(self, maxsize: int = 0) -> None:
        self._baton = _baton()
        self.maxsize = maxsize
        self._items: list[Any] = []
        self.unfinished_tasks = 0

    def __class_getitem__(cls, _: object) -> type[Self]:
        return cls

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items

    def full(self) -> bool:
        return 0 < self.maxsize <= len(self._items)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        limit = _limit(block, -1 if timeout is None else timeout)
        if not self._baton.wait("room in a queue", lambda: not self.full(), limit):
            raise queue.Full
        self._add(item)
        self.unfinished_tasks += 1

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        limit = _limit(block, -1 if timeout is None else timeout)
        if not self._baton.wait("a queue", lambda: bool(self._items), limit):
            raise queue.Empty
        return self._take()

    def put_nowait(self, item: Any) -> None:
        self.put(item, block=False)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def task_done(self) -> None:
        if not self.unfinished_tasks:
            raise ValueError("task_done() called too many times")
        self.unfinished_tasks -= 1

    def join(self) -> None:
        self._baton.wait("the tasks of a queue", lambda: not self.unfinished_tasks)

    def _add(self, item: Any) -> None:
        self._items.append(item)

    def _take(self) -> Any:
        return self._items.pop(0)


class CooperativeLifoQueue(CooperativeQueue):
    """``queue.LifoQueue``."""

    def _take(self) -> Any:
        return self._items.pop()


class CooperativePriorityQueue(CooperativeQueue):
    """``queue.PriorityQueue``."""

    def _add(self, item: Any) -> None:
        heappush(self._items, item)

    def _take(self) -> Any:
        return heappop(self._items)


def _sleep(seconds: float) -> None:
    """``time.sleep``. A sleep of 0 waits for the next step, because otherwise it would spin."""
    _baton().wait("a time", lambda: False, max(seconds, 1e-9))


def _now() -> float:
    return _baton().now


def _now_ns() -> int:
    return round(_baton().now * 1e9)


def _ident() -> int:
    return id(_baton().holder)


class _Current:
    """Replaces the object of ``threading.current_thread()``."""

    def __init__(self, holder: Worker | None) -> None:
        self.name = "MainThread" if holder is None else holder.name
        self.ident = id(holder)


def _current() -> _Current:
    return _Current(_baton().holder)


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise HarnessError(f"Threads has no stand-in for {name}; use a thread that sleeps, or a condition")

    return refuse


def _limit(blocking: bool, timeout: float) -> float | None:
    """Convert a call's timeout to the terms of ``Baton.wait``."""
    if not blocking:
        return 0.0
    return None if timeout < 0 else timeout


_THREADING: Final[Mapping[str, object]] = {
    "Thread": CooperativeThread,
    "Lock": CooperativeLock,
    "RLock": CooperativeRLock,
    "Condition": CooperativeCondition,
    "Event": CooperativeEvent,
    "Semaphore": CooperativeSemaphore,
    "BoundedSemaphore": CooperativeSemaphore,
    "current_thread": _current,
    "get_ident": _ident,
    "Timer": _refused("threading.Timer"),
    "Barrier": _refused("threading.Barrier"),
}
_QUEUE: Final[Mapping[str, object]] = {
    "Queue": CooperativeQueue,
    "SimpleQueue": CooperativeQueue,
    "LifoQueue": CooperativeLifoQueue,
    "PriorityQueue": CooperativePriorityQueue,
}
_TIME: Final[Mapping[str, object]] = {
    "sleep": _sleep,
    **dict.fromkeys(("time", "monotonic", "perf_counter"), _now),
    **dict.fromkeys(("time_ns", "monotonic_ns", "perf_counter_ns"), _now_ns),
}


def _module(real: ModuleType, parts: Mapping[str, object]) -> ModuleType:
    """Make a module with all other parts of the real one."""
    made = ModuleType(real.__name__, real.__doc__)
    vars(made).update({**vars(real), **parts})
    return made


def _stand_ins() -> dict[int, object]:
    """Map the identities of each real module and its waiting parts to their stand-ins."""
    found: dict[int, object] = {}
    for real, parts in ((threading, _THREADING), (queue, _QUEUE), (time, _TIME)):
        found[id(real)] = _module(real, parts)
        found |= {id(getattr(real, name)): part for name, part in parts.items()}
    return found


STAND_INS: Final = _stand_ins()
