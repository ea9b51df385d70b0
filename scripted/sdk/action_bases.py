"""Bases of the actions that every engine has: a request, an administrative call, a pause and its end, a failed batch.

An adapter derives its own from them and adds fields, routes and verbs of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import msgspec

from scripted.core.action import Action, RunLike, smaller_requests
from scripted.core.errors import BadCall
from scripted.core.prompts import prompt_ids, prompt_of
from scripted.core.verb import variable_of
from scripted.script.clients import Call
from scripted.script.static_checks import bounded, check_prompt_len

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

EXTRA_RID: Final = "extra"
PRESSURE_RID: Final = "pressure"
# Other prompts of a workload have small seeds; a prompt that fills the pool shares no prefix with them.
PRESSURE_SEED: Final = 97


class RequestStart(Action, frozen=True, kw_only=True, omit_defaults=True):
    """A request with a prompt of ``prompt`` tokens; equal ``seed`` values give equal prefixes.

    ``new`` is its ``max_new_tokens`` and ``stop`` a token that ends it. ``shared`` tokens of the prompt come from
    ``seed`` and the rest from ``tail``; with 0 all come from ``seed``.
    """

    rid: str
    prompt: int
    new: int = 2
    seed: int = 0
    priority: int = 0
    stop: int | None = None
    shared: int = 0
    tail: int = 0

    is_start: ClassVar[bool] = True
    shell_words: ClassVar = {"start": "start_req"}

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return prompt_ids(self.prompt, self.seed, self.shared, self.tail)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return () if self.stop is None else (self.stop,)

    @property
    def variable(self) -> str:
        """The name of its handle in a written script."""
        return variable_of(self.rid)

    def smaller(self) -> Iterator[Action]:
        return smaller_requests(self)

    @classmethod
    def among(cls, starts: Iterable[Action]) -> list[Self]:
        return [start for start in starts if isinstance(start, cls)]


def priority_above(starts: Iterable[RequestStart]) -> int:
    """The lowest priority that is higher than those of all requests."""
    return max((start.priority for start in starts), default=0) + 1


class AdministrativeCall(Action, frozen=True, kw_only=True, omit_defaults=True):
    """A call of an operator: POST to ``route``, which becomes one event and gets one answer."""

    event: ClassVar[Any]
    route: ClassVar[str]

    @property
    def path(self) -> str:
        """The route with its query."""
        return self.route

    def message(self, call_id: str) -> Any:
        """The call's event, with the values of the fields that have the same names."""
        names = set(self.__struct_fields__) & set(self.event.__struct_fields__)
        values = {name: value for name, value in msgspec.structs.asdict(self).items() if name in names}
        if "timeout_s" in values:
            values["timeout_s"] = as_seconds(values["timeout_s"])
        return self.event(call_id=call_id, **values)

    def post(self, t: BaseContext) -> Call:
        call: Call = t.run.call(self)
        return call

    def apply(self, run: RunLike) -> None:
        run.give(self.message(run.new_call_id()))


def as_seconds(timeout_s: float | None) -> float | None:
    """Return a timeout as JSON has it: a script may give a whole number."""
    return None if timeout_s is None else float(timeout_s)


class PauseCall(AdministrativeCall, frozen=True, kw_only=True, omit_defaults=True):
    """Pauses generation; a concrete one has a ``mode``."""

    route: ClassVar = "/pause_generation"
    needs_open: ClassVar[bool] = True
    shell_words: ClassVar = {"pause": "pause_generation"}

    @classmethod
    def words(cls, event: Any) -> str:
        return f"pause ({event.mode})"


class ResumeCall(AdministrativeCall, frozen=True, kw_only=True, omit_defaults=True):
    """Ends a pause."""

    route: ClassVar = "/continue_generation"
    examples: ClassVar = ("continue",)
    added_beside: ClassVar = "pause"
    phrase: ClassVar = "continue"
    shell_words: ClassVar = {"continue": "continue_generation"}

    def reaches(self, run: RunLike) -> bool:
        return run.oracle.paused is not None


class BatchFailure(Action, frozen=True, kw_only=True, omit_defaults=True):
    """Makes the next batch fail; the engine goes on."""

    examples: ClassVar = ("fail",)
    needs_open: ClassVar[bool] = True
    is_extra: ClassVar[bool] = True
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = {"fail": "fail_next_step"}


# -- arguments of start_req --


def check_one_prompt(given: Mapping[str, object]) -> str:
    """Return the name of the one argument that gives the prompt. Raises BadCall for none and for several."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        *first, last = given
        got = ", ".join(names) or "none of them"
        raise BadCall(f"start_req() takes exactly one of {', '.join(first)} and {last}, got {got}")
    return names[0]


def made_prompt(length: int, seed: int) -> list[int]:
    """Make the prompt of ``prompt_len`` and ``prompt_seed``. Raises BadCall."""
    check_prompt_len(length)
    if not isinstance(seed, int):
        raise BadCall(f"start_req() takes prompt_seed, a whole number, got {seed!r}")
    return prompt_of(length, seed)


def token_ids(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    """Return the token ids of an argument. Raises BadCall for anything else."""
    ids = ids if isinstance(ids, (str, bytes)) else bounded("start_req()", name, ids)
    if isinstance(ids, (str, bytes)) or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise BadCall(f"start_req() takes {name} that are whole numbers >= 0, got {ids!r}")
    return tuple(ids)
