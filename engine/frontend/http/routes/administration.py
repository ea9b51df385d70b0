"""Routes for operators: flush, weight update, LoRAs, abort, pause, sleep. Each sends one message and returns its
answer.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from engine.core.messages import CallAnswer, ClientMessage, FlushCache, LoadLora, StartProfile, UnloadLora, Wake
from engine.frontend.http.auth import require_json
from engine.frontend.http.body_reader import BodyReader
from engine.frontend.http.description import Description
from engine.frontend.http.engine_client import EngineClient
from engine.frontend.http.routes.information import ServerState
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.native import MAX_CALL_TIMEOUT_S, Body, parse_body, read_timeout
from engine.frontend.schema.operator_routes import (
    OPERATOR_ROUTES,
    LoadLoraBody,
    MessageBody,
    NoBody,
    SleepBody,
    UnloadLoraBody,
    UpdateWeightsBody,
    require_no_parameters,
)
from engine.frontend.sessions.requests import check_lora_name
from engine.process.settings import ServerSettings

ADMIN = "administration"
# The longest field of an operator's body is a path.
MAX_BODY_BYTES = 65_536
# Client-side names of the fields of LoRA messages.
LORA_FIELDS = {"name": "lora_name", "path": "lora_path"}


class Administration:
    """The operators' routes: read a body, call the scheduler, reply with its message."""

    def __init__(self, settings: ServerSettings, client: EngineClient, state: ServerState) -> None:
        self._settings = settings
        self._client = client
        self._state = state
        self._bodies = BodyReader(min(MAX_BODY_BYTES, settings.max_body_bytes))

    async def flush_cache(self, request: Request) -> Response:
        """Drop the prefix cache. Refused, with the counts, while anything owns memory or is in flight."""
        timeout_s = read_timeout(request.query_params, MAX_CALL_TIMEOUT_S)
        await self._read(request, NoBody)
        return await self._ask(lambda call_id: FlushCache(call_id=call_id, timeout_s=timeout_s))

    async def load_lora_adapter(self, request: Request) -> Response:
        """Load a LoRA adapter, which requests can then select as a model."""
        body = await self._read(request, LoadLoraBody)
        check_lora_name(body.lora_name, self._settings.model_name)
        answer = await self._client.call(
            lambda call_id: LoadLora(call_id=call_id, name=body.lora_name, path=body.lora_path)
        )
        if answer.ok:
            self._state.loras[body.lora_name] = body.lora_path
        return _response(answer, **LORA_FIELDS)

    async def unload_lora_adapter(self, request: Request) -> Response:
        """Unload a LoRA adapter. Refused, with the counts, while requests use it."""
        body = await self._read(request, UnloadLoraBody)
        answer = await self._client.call(
            lambda call_id: UnloadLora(call_id=call_id, name=body.lora_name, timeout_s=body.timeout)
        )
        if answer.ok:
            self._state.loras.pop(body.lora_name, None)
        return _response(answer, **LORA_FIELDS)

    async def start_profile(self, request: Request) -> Response:
        """Have every stage profile itself into a new folder of profile_dir."""
        await self._read_nothing(request)
        folder = new_trace_folder(self._settings.profile_dir)
        return await self._ask(lambda call_id: StartProfile(call_id=call_id, folder=folder))

    async def wake(self, request: Request) -> Response:
        """Allocate weights and KV memory again, and resume. Refused after level 2 without a weight update."""
        await self._read_nothing(request)
        response = await self._ask(lambda call_id: Wake(call_id=call_id))
        self._state.sleep_level = 0
        return response

    def of_message(self, message: Callable[[str], ClientMessage]) -> Callable[[Request], Awaitable[Response]]:
        """Build a route without a body that sends this message."""

        async def answer(request: Request) -> Response:
            await self._read_nothing(request)
            return await self._ask(message)

        return answer

    def of_body(self, body: type[MessageBody]) -> Callable[[Request], Awaitable[Response]]:
        """Build a route that sends the message of its body."""

        async def answer(request: Request) -> Response:
            require_no_parameters(request.query_params)
            asked = await self._read(request, body)
            response = await self._ask(asked.message)
            if isinstance(asked, UpdateWeightsBody):
                self._state.weights = asked.model_path
            if isinstance(asked, SleepBody):
                self._state.sleep_level = asked.level
            return response

        return answer

    async def _read(self, request: Request, model: type[Body]) -> Body:
        async with self._bodies.body_of(request) as data:
            if data:
                require_json(request)
            return parse_body(model, data)

    async def _read_nothing(self, request: Request) -> None:
        """Raise ApiError (400) for any field or parameter: the route has none."""
        require_no_parameters(request.query_params)
        await self._read(request, NoBody)

    async def _ask(self, message: Callable[[str], ClientMessage]) -> Response:
        return _response(await self._client.call(message))


def add_administration(
    router: APIRouter, settings: ServerSettings, client: EngineClient, state: ServerState, description: Description
) -> None:
    admin = Administration(settings, client, state)

    own: dict[str, Callable[..., Awaitable[Response]]] = {
        "/flush_cache": admin.flush_cache,
        "/v1/load_lora_adapter": admin.load_lora_adapter,
        "/v1/unload_lora_adapter": admin.unload_lora_adapter,
        "/start_profile": admin.start_profile,
        "/wake": admin.wake,
    }
    for path, route in OPERATOR_ROUTES.items():
        about = description.route(
            tag=ADMIN, body=route.body, body_required=route.body_required, query=route.query, errors=route.errors
        )
        if route.message is not None:
            name = path.removeprefix("/")
            router.post(path, name=name, description=route.says, **about)(admin.of_message(route.message))
        elif route.body is not None and issubclass(route.body, MessageBody):
            name, says = path.removeprefix("/"), route.body.says
            router.post(path, name=name, description=says, **about)(admin.of_body(route.body))
        else:
            router.post(path, **about)(own[path])


def new_trace_folder(parent: str) -> str:
    """Name a folder for one profile, in ``parent`` or among the temporary files; the stages create it."""
    name = f"profile-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return str(Path(parent or tempfile.gettempdir()).absolute() / name)


def _response(answer: CallAnswer, **fields: str) -> Response:
    """Return the reply to a call. ``fields`` maps the message's fields to the body's if the names differ.

    Raises ApiError for a refused call.
    """
    if not answer.ok:
        raise ApiError.of_call(answer, param=fields.get(answer.fault or "", answer.fault))
    return PlainTextResponse(answer.message)
