"""The threads beside the computation: there while there is an order, one after the other, each answered once."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, current_thread
from typing import Any

from engine.core.messages import FinishReason, Grammar, GrammarKind, GrammarReady
from engine.core.plan import GrammarOrder, LoraOrder
from engine.grammar.compiled import CompiledGrammars, GrammarError, UnfollowableGrammar
from engine.pipeline.beside import GrammarCompiler, LoraReader


class Slow(CompiledGrammars):
    """Compiles on demand, and notes the thread."""

    def __init__(self) -> None:
        super().__init__(lambda: "", vocab_size=1, eos_token_ids=(0,))
        self.go_on, self.begun = Event(), Event()
        self.threads: list[str] = []

    def compile(self, grammar_id: int, grammar: Grammar) -> GrammarError | None:
        self.threads.append(f"{current_thread().name} {current_thread().ident}")
        self.begun.set()
        assert self.go_on.wait(30)
        return None if grammar.text else UnfollowableGrammar(f"grammar {grammar_id} is empty")


def order(number: int, text: str = "a") -> GrammarOrder:
    return GrammarOrder(number, Grammar(GrammarKind.REGEX, text))


def test_orders_do_not_wait_for_the_compilation() -> None:
    """The loop goes on while a large schema is compiled; what is forgotten meanwhile is answered all the same."""
    grammars, answers = Slow(), list[GrammarReady]()
    compiler = GrammarCompiler(grammars, answers.append)
    for number in (1, 2, 3):
        compiler.order(order(number, "" if number == 2 else "a"))
    assert grammars.begun.wait(30)
    compiler.order(GrammarOrder(1, None))
    assert answers == []
    grammars.go_on.set()
    compiler.wait()
    assert answers == [
        GrammarReady(grammar_id=1),
        GrammarReady(grammar_id=2, error="grammar 2 is empty", reason=FinishReason.INVALID),
        GrammarReady(grammar_id=3),
    ]
    assert len(set(grammars.threads)) == 1


def test_the_thread_ends_with_the_work_and_comes_again() -> None:
    grammars, answers = Slow(), list[GrammarReady]()
    grammars.go_on.set()
    compiler = GrammarCompiler(grammars, answers.append)
    compiler.wait()
    for number in range(1, 4):
        compiler.order(order(number))
        compiler.wait()
        assert compiler._thread is not None
        assert not compiler._thread.is_alive()
    assert [answer.grammar_id for answer in answers] == [1, 2, 3]


class ReadingRunner:
    """Reads on demand, and notes its calls."""

    def __init__(self) -> None:
        self.go_on = Event()
        self.forgotten: list[int] = []
        self.read_loras = self

    def begin_lora(self, order: LoraOrder) -> Callable[[], str | None]:
        def read() -> str | None:
            assert self.go_on.wait(30)
            return None if order.path == "/there" else f"cannot read {order.path}"

        return read

    def forget(self, version: int) -> None:
        self.forgotten.append(version)


def test_the_loop_goes_on_while_loras_are_read() -> None:
    """Converting 100 MB takes a tenth of a second, and a slow disk takes as long as it likes."""
    runner, answers = ReadingRunner(), list[tuple[int, str | None]]()
    of_runner: Any = runner
    reader = LoraReader(of_runner, lambda *answer: answers.append(answer))
    reader.order(LoraOrder(1, "x", "/there"))
    reader.order(LoraOrder(2, "y", "/nowhere"))
    reader.order(LoraOrder(1, "x"))
    assert (answers, runner.forgotten) == ([], [1])
    runner.go_on.set()
    reader.wait()
    assert answers == [(1, None), (2, "cannot read /nowhere")]
