"""Another engine, asked over HTTP: its answers are read whole within a time and a size, whatever is at the other end.

httpx bounds each read and not the answer: a peer that sends a byte now and then holds its caller for ever, and one that
sends without end takes its memory. Owns the connections and the keys that an engine is asked with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import httpx
import msgspec
from pydantic import SecretStr

from engine.settings import ServerSettings

MAX_PEER_ANSWER_BYTES: Final = 4 * 2**20
KEPT_CONNECTIONS: Final = 64


class Peer:
    """The engine at ``base_url``. Whatever is no answer of an engine raises httpx.HTTPError.

    An answer to a short question is late after ``patience_s``. Others may take as long as they take: the engine has the
    limits, and its end ends the connection.
    """

    def __init__(
        self,
        base_url: str,
        settings: ServerSettings,
        patience_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._client_headers = _with_key(settings.api_key or settings.admin_key)
        self._operator_headers = _with_key(settings.admin_key or settings.api_key)
        self._patience_s = patience_s
        # As many connections as there are requests: the engine bounds both.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS)
        timeout = httpx.Timeout(None, connect=patience_s)
        self.client = httpx.AsyncClient(
            base_url=base_url, timeout=timeout, limits=limits, transport=transport, trust_env=False
        )

    async def health(self) -> httpx.Response:
        return await self.look("/health", {})

    async def look(self, target: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """The answer to a short question, with the key of clients if no headers are given."""
        headers = self._client_headers if headers is None else headers
        return await self._whole("GET", target, headers=headers, within_s=self._patience_s)

    async def operate(self, method: str, target: str, body: object = None) -> httpx.Response:
        """Ask as an operator."""
        content = b"" if body is None else msgspec.json.encode(body)
        headers = self._operator_headers | ({"content-type": "application/json"} if content else {})
        return await self._whole(method, target, headers=headers, content=content)

    async def close(self) -> None:
        await self.client.aclose()

    async def _whole(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str],
        content: bytes = b"",
        within_s: float | None = None,
    ) -> httpx.Response:
        """Raises httpx.HTTPError, also for what is late, compressed, or of more than ``MAX_PEER_ANSWER_BYTES``."""
        plain = {"accept-encoding": "identity", **headers}
        body = bytearray()
        asking = self.client.stream(method, target, headers=plain, content=content)
        try:
            async with asyncio.timeout(within_s), asking as answer:
                if "content-encoding" in answer.headers:
                    raise httpx.RemoteProtocolError("its answer is compressed, which it was not asked for")
                async for part in answer.aiter_bytes():
                    body += part
                    if len(body) > MAX_PEER_ANSWER_BYTES:
                        raise httpx.RemoteProtocolError(f"its answer has more than {MAX_PEER_ANSWER_BYTES} bytes")
        except TimeoutError as exc:
            raise httpx.ReadTimeout(f"its answer was not whole within {within_s:g} s") from exc
        return httpx.Response(answer.status_code, headers=answer.headers, content=bytes(body), request=answer.request)


def words_of(text: str) -> str:
    """What an engine's answer says: the message of an error, or the text."""
    try:
        return str(msgspec.json.decode(text)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return text


def load_in(answer: httpx.Response) -> dict[str, Any]:
    """The load in an answer of ``/get_load``. Raises ValueError or TypeError for one that is none."""
    (load,) = answer.json()
    return dict(load)


def _with_key(key: SecretStr | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
