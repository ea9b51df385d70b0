"""The front end process: serves the routes on a given socket and obeys the supervisor.

Owns the life cycle of the process: ready when it listens, broken off when another process dies, ended when its clients
have their errors. Until then it answers, even if the scheduler is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import uvicorn
from pydantic import ValidationError
from starlette.types import ASGIApp

from engine import __version__
from engine.core.errors import CheckpointError, ProcessDiedError
from engine.core.limits import Limits
from engine.core.routing.prefills import Prefills
from engine.frontend.http.app import body_works, build_app
from engine.frontend.http.auth import Access
from engine.frontend.http.connection import Connection, ConnectionBounds, quiet_resource_errors
from engine.frontend.http.engine_client import EngineClient
from engine.frontend.http.forked_work import LONG_BODY_BYTES, ForkedWork, LongBodies, body_work
from engine.frontend.http.grammar_check import import_grammars
from engine.frontend.http.kv_events import KvEvents
from engine.frontend.http.routes.information import ServerState
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.invalid_body import invalid_body
from engine.frontend.schema.native import SamplingFields
from engine.frontend.sessions.requests import ServedModel, served_model
from engine.model.checkpoint import read_sampling_defaults, resolve_folder
from engine.process.clock import MonotonicClock
from engine.process.control import Control, Drain, Drained, ProcessDied, Ready, Serving, Shutdown
from engine.process.death import DeathReport
from engine.process.kv_addresses import kv_addresses
from engine.process.links.listener import SERVER_BACKLOG
from engine.process.logs import failure_line
from engine.process.private_dir import PrivateDir
from engine.process.settings import ServerSettings

if TYPE_CHECKING:
    from engine.frontend.http.tracing import Tracing

# The time after a death for errors to reach the clients and for a probe to see 503, well within the supervisor's grace.
LAST_WORDS_S = 0.25
# The time for a connection to take its last bytes before it is cut.
DRAIN_TIMEOUT_S = 1
# At its end uvicorn sleeps this long before it first checks the connections. They nearly always close sooner, so this
# server checks LOOKS times meanwhile.
FIRST_LOOK_S = 0.1
LOOKS = 50
# Longer than clients keep an idle connection (httpx 5 s, aiohttp 15 s): otherwise the server might close one while the
# next request is on its way.
KEEP_ALIVE_S = 75
# Bounded, because a turn of the event loop that accepted 2,048 connections took 71 to 299 ms.
ACCEPTS_A_TURN = 32
# The name of the process that forks a worker for each long body.
READER = "reader"


def run_frontend(
    control: Control, settings: ServerSettings, limits: Limits, listener: socket.socket, folder: PrivateDir
) -> None:
    """Serve until the supervisor ends it or is gone. Raises ProcessDiedError if another process died."""
    served = served_model(settings, limits, sampling_defaults_of(settings))
    # Compiles the template once, rather than in the event loop and in each worker.
    with contextlib.suppress(ApiError):
        served.template.render([{"role": "user", "content": "x"}], {})
    reading = ForkedWork.start(
        READER, body_work(body_works(served)), stuck_s=settings.step_timeout_s, prepare=import_grammars
    )
    try:
        # Tokenizing a long text writes into memory that is shared with the forked parent. This copies those pages now
        # rather than in the event loop, where it took 10 ms of the first text. A tokenizer may refuse unknown
        # characters.
        with contextlib.suppress(Exception):
            served.tokenizer.encode_batch_fast(["x" * LONG_BODY_BYTES])
        asyncio.run(_serve(control, settings, served, reading, listener, folder))
    except ProcessDiedError as exc:
        if control.is_cut:  # The supervisor is gone, so no other process cleans up.
            _clear_up(settings, folder, exc)
        raise
    finally:
        reading.close()


def _clear_up(settings: ServerSettings, folder: PrivateDir, death: ProcessDiedError) -> None:
    """Clean up on behalf of a supervisor that was killed."""
    report = DeathReport(process=death.process, pid=0, cause=death.cause, when=time.time())
    sys.stderr.write(failure_line(settings, report.sentence()))
    sys.stderr.flush()
    if folder.lent:
        report.write(folder.path)
    folder.remove()


def sampling_defaults_of(settings: ServerSettings) -> Mapping[str, float]:
    """Read the checkpoint's sampling defaults. Raises CheckpointError for a value that a request may not have."""
    if settings.sampling_defaults == "openai":
        return {}
    folder = resolve_folder(settings)
    said = read_sampling_defaults(folder)
    try:
        kept = SamplingFields.model_validate(said)
    except ValidationError as exc:
        why = invalid_body(exc, SamplingFields).body.error.message
        raise CheckpointError(
            f"{folder / 'generation_config.json'} must have valid sampling values: {why}; correct it, or start with "
            "--sampling-defaults openai"
        ) from exc
    return {name: getattr(kept, name) for name in said}


class EventServer(uvicorn.Server):
    """A uvicorn server that waits for an event instead of waking ten times a second, and handles no signals."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening
        self._stop = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the supervisor."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(SERVER_BACKLOG)

    async def main_loop(self) -> None:
        """Wait for ``stop``. uvicorn calls this once it listens."""
        self._on_listening()
        await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as soon as all connections are closed; leave late ones to uvicorn's own shutdown."""
        for open_one in (*self.servers, *(sockets or ())):
            open_one.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        for _ in range(LOOKS):
            if not state.connections and not state.tasks:
                return
            await asyncio.sleep(FIRST_LOOK_S / LOOKS)
        await super().shutdown(sockets)

    def stop(self) -> None:
        """Accept no more connections, finish the current replies, and end."""
        self._stop.set()


