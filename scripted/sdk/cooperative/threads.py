"""The threads of one machine: its engine's modules see the stand-ins while its code runs, and only then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, TracebackType
from typing import Self

from scripted.core.machine import HasToBeClosed
from scripted.sdk.cooperative.baton import Baton
from scripted.sdk.cooperative.primitives import STAND_INS, CooperativeQueue, entered


class Threads(Baton, HasToBeClosed):
    """Runs the threads of an engine one at a time, in an order that depends on events alone.

    ``modules`` are the engine's: while ``with threads:`` is open, the names they import from ``threading``, ``queue``
    and ``time`` are stand-ins. Enter it wherever the engine's code runs: around its constructor, and in each step
    around the calls of clients and ``run``. ``queue()`` makes a queue between the machine and the engine, for results.
    """

    def __init__(self, *modules: ModuleType, poll_s: float = 0.1) -> None:
        super().__init__(poll_s)
        self._places = [
            (module, name, value, STAND_INS[id(value)])
            for module in modules
            for name, value in vars(module).items()
            if id(value) in STAND_INS
        ]
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self._patched())
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def queue(self, maxsize: int = 0) -> CooperativeQueue:
        with entered(self):
            return CooperativeQueue(maxsize)

    def close(self) -> None:
        """End all threads. Raises HarnessError for a thread that does not end."""
        with self._patched():
            super().close()

    @contextmanager
    def _patched(self) -> Iterator[None]:
        with entered(self):
            for module, name, _, stand_in in self._places:
                setattr(module, name, stand_in)
            try:
                yield
            finally:
                for module, name, value, _ in self._places:
                    setattr(module, name, value)
