"""The messages between the front and an engine: a request with its prompt, and the parts of an answer.

Owns these types and the port that the front asks engines through. Knows neither Ray nor HTTP libraries.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.routing import NO_PROMPT, Prompt

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedRequest:
    """A client's request as it goes to an engine. ``target`` is the path with its query.

    ``left_out`` are the replicas that have refused it or were lost with it; ``only`` is the one that the client named.
    """

    method: str
    target: str
    headers: Headers
    body: bytes
    prompt: Prompt = NO_PROMPT
    left_out: tuple[str, ...] = ()
    only: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The head of an engine's answer, and the replica that it comes from."""

    status: int
    headers: Headers
    replica: str

    def header(self, name: str) -> str | None:
        """The value of a header, by its name in lower case."""
        return next((value for key, value in self.headers if key == name), None)


class ReplicaLostError(Exception):
    """The replica that a request was sent to is gone: ``replica``, where that is known."""

    def __init__(self, message: str, replica: str = "") -> None:
        super().__init__(message)
        self.replica = replica


class Engines(Protocol):
    def ask(self, request: PassedRequest) -> AsyncIterator[Head | bytes]:
        """Send a request to the engine that the router chooses: the head of its answer, then its bytes as they come.

        Closing the iterator ends the request in the engine. Raises ApiError when no engine takes the request, and
        ReplicaLostError when the one that had it is gone.
        """

    async def loads(self, headers: Headers) -> list[Mapping[str, object]]:
        """The load that each engine reports, for a client that may ask. Raises ApiError."""
