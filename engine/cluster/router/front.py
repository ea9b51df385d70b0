"""The front of several engines: takes a request, finds its prompt, forwards it to an engine and streams the reply.

Owns the routes, the retry after a refusal or a loss before the reply began, and the last event of a stream that was
cut. Neither chooses engines nor computes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from engine.cluster.router.proxy import Engines, Head, Headers, PassedRequest, ReplicaLostError
from engine.core.routing.placement import Prompt
from engine.frontend.http.auth import Access, HostCheck
from engine.frontend.http.body_reader import BodyReader, unless_gone
from engine.frontend.http.request_log import REQUEST_ID_HEADER, current_record
from engine.frontend.http.responses import RETRY_AFTER_S, error_answer, error_handlers, error_of_route
from engine.frontend.http.routes.generation import CLIENT_PATHS
from engine.frontend.protocols.openai.response_shapes import ResponseError
from engine.frontend.schema.errors import ApiError, ErrorBody, ErrorType
from engine.frontend.schema.operator_routes import OPERATOR_ROUTES
from engine.frontend.sessions.sessions import written
from engine.process.settings import ServerSettings

# The clients' routes, which any engine can answer.
PASSED_ON: Final = frozenset(
    {
        *CLIENT_PATHS,
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/{model:path}",
        "/tokenize",
        "/detokenize",
        "/model_info",
        "/version",
        "/health",
    }
)
# Answered for all engines together.
OF_ALL: Final = frozenset({"/get_load"})
# Routes that operate or describe one engine, which a request names if it can.
OF_ONE_ENGINE: Final = frozenset({"/server_info", "/metrics", *OPERATOR_ROUTES})
_METHODS: Final = ("GET", "POST", "OPTIONS")
_EVENTS: Final = "text/event-stream"
_END_OF_EVENT: Final = b"\n\n"
# Bounds the engines that one bad request can kill.
_MOST_LOST: Final = 2
# The limit of a reply that is buffered until it is complete, and of one event of a stream; no engine sends more.
MAX_ANSWER_BYTES: Final = 2**30
MAX_EVENT_BYTES: Final = 2**28
# The header with the engine that answered, or in a request the engine that must answer.
ENGINE_HEADER: Final = "x-engine"
# Matches the number of an event of a response.
_NUMBER: Final = re.compile(rb'^data: \{"type":"[^"]*","sequence_number":(\d{1,15})\b', re.MULTILINE)
_REFUSALS: Final = frozenset({421, 429, 503})
# A function that finds the prompt in the body of a request to a path.
PromptReader = Callable[[str, bytes], Awaitable[Prompt]]
Answers = Callable[[Request], Awaitable[Response]]
NO_ROUTES: Final[Mapping[str, Answers]] = MappingProxyType({})


def front_app(
    engines: Engines,
    settings: ServerSettings,
    prompt_of: PromptReader,
    *,
    own: Sequence[Route] = (),
    access: Access | None = None,
    of_all: Mapping[str, Answers] = NO_ROUTES,
) -> ASGIApp:
    """Build the application. ``own`` routes come first; ``of_all`` serve operators who name no engine.

    ``access`` has the rules of a standalone server, whose clients may name an engine. Without it another server in
    front checks access, cancels abandoned requests, and assigns request ids.
    """
    front = _Front(engines, settings, prompt_of, access, of_all)
    passed = [Route(path, front.passed_on, methods=list(_METHODS)) for path in sorted(PASSED_ON)]
    alone = [Route(path, front.of_one_engine, methods=list(_METHODS)) for path in sorted(OF_ONE_ENGINE)]
    app = Starlette(
        routes=[*own, *alone, Route("/get_load", front.loads, methods=["GET"]), *passed],
        exception_handlers=error_handlers(_refusal, "the front failed ({}); the log of its replica says how"),
    )
    # As for an engine on loopback.
    return HostCheck(app, settings.hosts, everywhere=False)


class _Front:
    def __init__(
        self,
        engines: Engines,
        settings: ServerSettings,
        prompt_of: PromptReader,
        access: Access | None,
        of_all: Mapping[str, Answers],
    ) -> None:
        self._engines = engines
        self._bodies = BodyReader(settings.max_body_bytes)
        self._prompt_of = prompt_of
        self._access = access
        self._of_all = of_all

    async def passed_on(self, request: Request) -> Response:
        if self._access is not None and request.method != "OPTIONS" and request.url.path not in OPERATOR_ROUTES:
            await self._access.admit_client(request)
        async with self._bodies.body_of(request) as body:
            target = request.scope["raw_path"].decode("ascii") if "raw_path" in request.scope else request.url.path
            asked = PassedRequest(
                method=request.method,
                target=f"{target}?{request.url.query}" if request.url.query else target,
                headers=_with_id(request),
                body=body,
                prompt=await self._prompt_of(request.url.path, body),
                only=request.headers.get(ENGINE_HEADER, "") if self._access is not None else "",
            )
        answering = self._answer(asked)
        answer = await (unless_gone(request, answering) if self._access is not None else answering)
        return _refusal(request, answer) if isinstance(answer, ApiError) else answer

    async def loads(self, request: Request) -> Response:
        """List the load of every engine, numbered as SGLang numbers its ranks."""
        if self._access is not None:
            await self._access.admit_client(request)
        loads = await self._engines.loads(tuple(request.headers.items()))
        numbered = [msgspec.structs.replace(load, dp_rank=number) for number, load in enumerate(loads)]
        return Response(msgspec.json.encode(numbered), media_type="application/json")

    async def of_one_engine(self, request: Request) -> Response:
        """Forward a request to the engine that it names. Raises ApiError if it names none."""
        if self._access is not None and ENGINE_HEADER in request.headers:
            if request.url.path in OPERATOR_ROUTES and request.method != "OPTIONS":
                await self._access.admit_operator(request)
            return await self.passed_on(request)
        if request.url.path in self._of_all and request.method == "POST":
            return await self._of_all[request.url.path](request)
        if self._access is not None:
            raise ApiError.invalid(
                f"{request.url.path} is about one engine, and the request must name it in the header "
                f"{ENGINE_HEADER}; GET /health lists them"
            )
        raise ApiError(
            ErrorType.NOT_FOUND,
            f"{request.url.path} is about one engine, and this application has several; ask an engine that `engine "
            "serve` started, or change the application's arguments and run it again",
        )

    async def _answer(self, asked: PassedRequest) -> Response | ApiError:
        """Ask engines until one accepts; if all refuse, return the last refusal."""
        refusal: Response | None = None
        lost = 0
        while True:
            parts = self._engines.ask(asked)
            try:
                head = await anext(parts)
                assert isinstance(head, Head), f"a reply begins with its head, got {type(head).__name__}"
                if head.status == 200 and (head.header("content-type") or "").startswith(_EVENTS):
                    return StreamingResponse(_events(asked, parts, head), head.status, _headers(head))
                body = await _whole(parts, head.replica)
            except ApiError as exc:
                # No engine is left to take it.
                return refusal if refusal is not None else exc
            except ReplicaLostError as exc:
                await _close(parts)
                lost += 1
                if lost == _MOST_LOST:
                    return ApiError.unavailable(f"{lost} engines were lost while they had this request")
                if exc.replica:
                    asked = replace(asked, left_out=(*asked.left_out, exc.replica))
                continue
            except BaseException:
                await _close(parts)
                raise
            response = Response(body, head.status, _headers(head))
            if head.status not in _REFUSALS or head.replica in asked.left_out:
                return response
            refusal = response
            asked = replace(asked, left_out=(*asked.left_out, head.replica))


async def _whole(parts: AsyncIterator[Head | bytes], replica: str) -> bytes:
    """Collect a reply that is not a stream. Raises ReplicaLostError beyond ``MAX_ANSWER_BYTES``."""
    body = bytearray()
    async for part in parts:
        assert isinstance(part, bytes), "an answer has one head"
        body += part
        _require_bounded(len(body), MAX_ANSWER_BYTES, replica)
    return bytes(body)


def _require_bounded(size: int, most: int, replica: str) -> None:
    if size > most:
        raise ReplicaLostError(f"the engine of replica {replica} sent more than {most} bytes without an end", replica)


async def _events(asked: PassedRequest, parts: AsyncIterator[Head | bytes], head: Head) -> AsyncIterator[bytes]:
    """Forward whole events as they arrive, and an error as the last one if the engine is lost."""
    rest = sent = b""
    try:
        async for part in parts:
            assert isinstance(part, bytes), "an answer has one head"
            rest += part
            _require_bounded(len(rest), MAX_EVENT_BYTES, head.replica)
            end = rest.rfind(_END_OF_EVENT) + len(_END_OF_EVENT)
            if end >= len(_END_OF_EVENT):
                sent, rest = rest[:end], rest[end:]
                yield sent
                # Events that arrive together are written one by one, so that the loop notices a client that has left.
                await asyncio.sleep(0)
        if rest:
            yield rest
    except (ApiError, ReplicaLostError) as exc:
        error = ApiError.unavailable(f"the stream was cut: {exc}; try again")
        request_id = head.header(REQUEST_ID_HEADER) or dict(asked.headers).get(REQUEST_ID_HEADER)
        yield written([_last_event(asked, error.body_for(request_id), sent)])
    finally:
        await _close(parts)


def _last_event(asked: PassedRequest, error: ErrorBody, sent: bytes) -> msgspec.Struct:
    """Return the error event that ends a stream in the route's protocol; ``sent`` are the events before it."""
    path = asked.target.partition("?")[0]
    if path != "/v1/responses":
        return error_of_route(path, error)
    numbers = _NUMBER.findall(sent)
    return ResponseError.of(error, int(numbers[-1]) + 1 if numbers else 0)


def _with_id(request: Request) -> Headers:
    """Return a request's headers with the id from this server's log."""
    record = current_record()
    if record is None:
        return tuple(request.headers.items())
    others = [(name, value) for name, value in request.headers.items() if name != REQUEST_ID_HEADER]
    return (*others, (REQUEST_ID_HEADER, record.request_id))


async def _close(parts: AsyncIterator[Head | bytes]) -> None:
    if isinstance(parts, AsyncGenerator):
        await parts.aclose()


def _headers(head: Head) -> dict[str, str]:
    """Return a reply's headers without the ones that this server adds itself."""
    return {name: value for name, value in head.headers if name not in ("content-length", REQUEST_ID_HEADER)}


def _refusal(request: Request, error: ApiError, _: Mapping[str, str] | None = None) -> Response:
    """Reply with an error of the front, under the request id that the engines know. Serve adds the header with the
    id.
    """
    later = {"retry-after": RETRY_AFTER_S} if error.status == 503 else {}
    answer = error_answer(error, request.url.path, request_id=request.headers.get(REQUEST_ID_HEADER), headers=later)
    if REQUEST_ID_HEADER in answer.headers:
        del answer.headers[REQUEST_ID_HEADER]
    return answer
