"""Actions on grammars while requests wait for them: hold them, release them, fail one.

None of them is a client's message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from engine.core.messages import GrammarReady
from scripted.core.action import Action, RunLike, SearchBase, verb
from scripted.core.phrases import printable
from scripted_lockstep.actions.action import EngineAction, EventReader

if TYPE_CHECKING:
    from scripted.script.context import BaseContext


def _has_grammars(base: SearchBase) -> bool:
    return any(getattr(start, "regex", None) is not None for start in base.starts)


class HoldGrammars(EngineAction, frozen=True, kw_only=True, omit_defaults=True, tag="hold-grammars"):
    """Holds all grammars: none becomes ready from this step on."""

    examples: ClassVar = ("hold-grammars",)
    needs_open: ClassVar[bool] = True
    is_control: ClassVar[bool] = True

    @staticmethod
    @verb
    def hold_grammars(t: BaseContext) -> None:
        """From the next step on, no grammar becomes ready until it is released."""
        t.run.act(HoldGrammars())

    def apply(self, run: RunLike) -> None:
        run.device.grammars.hold()

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return (cls(),) if _has_grammars(base) else ()


class ReleaseGrammars(EngineAction, frozen=True, kw_only=True, omit_defaults=True, tag="release-grammars"):
    """Releases ``count`` held grammars, in the order in which they were ordered; by default all of them."""

    count: int | None = None

    examples: ClassVar = ("release-grammars", "release-grammars count=1")
    is_control: ClassVar[bool] = True

    @staticmethod
    @verb
    def release_grammars(t: BaseContext, n: int | None = None) -> None:
        """Let the oldest ``n`` grammars become ready, or all and stop holding."""
        t.check_released("release_grammars()", n)
        t.run.act(ReleaseGrammars(count=n))

    def apply(self, run: RunLike) -> None:
        run.device.grammars.release(self.count)

    def reaches(self, run: RunLike) -> bool:
        return bool(run.device.grammars.is_holding)


class FailGrammar(EngineAction, frozen=True, kw_only=True, omit_defaults=True, tag="fail-grammar"):
    """Makes the compilation of the next grammar that would become ready fail; the engine continues."""

    examples: ClassVar = ("fail-grammar",)
    needs_open: ClassVar[bool] = True
    event: ClassVar = GrammarReady
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = {"fail_grammar": "fail_next_grammar"}

    @staticmethod
    @verb
    def fail_next_grammar(t: BaseContext) -> None:
        """Make the compilation of the next grammar that would become ready fail; the engine continues."""
        t.run.act(FailGrammar())
        t.count_ineffective("failures of a grammar that none met")

    def apply(self, run: RunLike) -> None:
        run.device.grammars.fail_next()

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return (cls(),) if _has_grammars(base) else ()

    @classmethod
    def read_back(cls, event: GrammarReady, reader: EventReader) -> FailGrammar | None:
        return None if event.error is None else cls()

    @classmethod
    def words(cls, event: GrammarReady) -> str:
        said = "ready" if event.error is None else f"FAILED: {printable(event.error)}"
        return f"grammar {event.grammar_id} {said}"
