"""Base classes of the actions that every engine has: requests, administrative calls, pauses, failed batches.

An adapter derives its own actions from them and adds fields, routes and verbs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Self

import msgspec

from scripted.core.action import Action, Culprit, RequestSoFar, RunLike, smaller_requests
from scripted.core.errors import BadCall
from scripted.core.prompts import (
    MOST_ITEMS,
    PIECES,
    Piece,
    Recipe,
    code_of,
    pieces_of,
    prompt_ids,
    prompt_of,
    recipe_from,
)
from scripted.core.verb import Code, Verb, variable_of
from scripted.script.clients import Call
from scripted.script.static_checks import bounded, check_count, check_prompt_len

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

EXTRA_RID: Final = "extra"
PRESSURE_RID: Final = "pressure"
TURN_RID: Final = "turn"
# Other prompts of a workload have small seeds, so a prompt that fills the pool shares no prefix with them.
PRESSURE_SEED: Final = 97


class RequestStart(Action, frozen=True, kw_only=True, omit_defaults=True):
    """A request with a prompt of ``prompt`` tokens; equal ``seed`` values give equal prefixes.

    ``new`` is its ``max_new_tokens``, ``stop`` a token that ends it. ``shared`` tokens of the prompt come from ``seed``
    and the rest from ``tail``; with 0 all come from ``seed``. The pieces of ``parts`` come first, each as SEED:TOKENS
    or SEED:FIRST:TOKENS: they make prompts with equal blocks behind different prefixes.

    With ``after`` the request is a further turn: its prompt begins with the prompt of the request ``after`` and the
    first ``cut`` tokens of its output, by default all that exist when this request begins. An unknown or refused
    request contributes nothing.
    """

    rid: str
    prompt: Annotated[int, msgspec.Meta(le=MOST_ITEMS)]
    new: int = 2
    seed: int = 0
    priority: int = 0
    stop: int | None = None
    shared: int = 0
    tail: int = 0
    parts: Annotated[str, msgspec.Meta(pattern=PIECES)] = ""
    after: str = ""
    cut: Annotated[int, msgspec.Meta(ge=0)] | None = None

    is_start: ClassVar[bool] = True
    shell_words: ClassVar = {"start": "start_req"}

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens made from its seeds: the whole prompt, unless the request continues another one."""
        return prompt_ids(self.prompt, self.seed, self.shared, self.tail, self.parts)

    @property
    def pieces(self) -> list[Piece]:
        """The pieces of ``prompt_ids``."""
        return pieces_of(self.prompt, self.seed, self.shared, self.tail, self.parts)

    @property
    def prompt_code(self) -> Code:
        """The tokens of ``prompt_ids`` as an argument in a script."""
        return Code(code_of(self.pieces), self.prompt_ids)

    def continued(self, run: RunLike) -> RequestSoFar | None:
        """Return the request ``after`` with its output so far; None if there is none."""
        return run.request_so_far(self.after)

    def whole_prompt(self, run: RunLike) -> tuple[int, ...]:
        """Return the prompt, including the prompt and the output so far of the request ``after``."""
        before = self.continued(run) if self.after else None
        if before is not None:
            return (*before.message.prompt_ids, *before.said[: self.cut], *self.prompt_ids)
        # A further turn may add no tokens, but a prompt has at least one.
        return self.prompt_ids if self.prompt or not self.after else prompt_ids(1, self.seed)

    @property
    def turn_arguments(self) -> Mapping[str, object]:
        """The arguments of ``start_req`` that make it a further turn."""
        cut = {} if self.cut is None else {"cut": self.cut}
        return {"after": Code(variable_of(self.after)), **cut} if self.after else {}

    @classmethod
    def prompt_fields(cls, recipe: Recipe, length: int) -> dict[str, Any]:
        """Return the fields of a recorded prompt of this length."""
        fields = msgspec.structs.asdict(recipe)
        return {"prompt": length - fields.pop("begun"), **fields}

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return () if self.stop is None else (self.stop,)

    @property
    def variable(self) -> str:
        """The name of its handle in a written script."""
        return variable_of(self.rid)

    def renamed(self, names: Mapping[str, str]) -> Action:
        rids = {"rid": names.get(self.rid, self.rid), "after": names.get(self.after, self.after)}
        return msgspec.structs.replace(self, **rids)

    def with_handles(self, variables: Container[str]) -> Action:
        if not self.after or variable_of(self.after) in variables:
            return self
        return msgspec.structs.replace(self, after="", cut=None, prompt=max(1, self.prompt))

    def perform(self, t: BaseContext) -> bool:
        before = t.run.handles.latest(self.after) if self.after else None
        given = {} if before is None else {"after": before.choices[0]}
        for verb in (self if given else self.with_handles(())).verbs():
            Verb(verb.name, *verb.arguments, **{**verb.keywords, **given}).perform(t)
        return True

    def smaller(self) -> Iterator[Action]:
        """Yield simpler requests; a request that continues no other keeps at least one token."""
        for smaller in smaller_requests(self):
            if isinstance(smaller, RequestStart) and not smaller.after and not smaller.prompt:
                smaller = msgspec.structs.replace(smaller, prompt=1)
            yield smaller
        for pieces in self._fewer_pieces() if self.parts else ():
            fields = recipe_from(pieces)
            yield msgspec.structs.replace(
                self, seed=fields.seed, shared=fields.shared, tail=fields.tail, parts=fields.parts
            )

    def _fewer_pieces(self) -> Iterator[list[Piece]]:
        """Yield the pieces in their simplest form, then without one of them, then with one from its seed's start."""
        pieces = self.pieces
        yield pieces
        for place, piece in enumerate(pieces):
            yield pieces[:place] + pieces[place + 1 :]
            if piece.first:
                yield [*pieces[:place], piece._replace(first=0), *pieces[place + 1 :]]

    @classmethod
    def among(cls, starts: Iterable[Action]) -> list[Self]:
        return [start for start in starts if isinstance(start, cls)]


