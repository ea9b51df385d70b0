"""One engine, asked over HTTP on loopback: a request goes in as it came, an answer comes out as it is made.

Owns the connection and which headers belong to it alone. Leaving an answer closes its connection, and so ends its
request in the engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final

import httpx
import msgspec

from engine.frontend.errors import ApiError, ErrorBody
from engine.frontend.peer_answers import whole_answer
from engine.router.passed import Head, Headers, PassedRequest, ReplicaLostError
from engine.settings import ServerSettings

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
# An answer may take as long as it takes: the engine has the limits, and its end ends the connection.
_TIMEOUT: Final = httpx.Timeout(None, connect=5.0)
_PROBE_S: Final = 5.0


class EngineProxy:
    """Passes requests to the engine at ``base_url``. ``replica`` is the name that its answers bear."""

    def __init__(
        self, base_url: str, replica: str, settings: ServerSettings, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._replica = replica
        key = settings.api_key
        operators_key = settings.admin_key or key
        self._operator_headers = (
            {} if operators_key is None else {"authorization": f"Bearer {operators_key.get_secret_value()}"}
        )
        self._probe_headers = {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
        # As many connections as there are requests: the engine bounds both.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(
            base_url=base_url, timeout=_TIMEOUT, limits=limits, transport=transport, trust_env=False
        )

    async def answer(self, request: PassedRequest) -> AsyncIterator[Head | bytes]:
        """The engine's answer. Raises ReplicaLostError when the engine is gone, before the head or in the middle."""
        dropped = _NOT_PASSED_ON | _named_by_connection(request.headers)
        headers = [(name, value) for name, value in request.headers if name not in dropped]
        try:
            async with self._client.stream(
                request.method, request.target, headers=headers, content=request.body
            ) as answer:
                yield Head(status=answer.status_code, headers=_passed_back(answer.headers), replica=self._replica)
                async for part in answer.aiter_raw():
                    yield part
        except httpx.TransportError as exc:
            words = f"the engine of replica {self._replica} is gone ({type(exc).__name__})"
            raise ReplicaLostError(words, self._replica) from exc

    async def is_serving(self) -> bool:
        """Whether the engine takes requests: it is up, and neither draining nor going down."""
        return await self.why_not_serving() is None

    async def why_not_serving(self) -> str | None:
        """Why the engine takes no requests; None when it does."""
        try:
            answer = await self._asked("/health", {})
        except httpx.HTTPError as exc:
            return f"is gone ({type(exc).__name__})"
        return None if answer.status_code == httpx.codes.OK else f"is draining or starting ({answer.status_code})"

    async def about(self) -> dict[str, Any]:
        """Its settings and limits. Raises ApiError when it does not say."""
        try:
            answer = await self._asked("/server_info?timeout=0", self._probe_headers)
        except httpx.HTTPError as exc:
            raise ApiError.unavailable(f"does not describe itself ({type(exc).__name__})") from exc
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise ApiError.unauthenticated("asks the router for a key; set ENGINE_API_KEY to its own")
        if answer.status_code != httpx.codes.OK:
            raise ApiError.unavailable(f"does not describe itself ({answer.status_code})")
        return dict(answer.json())

    async def operate(self, method: str, target: str, body: object = None) -> tuple[int, str]:
        """Ask as an operator, with the router's own key: the status and the text of the answer.

        Raises ReplicaLostError when the engine is gone before it has answered.
        """
        content = b"" if body is None else msgspec.json.encode(body)
        headers = self._operator_headers | ({"content-type": "application/json"} if content else {})
        try:
            answer = await whole_answer(self._client, method, target, headers=headers, content=content)
        except httpx.HTTPError as exc:
            raise ReplicaLostError(f"is gone ({type(exc).__name__})", self._replica) from exc
        return answer.status_code, answer.text

    async def load(self) -> dict[str, Any] | None:
        """What the engine says of its load; None when it does not say."""
        try:
            answer = await self._asked("/get_load", self._probe_headers)
        except httpx.HTTPError:
            return None
        if answer.status_code != httpx.codes.OK:
            return None
        (load,) = answer.json()
        return dict(load)

    async def load_for(self, headers: Headers) -> dict[str, Any]:
        """The same for a client, who needs the key if there is one. Raises ApiError."""
        allowed = {name: value for name, value in headers if name == "authorization"}
        try:
            answer = await self._asked("/get_load", allowed)
        except httpx.HTTPError as exc:
            raise self._says_no_load() from exc
        try:
            if answer.status_code == httpx.codes.OK:
                (load,) = answer.json()
                return dict(load)
            detail = msgspec.json.decode(answer.content, type=ErrorBody).error
        except (msgspec.MsgspecError, ValueError, TypeError) as exc:
            raise self._says_no_load() from exc
        raise ApiError(answer.status_code, detail.type, detail.message)

    async def close(self) -> None:
        await self._client.aclose()

    def _says_no_load(self) -> ApiError:
        return ApiError.unavailable(f"the engine of replica {self._replica} does not say its load")

    async def _asked(self, target: str, headers: Mapping[str, str]) -> httpx.Response:
        return await whole_answer(self._client, "GET", target, headers=headers, within_s=_PROBE_S)


def _passed_back(headers: httpx.Headers) -> Headers:
    items = headers.multi_items()
    dropped = _OF_A_CONNECTION | _named_by_connection(items)
    return tuple((name, value) for name, value in items if name not in dropped)


def _named_by_connection(headers: Iterable[tuple[str, str]]) -> frozenset[str]:
    listed = ",".join(value for name, value in headers if name == "connection")
    return frozenset(name.strip().lower() for name in listed.split(","))
