"""Finds the scheduler's wrong decision: the last branch of a failing run whose reversal makes the run pass.

Traces a run's branches and reverses one of them in the compiled code, for one step of one run. A wrong number or a
wrong object has no such branch.
"""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, NamedTuple, TypeAlias

from scripted.core.edits import codes_in
from scripted.core.protocol import Adapter
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.run import Phase, Run
from scripted.core.schedule import Schedule
from scripted.search.execution import finish

BUDGET_S: Final = 5.0
_RUN_TIMEOUT_S: Final = 1.0
_OPPOSITE: Final = {"TRUE": "FALSE", "FALSE": "TRUE", "NONE": "NOT_NONE", "NOT_NONE": "NONE"}
_BRANCH: Final = re.compile(r"(.*JUMP.*_IF_)(TRUE|FALSE|NOT_NONE|NONE)(_OR_POP)?")


# A step, a code object and one of its lines.
_At: TypeAlias = tuple[int, CodeType, int]


class Branch(NamedTuple):
    """A branch of compiled code: the instruction at ``offset``, and its reverse.

    ``place`` is stable under edits elsewhere: the function, the line, and the position of the branch in the line.
    """

    code: CodeType
    offset: int
    reversed: int
    place: tuple[str, str, int, int]

    def __str__(self) -> str:
        file, function, line, _ = self.place
        return f"{file.rpartition('/')[2]}:{line}, in {function}: {linecache.getline(file, line).strip()}"


