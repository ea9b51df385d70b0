"""Waits of a script: steps that run until a condition holds, used with ``yield from``."""

from __future__ import annotations

import dis
from collections.abc import Callable, Generator
from types import CodeType, GeneratorType
from typing import Final

from scripted.core.errors import BadCall
from scripted.script.values import Nameless

DEFAULT_BUDGET_STEPS: Final = 400

# The remedy for a wait whose yields do not reach the harness.
HAND_ON: Final = "use a wait as 'yield from', or yield once for each of its yields"
Steps = Generator[None, None, None]
# Names whose values do not change while the engine is idle. Clients' answers are left out: they may arrive later.
# fmt: off
_TIMELESS: Final = frozenset((
    "all", "any", "batch_composition", "bool", "cached_tokens", "chunked", "chunks_done", "choices", "done",
    "error", "find_req_by_rid", "finish_reason", "finished", "forward_ct", "in_flight", "is_chunking",
    "is_finished", "is_fully_idle", "is_prefilled", "is_running", "kv_pages", "last_batch_forward_mode", "len",
    "list_active_reqs", "max", "min", "output_ids", "queues_clear", "remaining_prompt_tokens", "req", "retractions",
    "rid", "running", "set", "sorted", "state", "status", "sum", "transferring", "waiting", "waiting_for_grammar",
))
# fmt: on
_CHANGES: Final = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR")


class Wait(Nameless):
    """A wait, to be run with ``yield from`` exactly once."""

    _ask = "what it waits for"

    def __init__(self, what: str, generator: Steps) -> None:
        self.what = what
        self.generator = generator
        self.used = False

    def __iter__(self) -> Steps:
        if self.used:
            raise BadCall(f"t.{self.what} was run before and does nothing the second time; make another wait")
        self.used = True
        return self.generator

    def __repr__(self) -> str:
        return f"<{self.what}>"


def is_timeless(predicate: Callable[[], object]) -> bool:
    """Return whether a predicate certainly reads only requests and queues, and no step, time or counter of its own."""
    code = getattr(predicate, "__code__", None)
    captured = [cell.cell_contents for cell in getattr(predicate, "__closure__", None) or ()]
    return code is not None and not any(map(callable, captured)) and _names_only_queries(code)


def _names_only_queries(code: CodeType) -> bool:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    changes = any(one.opname in _CHANGES for one in dis.get_instructions(code))
    return not changes and _TIMELESS.issuperset(code.co_names) and all(map(_names_only_queries, inner))


def words_of_yielded(value: object) -> str:
    """Describe a yielded value, and the line that the script should have instead."""
    if isinstance(value, Wait):
        return f"t.{value.what}; write 'yield from t.{value.what}'"
    if isinstance(value, GeneratorType):
        return f"the generator {value.__name__}; write 'yield from {value.__name__}(...)'"
    return f"{value!r}; write 'yield' alone, which lets one step run"
