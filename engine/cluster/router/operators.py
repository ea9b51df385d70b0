"""The operators' routes of a router: a call changes all engines or none.

Drives the pure state machine of ``engine.core.routing.operators``: sends its calls to the engines over HTTP, feeds it
the answers, and limits the time of each stage. Decides nothing.
"""

from __future__ import annotations

import asyncio
from typing import Final

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse

from engine.cluster.router.engines import RoutedEngines, RouterPlan
from engine.core.routing.operators import Ask, Message, Order, Outcome, Seen, State, Verb
from engine.frontend.http.auth import Access
from engine.frontend.http.body_reader import BodyReader
from engine.frontend.http.peers import PartnerError
from engine.frontend.http.routes.administration import MAX_BODY_BYTES
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.native import MAX_CALL_TIMEOUT_S, parse_body, read_timeout
from engine.frontend.schema.operator_routes import (
    NoBody,
    PauseBody,
    SleepBody,
    UpdateWeightsBody,
    require_no_parameters,
)
from engine.process.settings import ServerSettings

# Routes that address all engines if a request names none.
VERBS: Final = {
    "/pause_generation": Verb.PAUSE,
    "/continue_generation": Verb.CONTINUE,
    "/flush_cache": Verb.FLUSH,
    "/update_weights_from_disk": Verb.UPDATE,
    "/sleep": Verb.SLEEP,
    "/wake": Verb.WAKE,
}
_TARGETS: Final = {verb: path for path, verb in VERBS.items()}
# The pause between looks: an engine may still carry out a call whose connection was lost, so looks repeat until it has
# none.
_LOOK_AGAIN_S: Final = 0.05


class FleetOperators:
    """Carries out acts over all ``engines``, one at a time, with the router's own keys."""

    def __init__(self, engines: RoutedEngines, settings: ServerSettings, access: Access, plan: RouterPlan) -> None:
        self._engines = engines
        self._access = access
        self._bodies = BodyReader(min(MAX_BODY_BYTES, settings.max_body_bytes))
        self._plan = plan
        self._machine = engines.operators
        self._asking: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[Outcome] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timed_stage = 0
        self._drain_s = 0.0
        engines.on_messages = self._send

    async def answer(self, request: Request) -> Response:
        """Carry out an operator's call on all engines. It continues if the operator disconnects."""
        await self._access.admit_operation(request)
        order, drain_s = await self._read(request)
        outcome = await asyncio.shield(self.act(order, drain_s))
        if outcome.is_done:
            return PlainTextResponse(outcome.words)
        raise (ApiError.invalid if outcome.is_refusal else ApiError.unavailable)(outcome.words)

    async def act(self, order: Order, drain_s: float) -> Outcome:
        """Carry out one act; running requests may finish for ``drain_s`` seconds before a flush or an update."""
        away = {name: engine.why_not for name, engine in self._engines.engines.items() if engine.why_not}
        is_first = not self._machine.is_acting
        if is_first:
            self._drain_s, self._ended = drain_s, asyncio.get_running_loop().create_future()
        messages = self._machine.begin(order, away)
        if messages and isinstance(messages[0], Outcome):
            return messages[0]
        self._send(messages)
        assert self._ended is not None, "an act has an end"
        return await self._ended

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    async def _read(self, request: Request) -> tuple[Order, float]:
        verb = VERBS[request.url.path]
        timeout_s = None
        if verb is Verb.FLUSH:
            timeout_s = read_timeout(request.query_params, MAX_CALL_TIMEOUT_S)
        else:
            require_no_parameters(request.query_params)
        async with self._bodies.body_of(request) as data:
            if verb is Verb.PAUSE:
                return Order(verb, parse_body(PauseBody, data).mode), 0.0
            if verb is Verb.SLEEP:
                asked = parse_body(SleepBody, data)
                return Order(verb, asked.mode, asked.level), 0.0
            if verb is Verb.UPDATE:
                body = parse_body(UpdateWeightsBody, data)
                return Order(verb, body.model_path), body.timeout or 0.0
            parse_body(NoBody, data)
        return Order(verb), timeout_s or 0.0

    def _send(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Outcome):
                assert self._ended is not None, "an outcome belongs to an act"
                self._ended.set_result(message)
            else:
                task = asyncio.create_task(self._ask(message))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
        self._engines.open_or_close()
        if self._machine.stage != self._timed_stage:
            self._time_stage()
        if self._machine.is_draining and not self._engines.sent:
            self._send(self._machine.drained())

    def _time_stage(self) -> None:
        """Limit the time of the stage that has begun, unless the act is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        stage = self._timed_stage = self._machine.stage
        if not self._machine.is_acting:
            return
        machine, plan = self._machine, self._plan
        limit_s = plan.change_s if machine.is_changing else plan.answer_s
        words = f"did not answer within {limit_s:g} s"
        if machine.is_draining:
            limit_s = self._drain_s
            words = f"has sent requests that did not finish within {limit_s:g} s; give a timeout, or pause with abort"
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(limit_s, lambda: self._send(machine.late(stage, words)))

    async def _ask(self, ask: Ask) -> None:
        try:
            ok, words, seen = await (self._look(ask) if ask.verb is Verb.LOOK else self._change(ask))
        except PartnerError as exc:
            if exc.status is None:
                self._send(self._machine.unanswered(ask.engine, str(exc)))
                return
            ok, words, seen = False, str(exc), None
        self._send(self._machine.answered(ask.engine, ok=ok, words=words, seen=seen))

    async def _look(self, ask: Ask) -> tuple[bool, str, Seen | None]:
        peer = self._engines.engines[ask.engine].proxy.peer
        while True:
            state = await peer.state()
            if state.stats is None:
                raise PartnerError("has a scheduler that does not answer")
            if not state.open_calls:
                seen = State(state.stats.paused, state.weights, state.stats.sleep_level)
                return True, "", Seen(seen, state.stats.alive)
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _change(self, ask: Ask) -> tuple[bool, str, None]:
        bodies = {
            Verb.PAUSE: {"mode": ask.argument},
            Verb.UPDATE: {"model_path": ask.argument},
            Verb.SLEEP: {"mode": ask.argument, "level": ask.level},
        }
        peer = self._engines.engines[ask.engine].proxy.peer
        answer = await peer.operate(_TARGETS[ask.verb], bodies.get(ask.verb))
        return answer.is_ok, answer.words, None
