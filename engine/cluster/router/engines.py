"""The engines of a router: sends each request to the engine that the placement chooses, and tracks it until its end.

Owns the report on the engines for clients and operators: availability, its reasons, and counters.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from engine.cluster.router.front import ENGINE_HEADER
from engine.cluster.router.proxy import EngineProxy, Head, Headers, PassedRequest, ReplicaLostError
from engine.core.errors import ConfigError
from engine.core.routing.cache_index import FollowedCache
from engine.core.routing.load import Load
from engine.core.routing.operators import OWED, Message, Operators
from engine.core.routing.placement import Placement, Refused, ReplicaLoad, Rules, Ticket
from engine.frontend.http.auth import Access
from engine.frontend.http.metrics import PREFIX
from engine.frontend.http.responses import RETRY_AFTER_S, json_answer
from engine.frontend.schema.errors import ApiError, ErrorType
from engine.frontend.schema.operator_routes import OPERATOR_ROUTES
from engine.process.links.endpoint import parse_engine_url


@dataclass(frozen=True, kw_only=True)
class RouterPlan:
    """The plan of a router: its engines, the rules of placement, and the period of its health checks, in seconds.

    An engine has ``answer_s`` seconds to answer an operator's call, and ``change_s`` for the change itself.
    """

    urls: tuple[str, ...]
    rules: Rules
    period_s: float = 1.0
    answer_s: float = 10.0
    change_s: float = 600.0

    def __post_init__(self) -> None:
        for url in self.urls:
            parse_engine_url(url, "an engine's URL")
        if len(set(self.urls)) < len(self.urls):
            raise ConfigError(f"each engine must be given once, got {' '.join(self.urls)}; drop the second one")


@dataclass
class RoutedEngine:
    """One engine. ``why_not`` is the reason why it takes no requests, empty while it takes them."""

    proxy: EngineProxy
    why_not: str = "has not answered yet"
    cache: FollowedCache | None = None
    # Called when a request finds the engine gone.
    look: Callable[[], None] = field(default=lambda: None)


@dataclass
class Counts:
    requests: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    gaps: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    held_tokens: int = 0


class RoutedEngines:
    """The port of the front. ``engines`` are by name, in the order of the command line."""

    def __init__(self, placement: Placement, engines: Mapping[str, RoutedEngine]) -> None:
        self.placement = placement
        self.engines = engines
        self.counts = Counts()
        self.operators = Operators(tuple(engines))
        # Sends the messages of the operators' machine. ``sent`` requests are at engines, ``held`` ones wait for an act
        # to end.
        self.on_messages: Callable[[list[Message]], None] = lambda _: None
        self.sent = 0
        self.held = 0
        self._is_open = asyncio.Event()
        self._is_open.set()

    async def ask(self, request: PassedRequest) -> AsyncIterator[Head | bytes]:
        await self._admit(request)
        ticket = None if request.only else self._place(request)
        name = request.only if ticket is None else ticket.replica
        if name not in self.engines:
            known = ", ".join(self.engines)
            words = f"{ENGINE_HEADER} must be one of {known}, got {name!r}"
            raise ApiError(ErrorType.NOT_FOUND, words)
        if request.only and request.target.partition("?")[0] in OPERATOR_ROUTES:
            self.operators.operated_alone(name)
        self.counts.requests[name] += 1
        self.sent += 1
        try:
            answer = self.engines[name].proxy.answer(request)
            async with contextlib.aclosing(answer):
                async for part in answer:
                    if isinstance(part, Head):
                        yield replace(part, headers=(*part.headers, (ENGINE_HEADER, name)))
                    else:
                        yield part
        except ReplicaLostError as exc:
            self.lost(name, str(exc))
            if request.only:
                raise ApiError.unavailable(str(exc)) from exc
            raise
        finally:
            self.sent -= 1
            if ticket is not None:
                self.placement.ended(ticket)
            if self.operators.is_draining and not self.sent:
                self.on_messages(self.operators.drained())

    async def loads(self, headers: Headers) -> list[Load]:
        """Return the load of each engine that takes requests. Raises a refusal if all refuse."""
        loads: list[Load] = []
        refusal: ApiError | None = None
        for engine in self.engines.values():
            try:
                if not engine.why_not:
                    loads.append(await engine.proxy.load_for(headers))
            except ApiError as exc:
                refusal = exc
        if refusal is not None and not loads:
            raise refusal
        return loads

    def open_or_close(self) -> None:
        """Forward or hold requests as the operators' act needs, and leave out engines that have yet to catch up."""
        for name, engine in self.engines.items():
            why = self.operators.why_not(name)
            if why and not engine.why_not:
                self.away(name, why)
            elif not why and engine.why_not == OWED:
                engine.why_not = ""
                self.placement.report(name, ReplicaLoad())
                engine.look()
        (self._is_open.clear if self.operators.is_closed else self._is_open.set)()

    def gone(self, name: str, why: str) -> None:
        """Note that an engine does not answer, or refuses all requests."""
        self.on_messages(self.operators.lost(name, why))
        self.away(name, why)

    def met(self, name: str) -> str:
        """Note that an engine answers. Returns why it takes no requests nevertheless: it has yet to catch up with an
        act.
        """
        self.on_messages(self.operators.met(name))
        return self.operators.why_not(name)

    def away(self, name: str, why: str) -> None:
        """Send an engine no more requests; its current ones may finish."""
        self.engines[name].why_not = why
        if self.placement.fleet.is_known(name):
            self.placement.lost(name)

    def lost(self, name: str, why: str) -> None:
        """Note that a request found an engine gone: it gets no more requests until a check finds it back."""
        self.counts.lost[name] += 1
        self.gone(name, why)
        self.engines[name].look()

    async def _admit(self, request: PassedRequest) -> None:
        """Wait while an act needs idle engines. An operator's call to one engine is refused during any act."""
        path = request.target.partition("?")[0]
        if path in OPERATOR_ROUTES:
            if self.operators.is_acting:
                raise ApiError.unavailable(f"{path} must wait for a call to all engines that is in progress; try again")
        elif request.method == "POST":
            self.held += 1
            try:
                while self.operators.is_closed:
                    await self._is_open.wait()
            finally:
                self.held -= 1

    def _place(self, request: PassedRequest) -> Ticket:
        ticket = self.placement.place(request.prompt, request.left_out)
        if isinstance(ticket, Refused):
            self.counts.refused[ticket.name] += 1
            raise self._refusal(ticket)
        self.counts.prompt_tokens += request.prompt.tokens
        self.counts.held_tokens += min(request.prompt.tokens, ticket.held_chunks * request.prompt.tokens_a_chunk)
        return ticket

    def _refusal(self, refused: Refused) -> ApiError:
        if refused is Refused.FULL:
            return ApiError(ErrorType.BUSY, f"{refused.value}; try again")
        causes = [f"{name} {engine.why_not}" for name, engine in self.engines.items() if engine.why_not]
        return ApiError.unavailable(
            f"{refused.value}: {'; '.join(causes) or 'all have refused this request'}; try again"
        )


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """``why_not`` is the reason why the engine takes no requests. ``cache`` is right, behind or guessed.

    ``requests`` counts the requests in flight there, ``cached_pages`` the cached pages that the router knows.
    """

    name: str
    why_not: str | None
    requests: int
    cache: str
    cached_pages: int


class RouterHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a router's ``GET /health``: 200 while an engine takes requests, else 503."""

    status: str
    engines: list[EngineHealth]


class RouterPages:
    """``GET /health`` and ``GET /metrics`` of a router."""

    def __init__(self, engines: RoutedEngines, access: Access) -> None:
        self._engines = engines
        self._access = access
        self._registry = CollectorRegistry()
        self._registry.register(_RouterCollector(engines))

    async def health(self, _: Request) -> Response:
        engines = [self._health_of(name, engine) for name, engine in self._engines.engines.items()]
        is_up = any(engine.why_not is None for engine in engines)
        return json_answer(
            RouterHealth(status="ok" if is_up else "no engine takes requests", engines=engines),
            status=200 if is_up else 503,
            headers={} if is_up else {"retry-after": RETRY_AFTER_S},
        )

    async def metrics(self, request: Request) -> Response:
        await self._access.admit_client(request)
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def _health_of(self, name: str, engine: RoutedEngine) -> EngineHealth:
        fleet, cache = self._engines.placement.fleet, engine.cache
        known = "guessed"
        if cache is not None:
            known = "right" if cache.is_right else "behind"
        return EngineHealth(
            name=name,
            why_not=engine.why_not or None,
            requests=fleet.in_flight(name) if fleet.is_known(name) else 0,
            cache=known,
            cached_pages=self._engines.placement.index.size(name) if cache is None else len(cache.mirror.pool),
        )


