"""How much of vLLM's scheduler the search runs: statements in function bodies, by file, and functions never entered.

`python -m benchmarks.vllm_reach --seconds 60` runs all workloads of the adapter and generated targets, each with
random events, for half of that process time each, and watches the scheduler's own files.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

_FILES: Final = (
    "sched.scheduler",
    "sched.async_scheduler",
    "kv_cache_manager",
    "block_pool",
    "kv_cache_coordinator",
    "single_type_kv_cache_manager",
    "encoder_cache_manager",
)


class Statement(NamedTuple):
    """One in the body of ``function``, from its first line to the last that is its own."""

    function: str
    first: int
    last: int


def statements_in(source: str) -> list[Statement]:
    """All in function bodies, without docstrings."""
    return list(_bodies(ast.parse(source), "", is_function=False))


def _bodies(node: ast.AST, name: str, *, is_function: bool) -> Iterator[Statement]:
    for child in ast.iter_child_nodes(node):
        is_definition = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if isinstance(child, ast.stmt) and is_function and not (is_definition or _is_docstring(child)):
            inner = [one.lineno for one in ast.iter_child_nodes(child) if isinstance(one, ast.stmt)]
            last = min(inner) - 1 if inner else (child.end_lineno or child.lineno)
            yield Statement(name, child.lineno, max(child.lineno, last))
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{name}.{child.name}" if name else child.name
            yield from _bodies(child, inside, is_function=not isinstance(child, ast.ClassDef))
        else:
            yield from _bodies(child, name, is_function=is_function)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class Watch:
    """Notes which lines of these files run, as long as it is open."""

    def __init__(self, files: Iterable[str]) -> None:
        self.lines: dict[str, set[int]] = {file: set() for file in files}
        self._left: dict[CodeType, set[int]] = {}

    def __enter__(self) -> Watch:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self.lines:
            return None
        if code not in self._left:
            self._left[code] = {line for *_, line in code.co_lines() if line is not None} - {code.co_firstlineno}
        # A call of a function whose lines all ran is not looked at.
        return self._step if self._left[code] else None

    def _step(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self.lines[frame.f_code.co_filename].add(frame.f_lineno)
            self._left[frame.f_code].discard(frame.f_lineno)
        return self._step


def report(source: str, lines: set[int]) -> tuple[int, int, list[str]]:
    """Statements that ran, all of them, and the functions of which none did."""
    counted = {}
    for function, statements in itertools.groupby(sorted(statements_in(source)), key=lambda one: one.function):
        found = [any(line in lines for line in range(one.first, one.last + 1)) for one in statements]
        counted[function] = sum(found), len(found)
    reached, every = (sum(column) for column in zip(*counted.values(), strict=True)) if counted else (0, 0)
    return reached, every, [function for function, (ran, _) in counted.items() if not ran]


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, and say what ran; 2 where no vLLM is installed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_reach", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of process time (default: %(default)s)")
    asked = parser.parse_args(arguments)
    if find_spec("vllm") is None:
        sys.stderr.write("no vLLM is installed; `make vllm` makes an environment with one\n")
        return 2
    from scripted.core.named import adapter_named
    from scripted.search.campaign import Campaign
    from scripted.search.strategies import StrategyName
    from scripted.search.units import SearchPlan

    workloads = tuple(adapter_named("vllm").workloads)
    specs = [find_spec(f"vllm.v1.core.{file}") for file in _FILES]
    files = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    schedules = 0
    with Watch(files) as watch:
        for targets in (workloads, ()):
            half, random = asked.seconds / 2, StrategyName.RANDOM
            plan = SearchPlan(targets=targets, strategy=random, cpu_seconds=half, adapter="vllm")
            schedules += Campaign(plan).run().schedules
    total = [0, 0]
    for file in files:
        ran, every, never = report(Path(file).read_text(encoding="utf-8"), watch.lines[file])
        total = [total[0] + ran, total[1] + every]
        sys.stdout.write(f"{Path(file).stem}: {_share(ran, every)}; never entered: {', '.join(never) or 'none'}\n")
    sys.stdout.write(f"all: {_share(*total)}, by {schedules} schedules\n")
    return 0


def _share(ran: int, every: int) -> str:
    return f"{ran} of {every} statements, {ran / max(1, every):.0%}"


if __name__ == "__main__":
    sys.exit(main())
