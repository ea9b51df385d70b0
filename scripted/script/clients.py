"""A script's view of its clients: the answer to one request, and to one administrative call.

Real HTTP clients fill them in the server tier, the simulated front end in the sim tier.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn, Protocol

import msgspec

from scripted.core.errors import BadCall
from scripted.script.values import Listed, Nameless, Status, Word

# The finish reasons of all adapters; each engine has some of them.
FINISH_REASONS: Final = frozenset({"length", "stop", "abort", "error", "timeout", "invalid", "unavailable"})

_OK: Final = 200
_MAY_BE_REFUSED: Final = ("/flush_cache", "/update_weights")


def finish_reason_of(reason: str | None) -> str | None:
    """Make a reason that only compares with ``FINISH_REASONS``; None before the end."""
    return None if reason is None else Word(reason, "finish_reason", FINISH_REASONS)


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of an answer; it does not repeat earlier pieces."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    input_logprobs: tuple[float | None, ...] = ()


class _Connection(msgspec.Struct):
    """The client's connection for one answer, shared by the choices of the answer."""

    status: Status | None = None
    error: str | None = None
    closed: bool = False
    dropped: bool = False


class ClientView(Nameless):
    """The answer to one request, as far as its client has received it.

    ``status`` is the HTTP status, None before it arrives; ``error`` the text of the error that ended the answer, if
    any; ``closed`` turns true once nothing more can arrive, ``dropped`` once the client itself disconnects.
    """

    _ask = "its .status, .finish_reason, .closed or .token_ids"

    def __init__(self, rid: str, *, streams: bool = True) -> None:
        self.rid = rid
        self.streams = streams
        self._connection = _Connection()
        self._chunks: list[Chunk] = []

    @property
    def _has_ended(self) -> bool:
        """Whether this answer ended before its connection."""
        return False

    @property
    def status(self) -> int | None:
        return self._connection.status

    @status.setter
    def status(self, status: int | None) -> None:
        self._connection.status = None if status is None else Status(status)

    @property
    def error(self) -> str | None:
        """The error that ended the answer; None for a choice that had already ended."""
        return None if self._has_ended else self._connection.error

    @property
    def closed(self) -> bool:
        return self._connection.closed or self._has_ended

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._connection.closed = closed

    @property
    def dropped(self) -> bool:
        return self._connection.dropped

    @dropped.setter
    def dropped(self, dropped: bool) -> None:
        self._connection.dropped = dropped

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Every piece of the answer, in order."""
        return Listed(self._chunks)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self._chunks)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return Listed(token for chunk in self._chunks for token in chunk.token_ids)

    @property
    def input_logprobs(self) -> tuple[float | None, ...]:
        """The logprobs of the prompt's tokens from ``logprob_start_len`` on; the first one is None."""
        return Listed(value for chunk in self._chunks for value in chunk.input_logprobs)

    @property
    def values(self) -> int:
        """The number of tokens and prompt logprobs received."""
        return len(self.token_ids) + sum(value is not None for value in self.input_logprobs)

    @property
    def finish_reason(self) -> str | None:
        """The reason in the terminal chunk; ``error`` for an answer that an error ended; None before the end."""
        if self.error is not None:
            return finish_reason_of("error")
        return finish_reason_of(next((c.finish_reason for c in self._chunks if c.finish_reason), None))

    @property
    def terminal_answers(self) -> int:
        """The number of terminal chunks: exactly one from a healthy engine."""
        return sum(1 for chunk in self._chunks if chunk.finish_reason) + (self.error is not None)

    @property
    def answer(self) -> ClientView:
        """The whole answer: itself, or for one of several choices the answer that contains it."""
        return self

    @property
    def choices(self) -> tuple[ClientView, ...]:
        """The choices of an answer with several, otherwise itself."""
        return (self,)

    def receive(self, chunk: Chunk) -> None:
        """Add a piece of the answer."""
        self._chunks.append(chunk)

    def fail(self, error: str, status: int | None = None) -> None:
        if status is not None:
            self.status = status
        self._connection.error = error
        self.closed = True

    def __repr__(self) -> str:
        return (
            f"ClientView({self.rid!r}, status={self.status}, text={self.text!r}, finish_reason={self.finish_reason!r}, "
            f"error={self.error!r}, closed={self.closed})"
        )


