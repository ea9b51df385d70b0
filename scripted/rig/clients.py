"""What a script's clients saw: the view of one request, and of one administrative call.

Filled by what plays the client: real HTTP in the server tier, the simulated front end in the sim tier. Read by scripts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from engine.messages import Reply
from scripted.actions import AdministrativeCall

__all__ = ["Call", "Chunk", "ClientView", "Clients"]


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of an answer as it arrived: what was new in it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


class ClientView:
    """What the client of one request received so far.

    ``status`` is the HTTP status, None before it is there; ``error`` the error's text, if the answer ended with one;
    ``closed`` turns true when nothing more can come, ``dropped`` when the client itself hung up.
    """

    def __init__(self, rid: str, *, streams: bool = True) -> None:
        self.rid = rid
        self.streams = streams
        self.status: int | None = None
        self.error: str | None = None
        self.closed = False
        self.dropped = False
        self._chunks: list[Chunk] = []

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Every piece of the answer, in order."""
        return tuple(self._chunks)

    @property
    def text(self) -> str:
        """All text received."""
        return "".join(chunk.text for chunk in self._chunks)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids received."""
        return tuple(token for chunk in self._chunks for token in chunk.token_ids)

    @property
    def finish_reason(self) -> str | None:
        """The terminal answer's reason; ``error`` for an answer that ended with an error; None before the end."""
        return (
            "error"
            if self.error is not None
            else next((c.finish_reason for c in self._chunks if c.finish_reason), None)
        )

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


class Call:
    """One administrative call of a script. ``arrived``: its message is at the gate; ``done``: its answer is in."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.call_id: str | None = None
        self.arrived = False
        self.done = False
        self.status: int | None = None
        self.text = ""

    def answer(self, status: int, text: str) -> None:
        """Note the HTTP answer."""
        self.status, self.text, self.done = status, text, True

    def __repr__(self) -> str:
        return f"Call({self.name}, arrived={self.arrived}, done={self.done}, status={self.status}, text={self.text!r})"


class Clients(Protocol):
    """All clients of the engine, played for a script."""

    def generate(self, rid: str, body: dict[str, Any]) -> ClientView:
        """POST ``body`` to ``/generate``."""
        ...

    def call(self, action: AdministrativeCall) -> Call:
        """Make an administrative call."""
        ...

    def disconnect(self, view: ClientView) -> None:
        """Drop the connection of a request."""
        ...

    def settle(self, replies: Sequence[Reply], views: Mapping[str, ClientView], calls: Mapping[str, Call]) -> None:
        """Wait until the clients have received what these replies bring; ``views`` are by rid, ``calls`` by call id."""
        ...

    def forget(self) -> None:
        """Drop every connection that is still open, before the next script."""
        ...
