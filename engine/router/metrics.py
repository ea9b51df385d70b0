"""What a router tells of itself: its engines, as JSON for a probe and as numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from engine.frontend.auth import Access
from engine.frontend.metrics import PREFIX
from engine.frontend.responses import RETRY_AFTER_S, json_answer
from engine.router.engines import RoutedEngine, RoutedEngines


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """``why_not`` says why the engine takes no requests. ``cache`` is right, behind, or guessed where it is not told.

    ``requests`` are in flight there; ``cached_pages`` are those that the router knows of.
    """

    name: str
    why_not: str | None
    requests: int
    cache: str
    cached_pages: int


class RouterHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a router's ``GET /health``: 200 while an engine takes requests, else 503."""

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
        return EngineHealth(
            name=name,
            why_not=engine.why_not or None,
            requests=fleet.in_flight(name) if fleet.is_known(name) else 0,
            cache="guessed" if cache is None else "right" if cache.is_right else "behind",
            cached_pages=self._engines.placement.index.size(name) if cache is None else len(cache.picture.pool),
        )


class _RouterCollector(Collector):
    def __init__(self, engines: RoutedEngines) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        engines, counts = self._engines.engines, self._engines.counts
        fleet = self._engines.placement.fleet
        up = {name: float(not engine.why_not) for name, engine in engines.items()}
        yield _gauge("engine_up", "1 while the engine takes requests.", up)
        flying = {name: float(fleet.in_flight(name)) for name in engines if fleet.is_known(name)}
        yield _gauge("requests_in_flight", "Requests that this router has sent and not seen end.", flying)
        right = {name: float(one.cache.is_right) for name, one in engines.items() if one.cache is not None}
        yield _gauge("cache_picture_right", "1 while it is known what the engine has cached.", right)
        pages = {name: float(len(one.cache.picture.pool)) for name, one in engines.items() if one.cache is not None}
        yield _gauge("cache_picture_pages", "Pages that the engine has cached, as it tells.", pages)
        for name, help_text, counted in (
            ("requests", "Requests sent, second tries too.", counts.requests),
            ("engine_lost", "Requests that found the engine gone.", counts.lost),
            ("kv_event_gaps", "How often KV events were missing.", counts.gaps),
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
        held = GaugeMetricFamily(f"{PREFIX}router_requests_held", "Requests that wait for an operator's call to end.")
        held.add_metric((), float(self._engines.held))
        yield held
        for name, help_text, count in (
            ("prompt_tokens", "Tokens of the prompts that were placed.", counts.prompt_tokens),
            ("prompt_tokens_held", "Tokens that the chosen engine was to have cached.", counts.held_tokens),
        ):
            family = CounterMetricFamily(f"{PREFIX}router_{name}", help_text)
            family.add_metric((), count)
            yield family


def _gauge(name: str, help_text: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}router_{name}", help_text, labels=("engine",))
    for engine, value in values.items():
        family.add_metric((engine,), value)
    return family
