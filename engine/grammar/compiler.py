"""Carries out the scheduler's orders: compiles grammars in a thread beside the computation, one after the other.

The thread ends when there is nothing to do, so an engine without requests for structured output has none. Each order to
compile is answered once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock, Thread

from engine.grammar.compiled import CompiledGrammars, GrammarError
from engine.messages import Grammar, GrammarReady
from engine.plan import GrammarOrder


class GrammarCompiler:
    """Fills ``grammars``. ``answer`` is called from the thread."""

    def __init__(self, grammars: CompiledGrammars, answer: Callable[[GrammarReady], None]) -> None:
        self._grammars = grammars
        self._answer = answer
        self._lock = Lock()
        self._open: deque[tuple[int, Grammar]] = deque()
        self._is_running = False
        self._thread: Thread | None = None

    def order(self, order: GrammarOrder) -> None:
        if order.grammar is None:
            self._grammars.forget(order.id)
            return
        self._grammars.want(order.id)
        with self._lock:
            self._open.append((order.id, order.grammar))
            if not self._is_running:
                self._is_running = True
                self._thread = Thread(target=self._run, name="grammar-compiler", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Return when every order is answered, unless others come meanwhile."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._open:
                    self._is_running = False
                    return
                grammar_id, grammar = self._open.popleft()
            self._answer(_ready(grammar_id, self._grammars.compile(grammar_id, grammar)))


def _ready(grammar_id: int, error: GrammarError | None) -> GrammarReady:
    if error is None:
        return GrammarReady(grammar_id=grammar_id)
    return GrammarReady(grammar_id=grammar_id, error=str(error), reason=error.reason)
