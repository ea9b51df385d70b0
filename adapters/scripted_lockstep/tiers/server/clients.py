"""The clients of the server tier: real HTTP to the server's own port, from a thread of the scheduler process.

The scheduler's thread only posts and waits; an asyncio loop in the thread sends the requests and fills in the views.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import httpx

from engine.core.messages import CallAnswer, FinishReason, Refusal, RefusalKind, Reply, TokenOutput
from engine.frontend.sessions.prefill_bodies import PREFILL as PREFILL_PATH
from scripted.core.errors import BadCall, NoAnswer
from scripted.script.clients import Call, Chunk, ClientView, receive_event, receive_events
from scripted.script.options import DEFAULT_RESULT_TIMEOUT_S
from scripted_lockstep.actions import EngineCall
from scripted_lockstep.actions.bodies import view_of
from scripted_lockstep.tiers.server.loop_thread import LoopThread

_NO_LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=64)
# A frozen engine answers when the script lets it continue.
_NO_TIMEOUT: Final = httpx.Timeout(None)
# The server is on loopback, without TLS. Loading the CA certificates would take longer than most scripts.
NO_AUTHORITIES: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class HttpClients(LoopThread):
    """HTTP clients of ``base_url``. They wake the loop whenever a client has received something.

    ``answer_timeout_s`` bounds the wait for a front end that should answer at once.
    """

    def __init__(self, base_url: str, *, pause: Callable[[float], object]) -> None:
        self._pause = pause
        self.answer_timeout_s = DEFAULT_RESULT_TIMEOUT_S
        super().__init__("scripted-clients")
        self._http = httpx.AsyncClient(
            base_url=base_url, timeout=_NO_TIMEOUT, limits=_NO_LIMITS, trust_env=False, verify=NO_AUTHORITIES
        )
        self._open: dict[int, Future[None]] = {}
        # The values that each view must have received, by its id: an earlier life of a rid may still be told tokens.
        self._expected: dict[int, int] = {}

    # -- the Clients protocol --

    def generate(self, rid: str, body: dict[str, Any], first_page: int | None = None) -> ClientView:
        if first_page is not None:
            raise BadCall("prefill() is for an engine whose config has role='prefill', not for one of t.engines(...)")
        return self._post("/generate", view_of(rid, body), body)

    def _post(self, path: str, view: ClientView, body: dict[str, Any]) -> ClientView:
        self._expected.update({id(choice): 0 for choice in view.choices})
        self._open[id(view)] = self._spawn(self._generate(path, view, body))
        return view

    def call(self, action: EngineCall) -> Call:
        call = Call(action.path)
        self._spawn(self._call(call, action))
        return call

    def disconnect(self, view: ClientView) -> None:
        view.dropped = True
        self._open.pop(id(view)).cancel()
        self._settle_until(lambda: view.closed, f"the connection of {view.rid} to be dropped")

    def settle(self, replies: Sequence[Reply], views: Mapping[str, ClientView], calls: Mapping[str, Call]) -> None:
        """Wait until every client has received these replies, so that a script sees the same in every run."""
        for reply in replies:
            if isinstance(reply, TokenOutput) and reply.rid in views and not views[reply.rid].dropped:
                self._settle_output(reply, views[reply.rid])
            elif isinstance(reply, Refusal) and reply.rid in views and reply.kind is not RefusalKind.DUPLICATE:
                # A refused duplicate's view is not the live request's.
                self._settle_refusal(views[reply.rid])
            elif isinstance(reply, CallAnswer) and reply.call_id in calls:
                self._settle_call(calls[reply.call_id])

    def _settle_refusal(self, view: ClientView) -> None:
        self._settle_until(lambda: view.closed, f"the refusal of {view}")

    def _settle_call(self, call: Call) -> None:
        self._settle_until(lambda: call.done, f"the answer to {call}")

    def forget(self) -> None:
        for future in self._open.values():
            future.cancel()
        self._open.clear()
        self._expected.clear()

    # -- waiting --

    def _settle_output(self, output: TokenOutput, view: ClientView) -> None:
        news = len(output.token_ids) + len(output.prompt_logprobs)
        expected = self._expected[id(view)] = self._expected.get(id(view), 0) + news
        if output.finish_reason is not None:
            self._settle_until(lambda: view.closed, f"the end of {view}")
            if all(choice.closed for choice in view.answer.choices):
                self._settle_until(lambda: view.answer.closed, f"the end of {view.answer}")
        elif view.streams:
            self._settle_until(
                lambda: view.closed or view.values >= expected, f"{expected} tokens and prompt logprobs of {view}"
            )

    def _settle_until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.answer_timeout_s
        while not done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NoAnswer(f"a client waited {self.answer_timeout_s} s for {what}: the front end hangs")
            self._pause(left_s)

    # -- in the thread --

    async def _end(self) -> None:
        await super()._end()
        await self._http.aclose()

    async def _generate(self, path: str, view: ClientView, body: dict[str, Any]) -> None:
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    view.fail(_error_text(await response.aread()), response.status_code)
                elif path == PREFILL_PATH:
                    view.receive(Chunk(text="", token_ids=(), finish_reason=FinishReason.LENGTH.value))
                    view.status = response.status_code
                elif view.streams:
                    view.status = response.status_code
                    await self._read_events(view, response)
                else:
                    receive_event(view, await response.aread())
                    view.status = response.status_code
        except httpx.HTTPError as exc:
            view.fail(f"the connection broke before the answer ended ({type(exc).__name__})")
        finally:
            view.closed = True
            self._wake()

    async def _read_events(self, view: ClientView, response: httpx.Response) -> None:
        async for line in response.aiter_lines():
            receive_events(view, f"{line}\n")
            self._wake()
        if not all(choice.terminal_answers for choice in view.choices):
            view.fail("the stream ended without a terminal answer")

    async def _call(self, call: Call, action: EngineCall) -> None:
        try:
            response = await self._http.post(action.path, json=action.body)
            call.answer(response.status_code, response.text if response.is_success else _error_text(response.content))
        except httpx.HTTPError as exc:
            call.answer(0, f"the connection broke before the answer came ({type(exc).__name__})")
        finally:
            self._wake()


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")
