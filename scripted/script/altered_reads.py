"""Alters one thing at a time that a script reads of its requests, their clients, its calls and the scheduler's state.

An assertion that then fails depends on what the engine does, though no known bug may be about it. The harness itself
reads everything as it is: its waits and its oracle are not deceived.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from scripted.script.clients import Call, ClientView, finish_reason_of
from scripted.script.context import BaseContext
from scripted.script.handles import BaseRequest, status_of
from scripted.script.measure import is_of_the_project
from scripted.script.state import State
from scripted.script.values import Listed, Status

# Left out: what a wait promises (``finished``), what the configuration or the script decides, and time.
_OF_REQUESTS: Final = (
    "finish_reason", "status", "output_ids", "logprobs", "prompt_logprobs", "chunks_done", "is_chunking",
    "cached_tokens", "cached_tokens_device", "cached_tokens_host", "remaining_prompt_tokens", "kv_pages", "lock_refs",
    "retractions",
)  # fmt: skip
_OF_CLIENTS: Final = ("status", "text", "token_ids", "finish_reason", "input_logprobs")
_OF_CALLS: Final = ("status", "text")
_OF_PAGES: Final = ("free", "cached", "held")
_NAMES: Final = (
    (BaseRequest, _OF_REQUESTS),
    (ClientView, _OF_CLIENTS),
    (Call, _OF_CALLS),
    (BaseContext, ("state",)),
)
_OK: Final = 200
_REFUSED: Final = 400


class Read(NamedTuple):
    """An attribute of the n-th object that a script reads, and one of the other values that it could have."""

    number: int
    name: str
    other: str

    def __str__(self) -> str:
        return f"another {self.other if self.name == 'state' else self.name}"


class Reads:
    """The reads of one script: notes them in a first run, and alters ``altered`` in a further one."""

    def __init__(self) -> None:
        self.noted: dict[Read, None] = {}
        self.altered: Read | None = None
        # Objects by identity, in the order in which a run reads them first; kept so that no identity comes again.
        self._numbers: dict[int, tuple[int, object]] = {}

    @contextlib.contextmanager
    def of(self, kinds: Iterable[type]) -> Iterator[None]:
        """Watch the attributes of these classes."""
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                for name in next((names for base, names in _NAMES if issubclass(kind, base)), ()):
                    original = inspect.getattr_static(kind, name, None)
                    if isinstance(original, property):
                        stack.enter_context(_replaced(kind, name, self._watched(name, original)))
            yield

    def begin(self, altered: Read | None) -> None:
        """Start over for another run."""
        self.altered = altered
        self._numbers.clear()

    def _watched(self, name: str, original: property) -> property:
        def read(owner: object) -> object:
            value = original.__get__(owner)
            if not is_of_the_project(sys._getframe(1).f_code.co_filename):  # noqa: SLF001 - who reads
                return value
            number, _ = self._numbers.setdefault(id(owner), (len(self._numbers), owner))
            if self.altered is None:
                self.noted |= dict.fromkeys(Read(number, name, other) for other in _others_of(owner, name, value))
            elif self.altered[:2] == (number, name):
                return _others_of(owner, name, value).get(self.altered.other, value)
            return value

        return property(read, original.fset)


@contextlib.contextmanager
def _replaced(kind: Any, name: str, watched: property) -> Iterator[None]:
    own = vars(kind).get(name)
    setattr(kind, name, watched)
    try:
        yield
    finally:
        if own is None:
            delattr(kind, name)
        else:
            setattr(kind, name, own)


def _others_of(owner: object, name: str, value: object) -> Mapping[str, object]:
    """Return other values that a wrong engine might have shown in place of this one, by what tells them apart."""
    match value:
        case State():
            return dict(_other_states(value))
        case bool():
            return {"other": not value}
        case Status():
            return {"other": Status(_REFUSED if value == _OK else _OK)}
        case int():
            return {"more": value + 1} | ({"none": 0} if value else {})
        case tuple() if value:
            return {"shorter": Listed(value[:-1]), **_with_another_end(value)}
        case str():
            return {"other": _other_text(owner, name, str(value))}
    return {}


def _other_text(owner: object, name: str, value: str) -> object:
    if name == "finish_reason":
        return finish_reason_of("abort" if value == "length" else "length")
    if name == "text":
        return f"altered: {value[:-1]}"
    assert isinstance(owner, BaseRequest), "no other status is a text"
    if owner.finished:
        return status_of(value)  # a wait promises it
    return status_of("running" if value == "waiting" else "waiting")


def _with_another_end(value: tuple[Any, ...]) -> Mapping[str, object]:
    return {"end": Listed([*value[:-1], value[-1] + 1])} if isinstance(value[-1], int) else {}


def _other_states(state: State) -> Iterator[tuple[str, State]]:
    queues: dict[str, tuple[Any, ...]] = {
        "waiting": state.waiting, "running": state.running, "in_flight": state.in_flight
    }  # fmt: skip
    for name, there in queues.items():
        if there:
            yield f"state.{name}", msgspec.structs.replace(state, **{name: there[:-1]})
    for name in _OF_PAGES:
        pages = msgspec.structs.asdict(state.kv)
        yield f"state.kv.{name}", msgspec.structs.replace(state, kv=_more(state.kv, name, pages[name]))
    yield "state.rows.free", msgspec.structs.replace(state, rows=_more(state.rows, "free", state.rows.free))
    for name, count in state.counts.items():
        yield f"state.{name}", msgspec.structs.replace(state, counts=state.counts | {name: count + 1})


def _more(counts: Any, name: str, now: int) -> Any:
    return msgspec.structs.replace(counts, **{name: now + 1})
