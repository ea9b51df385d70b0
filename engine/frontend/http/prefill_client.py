"""The client of prefill engines: has them compute the prompts that the scheduler wants, and watches each engine.

A shell around ``Prefills``, which decides. Closing a connection ends the prompt at the prefill engine.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import httpx

from engine.core.messages import ClientMessage, PrefillDropped, PrefillWanted
from engine.core.routing.prefills import Prefills
from engine.frontend.http.peers import PartnerError, Peer
from engine.frontend.sessions.prefill_bodies import PREFILL
from engine.process.settings import ServerSettings

# The maximum prompts in flight at one prefill engine; more wait here, within the scheduler's time limit.
MAX_CALLS: Final = 64
LOOK_PERIOD_S: Final = 1.0
_LOOK_S: Final = 3.0

logger = logging.getLogger(__name__)


class PrefillClient:
    """Calls the prefill engines of one decode engine.

    ``to`` returns the KV addresses of the decode engine's stages, once they are ready. ``send`` takes messages to its
    scheduler.
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
        # Called with the duration of each prompt, in seconds.
        self.observe: Callable[[float], None] = lambda _: None
        self._peers = {url: Peer(url, settings, _LOOK_S, transport) for url in prefills.urls}
        self._rooms = {url: asyncio.Semaphore(MAX_CALLS) for url in prefills.urls}
        self._calls: dict[int, asyncio.Task[None]] = {}

    def take(self, reply: PrefillWanted | PrefillDropped) -> None:
        """Order a prompt that the scheduler wants, or drop one."""
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
        """Watch every engine until cancelled."""
        async with asyncio.TaskGroup() as looks:
            for url in self.prefills.urls:
                looks.create_task(self._watch(url))

    def break_off(self) -> None:
        """Drop all calls: the scheduler is gone."""
        self.prefills.give_up()
        for transfer in list(self._calls):
            self._leave(transfer)

    async def close(self) -> None:
        """Drop all calls and close the connections."""
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
        """Order one prompt, and report a failure unless the prompt was dropped."""
        failed = None
        try:
            async with self._rooms[wanted.at]:
                answer = await self._peers[wanted.at].operate(PREFILL, self._body(wanted))
        except (PartnerError, OSError) as exc:
            why = str(exc) if isinstance(exc, PartnerError) else f"was not called ({exc})"
            failed = self.prefills.failed(wanted.transfer, why)
        else:
            if not answer.is_ok:
                why = f"refused a prompt ({answer.status}): {answer.words}"
                failed = self.prefills.failed(wanted.transfer, why, answer.status)
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
        """Check one engine once: its health, role and load."""
        peer = self._peers[url]
        try:
            self.prefills.met(url, await peer.load())
        except PartnerError as exc:
            if exc.status == httpx.codes.SERVICE_UNAVAILABLE and await self._is_healthy(peer):
                # Its front end answers, so only its scheduler is busy.
                self.prefills.busy(url)
            else:
                self.prefills.lost(url, str(exc))
        except Exception as exc:  # checking one engine must not end the checks of others
            logger.exception("the prefill engine %s could not be checked", url)
            self.prefills.lost(url, f"could not be checked ({type(exc).__name__}); see the log")

    async def _is_healthy(self, peer: Peer) -> bool:
        try:
            return await peer.health() == httpx.codes.OK
        except PartnerError:
            return False

    def _tell_news(self) -> None:
        for url, why in self.prefills.news():
            if why:
                logger.warning("prompts are computed here, because the prefill engine %s %s", url, why)
            else:
                logger.info("the prefill engine %s takes prompts", url)
