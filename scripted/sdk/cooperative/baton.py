"""The baton: of a machine's threads only the holder runs, and it hands the baton on when it has to wait.

Workers are real threads, so an engine's blocking code needs no change. They run in the order in which they started, so
equal events give equal runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from scripted.core.refusals import HarnessError
from scripted.core.violation import Violation

# Limit on the workers' turns in one step. Healthy engines take a few dozen.
TURNS_LIMIT: Final = 10_000
# How many seconds a machine's threads get to end when it is closed.
CLOSING_S: Final = 5.0


class Closed(BaseException):
    """Ends a worker at the point where it waits, because its machine closes. No engine code should catch it."""


class Worker:
    """One thread of the engine. ``waits_for`` describes what it waits for; empty while it can run."""

    def __init__(self, name: str, function: Callable[[], object]) -> None:
        self.name = name
        self.waits_for = ""
        self.is_ready: Callable[[], bool] = _always
        # When its wait ends without success; None for a wait without a limit.
        self.deadline: float | None = None
        # The timeout is so short that the wait ends with the next step.
        self.is_polling = False
        self.has_ended = False
        self.error: BaseException | None = None
        self.turn = threading.Lock()
        self.turn.acquire()
        self._function = function

    def body(self, back: threading.Lock) -> None:
        """Run the worker's function once it has the baton, and hand the baton back."""
        self.turn.acquire()
        try:
            self._function()
        except Closed:
            pass
        except BaseException as exc:  # noqa: BLE001 - the machine's step raises it
            self.error = exc
        finally:
            self.has_ended = True
            back.release()


