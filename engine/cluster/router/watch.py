"""The watch over one engine: whether it takes requests, its model, its load, and the contents of its cache.

An engine gets requests once it has answered, and its mirror is used while it is right. Also owns the sockets for KV
events; the mirror interprets the batches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from engine.cluster.router.engines import RoutedEngines
from engine.cluster.router.prompt_reader import ReadsPrompts
from engine.core.errors import ConfigError, EngineError
from engine.core.frames import BadFrameError
from engine.core.limits import Limits
from engine.core.routing.cache_index import Batch, FollowedCache
from engine.core.routing.placement import ReplicaLoad
from engine.frontend.http.kv_events import MAX_KEPT_BATCHES, MAX_KEPT_BYTES, batch_in, is_end, written
from engine.frontend.http.peers import About, PartnerError, shown
from engine.process.links.endpoint import parse_engine_url
from engine.process.settings import ServerSettings

ANSWER_S: Final = 5.0
# The size of all batches that an engine keeps, with their frames.
MOST_ANSWER_BYTES: Final = 2 * MAX_KEPT_BYTES
# One answer makes a mirror right, two after a restart of the engine; more, because it publishes in between.
MOST_QUESTIONS: Final = 4

logger = logging.getLogger(__name__)
# An engine may publish a bad batch every moment: one line a minute.
_batches = logger.getChild("batches")


class Subscription:
    """Keeps ``cache`` right. ``gaps`` counts the times that batches were missing.

    Nothing that an engine sends makes it raise: at worst the mirror is not used.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, cache: FollowedCache) -> None:
        self.cache = cache
        self.gaps = 0
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._context = zmq.asyncio.Context()
        self._asking = asyncio.Lock()

    async def run(self) -> None:
        """Listen until cancelled. If the endpoint is unusable, `ask` still works."""
        with self._context:
            try:
                await self._listen()
            except Exception as exc:  # noqa: BLE001 - an engine may give any text as its endpoint
                logger.warning("%s cannot be listened to: %s", shown(self._endpoint), shown(repr(exc)))
                self.cache.doubt()
            await asyncio.get_running_loop().create_future()

    async def ask(self) -> None:
        """Request the batches since the last one, even for a right mirror, so that a lost batch is noticed in time."""
        async with self._asking:
            for _ in range(MOST_QUESTIONS):
                first = self.cache.wanted
                try:
                    async with asyncio.timeout(ANSWER_S):
                        batches = await self._answer(first)
                except Exception as exc:  # noqa: BLE001 - an engine may send anything
                    why = f"within {ANSWER_S:g} s" if isinstance(exc, TimeoutError) else f"with KV events: {exc}"
                    logger.warning("%s did not answer %s", shown(self._replay_endpoint), shown(why))
                    self.cache.doubt()
                    return
                if self.cache.answered(first, batches):
                    return

    async def _listen(self) -> None:
        with self._context.socket(zmq.SUB) as live:
            _bound(live)
            live.setsockopt(zmq.SUBSCRIBE, b"")
            monitor = live.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            try:
                live.connect(self._endpoint)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._watch(monitor))
                    while True:
                        if self._misses(await live.recv_multipart()):
                            self.gaps += 1
                            tasks.create_task(self.ask())
            finally:
                live.disable_monitor()
                monitor.close(linger=0)

    def _misses(self, parts: Sequence[bytes]) -> bool:
        """Take a published batch. Returns whether it shows that others are missing."""
        was_right = self.cache.is_right
        try:
            return not self.cache.live(batch_in(parts)) and was_right
        except BadFrameError as exc:
            _batches.warning("%s published no KV events: %s", shown(self._endpoint), shown(str(exc)))
            self.cache.doubt()
            return was_right

    async def _answer(self, first: int) -> list[Batch]:
        """Fetch the batches from a number on. Each request has its own socket, so answers never mix."""
        batches: list[Batch] = []
        size = 0
        with self._context.socket(zmq.DEALER) as asking:
            _bound(asking)
            asking.setsockopt(zmq.RCVHWM, MAX_KEPT_BATCHES + 1)
            asking.connect(self._replay_endpoint)
            await asking.send_multipart((b"", written(first)))
            while True:
                parts = await asking.recv_multipart()
                if is_end(parts):
                    return batches
                batches.append(batch_in(parts))
                size += sum(map(len, parts))
                if len(batches) > MAX_KEPT_BATCHES or size > MOST_ANSWER_BYTES:
                    raise BadFrameError(f"more than {MAX_KEPT_BATCHES} batches or {MOST_ANSWER_BYTES} bytes")

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Doubt the mirror when the connection ends: later batches may be from a restarted engine."""
        while True:
            parse_monitor_message(await monitor.recv_multipart())
            self.cache.doubt()


def _bound(opened: zmq.asyncio.Socket) -> None:
    opened.setsockopt(zmq.LINGER, 0)
    opened.setsockopt(zmq.MAXMSGSIZE, MAX_KEPT_BYTES)


class EngineWatch:
    """Watches the engine ``name`` every ``period_s`` seconds, and at once when a request finds it gone."""

    def __init__(self, name: str, engines: RoutedEngines, reader: ReadsPrompts, period_s: float) -> None:
        self._name = name
        self._engines = engines
        self._reader = reader
        self._period_s = period_s
        self._engine = engines.engines[name]
        self._about: About | None = None
        self._subscription: Subscription | None = None
        self._listening: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._engine.look = self._wanted.set

    async def run(self) -> None:
        try:
            while True:
                self._wanted.clear()
                await self.look()
                try:
                    await asyncio.wait_for(self._wanted.wait(), self._period_s)
                except TimeoutError:
                    continue
                # All requests of a dead engine report its end; one check answers them together.
                await asyncio.sleep(self._period_s / 4)
        finally:
            await self._unsubscribe()

    async def look(self) -> None:
        before = self._engine.why_not
        try:
            why = await self._looked()
        except Exception as exc:  # no reply of an engine may end its watch or disturb the others
            logger.exception("%s could not be looked at", self._name)
            why = f"could not be looked at ({type(exc).__name__}); the router's log says why"
            self._engines.away(self._name, why)
        if why != before:
            logger.log(logging.WARNING if why else logging.INFO, "%s %s", self._name, why or "takes requests")

    async def _looked(self) -> str:
        """Check the engine once. Returns why it takes no requests, '' if it does."""
        why = await self._engine.proxy.why_not_serving() or await self._meet()
        if why:
            self._engines.gone(self._name, why)
        elif why := self._engines.met(self._name):
            self._engines.away(self._name, why)
        else:
            self._engine.why_not = ""
            if self._subscription is not None:
                await self._subscription.ask()
                self._engines.counts.gaps[self._name] = self._subscription.gaps
        return why

    async def _meet(self) -> str:
        """Fetch the load, and for a new or restarted engine its settings. Returns why it cannot be used, else ''."""
        try:
            if self._engine.why_not:
                about = await self._engine.proxy.peer.about()
                if about != self._about:
                    await self._join(about)
            load = await self._engine.proxy.load()
        except EngineError as exc:
            return f"cannot be used: it {exc}" if isinstance(exc, PartnerError) else f"cannot be used: {exc}"
        if load is not None:
            self._engines.placement.take_load(self._name, load)
        elif self._engine.why_not:
            # A scheduler that is too busy to report its load still takes requests.
            self._engines.placement.report(self._name, ReplicaLoad())
        return ""

    async def _join(self, about: About) -> None:
        """Add an engine. Raises EngineError if it cannot be used here."""
        self._about = None
        placement = self._engines.placement
        if placement.fleet.is_known(self._name):
            placement.leave(self._name)
        await self._unsubscribe()
        self._engine.cache = None
        limits = about.limits
        try:
            settings = _settings_of(about)
            await self._reader.learn(settings, limits)
        except EngineError:
            raise
        except Exception as exc:  # bad settings or model files can raise almost anything
            raise PartnerError(f"is not an engine of this version ({shown(repr(exc))})") from exc
        cache = self._engine.cache = self._subscribe(settings, limits)
        placement.join(self._name, settings.max_running_requests + settings.max_queued_requests, cache)
        self._about = about

    def _subscribe(self, settings: ServerSettings, limits: Limits) -> FollowedCache | None:
        """Follow an engine on this machine. The endpoints of a remote engine are on its own loopback."""
        endpoint, replay_endpoint = settings.kv_events_endpoint, settings.kv_events_replay_endpoint
        if not (endpoint and replay_endpoint and parse_engine_url(self._name, "an engine's URL").is_loopback):
            logger.warning(
                "%s publishes no KV events that this router can follow, so its cache is guessed from its prompts; "
                "give it --kv-events, --kv-events-endpoint and --kv-events-replay-endpoint",
                self._name,
            )
            return None
        self._subscription = Subscription(endpoint, replay_endpoint, FollowedCache(limits.page_size))
        self._listening = asyncio.create_task(self._subscription.run())
        return self._subscription.cache

    async def _unsubscribe(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._listening = self._subscription = None


def _settings_of(about: About) -> ServerSettings:
    settings = ServerSettings.model_validate(about.settings)
    if settings.role == "prefill":
        raise ConfigError(
            "an engine behind a router must answer clients, got one with role='prefill'; give it to the decode "
            "engines with --prefill-engines"
        )
    return settings