class _Life:
    """Applies the supervisor's messages to the front end."""

    def __init__(self, control: Control, client: EngineClient, state: ServerState) -> None:
        self._control = control
        self._client = client
        self._state = state
        self.over = asyncio.Event()
        self.death: ProcessDiedError | None = None
        self._draining: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Take one message from the supervisor. The loop calls this when its pipe is readable."""
        try:
            message = self._control.receive()
        except ProcessDiedError as exc:
            self._die(exc)
            return
        match message:
            case Serving():
                self._state.pids = message.pids
                self._state.serving = True
            case ProcessDied():
                self._die(ProcessDiedError(message.process, message.cause, message.node))
            case Drain():
                self._client.sessions.close(ApiError.unavailable("the server is draining; use another one"))
                self._draining = asyncio.create_task(self._drain())
            case None:
                return
            case Shutdown():
                self._end(ApiError.unavailable("the server is shutting down; the request was cut off"))

    def lose_reader(self, reading: ForkedWork) -> None:
        """End the server after the loss of the workers' parent, which it needs to read long bodies."""
        asyncio.get_running_loop().remove_reader(reading.fileno())
        self._die(ProcessDiedError(READER, reading.why_lost))

    async def _drain(self) -> None:
        await self._client.wait_quiet()
        self._control.send(Drained())

    def _die(self, death: ProcessDiedError) -> None:
        self.death = self.death or death
        self._end(ApiError.going_down(death))

    def _end(self, reason: ApiError) -> None:
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._client.break_off(reason)
        self.over.set()


async def _serve(
    control: Control,
    settings: ServerSettings,
    served: ServedModel,
    reading: ForkedWork,
    listener: socket.socket,
    folder: PrivateDir,
) -> None:
    tracing = _tracing_of(settings)
    client = _client_of(settings, served.limits, folder, tracing)
    loop = asyncio.get_running_loop()
    if settings.kv_events_endpoint:
        client.kv_events = KvEvents(settings.kv_events_endpoint, settings.kv_events_replay_endpoint)
        client.kv_events.listen(loop)
    access = Access(settings, listener.getsockname()[0])
    state = ServerState(dict(served.limits.loras))
    app = build_app(settings, served, client, access, LongBodies(reading.run), state)
    life = _Life(control, client, state)
    loop.add_reader(control.fileno(), life.listen)
    loop.add_reader(reading.fileno(), life.lose_reader, reading)
    loop.add_signal_handler(signal.SIGCHLD, reading.look_at_parent)
    loop.set_exception_handler(quiet_resource_errors())
    server = EventServer(uvicorn_config(app, settings), lambda: control.send(Ready(about=served.dialect.about())))
    await _serve_until_over(server, listener, client, life)
    # The signal of a child that ends while the loop closes would write to the loop's closed descriptor.
    loop.remove_signal_handler(signal.SIGCHLD)
    if client.prefill_client is not None:
        await client.prefill_client.close()
    client.close()
    if tracing is not None:
        tracing.close()
    if client.kv_events is not None:
        client.kv_events.close()
    if life.death is not None:
        raise life.death


async def _serve_until_over(server: EventServer, listener: socket.socket, client: EngineClient, life: _Life) -> None:
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve(sockets=[listener]))
        working = [tasks.create_task(client.deliver_replies())]
        if client.prefill_client is not None:
            working.append(tasks.create_task(client.prefill_client.watch()))
        await life.over.wait()
        if life.death is not None:
            await asyncio.sleep(LAST_WORDS_S)
        server.stop()
        await serving
        for task in working:
            task.cancel()


def _tracing_of(settings: ServerSettings) -> Tracing | None:
    if not settings.otlp_traces_endpoint:
        return None
    from engine.frontend.http.tracing import open_tracing  # An optional dependency, only for traces.

    return open_tracing(settings.otlp_traces_endpoint, settings.model_name, MonotonicClock())


def _client_of(settings: ServerSettings, limits: Limits, folder: PrivateDir, tracing: Tracing | None) -> EngineClient:
    """Build the client of the engine; for a decode engine also the client of prefill engines."""
    if settings.role != "decode":
        return EngineClient(folder.path, tracing)
    from engine.frontend.http.prefill_client import PrefillClient  # Only decode engines need its HTTP client.

    capacity = settings.max_running_requests + settings.max_queued_requests
    now, retry_s = MonotonicClock().now, settings.prefill_retry_s
    prefills = Prefills(settings.prefill_urls, limits.page_size, capacity, now, retry_s, __version__, limits.kv_origin)
    client = EngineClient(folder.path, tracing, prefills)
    to = functools.partial(kv_addresses, folder.path, settings.pp_size)
    client.prefill_client = PrefillClient(prefills, settings, limits.page_size, to, client.sessions.send)
    return client


def uvicorn_config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection.under(ConnectionBounds(settings)),
        ws="none",
        lifespan="off",
        # asyncio accepts as many connections in one turn of the loop as the listen backlog.
        backlog=ACCEPTS_A_TURN,
        log_config=None,
        access_log=False,
        # uvicorn's own loop would set it once a second, but this server does not run that loop.
        date_header=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
