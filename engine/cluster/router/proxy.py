"""One engine, asked over HTTP on loopback: a request goes in as it came, an answer comes out as it is made.

Owns the messages between the front and an engine, the port that the front asks engines through, and which headers
belong to a connection alone. Leaving an answer closes its connection, and so ends its request in the engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import httpx
import msgspec

from engine.core.routing.placement import NO_PROMPT, Prompt
from engine.frontend.http.peers import Peer, load_in
from engine.frontend.schema.errors import ApiError, ErrorBody, ErrorType
from engine.process.settings import ServerSettings

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


# Headers of one connection and not of what is sent over it; so are those that a Connection header names.
_OF_A_CONNECTION: Final = frozenset(
    {
        "connection",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# httpx counts the body itself; an engine compresses nothing.
_NOT_PASSED_ON: Final = _OF_A_CONNECTION | {"content-length", "accept-encoding", "expect"}
PATIENCE_S: Final = 5.0


class EngineProxy:
    """Passes requests to the engine at ``base_url``. ``replica`` is the name that its answers bear."""

    def __init__(
        self, base_url: str, replica: str, settings: ServerSettings, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._replica = replica
        self._peer = Peer(base_url, settings, PATIENCE_S, transport)

    async def answer(self, request: PassedRequest) -> AsyncIterator[Head | bytes]:
        """The engine's answer. Raises ReplicaLostError when the engine is gone, before the head or in the middle."""
        dropped = _NOT_PASSED_ON | _named_by_connection(request.headers)
        headers = [(name, value) for name, value in request.headers if name not in dropped]
        try:
            async with self._peer.client.stream(
                request.method, request.target, headers=headers, content=request.body
            ) as answer:
                yield Head(status=answer.status_code, headers=_passed_back(answer.headers), replica=self._replica)
                async for part in answer.aiter_raw():
                    yield part
        except httpx.TransportError as exc:
            words = f"the engine of replica {self._replica} is gone ({type(exc).__name__})"
            raise ReplicaLostError(words, self._replica) from exc

    async def why_not_serving(self) -> str | None:
        """Why the engine takes no requests, being down, draining or on its way down; None when it does."""
        try:
            answer = await self._peer.health()
        except httpx.HTTPError as exc:
            return f"is gone ({type(exc).__name__})"
        return None if answer.status_code == httpx.codes.OK else f"is draining or starting ({answer.status_code})"

    async def about(self) -> dict[str, Any]:
        """Its settings and limits. Raises ApiError when it does not say."""
        try:
            answer = await self._peer.look("/server_info?timeout=0")
        except httpx.HTTPError as exc:
            raise ApiError.unavailable(f"does not describe itself ({type(exc).__name__})") from exc
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise ApiError(ErrorType.UNAUTHENTICATED, "asks the router for a key; set ENGINE_API_KEY to its own")
        if answer.status_code != httpx.codes.OK:
            raise ApiError.unavailable(f"does not describe itself ({answer.status_code})")
        return dict(answer.json())

    async def operate(self, method: str, target: str, body: object = None) -> tuple[int, str]:
        """Ask as an operator, with the router's own key: the status and the text of the answer.

        Raises ReplicaLostError when the engine is gone before it has answered.
        """
        try:
            answer = await self._peer.operate(method, target, body)
        except httpx.HTTPError as exc:
            raise ReplicaLostError(f"is gone ({type(exc).__name__})", self._replica) from exc
        return answer.status_code, answer.text

    async def load(self) -> dict[str, Any] | None:
        """What the engine says of its load; None when it does not say."""
        try:
            answer = await self._peer.look("/get_load")
        except httpx.HTTPError:
            return None
        return load_in(answer) if answer.status_code == httpx.codes.OK else None

    async def load_for(self, headers: Headers) -> dict[str, Any]:
        """The same for a client, who needs the key if there is one. Raises ApiError."""
        allowed = {name: value for name, value in headers if name == "authorization"}
        try:
            answer = await self._peer.look("/get_load", allowed)
            if answer.status_code == httpx.codes.OK:
                return load_in(answer)
            detail = msgspec.json.decode(answer.content, type=ErrorBody).error
        except (httpx.HTTPError, msgspec.MsgspecError, ValueError, TypeError) as exc:
            raise ApiError.unavailable(f"the engine of replica {self._replica} does not say its load") from exc
        raise ApiError(detail.type, detail.message, status=answer.status_code)

    async def close(self) -> None:
        await self._peer.close()


def _passed_back(headers: httpx.Headers) -> Headers:
    items = headers.multi_items()
    dropped = _OF_A_CONNECTION | _named_by_connection(items)
    return tuple((name, value) for name, value in items if name not in dropped)


def _named_by_connection(headers: Iterable[tuple[str, str]]) -> frozenset[str]:
    listed = ",".join(value for name, value in headers if name == "connection")
    return frozenset(name.strip().lower() for name in listed.split(","))
