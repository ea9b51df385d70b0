"""The proxy of one engine: forwards a request unchanged and streams the reply back.

Owns the messages between the front and an engine, the front's port to all engines, and the list of headers that belong
to one connection. Abandoning a reply closes its connection, which ends the request in the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import httpx

from engine.core.routing.load import Load
from engine.core.routing.placement import NO_PROMPT, Prompt
from engine.frontend.http.peers import PartnerError, Peer
from engine.frontend.schema.errors import ApiError
from engine.process.settings import ServerSettings

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedRequest:
    """A client's request on its way to an engine. ``target`` is the path with its query.

    ``left_out`` lists the replicas that have refused the request or died with it. ``only`` is the replica that the
    client named, if any.
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
    """The head of an engine's reply, with the name of its replica."""

    status: int
    headers: Headers
    replica: str

    def header(self, name: str) -> str | None:
        """The value of a header, by its name in lower case."""
        return next((value for key, value in self.headers if key == name), None)


class ReplicaLostError(Exception):
    """A replica died with a request. ``replica`` is its name, '' if unknown."""

    def __init__(self, message: str, replica: str = "") -> None:
        super().__init__(message)
        self.replica = replica


class Engines(Protocol):
    def ask(self, request: PassedRequest) -> AsyncIterator[Head | bytes]:
        """Send a request to the engine that the router chooses; yield the head of its reply, then its bytes as they
        arrive.

        Closing the iterator ends the request in the engine. Raises ApiError when no engine takes the request, and
        ReplicaLostError if the engine that had it is gone.
        """

    async def loads(self, headers: Headers) -> list[Load]:
        """Return the load that each engine reports, for a client with access. Raises ApiError."""


# Headers of one connection, never passed on; a Connection header names more of them.
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
# httpx counts the body itself, and an engine compresses nothing.
_NOT_PASSED_ON: Final = _OF_A_CONNECTION | {"content-length", "accept-encoding", "expect"}
PATIENCE_S: Final = 5.0
_STATUSES: Final = range(200, 600)


class EngineProxy:
    """Forwards requests to the engine at ``base_url``; its replies carry the name ``replica``.

    ``peer`` makes the router's own calls to the engine, with the router's keys.
    """

    def __init__(
        self, base_url: str, replica: str, settings: ServerSettings, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._replica = replica
        self.peer = Peer(base_url, settings, PATIENCE_S, transport)

    async def answer(self, request: PassedRequest) -> AsyncGenerator[Head | bytes, None]:
        """Forward a request: yield the head of the engine's reply, then its bytes.

        Raises ApiError for a request that cannot be sent, and ReplicaLostError if the engine is gone, before the head
        or later.
        """
        dropped = _NOT_PASSED_ON | _named_by_connection(request.headers)
        headers = [(name, value) for name, value in request.headers if name not in dropped]
        client = self.peer.client
        try:
            sent = client.build_request(request.method, request.target, headers=headers, content=request.body)
        except (httpx.InvalidURL, ValueError) as exc:
            raise ApiError.invalid(f"the request's target and headers must be valid HTTP: {exc}") from exc
        try:
            answer = await client.send(sent, stream=True)
            async with contextlib.aclosing(answer):
                yield Head(status=_status_of(answer), headers=_passed_back(answer.headers), replica=self._replica)
                async for part in answer.aiter_raw():
                    yield part
        except Exception as exc:  # malformed bytes can make an HTTP client raise almost anything
            words = f"the engine of replica {self._replica} is gone ({type(exc).__name__})"
            raise ReplicaLostError(words, self._replica) from exc

    async def why_not_serving(self) -> str | None:
        """Return why the engine takes no requests (down, starting, draining); None when it takes them."""
        try:
            status = await self.peer.health()
        except PartnerError as exc:
            return str(exc)
        return None if status == httpx.codes.OK else f"is draining or starting ({status})"

    async def load(self) -> Load | None:
        """Return the load; None while the scheduler is too busy to report it. Raises PartnerError otherwise."""
        try:
            return await self.peer.load()
        except PartnerError as exc:
            if exc.status == httpx.codes.SERVICE_UNAVAILABLE:
                return None
            raise

    async def load_for(self, headers: Headers) -> Load:
        """Return the load for a client, who needs the engine's key. Raises ApiError."""
        allowed = {name: value for name, value in headers if name == "authorization"}
        try:
            return await self.peer.load_for(allowed)
        except PartnerError as exc:
            raise ApiError.unavailable(f"the engine of replica {self._replica} does not report its load") from exc

    async def close(self) -> None:
        await self.peer.close()


def _status_of(answer: httpx.Response) -> int:
    if answer.status_code not in _STATUSES:
        raise httpx.RemoteProtocolError(f"a reply must have a status from 200 to 599, got {answer.status_code}")
    return answer.status_code


def _passed_back(headers: httpx.Headers) -> Headers:
    # Decoded as the server encodes them, byte for byte.
    headers.encoding = "latin-1"
    items = headers.multi_items()
    dropped = _OF_A_CONNECTION | _named_by_connection(items)
    return tuple((name, value) for name, value in items if name not in dropped)


def _named_by_connection(headers: Iterable[tuple[str, str]]) -> frozenset[str]:
    listed = ",".join(value for name, value in headers if name == "connection")
    return frozenset(name.strip().lower() for name in listed.split(","))