def priority_above(starts: Iterable[RequestStart]) -> int:
    """Return the lowest priority above those of all requests."""
    return max((start.priority for start in starts), default=0) + 1


class AdministrativeCall(Action, frozen=True, kw_only=True, omit_defaults=True):
    """A call by an operator: POST to ``route``, which becomes one event and gets one answer."""

    event: ClassVar[Any]
    route: ClassVar[str]
    caused_by: ClassVar[Culprit] = Culprit.OPERATOR

    @property
    def path(self) -> str:
        """The route with its query."""
        return self.route

    def message(self, call_id: str) -> Any:
        """The call's event, with the values of the fields of the same names."""
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
    """Return a timeout as the float that JSON would give; a script may pass a whole number."""
    return None if timeout_s is None else float(timeout_s)


class PauseCall(AdministrativeCall, frozen=True, kw_only=True, omit_defaults=True):
    """Pauses generation; a concrete class has a ``mode``."""

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
    """Makes the next batch fail; the engine continues."""

    examples: ClassVar = ("fail",)
    needs_open: ClassVar[bool] = True
    is_extra: ClassVar[bool] = True
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = {"fail": "fail_next_step"}
    caused_by: ClassVar[Culprit] = Culprit.HARDWARE


# -- arguments of start_req --


def check_one_prompt(given: Mapping[str, object], *, continues: bool = False) -> str | None:
    """Return the name of the argument that gives the prompt. Raises BadCall unless there is exactly one.

    A request that ``continues`` another needs none, and takes no text: its tokens would depend on the preceding ones.
    """
    if continues and given.get("text") is not None:
        raise BadCall("start_req() takes after= with prompt_len or prompt_ids, got text; give its tokens as prompt_ids")
    names = [name for name, value in given.items() if value is not None]
    if continues and not names:
        return None
    if len(names) != 1:
        *first, last = given
        got = ", ".join(names) or "none of them"
        raise BadCall(f"start_req() takes exactly one of {', '.join(first)} and {last}, got {got}")
    return names[0]


def earlier_turns(t: BaseContext, after: Any, cut: int | None) -> tuple[int, ...]:
    """Return the prompt of an earlier request with its output so far, or with the first ``cut`` tokens of the output.

    Raises BadCall for anything but a handle of this script, and for a cut without a handle.
    """
    if after is None:
        if cut is not None:
            raise BadCall(f"start_req() takes cut={cut!r} with after= only; name the request that this one continues")
        return ()
    t.check_handle("start_req()", after)
    if cut is not None:
        check_count("start_req()", "cut", cut, least=0)
    return (*after.prompt_ids, *after.choices[0].output_ids[:cut])


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
