"""Other engines, asked over HTTP: their answers are read whole within a time and a size, whatever is at the other end.

httpx bounds each read and not the answer: a peer that sends a byte now and then holds its caller for ever, and one that
sends without end takes its memory. And what asks prefill engines for what the scheduler wants, and looks at them again
and again: a shell around ``Prefills``, which decides. Leaving a connection ends the prompt at the prefill engine.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import httpx
import msgspec
from pydantic import SecretStr

from engine.core.messages import ClientMessage, PrefillDropped, PrefillWanted
from engine.core.routing.prefills import Prefills
from engine.frontend.sessions.prefill_bodies import PREFILL
from engine.process.settings import ServerSettings

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


# Prompts that one prefill engine is asked for at a time; more wait here, within the scheduler's time.
MAX_CALLS: Final = 64
LOOK_PERIOD_S: Final = 1.0
_LOOK_S: Final = 3.0
_MAX_SHOWN_CHARS: Final = 512

logger = logging.getLogger(__name__)


class PrefillClient:
    """The prefill engines of a decode engine.

    ``to`` says where its stages take KV, once they are ready; ``send`` tells its scheduler.
    """

    def __init__(
        self,
        prefills: Prefills,
        settings: ServerSettings,
        page_size: int,
        to: Callable[[], Sequence[str]],
        send: Callable[[ClientMessage], None],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.prefills = prefills
        self._timeout_s = settings.prefill_timeout_s
        self._page_size = page_size
        self._to = functools.cache(to)
        self._send = send
        # Is told how long each prompt took, in seconds.
        self.observe: Callable[[float], None] = lambda _: None
        self._peers = {url: Peer(url, settings, _LOOK_S, transport) for url in prefills.urls}
        self._rooms = {url: asyncio.Semaphore(MAX_CALLS) for url in prefills.urls}
        self._calls: dict[int, asyncio.Task[None]] = {}

    def take(self, reply: PrefillWanted | PrefillDropped) -> None:
        """Do what the scheduler wants, or leave what it wants no more."""
        if isinstance(reply, PrefillWanted):
            refused = self.prefills.wanted(reply)
            if refused is not None:
                self._send(refused)
                return
            self._calls[reply.transfer] = asyncio.create_task(self._ask(reply))
            return
        self.prefills.dropped(reply.transfer, is_late=reply.is_late)
        self._leave(reply.transfer)
        self._tell_news()

    async def watch(self) -> None:
        """Look at every engine again and again, until this is cancelled."""
        async with asyncio.TaskGroup() as looks:
            for url in self.prefills.urls:
                looks.create_task(self._watch(url))

    def break_off(self) -> None:
        """Leave all calls: the scheduler is gone."""
        self.prefills.give_up()
        for transfer in list(self._calls):
            self._leave(transfer)

    async def close(self) -> None:
        """Leave all calls and close the connections."""
        calls = list(self._calls.values())
        self.break_off()
        await asyncio.gather(*calls, return_exceptions=True)
        for peer in self._peers.values():
            await peer.close()

    def _leave(self, transfer: int) -> None:
        call = self._calls.pop(transfer, None)
        if call is not None:
            call.cancel()

    async def _ask(self, wanted: PrefillWanted) -> None:
        """Ask for one prompt, and tell how it ended unless it was dropped."""
        try:
            async with self._rooms[wanted.at]:
                answer = await self._peers[wanted.at].operate("POST", PREFILL, self._body(wanted))
        except (httpx.HTTPError, OSError) as exc:
            failed = self.prefills.failed(wanted.transfer, f"is gone ({type(exc).__name__})")
        else:
            failed = None
            if answer.status_code != httpx.codes.OK:
                why = f"refused a prompt ({answer.status_code}): {words_of(answer.text)[:_MAX_SHOWN_CHARS]}"
                failed = self.prefills.failed(wanted.transfer, why, answer.status_code)
            elif (took_s := self.prefills.answered(wanted.transfer)) is not None:
                self.observe(took_s)
        self._calls.pop(wanted.transfer, None)
        if failed is not None:
            self._send(failed)
        self._tell_news()

    def _body(self, wanted: PrefillWanted) -> dict[str, Any]:
        return {
            "to": self._to(),
            "transfer": wanted.transfer,
            "first_page": wanted.first_page,
            "weights": wanted.weights,
            "page_size": self._page_size,
            "prompt_ids": wanted.ids,
            "priority": wanted.priority,
            "cache_salt": wanted.cache_salt,
            "timeout_s": self._timeout_s,
        }

    async def _watch(self, url: str) -> None:
        while True:
            await self.look(url)
            self._tell_news()
            await asyncio.sleep(LOOK_PERIOD_S)

    async def look(self, url: str) -> None:
        """Look once whether an engine is there, what it is, and how loaded."""
        try:
            answer = await self._peers[url].look("/get_load")
            if answer.status_code == httpx.codes.OK:
                self.prefills.met(url, load_in(answer))
                return
            # Its front end answers, so its scheduler is busy, or it goes down.
            health = await self._peers[url].health()
        except httpx.HTTPError as exc:
            self.prefills.lost(url, f"is gone ({type(exc).__name__})")
        except (LookupError, TypeError, ValueError, AttributeError) as exc:
            self.prefills.lost(url, f"is no engine of this version ({exc!r})")
        else:
            if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and health.status_code == httpx.codes.OK:
                self.prefills.busy(url)
            else:
                self.prefills.lost(
                    url, f"does not say its load ({answer.status_code}): {words_of(answer.text)[:_MAX_SHOWN_CHARS]}"
                )

    def _tell_news(self) -> None:
        for url, why in self.prefills.news():
            if why:
                logger.warning("prompts are computed here, because the prefill engine %s %s", url, why)
            else:
                logger.info("the prefill engine %s takes prompts", url)
