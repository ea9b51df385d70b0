"""Writes a finding as one pytest file of the scheduler's own classes: its machine's calls, and the fault.

The file imports nothing from this project. An adapter describes its engine (``Standalone``); the calls are recorded
while the schedule runs, and the file is run by itself before it is kept.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import os
import re
import sys
import tempfile
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Generic, NamedTuple

import msgspec
from typing_extensions import TypeVar

from scripted.core.errors import Overdue
from scripted.core.installed import harness_packages
from scripted.core.phrases import text_of as words_of
from scripted.core.protocol import WrittenTest
from scripted.core.run import WAITING_LIMIT, Run
from scripted.core.schedule import Schedule
from scripted.core.verb import variable_of
from scripted.core.violation import Violation
from scripted.script.bounded_command import run_bounded
from scripted.script.watchdog import watchdog
from scripted.sdk.messages import SdkMachine
from scripted.search.execution import OVERDUE, RUN_TIMEOUT_S

_INDENT: Final = "    "
_WIDTH: Final = 110
# The texts of faults in which a request never begins or never ends.
_WAITS: Final = r"\bwaits?\b|has dropped|says again|asked for another step"
_PASSED: Final = "passed over"
_LIMIT_S: Final = 300
# More empty launches than this change nothing.
_EMPTY_LAUNCHES: Final = 20
_MORE_LAUNCHES: Final = 3
_PACKAGES: Final = (*sorted(harness_packages()), "engine")
# Runs a file where none of these packages can be imported.
_ALONE: Final = (
    f"import sys; sys.modules.update(dict.fromkeys({_PACKAGES!r})); import pytest; "
    "sys.exit(pytest.main([sys.argv[1], '-q', '-p', 'no:cacheprovider', '-c', sys.argv[2], '--rootdir', sys.argv[3]]))"
)


_SettingsT = TypeVar("_SettingsT", bound=msgspec.Struct, default=Any)
_MachineT = TypeVar("_MachineT", bound=SdkMachine, default=Any)


class Standalone(ABC, Generic[_SettingsT, _MachineT]):
    """An adapter's description of its engine. ``engine`` is the name and version that a file is for.

    ``launch`` is the method that plans a batch, ``update`` the method that returns replies to clients.
    """

    launch = "schedule"
    update = "update_from_output"
    # Statements before the imports of a file, and before its trial run (for imports that the run never uses).
    first: Sequence[str] = ()
    prepare = ""
    # The command that writes schedules which this form cannot express.
    instead: Standalone | None = None

    @property
    @abstractmethod
    def engine(self) -> str: ...

    @abstractmethod
    def modules(self, config: _SettingsT) -> Sequence[ModuleType]:
        """The adapter's modules whose text is copied. They import no other modules of this project."""

    # Functions that a file needs, as far as this engine allows them: ``launches(plan)`` and ``moves(plan)``, launching
    # or not; ``positions_of(plan, request_id)``; ``said_of(outputs, request_id)``.
    helpers: Sequence[Callable[..., object]] = ()

    @abstractmethod
    def opening(self, config: _SettingsT) -> Sequence[str]:
        """Return the statements that make the engine from ``settings``."""

    @abstractmethod
    def watched(self, machine: _MachineT) -> Mapping[str, tuple[object, Sequence[str]]]:
        """Return the engine's objects by their expressions in the file, with the methods that the machine calls."""

    @abstractmethod
    def spelled(self, value: object, calls: Calls, arguments: Sequence[object]) -> str | None:
        """Return an argument as an expression; None for one with a literal form. Rids are noted in ``calls``."""

    def must_hold(self, machine: _MachineT, calls: Calls, said: str) -> str:
        """Return an assertion for the file that fails after these calls; empty if the fault has none.

        ``said`` is the text of the fault.
        """
        del machine, calls, said
        return ""

    def ending(self, calls: Calls) -> Sequence[str]:
        """Return the statements after the last call, which raises an error; they may run the calls before them."""
        del calls
        return ()

    def written(self, called: str, given: Sequence[str]) -> str:
        """Return a call in the form it takes in the file."""
        return _call(called, given)

    @abstractmethod
    def remark(self, plan: Any) -> str:
        """Return a remark on a plan for the reader."""


