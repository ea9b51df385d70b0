"""Measures which statements of another engine's scheduler the search runs, and why the others do not run.

`python -m benchmarks.vllm_reach --adapter vllm --seconds 60` runs all workloads of the engine's adapters and generated
targets, each with random events and for the same part of that process time, and watches the scheduler's own files. The
reasons come from `benchmarks/vllm_reach.toml` or `sglang_reach.toml`; `--markdown FILE` writes the table.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

_VLLM: Final = (
    "sched.scheduler",
    "sched.async_scheduler",
    "kv_cache_manager",
    "block_pool",
    "kv_cache_coordinator",
    "single_type_kv_cache_manager",
    "encoder_cache_manager",
)
_SGLANG: Final = (
    *("managers.scheduler", "managers.schedule_policy", "managers.schedule_batch", "mem_cache.common"),
    *("managers.scheduler_components.batch_result_processor", "managers.scheduler_components.output_streamer"),
    *("mem_cache.unified_radix_cache", "disaggregation.prefill", "disaggregation.decode", "disaggregation.utils"),
    *("disaggregation.decode_schedule_batch_mixin", "disaggregation.common.conn", "disaggregation.mooncake.conn"),
    *("managers.cache_controller", "mem_cache.hybrid_cache.hybrid_cache_controller", "mem_cache.buffer_mode.pipeline"),
    *("mem_cache.unified_cache.unified_tree_core", "mem_cache.unified_cache.components.full", "mem_cache.l2_transfer"),
    *("mem_cache.pool_host.base", "mem_cache.pool_host.group", "mem_cache.storage_prefetch"),
)


class Engine(NamedTuple):
    """An engine to watch: our ``adapters`` that run it, its ``package``, and the watched files there."""

    adapters: tuple[str, ...]
    package: str
    files: tuple[str, ...]


_ENGINES: Final = {
    "vllm": Engine(("vllm",), "vllm.v1.core", _VLLM),
    "sglang": Engine(("sglang", "sglang-fleet"), "sglang.srt", _SGLANG),
}
_WIDTH: Final = 100
# For a reason with more functions the page lists files.
_MOST_FUNCTIONS: Final = 20
_NO_REASON: Final = "(no reason is known)"


class Statement(NamedTuple):
    """A statement in the body of ``function``, from its first line to the last one without nested statements."""

    function: str
    first: int
    last: int


class Left(NamedTuple):
    """Statements of one function that did not run, for one reason."""

    file: str
    function: str
    lines: tuple[int, ...]
    why: str


def statements_in(source: str) -> list[Statement]:
    """Return all statements in function bodies, without docstrings."""
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
    """Notes which lines of these files run while it is open."""

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
        # Calls of a function whose lines have all run are no longer watched.
        return self._step if self._left[code] else None

    def _step(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self.lines[frame.f_code.co_filename].add(frame.f_lineno)
            self._left[frame.f_code].discard(frame.f_lineno)
        return self._step


def report(file: str, source: str, lines: set[int], reasons: Mapping[str, str]) -> tuple[int, int, list[Left]]:
    """Return the number of statements that ran, of all statements, and the rest by function and reason.

    A statement has the first reason with a pattern found in its ``file.function: text``; the text begins with the
    statement's enclosing conditions.
    """
    statements = statements_in(source)
    missed = [one for one in statements if not any(line in lines for line in range(one.first, one.last + 1))]
    left: dict[tuple[str, str], list[int]] = {}
    for one in missed:
        text = f"{file}.{one.function}: {_text_of(one, source.splitlines())}"
        why = next((why for pattern, why in reasons.items() if re.search(pattern, text)), _NO_REASON)
        left.setdefault((one.function, why), []).append(one.first)
    ordered = [Left(file, function, tuple(firsts), why) for (function, why), firsts in left.items()]
    return len(statements) - len(missed), len(statements), ordered


def _text_of(statement: Statement, lines: Sequence[str]) -> str:
    """Return its first line, after the first lines of its enclosing statements."""
    line = lines[statement.first - 1]
    before: list[str] = []
    depth, is_open, closed = _depth(line), False, 0
    for above in reversed(lines[: statement.first - 1]):
        if not above.strip():
            continue
        # A condition over several lines ends with its bracket.
        if is_open or _depth(above) < depth:
            if not is_open:
                closed = len(before)
            is_open = above.lstrip().startswith(")") or (is_open and _depth(above) > depth)
            depth = min(depth, _depth(above))
            before.append(above.strip())
            if above.lstrip().startswith(("def ", "class ")):
                # A function's parameters are not conditions.
                before[closed:-1] = []
                break
    return " ".join([*reversed(before), line.strip()])


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def reasons(engine: str) -> dict[str, str]:
    """Return the reasons for statements that do not run, by pattern, in the file's order."""
    file = Path(__file__).with_name(f"{engine}_reach.toml")
    classes = tomllib.loads(file.read_text(encoding="utf-8"))["class"]
    return {pattern: one["why"] for one in classes for pattern in one["found_in"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Search and report what ran; 2 if the engine is not installed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_reach", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of process time (default: %(default)s)")
    parser.add_argument("--adapter", choices=_ENGINES, default="vllm", help="and its fleets (default: %(default)s)")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    asked = parser.parse_args(arguments)
    engine = _ENGINES[asked.adapter]
    if find_spec(asked.adapter) is None:
        sys.stderr.write(f"no {asked.adapter} is installed; `make {asked.adapter}` makes an environment with one\n")
        return 2
    from scripted.core.adapters import adapter_named
    from scripted.sdk.adapter import SchedulerAdapter

    # It makes stubs for absent modules that are never called.
    adapter = adapter_named(asked.adapter)
    assert isinstance(adapter, SchedulerAdapter), f"{adapter.name} is driven by no adapter of the SDK"
    assert adapter.standalone is not None, f"{adapter.name} writes no tests of its engine's classes alone"
    installed = adapter.standalone.engine
    specs = [find_spec(f"{engine.package}.{file}") for file in engine.files]
    files = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    with Watch(files) as watch:
        schedules = _search(engine.adapters, asked.seconds)
    rows, left = [], []
    for name, file in zip(engine.files, files, strict=True):
        stem = name.split(".", 1)[-1].removeprefix("scheduler_components.")
        ran, every, missed = report(
            stem, Path(file).read_text(encoding="utf-8"), watch.lines[file], reasons(asked.adapter)
        )
        rows.append((stem, ran, every))
        left += missed
    command = f"`python -m benchmarks.vllm_reach --adapter {asked.adapter} --seconds {asked.seconds:g}`"
    text = markdown(rows, left, command, schedules, installed)
    sys.stdout.write(text)
    if asked.markdown is not None:
        asked.markdown.write_text(text, encoding="utf-8")
    return 0


def _search(adapters: Sequence[str], seconds: float) -> int:
    """Run workloads and generated targets of each adapter; return the number of schedules."""
    from scripted.core.adapters import adapter_named
    from scripted.search.campaign import Campaign
    from scripted.search.strategies import StrategyName
    from scripted.search.units import SearchPlan

    schedules, part = 0, seconds / len(adapters) / 2
    for adapter in adapters:
        for targets in (tuple(adapter_named(adapter).workloads), ()):
            plan = SearchPlan(targets=targets, strategy=StrategyName.RANDOM, cpu_seconds=part, adapter=adapter)
            schedules += Campaign(plan).run().schedules
    return schedules


def markdown(
    rows: Sequence[tuple[str, int, int]], left: Sequence[Left], command: str, schedules: int, engine: str
) -> str:
    """Format the page: files with their shares, then the rest by reason and function. ``engine`` has its version."""
    lines = [
        f"# How much of {engine.partition(' ')[0]}'s scheduler the search runs\n",
        *textwrap.wrap(
            f"{command} on {engine}: all workloads and generated targets, with random events, {schedules:,} schedules. "
            "Statements in function bodies.",
            _WIDTH,
        ),
        "",
        *_rows(rows),
        "\n## What is left, and why\n",
        "By reason, then by function or file with the number of its statements that did not run.",
    ]
    for why in dict.fromkeys(one.why for one in sorted(left, key=lambda one: one.why)):
        ours = [one for one in left if one.why == why]
        lines += ["", *textwrap.wrap(f"**{sum(len(one.lines) for one in ours)}: {why}**", _WIDTH), ""]
        if len(ours) <= _MOST_FUNCTIONS:
            lines += [f"- `{one.file}`: `{one.function}` {len(one.lines)}" for one in ours]
            continue
        for file in dict.fromkeys(one.file for one in ours):
            here = [len(one.lines) for one in ours if one.file == file]
            lines.append(f"- `{file}`: {sum(here)} in {len(here)} function{'s' * (len(here) > 1)}")
    return "\n".join(lines) + "\n"


def _rows(rows: Sequence[tuple[str, int, int]]) -> list[str]:
    total = ("all", sum(ran for _, ran, _ in rows), sum(every for *_, every in rows))
    return [
        "| file | reached | of | |",
        "| --- | ---: | ---: | ---: |",
        *[f"| `{name}` | {ran:,} | {every:,} | {ran / max(1, every):.0%} |" for name, ran, every in (*rows, total)],
    ]


if __name__ == "__main__":
    sys.exit(main())