class HasChoices(Protocol):
    """A request with several choices, or the client of its answer."""

    rid: str

    @property
    def choices(self) -> Sequence[object]: ...


class AskedOfEachChoice:
    """An attribute that belongs to each choice: a request with several choices refuses it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, request: HasChoices, owner: type) -> NoReturn:
        path = f"r.choices[0].{'client.' if isinstance(request, ClientView) else ''}{self._name}"
        raise BadCall(
            f"{request.rid} has {len(request.choices)} choices, each with its own .{self._name}; "
            f"ask {path}, or another one"
        )


class ChoiceView(ClientView):
    """One of several choices in an answer: it has its own chunks and shares the connection."""

    def __init__(self, rid: str, answer: ClientView) -> None:
        super().__init__(rid, streams=answer.streams)
        self._answer = answer
        self._connection = answer._connection  # noqa: SLF001 - shared within one answer

    @property
    def answer(self) -> ClientView:
        return self._answer

    @property
    def _has_ended(self) -> bool:
        return any(chunk.finish_reason for chunk in self._chunks)


class ChoicesView(ClientView):
    """An answer with several choices: its status, error and end; everything else belongs to a choice."""

    def __init__(self, rid: str, rids: Sequence[str], *, streams: bool = True) -> None:
        super().__init__(rid, streams=streams)
        self._choices = tuple(ChoiceView(one, self) for one in rids)

    @property
    def choices(self) -> tuple[ClientView, ...]:
        return self._choices

    chunks = AskedOfEachChoice()
    text = AskedOfEachChoice()
    token_ids = AskedOfEachChoice()
    input_logprobs = AskedOfEachChoice()
    finish_reason = AskedOfEachChoice()

    def __repr__(self) -> str:
        return (
            f"ClientView({self.rid!r}, status={self.status}, error={self.error!r}, closed={self.closed}, "
            f"choices={list(self._choices)})"
        )


class Call(Nameless):
    """One administrative call of a script. ``arrived``: its message has reached the gate; ``done``: its answer is in.

    ``was_read``: the script has read the answer's status or text. ``must_be_read``: otherwise the call tests nothing.
    """

    _ask = "its .done or .status"

    def __init__(self, name: str) -> None:
        self.name = name
        # The engine may refuse the call, or has refused it.
        self.must_be_read = name.startswith(_MAY_BE_REFUSED)
        self.call_id: str | None = None
        self.arrived = False
        self.done = False
        self.was_read = False
        self._status = Status(0)
        self._text = ""

    @property
    def status(self) -> int:
        """The HTTP status of the answer. Raises BadCall before it arrives."""
        self._read("status")
        return self._status

    @property
    def text(self) -> str:
        """The text of the answer. Raises BadCall before it arrives."""
        self._read("text")
        return self._text

    def answer(self, status: int, text: str) -> None:
        self._status, self._text, self.done = Status(status), text, True
        self.must_be_read |= status != _OK

    def _read(self, what: str) -> None:
        if not self.done:
            raise BadCall(
                f"POST {self.name} has no answer yet, so it has no .{what}; "
                "wait for it: yield from t.run_until(lambda: call.done)"
            )
        self.was_read = True

    def __repr__(self) -> str:
        answer = f"status={self._status}, text={self._text!r}" if self.done else "no answer yet"
        return f"Call({self.name}, arrived={self.arrived}, {answer})"


def receive_events(view: ClientView, part: str | bytes) -> None:
    """Feed a client whole lines of a server-sent event stream."""
    text = part.decode() if isinstance(part, bytes) else part
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            receive_event(view, line.removeprefix("data: "))


def receive_event(view: ClientView, data: str | bytes) -> None:
    """Feed a client one event of a stream, or the body of an unstreamed answer."""
    event = json.loads(data)
    if "error" in event:
        view.fail(event["error"]["message"], view.status)
        return
    for piece in event if isinstance(event, list) else [event]:
        _receive_piece(view.choices[piece.get("index", 0)], piece)


def _receive_piece(view: ClientView, event: Mapping[str, Any]) -> None:
    meta = event["meta_info"]
    inputs = tuple(value for value, _, _ in meta.get("input_token_logprobs", ()))
    ids = tuple(event["output_ids"])
    view.receive(Chunk(text=event["text"], token_ids=ids, finish_reason=meta["finish_reason"], input_logprobs=inputs))
