"""The language of the shell: a line is a statement of the script, or a command that shows or changes the session.

Owns the words and their refusals; never runs anything.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import shlex
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from scripted.core.action import Action
from scripted.core.phrases import nearest
from scripted.core.placed_action import parse_action
from scripted.core.refusals import BadCommand, ScriptDefinitionError
from scripted.core.verb import Code, Verb
from scripted.shell.statements import RunUntil, Statement, StepOn, VerbCall
from scripted.shell.words import ShellWord

MAX_STEPS_PER_COMMAND: Final = 10_000
# The length of a prompt if none is given.
DEFAULT_PROMPT_TOKENS: Final = 16
DEFAULT_HISTORY_STEPS: Final = 12
_HELP: Final = {
    "step [N]": "run one step, or N",
    "until EXPR": "run steps until a Python expression holds, as state.chunked",
    "show EXPR": "its value; it may name t, state (t.state), requests and calls",
    "state, requests": "tables of the scheduler and of the requests",
    "history [N]": "the last steps",
    "script": "the session as lines of script",
    "undo [N]": "take the last commands back: the others run again",
    "save FILE": "write the session as a pytest file that passes",
    "help [WORD]": "this, or all that a word of the scheduler takes",
    "quit": "leave; the scheduler drains first",
}
_TO_THE_SCHEDULER: Final = "To the scheduler, or a clause of a schedule (help WORD says more):"
# Help fits the smallest terminal: 80 columns and 24 lines.
_HELP_INDENT: Final = 17
_HELP_WIDTH: Final = 79
_NO_BREAK: Final = "\N{NO-BREAK SPACE}"
_PROMPTS: Final = ("prompt_len", "prompt_ids", "text")


class Own(StrEnum):
    """The session's own words that are not statements."""

    STATE = "state"
    REQUESTS = "requests"
    HISTORY = "history"
    SCRIPT = "script"
    HELP = "help"
    QUIT = "quit"
    SHOW = "show"
    UNDO = "undo"
    SAVE = "save"


OWN_WORDS: Final = (*Own, "step", "until")
# The default count of a word, and the counts that it takes.
_COUNTED: Final = {
    "step": (1, f"1 to {MAX_STEPS_PER_COMMAND} steps"),
    Own.UNDO: (1, "1 or more"),
    Own.HISTORY: (DEFAULT_HISTORY_STEPS, "1 step or more"),
}


@dataclass(frozen=True)
class Order:
    """One of the session's own words with its ``count`` or its ``text``: an expression, a word or a file."""

    word: Own
    count: int = 0
    text: str = ""


Command = Statement | Order


def read_command(
    line: str, before: Sequence[Statement], words: Mapping[str, ShellWord], actions: Collection[type[Action]] = ()
) -> Command:
    """Read a non-empty line; ``before`` are the statements so far. Raises BadCommand with the remedy.

    A clause of ``actions``, as a schedule writes it after its step, is read as the equivalent verb.
    """
    word, _, rest = line.strip().partition(" ")
    if word == "until":
        return RunUntil(_expression(word, rest, words))
    if word == Own.SHOW:
        return Order(Own.SHOW, text=_expression(word, rest, words))
    try:
        given = shlex.split(rest)
    except ValueError as exc:
        raise BadCommand(f"{line.strip()!r} has a quote that does not end: {exc}") from exc
    if word == "step":
        return StepOn(_count(word, given))
    if word in OWN_WORDS:
        return _order(Own(word), given, words)
    tags = [str(action.__struct_config__.tag) for action in actions]
    if word not in words and word not in tags:
        meant = _step_before(word, rest) or nearest(word, dict.fromkeys([*OWN_WORDS, *words, *tags]))
        raise BadCommand(f"there is no command {word!r}{meant}; help lists them")
    rids = [statement.rid for statement in before if isinstance(statement, VerbCall) and statement.rid is not None]
    if word not in words:
        return _statement(*_verb_of_clause(line.strip(), words, actions), before, rids)
    try:
        verb = words[word].read(given, rids)
    except BadCommand as exc:
        if word not in tags:
            raise
        return _statement(*_verb_of_clause(line.strip(), words, actions, exc), before, rids)
    return _statement(verb, words[word], before, rids)


def _step_before(word: str, rest: str) -> str:
    """Return the remedy for a clause that was typed with its step."""
    return f"; a line has no step before it: write 'step {word}', then {rest.strip()!r}" if word.isdigit() else ""


def _verb_of_clause(
    clause: str, words: Mapping[str, ShellWord], actions: Collection[type[Action]], refused: BadCommand | None = None
) -> tuple[Verb, ShellWord]:
    """Return a clause's verb and its word. ``refused`` says why the line is not a call of a verb with that name."""
    try:
        verbs = parse_action(clause, actions).verbs()
    except ScriptDefinitionError as exc:
        raise BadCommand(str(exc) if refused is None else f"{refused}; {exc}") from exc
    by_path = {word.path: word for word in words.values()}
    if len(verbs) != 1:
        lines = [" ".join([by_path[verb.name].text, *map(str, verb.arguments)]) for verb in verbs]
        raise BadCommand(
            f"{clause!r} is more than one command here: write {', then '.join(map(repr, lines))}"
            if lines
            else f"{clause!r} does nothing; say what it acts on, NAME=VALUE"
        )
    (verb,) = verbs
    keywords = {name: value.value if isinstance(value, Code) else value for name, value in verb.keywords.items()}
    return Verb(verb.name, *verb.arguments, **keywords), by_path[verb.name]