class Calls:
    """Records the calls that a machine makes to its engine's methods, as statements; nested calls are the engine's own.

    ``names`` are the engine's names of requests by rid.
    """

    def __init__(self, standalone: Standalone) -> None:
        self.lines: list[str] = []
        self.names: dict[str, str] = {}
        # The output of each request when it runs alone, by rid.
        self.outputs: dict[str, Sequence[int]] = {}
        # Results by name, in order, with their line numbers. Keeping them alive keeps their ids unique.
        self.results: dict[str, tuple[object, str, int]] = {}
        self._standalone = standalone
        self._known: dict[int, str] = {}
        self._inside = False
        # Of the enumerations whose members are arguments.
        self.imports: list[ast.ImportFrom] = []

    @contextlib.contextmanager
    def noted(self, machine: SdkMachine) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for expression, (target, methods) in self._standalone.watched(machine).items():
                for method in methods:
                    stack.enter_context(self._one(type(target), method, f"{expression}.{method}"))
            yield

    @contextlib.contextmanager
    def _one(self, kind: type, method: str, called: str) -> Iterator[None]:
        own, original = method in vars(kind), getattr(kind, method)

        @functools.wraps(original)
        def call(target: object, *args: object, **kwargs: object) -> object:
            if self._inside:
                return original(target, *args, **kwargs)
            self._inside = True
            try:
                given = [self.spell(value, args) for value in args]
                given += [f"{name}={self.spell(value, args)}" for name, value in kwargs.items()]
                name = f"{variable_of(method)}_{1 + sum(one[1] == method for one in self.results.values())}"
                self.lines.append(f"{name} = {self._standalone.written(called, given)}")
                result = original(target, *args, **kwargs)
            finally:
                self._inside = False
            self.results[name] = result, method, len(self.lines)
            self._known[id(result)] = name
            if method == self._standalone.launch:
                self.lines[-1] += f"  # {self._standalone.remark(result)}"
            return result

        setattr(kind, method, call)
        try:
            yield
        finally:
            if own:
                setattr(kind, method, original)
            else:
                delattr(kind, method)

    def spell(self, value: object, arguments: Sequence[object] = ()) -> str:
        """Return an expression that makes this value. Raises NotImplementedError if it has none."""
        if isinstance(value, (bool, int, float, str, bytes, type(None))) and not isinstance(value, Enum):
            return repr(value)
        if id(value) in self._known:
            return self._known[id(value)]
        spelled = self._standalone.spelled(value, self, arguments)
        if spelled is not None:
            return spelled
        match value:
            case Enum():
                kind = type(value)
                self.imports.append(ast.ImportFrom(kind.__module__, [ast.alias(kind.__name__)], 0))
                return f"{kind.__name__}.{value.name}"
            case list():
                return f"[{', '.join(self.spell(one) for one in value)}]"
            case tuple():
                return f"({''.join(self.spell(one) + ', ' for one in value).strip()})"
            case set():
                return f"{{{', '.join(sorted(self.spell(one) for one in value))}}}" if value else "set()"
            case dict():
                return f"{{{', '.join(f'{self.spell(name)}: {self.spell(one)}' for name, one in value.items())}}}"
        raise NotImplementedError(f"a call has an argument that cannot be written down: {type(value).__name__}")

    def launch_again(self, machine: SdkMachine) -> None:
        """Launch a few more times with no call in between: a waiting request may begin in any of these launches."""
        launch = self._standalone.launch
        target = next(one for one, methods in self._standalone.watched(machine).values() if launch in methods)
        with self.noted(machine):
            for _ in range(_MORE_LAUNCHES):
                getattr(target, launch)()

    def named(self, method: str) -> list[str]:
        return [name for name, one in self.results.items() if one[1] == method]