class Baton:
    """Hands the baton from worker to worker. The harness's thread holds it between two calls of ``run``.

    A wait of at most ``poll_s`` seconds is a poll and ends with the next step; a longer one ends by the clock.
    """

    def __init__(self, poll_s: float = 0.1) -> None:
        self.workers: list[Worker] = []
        self.now = 0.0
        self.holder: Worker | None = None
        self.is_closed = False
        self._poll_s = poll_s
        self._back = threading.Lock()
        self._back.acquire()
        self._steps = 0
        self._last = -1
        # How many waits the workers reach in this step before they stall; None for no limit.
        self._left: int | None = None
        self._stalled: list[Worker] = []

    def start(self, name: str, function: Callable[[], object]) -> Worker:
        """Start a thread, which runs once it gets the baton."""
        worker = Worker(name, function)
        self.workers.append(worker)
        threading.Thread(target=worker.body, args=(self._back,), name=name, daemon=True).start()
        return worker

    # -- steps --

    def run(self, now: float) -> None:
        """Let every worker run until it waits. Raises the exception that ended a worker."""
        self.now = max(self.now, now)
        self._steps += 1
        self._stalled = []
        self._run_workers()
        self._left = None

    def stall(self, after: int = 0) -> None:
        """In the next ``run``, stop workers once they have begun ``after`` waits, until the following ``run``.

        Calls from outside then meet them between two of their own actions.
        """
        self._left = after

    @property
    def is_stalled(self) -> bool:
        """Whether ``stall`` holds a worker, so that another step makes progress."""
        return bool(self._stalled)

    @property
    def is_polling(self) -> bool:
        """Whether a worker polls, so that it runs in the next step in any case."""
        return any(worker.is_polling for worker in self.workers)

    @property
    def deadline(self) -> float | None:
        """The earliest time at which a worker continues by itself; None if there is none."""
        times = [one.deadline for one in self.workers if one.deadline is not None and not one.is_polling]
        return min(times, default=None)

    @property
    def waits(self) -> dict[str, str]:
        """The wait of each worker, by the worker's name."""
        return {worker.name: worker.waits_for for worker in self.workers if not worker.has_ended}

    def _run_workers(self) -> None:
        for _ in range(TURNS_LIMIT):
            worker = self._next()
            if worker is None:
                return
            self._hand_to(worker)
        raise Violation(f"the threads never all wait: they took {TURNS_LIMIT} turns in one step ({self._words()})")

    def _next(self) -> Worker | None:
        """Return the next worker in turn that can run."""
        count = len(self.workers)
        for place in range(self._last + 1, self._last + 1 + count):
            worker = self.workers[place % count]
            if not worker.has_ended and worker not in self._stalled and self._can_run(worker):
                self._last = place % count
                return worker
        return None

    def _can_run(self, worker: Worker) -> bool:
        is_due = worker.deadline is not None and not worker.is_polling and worker.deadline <= self.now
        return self.is_closed or is_due or worker.is_ready()

    def _hand_to(self, worker: Worker) -> None:
        self.holder = worker
        worker.waits_for = ""
        worker.turn.release()
        self._back.acquire()
        self.holder = None
        if worker.has_ended:
            self.workers.remove(worker)
            self._last -= 1
            if worker.error is not None and not self.is_closed:
                raise worker.error

    def _words(self) -> str:
        return ", ".join(f"{name}: {waits_for or 'runs'}" for name, waits_for in self.waits.items()) or "no thread"

    # -- waiting --

    def wait(self, what: str, is_ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until ``is_ready``; return False if the timeout comes first.

        Raises Violation if a call from outside would wait forever.
        """
        if self.holder is None:
            return self._wait_outside(what, is_ready, timeout)
        self._stand_still(self.holder, what)
        if not is_ready() and (timeout is None or timeout > 0):
            self._hand_back(self.holder, what, is_ready, timeout)
        return is_ready()

    def _wait_outside(self, what: str, is_ready: Callable[[], bool], timeout: float | None) -> bool:
        """Let workers run until the condition holds: a caller from outside takes no turns."""
        for _ in range(TURNS_LIMIT):
            if is_ready():
                return True
            worker = self._next()
            if worker is not None:
                self._hand_to(worker)
            elif self._stalled:
                self._stalled = []
            elif timeout is not None or self.is_closed:
                return False
            else:
                break
        raise Violation(f"a call from outside waits for {what} forever; the threads: {self._words()}")

    def _stand_still(self, worker: Worker, what: str) -> None:
        """Wait for the next step if the workers have to stall here."""
        if self.is_closed:
            raise Closed
        if self._left is None:
            return
        if self._left > 0:
            self._left -= 1
            return
        self._stalled.append(worker)
        self._hand_back(worker, f"{what} (stalled)", _always, None)

    def _hand_back(self, worker: Worker, what: str, is_ready: Callable[[], bool], timeout: float | None) -> None:
        worker.waits_for = what
        begun = self._steps
        worker.is_polling = timeout is not None and timeout <= self._poll_s
        worker.deadline = None if timeout is None else self.now + timeout
        worker.is_ready = (lambda: is_ready() or self._steps > begun) if worker.is_polling else is_ready
        self._back.release()
        worker.turn.acquire()
        worker.deadline, worker.is_polling, worker.is_ready = None, False, _always
        if self.is_closed:
            raise Closed

    # -- the end --

    def close(self) -> None:
        """End all threads, each at the point where it waits. Raises HarnessError for a thread that does not end.

        A thread that was interrupted while it ran ends at its next wait, or with the process.
        """
        self.is_closed = True
        if self.holder is not None:
            return
        for _ in range(TURNS_LIMIT):
            worker = next((one for one in self.workers if not one.has_ended), None)
            if worker is None:
                return
            self.holder = worker
            worker.turn.release()
            if not self._back.acquire(timeout=CLOSING_S):
                raise HarnessError(f"the thread {worker.name} does not end within {CLOSING_S:g} s: it never waits")
            self.holder = None
            if worker.has_ended:
                self.workers.remove(worker)
        raise HarnessError(f"the threads do not end: {self._words()}; one catches the exception that ends it")


def _always() -> bool:
    return True