class _RouterCollector(Collector):
    def __init__(self, engines: RoutedEngines) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        yield from self._states()
        yield from self._requests()
        yield from self._prompts()

    def _states(self) -> Iterator[Metric]:
        """Yield the state of each engine, of its requests and of the mirror of its cache."""
        engines, fleet = self._engines.engines, self._engines.placement.fleet
        up = {name: float(not engine.why_not) for name, engine in engines.items()}
        yield _gauge("engine_up", "1 while the engine takes requests.", up)
        flying = {name: float(fleet.in_flight(name)) for name in engines if fleet.is_known(name)}
        yield _gauge("requests_in_flight", "Unfinished requests that this router has sent.", flying)
        right = {name: float(one.cache.is_right) for name, one in engines.items() if one.cache is not None}
        yield _gauge("cache_mirror_right", "1 while the router's mirror of the engine's cache is exact.", right)
        pages = {name: float(len(one.cache.mirror.pool)) for name, one in engines.items() if one.cache is not None}
        yield _gauge("cache_mirror_pages", "Pages that the engine has cached, by its KV events.", pages)

    def _requests(self) -> Iterator[Metric]:
        """Yield the counts of requests that were sent, lost, refused and held."""
        engines, counts = self._engines.engines, self._engines.counts
        for name, help_text, counted in (
            ("requests", "Requests sent, retries included.", counts.requests),
            ("engine_lost", "Requests that found the engine gone.", counts.lost),
            ("kv_event_gaps", "Times that KV events were missing.", counts.gaps),
        ):
            family = CounterMetricFamily(f"{PREFIX}router_{name}", help_text, labels=("engine",))
            for engine in engines:
                family.add_metric((engine,), counted[engine])
            yield family
        refused = CounterMetricFamily(
            f"{PREFIX}router_requests_refused", "Requests that no engine could take, by `reason`.", labels=("reason",)
        )
        for reason, count in counts.refused.items():
            refused.add_metric((reason.lower(),), count)
        yield refused
        held = GaugeMetricFamily(
            f"{PREFIX}router_requests_held", "Requests that wait for the end of an operator's call."
        )
        held.add_metric((), float(self._engines.held))
        yield held

    def _prompts(self) -> Iterator[Metric]:
        """Yield the tokens of all prompts, and those expected to be cached."""
        counts = self._engines.counts
        for name, help_text, count in (
            ("prompt_tokens", "Tokens of the prompts that were placed.", counts.prompt_tokens),
            (
                "prompt_tokens_held",
                "Prompt tokens that the chosen engine was expected to have cached.",
                counts.held_tokens,
            ),
        ):
            family = CounterMetricFamily(f"{PREFIX}router_{name}", help_text)
            family.add_metric((), count)
            yield family


def _gauge(name: str, help_text: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}router_{name}", help_text, labels=("engine",))
    for engine, value in values.items():
        family.add_metric((engine,), value)
    return family
