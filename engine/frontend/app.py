"""The HTTP routes of the server: each reads its body, asks the engine, and answers.

Owns statuses, bodies and the event stream; decides nothing about requests. The first and the last place of a request's
life.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from engine import __version__
from engine.frontend.admission import admit
from engine.frontend.engine_client import EngineClient
from engine.frontend.generation import Generation
from engine.frontend.problems import ApiError, ProblemType
from engine.frontend.protocol import AbortBody, GenerateAnswer, GenerateBody, PauseBody, parse_body
from engine.launch.settings import ServerSettings
from engine.limits import Limits
from engine.messages import (
    Abort,
    AbortAll,
    CallAnswer,
    ContinueGeneration,
    EngineStats,
    FlushCache,
    PauseGeneration,
)

__all__ = ["FrontEnd", "build_app"]

# The loop answers between two steps; one that is frozen or very busy does not keep an operator waiting.
STATS_TIMEOUT_S = 1.0
MAX_FLUSH_TIMEOUT_S = 3600.0


@dataclass
class FrontEnd:
    """Everything that the routes need. ``pids`` are the engine's processes by name, known once all are ready."""

    settings: ServerSettings
    limits: Limits
    tokenizer: Tokenizer
    client: EngineClient
    serving: bool = False
    pids: dict[str, int] = field(default_factory=dict)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/model_info``; sizes are in tokens."""

    model: str
    vocab_size: int
    context_length: int
    max_total_tokens: int
    eos_token_ids: tuple[int, ...]


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/server_info``. ``stats`` is null when the scheduler did not answer within the bound."""

    version: str
    settings: dict[str, str | int | float | bool | None]
    limits: Limits
    processes: dict[str, int]
    open_requests: int
    stats: EngineStats | None


class EventStream(StreamingResponse):
    """A stream of server-sent events that a client's disconnect does not cancel.

    The request is aborted then, and the stream ends with the request; cancelled first, it would forget the request
    before the scheduler does.
    """

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the events; a client that is gone takes none, and that is no error."""
        await self.stream_response(send)


def build_app(front: FrontEnd) -> FastAPI:
    """The application over an engine's front end."""
    app = FastAPI(title="Lockstep", version=__version__)
    _add_error_answers(app)
    _add_generation(app, front)
    _add_administration(app, front)
    _add_information(app, front)
    return app


def _add_generation(app: FastAPI, front: FrontEnd) -> None:
    @app.post("/generate")
    async def generate(request: Request) -> Response:
        body = parse_body(GenerateBody, await _read_body(request, front.settings.max_body_bytes))
        message = await admit(body, front.tokenizer, front.limits)
        generation = Generation(front.client, front.tokenizer, message)
        watch = asyncio.create_task(_abort_on_disconnect(request, generation))
        try:
            if not body.stream:
                answer = await generation.whole()
                watch.cancel()
                return _json(answer)
            pieces = generation.pieces()
            # The status of a stream waits for the first output, so that a refusal gets its own.
            return EventStream(_events(await anext(pieces), pieces, watch))
        except ApiError:
            watch.cancel()
            raise


def _add_administration(app: FastAPI, front: FrontEnd) -> None:
    async def read(request: Request) -> bytes:
        return await _read_body(request, front.settings.max_body_bytes)

    @app.get("/flush_cache")
    @app.post("/flush_cache")
    async def flush_cache(request: Request) -> Response:
        timeout_s = _read_timeout(request)
        return _call_answer(await front.client.call(lambda call_id: FlushCache(call_id=call_id, timeout_s=timeout_s)))

    @app.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        body = parse_body(AbortBody, await read(request))
        if body.rid is None:
            return _call_answer(await front.client.call(lambda call_id: AbortAll(call_id=call_id)))
        rid = body.rid
        return _call_answer(await front.client.call(lambda call_id: Abort(rid=rid, call_id=call_id)))

    @app.post("/pause_generation")
    async def pause_generation(request: Request) -> Response:
        body = parse_body(PauseBody, await read(request))
        return _call_answer(await front.client.call(lambda call_id: PauseGeneration(call_id=call_id, mode=body.mode)))

    @app.post("/continue_generation")
    async def continue_generation() -> Response:
        return _call_answer(await front.client.call(lambda call_id: ContinueGeneration(call_id=call_id)))


