"""Work that a stage does beside its computation: compiles grammars and reads LoRAs, each in a thread.

The thread answers each order once, in order, and ends when its queue is empty, so an engine without such orders has
none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from threading import Lock, Thread
from typing import ClassVar, Generic, TypeVar

from engine.core.messages import Grammar, GrammarReady
from engine.core.plan import GrammarOrder, LoraOrder
from engine.grammar.compiled import CompiledGrammars
from engine.model.runner import StageRunner

_OrderT = TypeVar("_OrderT")


class OrderThread(ABC, Generic[_OrderT]):
    """Carries out one order after another in a thread called ``name``, which lives while there are orders."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._lock = Lock()
        self._open: deque[_OrderT] = deque()
        self._is_running = False
        self._thread: Thread | None = None

    @abstractmethod
    def carry_out(self, order: _OrderT) -> None:
        """Carry out an order and answer it, in the thread."""

    def add(self, order: _OrderT) -> None:
        with self._lock:
            self._open.append(order)
            if not self._is_running:
                self._is_running = True
                self._thread = Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait until every order so far is answered."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._open:
                    self._is_running = False
                    return
                order = self._open.popleft()
            self.carry_out(order)


class GrammarCompiler(OrderThread[tuple[int, Grammar]]):
    """Compiles into ``grammars``, and calls ``answer`` with each result."""

    name = "grammar-compiler"

    def __init__(self, grammars: CompiledGrammars, answer: Callable[[GrammarReady], None]) -> None:
        super().__init__()
        self._grammars = grammars
        self._answer = answer

    def order(self, order: GrammarOrder) -> None:
        if order.grammar is None:
            self._grammars.forget(order.id)
            return
        self._grammars.want(order.id)
        self.add((order.id, order.grammar))

    def carry_out(self, order: tuple[int, Grammar]) -> None:
        number, grammar = order
        error = self._grammars.compile(number, grammar)
        if error is None:
            self._answer(GrammarReady(grammar_id=number))
        else:
            self._answer(GrammarReady(grammar_id=number, error=str(error), reason=error.reason))


class LoraReader(OrderThread[tuple[int, Callable[[], str | None]]]):
    """Reads the shares of LoRAs for ``runner``, and calls ``answer`` with each version and its error, if any."""

    name = "lora-reader"

    def __init__(self, runner: StageRunner, answer: Callable[[int, str | None], None]) -> None:
        super().__init__()
        self._runner = runner
        self._answer = answer

    def order(self, order: LoraOrder) -> None:
        if order.path is None:
            self._runner.read_loras.forget(order.version)
        else:
            self.add((order.version, self._runner.begin_lora(order)))

    def carry_out(self, order: tuple[int, Callable[[], str | None]]) -> None:
        version, read = order
        self._answer(version, read())