class Decisions:
    """The branches that a failing run of a schedule takes, with their steps, last one first.

    Empty if the run does not fail without additions, or if the scheduler's packages are unknown.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._functions = _functions(_packages_of(schedule.adapter))
        self._lines: Mapping[_At, int] = {}
        self._refused = 0
        self._decided: list[tuple[int, Branch]] = []
        passed, lines, refused = _traced(schedule) if self._functions else (True, {}, 0)
        if not passed:
            self._lines, self._refused = lines, refused
            self._decided = _decided(lines)

    def wrong(self, budget_s: float = BUDGET_S) -> Branch | None:
        """Return the last branch whose reversal in its step makes the run pass; None if there is none."""
        until = time.process_time() + budget_s
        for step, branch in self._decided:
            if time.process_time() > until:
                break
            if self._makes_pass(branch, step):
                return branch
        return None

    def needed(self, passing: Iterable[Schedule]) -> frozenset[tuple[str, int]]:
        """Return the lines, with their functions, that the run executes and one of these passing runs does not."""
        needed: set[tuple[str, int]] = set()
        here = _places(self._lines)
        for schedule in passing:
            passed, lines, _ = _traced(schedule)
            if passed:
                needed |= here - _places(lines)
        return frozenset(needed)

    def _makes_pass(self, branch: Branch, step: int) -> bool:
        """Return whether the run passes without refusing more requests, since a refused request breaks no promise."""
        function = self._functions.get(branch.code)
        if function is None:
            return False
        healthy = function.__code__
        reversed_code = _reversed(healthy, branch)
        run: Run | None = None

        def watch(now: Run) -> None:
            nonlocal run
            run = now
            function.__code__ = reversed_code if now.step + 1 == step else healthy

        try:
            passed = _passes(self._schedule, watch, _RUN_TIMEOUT_S)
        finally:
            function.__code__ = healthy
        return passed and run is not None and _refused(run) <= self._refused


def _refused(run: Run) -> int:
    return sum(life.end == "refused" for life in run.oracle.account.lives)


def _traced(schedule: Schedule) -> tuple[bool, Mapping[_At, int], int]:
    """Run a schedule; return whether it passes, the order of the scheduler's last executed lines by step, and refusals.

    Leaves out lines that run while a step is judged.
    """
    packages, count = _packages_of(schedule.adapter), 0
    run: Run | None = None
    last: dict[_At, int] = {}

    def on_line(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        nonlocal count
        if event == "line" and run is not None and run.phase is not Phase.ORACLE:
            count += 1
            # The step counter lags until a step is composed.
            last[run.step + (run.phase is Phase.HARNESS), frame.f_code, frame.f_lineno] = count
        return on_line

    def on_call(frame: FrameType, _event: str, _arg: Any) -> Callable[..., Any] | None:
        return on_line if frame.f_globals.get("__name__", "").partition(".")[0] in packages else None

    def watch(now: Run) -> None:
        nonlocal run
        run = now

    tracer = sys.gettrace()
    sys.settrace(on_call)
    try:
        passed = _passes(schedule, watch)
    finally:
        sys.settrace(tracer)
    return passed, last, 0 if run is None else _refused(run)


def _decided(lines: Mapping[_At, int]) -> list[tuple[int, Branch]]:
    branches: dict[CodeType, list[Branch]] = {}
    found = []
    for (step, code, line), turn in lines.items():
        if code not in branches:
            branches[code] = list(_branches(code))
        found += [(turn, step, one) for one in branches[code] if one.place[2] == line]
    return [(step, one) for _, step, one in sorted(found, key=lambda each: -each[0])]


def _places(lines: Iterable[_At]) -> set[tuple[str, int]]:
    return {(code.co_qualname, line) for _, code, line in lines}


def _passes(schedule: Schedule, watch: Callable[[Run], None], timeout_s: float | None = None) -> bool:
    """Return whether a watched run passes; False if it cannot be judged."""
    try:
        return finish(Run(schedule, watch=watch), timeout_s=timeout_s).failure is None
    except (HarnessError, ScriptDefinitionError, ValueError):
        return False


def _branches(code: CodeType) -> Iterator[Branch]:
    of_line = Counter[int]()
    for one in dis.get_instructions(code):
        line = one.positions.lineno if one.positions is not None else None
        found = _BRANCH.fullmatch(one.opname)
        if found is None or line is None:
            continue
        of_line[line] += 1
        other = dis.opmap[f"{found[1]}{_OPPOSITE[found[2]]}{found[3] or ''}"]
        yield Branch(code, one.offset, other, (code.co_filename, code.co_qualname, line, of_line[line]))


def _reversed(outer: CodeType, branch: Branch) -> CodeType:
    """Return the code of a function with a branch reversed, in it or in a nested function."""
    if outer is branch.code:
        instructions = bytearray(outer.co_code)
        instructions[branch.offset] = branch.reversed
        return outer.replace(co_code=bytes(instructions))
    inner = (_reversed(one, branch) if isinstance(one, CodeType) else one for one in outer.co_consts)
    return outer.replace(co_consts=tuple(inner))


def _packages_of(adapter: Adapter) -> frozenset[str]:
    """Return the scheduler's packages; for an adapter file that states none, the modules in its folder."""
    file = Path(adapter.name)
    if adapter.packages or file.suffix != ".py":
        return frozenset(adapter.packages)
    # Thousands of modules are imported, and each failure asks: building a Path for each would dominate.
    place = str(file.resolve())
    folder = place.rpartition(os.sep)[0]
    files = [(name, getattr(module, "__file__", None) or "") for name, module in list(sys.modules.items())]
    return frozenset(name for name, other in files if other != place and other.rpartition(os.sep)[0] == folder)


def _functions(packages: Collection[str]) -> Mapping[CodeType, FunctionType]:
    """Return the functions of these packages by code object."""
    found: dict[CodeType, FunctionType] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in packages:
            continue
        for value in list(vars(module).values()):
            members = list(vars(value).values()) if isinstance(value, type) and value.__module__ == name else [value]
            for function in filter(None, map(_function_of, members)):
                if function.__module__ == name:
                    found.update(dict.fromkeys(codes_in(function.__code__), function))
    return found


def _function_of(member: object) -> FunctionType | None:
    """Return the function that a method, a property or a decorator wraps."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, functools.cached_property):
        member = member.func
    elif isinstance(member, staticmethod | classmethod):
        member = member.__func__
    # Read without the object's own __getattr__, which raises in vLLM's stand-ins for absent libraries.
    while callable(member):
        inner = inspect.getattr_static(member, "__wrapped__", None)
        if inner is None or inner is member:
            break
        member = inner
    return member if isinstance(member, FunctionType) else None