def _add_information(app: FastAPI, front: FrontEnd) -> None:
    @app.get("/health")
    async def health() -> Response:
        if front.client.broken is not None:
            raise front.client.broken
        if not front.serving:
            raise ApiError.unavailable("the server is starting; ask again until it is ready")
        return PlainTextResponse("ok")

    @app.get("/model_info")
    async def model_info() -> Response:
        limits = front.limits
        return _json(
            ModelInfo(
                model=front.settings.model,
                vocab_size=limits.vocab_size,
                context_length=limits.context_length,
                max_total_tokens=limits.total_pages * limits.page_size,
                eos_token_ids=limits.eos_token_ids,
            )
        )

    @app.get("/server_info")
    async def server_info() -> Response:
        return _json(
            ServerInfo(
                version=__version__,
                settings=front.settings.model_dump(mode="json", exclude={"gate_options"}),
                limits=front.limits,
                processes=front.pids,
                open_requests=front.client.open_requests,
                stats=await front.client.stats(STATS_TIMEOUT_S),
            )
        )


def _add_error_answers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def answer_api_error(_: Request, exc: ApiError) -> Response:
        return _json(exc.body, status=exc.status)

    @app.exception_handler(HTTPException)
    async def answer_http_exception(request: Request, exc: HTTPException) -> Response:
        kind = ProblemType.NOT_FOUND if exc.status_code == 404 else ProblemType.INVALID
        problem = ApiError(exc.status_code, kind, f"{request.method} {request.url.path}: {exc.detail}")
        return _json(problem.body, status=exc.status_code, headers=exc.headers)

    @app.exception_handler(Exception)
    async def answer_bug(_: Request, exc: Exception) -> Response:
        problem = ApiError(500, ProblemType.ENGINE, f"the front end failed: {type(exc).__name__}: {exc}")
        return _json(problem.body, status=500)


async def _events(
    first: GenerateAnswer, rest: AsyncIterator[GenerateAnswer], watch: asyncio.Task[None]
) -> AsyncIterator[bytes]:
    """The event stream of an answer. Only one that ended in order is closed by ``[DONE]``."""
    try:
        yield _event(first)
        async for piece in rest:
            yield _event(piece)
        yield b"data: [DONE]\n\n"
    except ApiError as exc:
        yield _event(exc.body)
    finally:
        watch.cancel()


async def _abort_on_disconnect(request: Request, generation: Generation) -> None:
    """Abort the request as soon as its client goes away. Its body was read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
    generation.abort()


async def _read_body(request: Request, limit_bytes: int) -> bytes:
    """The body, read no further than the limit. Raises ApiError (413)."""
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    parts: list[bytes] = []
    if size <= limit_bytes:
        size = 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > limit_bytes:
                break
    if size > limit_bytes:
        raise ApiError(
            413,
            ProblemType.TOO_LARGE,
            f"the body must have at most {limit_bytes} bytes, got {size} or more; send less or raise --max-body-bytes",
        )
    return b"".join(parts)


def _read_timeout(request: Request) -> float | None:
    """The ``timeout`` of a deferred flush in seconds. Raises ApiError (400)."""
    unknown = set(request.query_params) - {"timeout"}
    if unknown:
        message = f"the only parameter here is timeout, got {', '.join(sorted(unknown))}; remove it"
        raise ApiError.invalid(message, param=min(unknown))
    text = request.query_params.get("timeout")
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError as exc:
        raise ApiError.invalid(f"timeout must be a number of seconds, got {text!r}", param="timeout") from exc
    if not 0 <= timeout_s <= MAX_FLUSH_TIMEOUT_S:
        raise ApiError.invalid(f"timeout must be from 0 to {MAX_FLUSH_TIMEOUT_S} seconds, got {text}", param="timeout")
    return timeout_s


def _call_answer(answer: CallAnswer) -> Response:
    return PlainTextResponse(answer.message, status_code=200 if answer.ok else 400)


def _event(data: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _json(data: msgspec.Struct, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(data), status, headers, "application/json")
