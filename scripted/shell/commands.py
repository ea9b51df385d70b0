"""The language of the shell: one line read as a statement of the script, or as a wish to look at it or to change it.

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

from scripted.errors import ScriptDefinitionError
from scripted.script.verbs import PAUSE_MODES
from scripted.shell.statements import RunUntil, Statement, StepOn, VerbCall

__all__ = ["HELP", "BadCommand", "Command", "Look", "Save", "Show", "Undo", "read_command"]

MAX_STEPS_PER_COMMAND: Final = 10_000
DEFAULT_PROMPT_TOKENS: Final = 16
DEFAULT_HISTORY_STEPS: Final = 12
HELP: Final = """\
step [N]              run one step, or N
until EXPR            run steps until a Python expression holds: over t, state (t.state), requests by rid, calls by name
start [rid=R] [prompt_len=N] [prompt_seed=N] [max_new_tokens=N] [priority=N] [ignore_eos=true] [stream=false]
abort RID | all       abort a request, or everything
disconnect RID        its client hangs up
flush [SECONDS]       flush the cache; with seconds of virtual time, wait that long for the chance
update WEIGHTS        update the weights, for instance to embedded:7
pause MODE, continue  pause generation (retract, in_place, abort), go on
hold, release [N]     keep results back; let the oldest N, or all, through
exhaust_kv N, exhaust_rows N, exhaust_locks N, release_exhausted
                      keep memory from requests until N are left; give it back
evict [PAGES]         evict unlocked cache
stall N, resume N     stop a stage, let it go on
fail N, kill N        fail a stage's next microbatch; kill the stage
advance SECONDS       virtual time
state, requests       tables of the engine and of the requests
history [N]           the last steps
script                the session as lines of script
undo [N]              take the last commands back: all others run again on a new engine
save FILE             write the session as a pytest file that passes
help, quit"""


class BadCommand(ScriptDefinitionError):  # noqa: N818 - it reads as what happened
    """A line that is no command; nothing was done."""


class Show(StrEnum):
    """What can be looked at."""

    STATE = "state"
    REQUESTS = "requests"
    HISTORY = "history"
    SCRIPT = "script"
    HELP = "help"
    QUIT = "quit"


@dataclass(frozen=True)
class Look:
    """Show something; ``count`` rows of a history. Leaving is the last look."""

    what: Show
    count: int = DEFAULT_HISTORY_STEPS


@dataclass(frozen=True)
class Undo:
    """Take so many statements back."""

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
        return RunUntil(_condition(rest))
    try:
        words = shlex.split(rest)
    except ValueError as exc:
        raise BadCommand(f"{line.strip()!r} has a quote that does not end: {exc}") from exc
    if word in _READERS:
        return _READERS[word](words)
    if word == "start":
        return _start(words, before)
    if word in _CALLS:
        return VerbCall(_CALLS[word](words), _call_name(before))
    raise BadCommand(f"there is no command {word!r}; help lists them")


def _start(words: list[str], before: Sequence[Statement]) -> VerbCall:
    taken = {statement.rid for statement in before if isinstance(statement, VerbCall) and statement.rid is not None}
    given = dict(_assignment(word) for word in words)
    free = next(f"r{number}" for number in range(1, len(taken) + 2) if f"r{number}" not in taken)
    rid = _rid(given.pop("rid", free))
    values = {"prompt_len": str(DEFAULT_PROMPT_TOKENS)} | given
    arguments = ", ".join(f"{name}={_value(name, text)!r}" for name, text in values.items())
    return VerbCall(f"t.start_req(rid={rid!r}, {arguments})", rid, rid)


def _assignment(word: str) -> tuple[str, str]:
    name, equals, text = word.partition("=")
    if not equals or name not in ("rid", *_START_FIELDS):
        raise BadCommand(f"start takes rid, {', '.join(_START_FIELDS)}, each as name=value, got {word!r}")
    return name, text


def _value(name: str, text: str) -> int | bool:
    if _START_FIELDS[name] is int:
        return _whole(f"start {name}=", text)
    if text.lower() not in ("true", "false"):
        raise BadCommand(f"start {name}= takes true or false, got {text!r}")
    return text.lower() == "true"


def _rid(rid: str) -> str:
    """A rid is its variable's name in the script, so it must be one, and none that means something else there."""
    taken = {"t", "state"} | set(dir(builtins))
    if not rid.isidentifier() or not rid.isascii() or keyword.iskeyword(rid) or rid in taken or rid.startswith("call_"):
        raise BadCommand(
            f"in the shell a rid is a variable of the script, so it must be a name that is free there, got {rid!r}; "
            "write rid=batch_1"
        )
    return rid


