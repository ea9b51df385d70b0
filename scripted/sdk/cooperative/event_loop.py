"""An asyncio loop that a machine steps: it runs until every task waits, on the machine's clock, and polls no files."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

from scripted.core.machine import HasToBeClosed
from scripted.core.violation import Violation

_T = TypeVar("_T")
_Arguments = TypeVarTuple("_Arguments")
# How far the loop's time advances in a step that only a poll asked for.
_TICK_S: Final = 1e-6
# Limit on the rounds of ready callbacks in one step. Healthy engines take a few dozen.
ROUNDS_LIMIT: Final = 10_000


class _NoSelector(selectors.BaseSelector):
    """Knows no file but the loop's own pipe, and tells the loop when it would wait."""

    def __init__(self) -> None:
        self._keys: dict[object, selectors.SelectorKey] = {}
        self.on_wait: Callable[[float | None], None] = lambda _: None

    def register(self, fileobj: Any, events: int, data: object = None) -> selectors.SelectorKey:
        descriptor = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, descriptor, events, data)
        return key

    def unregister(self, fileobj: object) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.on_wait(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class EventLoop(asyncio.SelectorEventLoop, HasToBeClosed):
    """The event loop of one machine. Callbacks run in the order in which they became ready.

    ``start`` begins the engine's main tasks; ``call`` runs one of its functions inside the loop. Time is the
    machine's; ``deadline`` is when the next timer is due that is no poll. An executor computes at once. An exception
    that ends any task is raised from ``run``, unless its type is ``allowed``: a task that died unnoticed is the usual
    cause of a hanging engine. A timer of at most ``poll_s`` seconds is a poll and ends with the next step.
    """

    def __init__(self, *, allowed: tuple[type[BaseException], ...] = (), poll_s: float = 0.1) -> None:
        self._waits = _NoSelector()
        super().__init__(self._waits)
        self._waits.on_wait = self._would_wait
        self._now = 0.0
        self._rounds = 0
        self._allowed = allowed
        self._poll_s = poll_s
        # A poll is pending, so the loop runs in the next step in any case.
        self.is_polling = False
        # The timers that are not due yet.
        self._polls: list[asyncio.TimerHandle] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._errors: list[BaseException] = []
        self.deadline: float | None = None
        self.set_task_factory(self._new_task)
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._now

    def run(self, now: float) -> None:
        """Run until every task waits. Raises the exception that ended a task, or Violation if tasks never wait."""
        self._now = max(now, self._now + 2 * _TICK_S if self.is_polling else self._now)
        self._rounds = 0
        self.run_forever()
        if self._errors:
            raise self._errors.pop(0)

    def start(self, coroutine: Coroutine[object, object, _T]) -> asyncio.Task[_T]:
        """Begin a task, which runs in the next ``run``."""
        return self.create_task(coroutine)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Run a function inside the loop, where it may create tasks, until every task waits again."""
        self.call_soon(function, *arguments)
        self.run(self._now)

    def close(self) -> None:
        """Cancel all tasks, let them end, and close the loop."""
        if self.is_closed():
            return
        for task in self._tasks:
            task.cancel()
        self._rounds = 0
        try:
            self.run_forever()
            self.run_until_complete(self.shutdown_asyncgens())
        finally:
            self._errors.clear()
            super().close()

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[_Arguments]], _T], *args: *_Arguments
    ) -> asyncio.Future[_T]:
        """Compute at once."""
        del executor
        future: asyncio.Future[_T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as exc:  # noqa: BLE001 - the awaiter gets it
            future.set_exception(exc)
        return future

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Arguments]], object],
        *args: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        is_poll = when - self._now <= self._poll_s
        timer = super().call_at(self._now + _TICK_S if is_poll else when, callback, *args, context=context)
        (self._polls if is_poll else self._timers).append(timer)
        return timer

    # -- called by asyncio --

    def _would_wait(self, timeout: float | None) -> None:
        self._rounds += 1
        if timeout != 0:
            self._polls, self._timers = list(self._pending(self._polls)), list(self._pending(self._timers))
            self.is_polling = bool(self._polls)
            self.deadline = min((timer.when() for timer in self._timers), default=None)
            self.stop()
        elif self._rounds > ROUNDS_LIMIT:
            raise Violation(f"the tasks never all wait: they took {ROUNDS_LIMIT} rounds in one step")

    def _pending(self, timers: Iterable[asyncio.TimerHandle]) -> Iterator[asyncio.TimerHandle]:
        return (timer for timer in timers if not timer.cancelled() and timer.when() > self._now)

    def _new_task(self, _: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=self, **more)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, self._allowed):
            self._errors.append(error)

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Keep a callback's exception; tasks report their own."""
        error = context.get("exception")
        if isinstance(error, BaseException) and "handle" in context:
            self._errors.append(error)
