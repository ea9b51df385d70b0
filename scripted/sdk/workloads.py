"""Base workloads for any scheduler of the usual shape, sized by its limits.

Each has one situation that is easy to get wrong. Workloads for a scheduler's special features go to its
``SchedulerAdapter``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from scripted.sdk.capabilities import Capabilities, Limits

_SHARED: Final = re.compile(r"[A-Z][A-Z0-9-]*")


def read_workloads(file: Path, prefix: str = "") -> tuple[dict[str, str], dict[str, str]]:
    """Read the schedules in a file; names in capitals are settings or clauses that several schedules share."""
    texts: dict[str, str] = {}
    shared: dict[str, str] = {}
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    for line in "\n".join(lines).replace("\n    ", " ").splitlines():
        name, _, text = line.partition(": ")
        table = shared if name.isupper() else texts
        name = name if name.isupper() else f"{prefix}{name}"
        assert name not in table, f"{file.name} has two workloads called {name}"
        table[name] = _SHARED.sub(lambda word: shared.get(word[0], word[0]), text)
    return texts, shared


def workloads_of(limits: Limits, can: Capabilities) -> Mapping[str, str]:
    """Make the workloads by name, as text for the default configuration."""
    size, pool, budget = limits.block_size, limits.pool_tokens, limits.batch_tokens
    most = min(pool, limits.context_tokens) - 3
    long = max(1, min(most, 2 * budget + size // 2 + 1 if can.chunked else budget))
    made: dict[str, Iterable[str]] = {
        "alone": (_start("a", long, new=3),),
        **_prefixes(size),
        "beside-decodes": (
            _start("a", size, new=8),
            _start("b", size, seed=1, new=8),
            _start("c", long, seed=2, step=4),
        ),
        "many": [_start(f"r{i}", max(1, size - 1 + i % 3), seed=i, new=1 + i % 4, step=1 + i // 2) for i in range(6)],
        "late-results": (
            _start("a", size + 1, new=3),
            "2 hold",
            _start("b", size + 1, step=3),
            "8 release count=1",
            "10 release",
        ),
        # Each name is a prefix of the next: an action on one request must not hit another.
        "prefixed-names": (
            _start("a", size + 1, new=6),
            _start("ab", size + 1, seed=1, new=6),
            _start("abc", size, seed=2, new=4, step=2),
        ),
        "stops": [_start(f"s{i}", size, seed=i, new=6, stop=33 + 20 * i) for i in range(5)],
        **_aborts(size, long),
        **_without_room(limits, can, most, long),
    }
    if can.pause_modes:
        pause = f"3 pause mode={can.pause_modes[0].name}"
        made["paused"] = (_start("a", long, new=3), _start("b", size, seed=1, new=4, step=2), pause, "9 continue")
    return {name: "; ".join(["default", *clauses]) for name, clauses in made.items()}


def _prefixes(size: int) -> dict[str, Iterable[str]]:
    """Prompts that share cached tokens: all of them, full blocks, parts of a block."""
    return {
        # Equal prompts of full blocks: a fully cached prompt must still compute one token.
        "twins": (_start("a", 2 * size), _start("b", 2 * size, step=2), _start("c", 2 * size, new=3, step=8)),
        "warm-prefix": (_start("warm", 2 * size + 1, new=1), _start("a", 3 * size + 1, step=12)),
        "branches": (
            _start("a", 3 * size + 1, new=1),
            _start("b", 3 * size + 1, step=6, shared=2 * size, tail=1),
            _start("c", 3 * size + 1, step=8, shared=size + 1, tail=2),
            _start("d", 3 * size + 1, step=10),
        ),
    }


def _aborts(size: int, long: int) -> dict[str, Iterable[str]]:
    """Requests that meet the remains of an aborted one: its blocks written again, its prompt sent again."""
    return {
        "aborted": (
            _start("a", long, new=3),
            "2 abort a",
            _start("b", long, seed=1, step=3),
            _start("c", long, step=4),
        ),
        "aborted-decodes": (
            _start("a", size, new=6),
            _start("b", size, seed=1, new=6),
            "4 abort a",
            _start("c", long, step=5),
            _start("d", 2 * size, step=6),
        ),
    }


def _without_room(limits: Limits, can: Capabilities, most: int, long: int) -> dict[str, Iterable[str]]:
    """Requests that don't fit together: they wait, are preempted, or overtake one another."""
    size, pool = limits.block_size, limits.pool_tokens
    # Prompts of a third of the pool: three of them and their outputs do not fit.
    third = max(1, min(pool // 3 - 1, long))
    grown = max(1, min(pool // 3, limits.context_tokens - third))
    made: dict[str, Iterable[str]] = {
        "refilled": (_start("a", third), _start("b", third, seed=1, step=10), _start("a", third, step=20)),
        # A request that reaches the end of the context before its output is complete: refused at once, or ended with
        # length.
        "at-the-context": (_start("a", most + 2, new=5), _start("b", size, seed=1, new=3, step=2)),
    }
    if limits.context_tokens > pool + 1:
        # A request larger than the pool: refused or ended, never left waiting.
        made["beyond-the-pool"] = (_start("a", pool + 1), _start("b", size, seed=1, new=3, step=2))
    if can.preemption:
        made["full"] = [_start(f"r{i}", third, seed=i, new=grown, step=1 + i) for i in range(3)]
        made["full-twins"] = [_start(f"r{i}", third, seed=i // 2, new=grown, step=1 + i) for i in range(4)]
        made["one-fills-all"] = (_start("small", size, new=grown), _start("big", max(1, most - size), seed=1, step=2))
    if can.priority:
        made["priorities"] = [_start(f"r{i}", third, seed=i, new=grown, step=1 + i, priority=i) for i in range(3)]
    return made


def _start(rid: str, prompt: int, *, new: int = 2, step: int = 1, **more: int) -> str:
    words = "".join(f" {name}={value}" for name, value in more.items() if value)
    return f"{step} start {rid} prompt={prompt} new={new}{words}"