def write_standalone(standalone: Standalone, schedules: Sequence[Schedule], *, name: str) -> WrittenTest:
    """Write the first of these schedules whose file fails without this project as the schedule failed here."""
    refused: list[str] = []
    for schedule in schedules:
        text, why = text_of(standalone, schedule, name)
        if text is not None:
            why = what_is_wrong(text, why, prepare=standalone.prepare)
        if text is not None and why is None:
            return WrittenTest(text, (*refused, f"it fails on {standalone.engine}, where nothing else is imported"))
        refused.append(f"not kept: a test of the scheduler's own classes: {why}")
    return WrittenTest(None, tuple(refused))


def text_of(standalone: Standalone, schedule: Schedule, name: str) -> tuple[str | None, str | None]:
    """Return the file with its expected failure, or the reason why there is none."""
    text, why = _text_of(standalone, schedule, name)
    if text is None and standalone.instead is not None:
        return text_of(standalone.instead, schedule, name)
    return text, why


def _text_of(standalone: Standalone, schedule: Schedule, name: str) -> tuple[str | None, str | None]:
    calls = Calls(standalone)
    events: dict[int, list[str]] = {}
    for placed in schedule.placed:
        events.setdefault(placed.step, []).append(str(placed).partition(" ")[2])

    def mark(run: Run) -> None:
        if calls.lines and calls.lines[-1].startswith("# step"):
            del calls.lines[-1]
        calls.lines.append(f"# step {run.step + 1}{''.join(f'; {text}' for text in events.get(run.step + 1, ()))}")

    adapter = schedule.adapter
    run = Run(schedule, watch=mark)
    try:
        with calls.noted(run.machine), watchdog(RUN_TIMEOUT_S, OVERDUE, is_busy=True):
            adapter.drive(run)
    except NotImplementedError as exc:
        return None, str(exc)
    except Overdue as exc:
        return None, f"it {words_of(exc)}, so the test would not end either"
    except Exception as exc:  # noqa: BLE001 - its type decides what the file asserts
        try:
            asserted = _asserted(standalone, run, exc, calls)
        except NotImplementedError as wrong:
            return None, str(wrong)
        expected = "AssertionError: " if isinstance(exc, Violation) else type(exc).__name__
        why = f"{type(exc).__name__}: {words_of(exc)}"
        return _file(standalone, run.machine, schedule, calls, asserted, name, why), expected
    return None, "the schedule does not fail"


# -- the fault as an assertion --


def _asserted(standalone: Standalone, run: Run, exc: Exception, calls: Calls) -> list[str]:
    """Return the statements that fail. Raises NotImplementedError for a fault that no call or plan shows."""
    if not isinstance(exc, Violation):
        return [*standalone.ending(calls), f"# The last call raises {type(exc).__name__}."]
    said, plans = words_of(exc), calls.named(standalone.launch)
    helpers = {one.__name__: one for one in standalone.helpers}
    messages = [life.message for life in run.oracle.account.lives]
    calls.outputs = {one.rid: one.alone(one.max_new_tokens) for one in messages}
    rule = standalone.must_hold(run.machine, calls, said)
    if rule:
        return _assert(rule, said)
    if "positions_of" in helpers and (exc.bounds is not None or exc.left_out):
        return _positions(standalone, exc, calls)
    for life in run.oracle.account.lives:
        message = life.message
        alone = list(message.alone(message.max_new_tokens))
        if life.said != alone[: len(life.said)] and "said_of" in helpers:
            heard = f"said = said_of([{', '.join(calls.named(standalone.update))}], {calls.names[message.rid]!r})"
            return [heard, *_assert(f"said == {alone}[: len(said)]", said)]
    waiting = ", ".join(calls.names[rid] for rid in run.oracle.account.live) if re.search(_WAITS, said) else ""
    if waiting:
        calls.launch_again(run.machine)
        plans = calls.named(standalone.launch)
    for sign in ("moves", "launches"):
        there = [sign in helpers and bool(helpers[sign](calls.results[one][0])) for one in plans]
        empty = plans[max((at + 1 for at, is_there in enumerate(there) if is_there), default=0) :]
        if waiting and sign in helpers and len(empty) > 1:
            if len(empty) > _EMPTY_LAUNCHES:
                # Further ones repeat the same fault.
                empty = empty[:_EMPTY_LAUNCHES]
                del calls.lines[calls.results[empty[-1]][2] :]
            return [
                *_listed("plans", empty),
                *_assert(f"any(map({sign}, plans))", f"{waiting} waits, and all of these plans are empty"),
            ]
    raise NotImplementedError(f"what is wrong is not seen in a call or a plan: {words_of(exc)}")