def _statement(verb: Verb, word: ShellWord, before: Sequence[Statement], rids: Sequence[str]) -> VerbCall:
    """Return a verb as a statement; its result gets a name if it is a request or a call."""
    if word.is_start:
        return _start(verb, word, rids)
    return VerbCall(str(verb), _call_name(before) if word.is_call else None)


def _start(verb: Verb, word: ShellWord, taken: Sequence[str]) -> VerbCall:
    free = next(f"r{number}" for number in range(1, len(taken) + 2) if f"r{number}" not in taken)
    given = dict(verb.keywords)
    rid = _rid(str(given.pop("rid", free)))
    if word.signature.parameters.keys() >= {*_PROMPTS} and given.keys().isdisjoint(_PROMPTS):
        given = {"prompt_len": DEFAULT_PROMPT_TOKENS} | given
    return VerbCall(str(Verb(verb.name, *verb.arguments, rid=rid, **given)), rid, rid)


def _rid(rid: str) -> str:
    """Return a rid that can name its variable in the script. Raises BadCommand."""
    taken = {"t", "state"} | set(dir(builtins))
    if not rid.isidentifier() or not rid.isascii() or keyword.iskeyword(rid) or rid in taken or rid.startswith("call_"):
        raise BadCommand(
            f"in the shell a rid is a variable of the script, so it must be a name that is free there, got {rid!r}; "
            "write rid=batch_1"
        )
    return rid


def _expression(word: str, text: str, words: Mapping[str, ShellWord]) -> str:
    """Return an expression in a script's form, with ``t.state`` for the state. Raises BadCommand if it acts."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as exc:
        raise BadCommand(f"{word} takes a Python expression, got {text.strip()!r}: {exc.msg}") from exc
    # The effect of a verb would be in no statement and could not be undone.
    verbs = {f"t.{known.path}" for known in words.values()}
    nodes = list(ast.walk(tree))
    calls = any(isinstance(node, ast.Attribute) and ast.unparse(node) in verbs for node in nodes)
    if calls or any(isinstance(node, _ACTS) for node in nodes):
        raise BadCommand(f"{word} takes an expression that only looks, got {text.strip()!r}")
    return ast.unparse(_StateOfT().visit(tree))


_ACTS: Final = (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr)


class _StateOfT(ast.NodeTransformer):
    """Replaces ``state`` with ``t.state``, which is new in each step."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse("t.state", mode="eval").body if node.id == "state" else node


def _call_name(before: Sequence[Statement]) -> str:
    calls = [s for s in before if isinstance(s, VerbCall) and s.name is not None and s.rid is None]
    return f"call_{len(calls) + 1}"


def _order(word: Own, given: list[str], words: Mapping[str, ShellWord]) -> Order:
    match word:
        case Own.UNDO | Own.HISTORY:
            return Order(word, _count(word, given))
        case Own.SAVE:
            path = Path(_only("save", given, "a file"))
            if path.suffix != ".py" or not path.name.startswith("test_") or not path.stem.isidentifier():
                raise BadCommand(f"save takes a file that pytest finds, test_<name>.py, got {str(path)!r}")
            return Order(word, text=str(path))
        case Own.HELP if given:
            asked = _only("help", given, "one word, or none")
            if asked not in words:
                meant = nearest(asked, words)
                raise BadCommand(f"help takes a word of the scheduler, got {asked!r}{meant}; help lists them")
            return Order(word, text=asked)
    if given:
        raise BadCommand(f"{word} stands alone, got {' '.join(given)!r} after it")
    return Order(word)


def _only(word: str, words: list[str], what: str) -> str:
    """Return the only word. Raises BadCommand."""
    if len(words) != 1:
        raise BadCommand(f"{word} takes {what}, got {' '.join(words) or 'nothing'}")
    return words[0]


def _count(word: str, given: list[str]) -> int:
    default, takes = _COUNTED[word]
    text = _only(word, given, "a whole number") if given else str(default)
    try:
        count = int(text)
    except ValueError as exc:
        raise BadCommand(f"{word} takes a whole number, got {text!r}") from exc
    if count < 1 or (word == "step" and count > MAX_STEPS_PER_COMMAND):
        raise BadCommand(f"{word} takes {takes}, got {count}")
    return count


def help_text(words: Mapping[str, ShellWord]) -> str:
    """Describe the session's own words and list the scheduler's; `help WORD` describes those."""
    ordered = sorted(words.values(), key=lambda word: not word.is_start)
    takes = [f"{word.text} {word.takes}".rstrip().replace(" ", _NO_BREAK) for word in ordered]
    listed = textwrap.fill(", ".join(takes), _HELP_WIDTH, initial_indent="  ", subsequent_indent="  ")
    own = [f"{words:{_HELP_INDENT}}{meaning}" for words, meaning in _HELP.items()]
    return "\n".join([*own, _TO_THE_SCHEDULER, listed.replace(_NO_BREAK, " ")])


def completions(line: str, words: Mapping[str, ShellWord], before: Sequence[Statement]) -> list[str]:
    """Return completions for a line: words, or after a scheduler word its parameters' names and rids."""
    first, space, _ = line.lstrip().partition(" ")
    if not space or first == Own.HELP:
        return sorted([*words] if space else [*OWN_WORDS, *words])
    if first not in words:
        return []
    named = [f"{name}=" for name in words[first].signature.parameters]
    return [statement.rid for statement in before if isinstance(statement, VerbCall) and statement.rid] + named