def _condition(text: str) -> str:
    """The expression as it stands in a script, where the state is ``t.state``."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as exc:
        raise BadCommand(f"until takes a Python expression, got {text.strip()!r}: {exc.msg}") from exc
    if any(isinstance(node, ast.Yield | ast.YieldFrom | ast.Await | ast.NamedExpr) for node in ast.walk(tree)):
        raise BadCommand(f"until takes an expression that only looks, got {text.strip()!r}")
    return ast.unparse(_StateOfT().visit(tree))


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
    path = Path(_only("save", words, "a file"))
    if path.suffix != ".py" or not path.name.startswith("test_") or not path.stem.isidentifier():
        raise BadCommand(f"save takes a file that pytest finds, test_<name>.py, got {str(path)!r}")
    return Save(path)


def _abort(words: list[str]) -> str:
    rid = _only("abort", words, "a rid, or all")
    return "t.abort_all()" if rid == "all" else f"t.abort({rid!r})"


def _flush(words: list[str]) -> str:
    return f"t.flush_cache(timeout_s={_seconds('flush', words)})" if words else "t.flush_cache()"


def _update(words: list[str]) -> str:
    return f"t.update_weights({_only('update', words, 'weights, for instance embedded:7')!r})"


def _pause(words: list[str]) -> str:
    mode = _only("pause", words, f"one of {', '.join(PAUSE_MODES)}")
    if mode not in PAUSE_MODES:
        raise BadCommand(f"pause takes one of {', '.join(PAUSE_MODES)}, got {mode!r}")
    return f"t.pause_generation({mode!r})"


def _none(word: str, expression: str) -> Callable[[list[str]], str]:
    def read(words: list[str]) -> str:
        if words:
            raise BadCommand(f"{word} stands alone, got {' '.join(words)!r} behind it")
        return expression

    return read


def _look(what: Show) -> Callable[[list[str]], Look]:
    def read(words: list[str]) -> Look:
        _none(what.value, "")(words)
        return Look(what)

    return read


def _numbered(word: str, verb: str, *, optional: bool = False) -> Callable[[list[str]], VerbCall]:
    def read(words: list[str]) -> VerbCall:
        if optional and not words:
            return VerbCall(f"t.{verb}()")
        return VerbCall(f"t.{verb}({_whole(word, _only(word, words, 'a whole number'))})")

    return read


def _plain(word: str, expression: str) -> Callable[[list[str]], VerbCall]:
    return lambda words: VerbCall(_none(word, expression)(words))


def _disconnect(words: list[str]) -> VerbCall:
    return VerbCall(f"t.disconnect({_rid(_only('disconnect', words, 'a rid'))})")


def _advance(words: list[str]) -> VerbCall:
    return VerbCall(f"t.clock.advance({_seconds('advance', words)})")


def _count(word: str, words: list[str], default: int) -> int:
    return _whole(word, _only(word, words, "a whole number")) if words else default


def _only(word: str, words: list[str], what: str) -> str:
    if len(words) != 1:
        raise BadCommand(f"{word} takes {what}, got {' '.join(words) or 'nothing'}")
    return words[0]


def _whole(word: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as exc:
        raise BadCommand(f"{word} takes a whole number, got {text!r}") from exc


def _seconds(word: str, words: list[str]) -> float:
    text = _only(word, words, "seconds")
    try:
        seconds = float(text)
    except ValueError as exc:
        raise BadCommand(f"{word} takes seconds, got {text!r}") from exc
    if not 0 <= seconds < float("inf"):
        raise BadCommand(f"{word} takes seconds from 0 on, got {text}")
    return seconds


_START_FIELDS: Final[dict[str, type]] = {
    "prompt_len": int,
    "prompt_seed": int,
    "max_new_tokens": int,
    "priority": int,
    "ignore_eos": bool,
    "stream": bool,
}
# What is answered over HTTP: the call is kept under a name.
_CALLS: Final[dict[str, Callable[[list[str]], str]]] = {
    "abort": _abort,
    "flush": _flush,
    "update": _update,
    "pause": _pause,
    "continue": _none("continue", "t.continue_generation()"),
}
_LOOKS: Final[dict[str, Callable[[list[str]], Command]]] = {
    show.value: _look(show) for show in Show if show is not Show.HISTORY
}
_READERS: Final[dict[str, Callable[[list[str]], Command]]] = {
    **_LOOKS,
    "step": _step,
    "disconnect": _disconnect,
    "hold": _plain("hold", "t.hold_results()"),
    "release": _numbered("release", "release_results", optional=True),
    "exhaust_kv": _numbered("exhaust_kv", "exhaust_kv"),
    "exhaust_rows": _numbered("exhaust_rows", "exhaust_rows"),
    "exhaust_locks": _numbered("exhaust_locks", "exhaust_locks"),
    "release_exhausted": _plain("release_exhausted", "t.release_exhausted()"),
    "evict": _numbered("evict", "evict", optional=True),
    "stall": _numbered("stall", "stall_stage"),
    "resume": _numbered("resume", "resume_stage"),
    "fail": _numbered("fail", "fail_next_step"),
    "kill": _numbered("kill", "kill_stage"),
    "advance": _advance,
    "undo": _undo,
    "save": _save,
    "history": _history,
}