def _positions(standalone: Standalone, exc: Violation, calls: Calls) -> list[str]:
    """Return assertions about the positions in plans: wrong positions, or requests that got none."""
    said, plans = words_of(exc), calls.named(standalone.launch)
    if exc.bounds is not None:
        rid, first, end, last = exc.bounds
        rules = [] if first is None else [f"positions[0] <= {first}"]
        rules += [] if end is None else [f"positions[-1] < {end}"]
        rules += [] if last is None else [f"positions[-1] == {last}"]
        positions = f"positions = positions_of({plans[-1]}, {calls.names[rid]!r})"
        return [positions, *_assert(f"not positions or ({' and '.join(rules)})", said)]
    launches = next((one for one in standalone.helpers if one.__name__ == "launches"), None)
    launched = [one for one in plans if launches is None or launches(calls.results[one][0])]
    names = [calls.names[rid] for rid in exc.left_out]
    rule = f"any(positions_of(plan, name) for plan in plans for name in {names})"
    return [*_listed("plans", launched[-WAITING_LIMIT:]), *_assert(rule, said)]


def _listed(name: str, values: Sequence[str]) -> list[str]:
    return textwrap.wrap(f"{name} = [{', '.join(values)}]", _WIDTH, subsequent_indent=_INDENT)


def _assert(rule: str, said: str) -> list[str]:
    lines = [repr(line) for line in textwrap.wrap(said, _WIDTH - 10, drop_whitespace=False)]
    return [f"assert {rule}, (", *(_INDENT + line for line in lines), ")"]


# -- the file --


def _file(
    standalone: Standalone,
    machine: SdkMachine,
    schedule: Schedule,
    calls: Calls,
    asserted: Sequence[str],
    name: str,
    why: str,
) -> str:
    config = schedule.config
    imports, parts = _sources(standalone.modules(config), config)
    # A call in the file has the names that the machine or the adapter gives it.
    imports += _sources([sys.modules[type(one).__module__] for one in (machine, standalone)], config)[0]
    imports += calls.imports
    parts += [_Part({one.__name__}, ["", *inspect.getsource(one).split("\n")]) for one in standalone.helpers]
    statements = "\n".join([*standalone.opening(config), *calls.lines, *asserted])
    for result in calls.results:
        if not re.search(rf"\b{result}\b(?! =)", statements):
            statements = statements.replace(f"{result} = ", "")
    bodies = _needed(parts, statements)
    written = "\n".join([*bodies, statements])
    fields = [one for one in dir(config) if re.search(rf"settings\.{one}\b", written)]
    settings = ", ".join(f"{one}={getattr(config, one)!r}" for one in fields)
    body = [
        "values = dict(",
        *(_INDENT + line for line in textwrap.wrap(settings, _WIDTH)),
        ")",
        'settings = namedtuple("Settings", values)(**values)',
        *statements.split("\n"),
    ]
    goal = textwrap.wrap(f"It fails: {why}".replace("\\", "/").replace('"', "'"), _WIDTH)
    shown = textwrap.wrap(str(schedule), _WIDTH)
    head = [f'"""Found by search in {standalone.engine}; nothing else is needed.', "", *goal, ""]
    head += [*(_INDENT + line for line in shown), '"""', "", "from __future__ import annotations", ""]
    text = [*head, *standalone.first, *_used(imports, written), "", *bodies]
    text += ["", f"def test_{variable_of(name)}() -> None:", *(_INDENT + line for line in body), ""]
    return "\n".join(text)


class _Part(NamedTuple):
    """A definition of a module: the names that it binds, and its lines."""

    names: set[str]
    lines: list[str]


def _needed(parts: Sequence[_Part], statements: str) -> list[str]:
    """Return the lines of the parts that these statements use, directly or through one another."""
    text, left, used = statements, list(parts), set[int]()
    while found := [one for one in left if any(re.search(rf"\b{name}\b", text) for name in one.names)]:
        used |= set(map(id, found))
        left = [one for one in left if id(one) not in used]
        text = "\n".join(line for one in found for line in one.lines)
    return [line for one in parts if id(one) in used for line in one.lines]


