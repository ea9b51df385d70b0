"""What a script's clients saw: the view of one request, and of one administrative call.

Filled by what plays the client: real HTTP in the server tier, the simulated front end in the sim tier. Read by scripts.
"""

from __future__ import annotations

import json
from typing import Final

import msgspec

from scripted.errors import BadCall
from scripted.script.values import Listed, Nameless, Status, Word

# Those of every adapter: an engine has some of them.
FINISH_REASONS: Final = frozenset({"length", "stop", "abort", "error", "timeout", "invalid", "unavailable"})

_OK: Final = 200
_MAY_BE_REFUSED: Final = ("/flush_cache", "/update_weights")


def finish_reason_of(reason: str | None) -> str | None:
    """A reason that can only be compared with one of ``FINISH_REASONS``, or None before the end."""
    return None if reason is None else Word(reason, "finish_reason", FINISH_REASONS)


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of an answer as it arrived: what was new in it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    input_logprobs: tuple[float | None, ...] = ()


class ClientView(Nameless):
    """What the client of one request received so far.

    ``status`` is the HTTP status, None before it is there; ``error`` the error's text, if the answer ended with one;
    ``closed`` turns true when nothing more can come, ``dropped`` when the client itself hung up.
    """

    _ask = "its .status, .finish_reason, .closed or .token_ids"

    def __init__(self, rid: str, *, streams: bool = True) -> None:
        self.rid = rid
        self.streams = streams
        self._status: Status | None = None
        self.error: str | None = None
        self.closed = False
        self.dropped = False
        self._chunks: list[Chunk] = []

    @property
    def status(self) -> int | None:
        """The HTTP status."""
        return self._status

    @status.setter
    def status(self, status: int | None) -> None:
        self._status = None if status is None else Status(status)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Every piece of the answer, in order."""
        return Listed(self._chunks)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self._chunks)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids received."""
        return Listed(token for chunk in self._chunks for token in chunk.token_ids)

    @property
    def input_logprobs(self) -> tuple[float | None, ...]:
        """The logprobs of the prompt's tokens from ``logprob_start_len`` on; the first one is None."""
        return Listed(value for chunk in self._chunks for value in chunk.input_logprobs)

    @property
    def values(self) -> int:
        """How many tokens and how many logprobs of its prompt it received."""
        return len(self.token_ids) + sum(value is not None for value in self.input_logprobs)

    @property
    def finish_reason(self) -> str | None:
        """The terminal answer's reason; ``error`` for an answer that ended with an error; None before the end."""
        if self.error is not None:
            return finish_reason_of("error")
        return finish_reason_of(next((c.finish_reason for c in self._chunks if c.finish_reason), None))

    @property
    def terminal_answers(self) -> int:
        """How many terminal answers came: one, for every client of an engine that works."""
        return sum(1 for chunk in self._chunks if chunk.finish_reason) + (self.error is not None)

    def receive(self, chunk: Chunk) -> None:
        """Add a piece of the answer."""
        self._chunks.append(chunk)

    def fail(self, error: str, status: int | None = None) -> None:
        """End with an error."""
        self.status = self.status if status is None else status
        self.error = error
        self.closed = True

    def __repr__(self) -> str:
        return (
            f"ClientView({self.rid!r}, status={self.status}, text={self.text!r}, finish_reason={self.finish_reason!r}, "
            f"error={self.error!r}, closed={self.closed})"
        )


class Call(Nameless):
    """One administrative call of a script. ``arrived``: its message is at the gate; ``done``: its answer is in.

    ``was_read`` says that the answer's status or text was looked at. One that ``must_be_read`` and was not, tests
    nothing.
    """

    _ask = "its .done or .status"

    def __init__(self, name: str) -> None:
        self.name = name
        # The engine may refuse what was asked for, or has refused it.
        self.must_be_read = name.startswith(_MAY_BE_REFUSED)
        self.call_id: str | None = None
        self.arrived = False
        self.done = False
        self.was_read = False
        self._status = Status(0)
        self._text = ""

    @property
    def status(self) -> int:
        """The HTTP status of the answer. Raises BadCall before it is there."""
        self._read("status")
        return self._status

    @property
    def text(self) -> str:
        """The text of the answer. Raises BadCall before it is there."""
        self._read("text")
        return self._text

    def answer(self, status: int, text: str) -> None:
        """Note the HTTP answer."""
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
    """Give a client whole lines of a stream of server-sent events."""
    text = part.decode() if isinstance(part, bytes) else part
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            receive_event(view, line.removeprefix("data: "))


def receive_event(view: ClientView, data: str | bytes) -> None:
    """Give a client one event of a stream, or the body of an answer that was sent whole."""
    event = json.loads(data)
    if "error" in event:
        view.fail(event["error"]["message"], view.status)
        return
    meta = event["meta_info"]
    inputs = tuple(value for value, _, _ in meta.get("input_token_logprobs", ()))
    ids = tuple(event["output_ids"])
    view.receive(Chunk(text=event["text"], token_ids=ids, finish_reason=meta["finish_reason"], input_logprobs=inputs))
