"""The language of the shell: one line read as a statement of the script, or as a command that shows or changes it.

Owns the words and their refusals; never runs anything.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from scripted.adapters.lockstep.actions import (
    Action,
    AdministrativeCall,
    DisconnectClient,
    StartRequest,
    Verb,
    all_actions,
)
from scripted.core.action import verbs_of
from scripted.core.refusals import BadCommand
from scripted.core.shell_words import ShellWord, only, whole
from scripted.shell.statements import RunUntil, Statement, StepOn, VerbCall

__all__ = ["HELP", "Command", "Look", "Save", "Show", "Undo", "read_command"]

MAX_STEPS_PER_COMMAND: Final = 10_000
DEFAULT_HISTORY_STEPS: Final = 12
_HELP_TOP: Final = """\
step [N]              run one step, or N
until EXPR            run steps until a Python expression holds: over t, state (t.state), requests, calls"""
_HELP_END: Final = """\
show EXPR             the value of a Python expression over the same names
state, requests       tables of the engine and of the requests
history [N]           the last steps
script                the session as lines of script
undo [N]              take the last commands back: all others run again on a new engine
save FILE             write the session as a pytest file that passes
help, quit"""
_HELP_COLUMNS: Final = 22
_NAMES_OF_VERBS: Final = frozenset(name for action in all_actions() for name in verbs_of(action)) | {"warmup_radix"}


class Show(StrEnum):
    """What can be looked at."""

    STATE = "state"
    REQUESTS = "requests"
    HISTORY = "history"
    SCRIPT = "script"
    HELP = "help"
    QUIT = "quit"
    VALUE = "show"


@dataclass(frozen=True)
class Look:
    """Show something; ``count`` rows of a history, or the value of ``expression``. Leaving is the last look."""

    what: Show
    count: int = DEFAULT_HISTORY_STEPS
    expression: str = ""


@dataclass(frozen=True)
class Undo:
    """Take the last ``count`` statements back."""

    count: int


@dataclass(frozen=True)
class Save:
    """Write the session as a test."""

    path: Path


Command = Statement | Look | Undo | Save


def read_command(line: str, before: Sequence[Statement]) -> Command:
    """What a line that is not empty says; ``before`` are the statements so far. Raises BadCommand, with the remedy."""
    word, _, rest = line.strip().partition(" ")
    if word == "until":
        return RunUntil(_expression(word, rest))
    if word == Show.VALUE:
        return Look(Show.VALUE, expression=_expression(word, rest))
    try:
        words = shlex.split(rest)
    except ValueError as exc:
        raise BadCommand(f"{line.strip()!r} has a quote that does not end: {exc}") from exc
    if word in _READERS:
        return _READERS[word](words)
    if word in _VERBS:
        action, known = _VERBS[word]
        return _statement(known.read(words), action, before)
    raise BadCommand(f"there is no command {word!r}; help lists them")


def _statement(verb: Verb, action: type[Action], before: Sequence[Statement]) -> VerbCall:
    """A verb as a line of the session: what it returns has a name if a script can ask it for something."""
    if action is StartRequest:
        return _start(verb, before)
    if action is DisconnectClient:
        _rid(verb.arguments[0].text)
    return VerbCall(str(verb), _call_name(before) if issubclass(action, AdministrativeCall) else None)


def _start(verb: Verb, before: Sequence[Statement]) -> VerbCall:
    taken = {statement.rid for statement in before if isinstance(statement, VerbCall) and statement.rid is not None}
    free = next(f"r{number}" for number in range(1, len(taken) + 2) if f"r{number}" not in taken)
    rid = _rid(verb.keywords.get("rid", free))
    return VerbCall(str(Verb(verb.name, **{"rid": rid} | verb.keywords)), rid, rid)


def _rid(rid: str) -> str:
    """A rid is its variable's name in the script, so it must be one, and none that means something else there."""
    taken = {"t", "state"} | set(dir(builtins))
    if not rid.isidentifier() or not rid.isascii() or keyword.iskeyword(rid) or rid in taken or rid.startswith("call_"):
        raise BadCommand(
            f"in the shell a rid is a variable of the script, so it must be a name that is free there, got {rid!r}; "
            "write rid=batch_1"
        )
    return rid


def _expression(word: str, text: str) -> str:
    """The expression as it stands in a script, where the state is ``t.state``; it only looks."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as exc:
        raise BadCommand(f"{word} takes a Python expression, got {text.strip()!r}: {exc.msg}") from exc
    if any(isinstance(node, _ACTS) or _is_verb(node) for node in ast.walk(tree)):
        raise BadCommand(f"{word} takes an expression that only looks, got {text.strip()!r}")
    return ast.unparse(_StateOfT().visit(tree))


_ACTS: Final = (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr)


def _is_verb(node: ast.AST) -> bool:
    """``t.flush_cache`` and the like: what it does would be in no script and could not be undone."""
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "t" and node.attr in _NAMES_OF_VERBS


class _StateOfT(ast.NodeTransformer):
    """``state`` means ``t.state``, taken anew at each step."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace the one name."""
        return ast.parse("t.state", mode="eval").body if node.id == "state" else node


def _call_name(before: Sequence[Statement]) -> str:
    calls = [s for s in before if isinstance(s, VerbCall) and s.name is not None and s.rid is None]
    return f"call_{len(calls) + 1}"


def _step(words: list[str]) -> StepOn:
    count = _count("step", words, 1)
    if not 1 <= count <= MAX_STEPS_PER_COMMAND:
        raise BadCommand(f"step takes 1 to {MAX_STEPS_PER_COMMAND} steps, got {count}")
    return StepOn(count)


def _undo(words: list[str]) -> Undo:
    count = _count("undo", words, 1)
    if count < 1:
        raise BadCommand(f"undo takes 1 or more, got {count}")
    return Undo(count)


def _history(words: list[str]) -> Look:
    count = _count("history", words, DEFAULT_HISTORY_STEPS)
    if count < 1:
        raise BadCommand(f"history takes 1 step or more, got {count}")
    return Look(Show.HISTORY, count)


def _save(words: list[str]) -> Save:
    path = Path(only("save", words, "a file"))
    if path.suffix != ".py" or not path.name.startswith("test_") or not path.stem.isidentifier():
        raise BadCommand(f"save takes a file that pytest finds, test_<name>.py, got {str(path)!r}")
    return Save(path)


def _look(what: Show) -> Callable[[list[str]], Look]:
    def read(words: list[str]) -> Look:
        if words:
            raise BadCommand(f"{what.value} stands alone, got {' '.join(words)!r} after it")
        return Look(what)

    return read


def _count(word: str, words: list[str], default: int) -> int:
    return whole(word, only(word, words, "a whole number")) if words else default


_LOOKS: Final[dict[str, Callable[[list[str]], Command]]] = {
    show.value: _look(show) for show in Show if show not in (Show.HISTORY, Show.VALUE)
}
_READERS: Final[dict[str, Callable[[list[str]], Command]]] = {
    **_LOOKS,
    "step": _step,
    "undo": _undo,
    "save": _save,
    "history": _history,
}
_VERBS: Final[dict[str, tuple[type[Action], ShellWord]]] = {
    known.word: (action, known) for action in all_actions() for known in action.shell_words
}


def _help() -> str:
    verbs = (known for _, known in _VERBS.values())
    lines = (f"{f'{known.word} {known.takes}':{_HELP_COLUMNS}}{known.meaning}" for known in verbs)
    return "\n".join([_HELP_TOP, *lines, _HELP_END])


HELP: Final = _help()