def _sources(modules: Sequence[ModuleType], config: object) -> tuple[list[ast.Import | ast.ImportFrom], list[_Part]]:
    """Return these modules' imports and their parts, without the lines that this configuration doesn't use."""
    imports: list[ast.Import | ast.ImportFrom] = []
    parts: list[_Part] = []
    for module in modules:
        source = inspect.getsource(module)
        lines, tree = source.split("\n"), ast.parse(source)
        for node in ast.walk(tree):
            setting = re.fullmatch(r"settings\.(\w+)", ast.unparse(node.test)) if isinstance(node, ast.If) else None
            if isinstance(node, ast.If) and setting is not None and not getattr(config, setting[1]):
                assert node.end_lineno is not None
                lines[node.lineno - 1 : node.end_lineno] = [_PASSED] * (node.end_lineno - node.lineno + 1)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imports.append(node)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign):
                first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
                while lines[first - 2].startswith("#"):
                    first -= 1
                # One or two blank lines between them, as in the source.
                kept = [line for line in lines[first - 1 : node.end_lineno] if line is not _PASSED]
                parts.append(_Part(_names_of(node), ["", *kept, ""]))
    return imports, parts


def _names_of(node: ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign) -> set[str]:
    """Return the names that a statement of a module binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}


def _used(imports: Sequence[ast.Import | ast.ImportFrom], text: str) -> list[str]:
    """Return the imports from outside the adapter that this text needs, each module once."""
    found: dict[str, set[str]] = {"collections": {"namedtuple"}}
    plain = set()
    for node in imports:
        names = {ast.unparse(one) for one in node.names}
        names = {one for one in names if re.search(rf"\b{one.split()[-1].partition('.')[0]}\b", text)}
        if isinstance(node, ast.Import):
            plain |= {f"import {one}" for one in names}
        elif names and node.module and node.module.partition(".")[0] not in (*_PACKAGES, "__future__"):
            found.setdefault(node.module, set()).update(names)
    lines = {f"from {module} import {', '.join(sorted(names))}" for module, names in found.items()} | plain
    own = sorted(line for line in lines if line.split()[1].partition(".")[0] in sys.stdlib_module_names)
    return [*own, "", *sorted(lines.difference(own))]


def _call(called: str, given: Sequence[str]) -> str:
    """Format a call with its arguments, over several lines if it is long."""
    line = f"{called}({', '.join(given)})"
    if len(line) <= _WIDTH - 20:
        return line
    wrapped = [part for one in given for part in textwrap.wrap(f"{one},", _WIDTH, subsequent_indent=_INDENT)]
    return "\n".join([f"{called}(", *(_INDENT + part for part in wrapped), ")"])


def what_is_wrong(text: str, expected: str | None, python: str = sys.executable, *, prepare: str = "") -> str | None:
    """Return why a file does not fail as expected without this project; None if it does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_standalone.py"
        path.write_text(text, encoding="utf-8")
        status, said = run_alone(path, python, prepare=prepare)
    return why_not_red(status, said, expected)


def why_not_red(status: int, said: str, expected: str | None) -> str | None:
    """Return why pytest's status and output are not of one test that fails as expected; None if they are."""
    errors = [line for line in said.splitlines() if line.startswith("E ")]
    if status == 1 and "1 failed" in said and errors and str(expected) in errors[0]:
        return None
    return f"it does not fail with {expected} by itself: {said.strip()[-600:]}"


def run_alone(path: Path, python: str, *, prepare: str = "") -> tuple[int, str]:
    """Run the tests of a file without this project; return the exit status and the output."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "pytest.ini"
        settings.write_text("[pytest]\n", encoding="utf-8")
        ended = run_bounded(
            [python, "-c", f"{prepare}\n{_ALONE}", str(path), str(settings), folder],
            _LIMIT_S,
            environment={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            folder=Path(folder),
        )
    return ended.returncode, (ended.stdout + ended.stderr).decode("utf-8", "replace")
