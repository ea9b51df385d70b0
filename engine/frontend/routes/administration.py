"""Routes for operators: flush, weight update, adapters, abort, pause, continue. Each is one message and its answer."""

from __future__ import annotations

import secrets
import tempfile
import time
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from engine.frontend.body_reader import BodyReader
from engine.frontend.context import FrontEnd
from engine.frontend.description import Description
from engine.frontend.errors import ApiError
from engine.frontend.origins import require_json
from engine.frontend.protocol import (
    MAX_CALL_TIMEOUT_S,
    AbortBody,
    Body,
    LoadLoraBody,
    PauseBody,
    UnloadLoraBody,
    UpdateWeightsBody,
    parse_body,
)
from engine.frontend.routes.queries import read_timeout
from engine.messages import (
    Abort,
    AbortAll,
    CallAnswer,
    ContinueGeneration,
    FlushCache,
    LoadAdapter,
    PauseGeneration,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
)

__all__ = ["add_administration"]

ADMIN = "administration"
# The longest that an operator has to say is a path.
MAX_BODY_BYTES = 65_536
FLUSH_QUERY = (("timeout", MAX_CALL_TIMEOUT_S, "seconds to wait for the engine to become quiet"),)


def add_administration(router: APIRouter, front: FrontEnd, description: Description) -> None:
    """Add the operators' routes."""

    bodies = BodyReader(min(MAX_BODY_BYTES, front.settings.max_body_bytes))

    async def read(request: Request, model: type[Body]) -> Body:
        async with bodies.body_of(request) as data:
            if data:
                require_json(request)
            return parse_body(model, data)

    @router.post("/flush_cache", **description.route(query=FLUSH_QUERY, errors=(400, 429), tag=ADMIN))
    async def flush_cache(request: Request) -> Response:
        """Drop the prefix cache; refused with the counts unless nothing owns memory or is in flight."""
        timeout_s = read_timeout(request, MAX_CALL_TIMEOUT_S)
        return _call_answer(await front.client.call(lambda call_id: FlushCache(call_id=call_id, timeout_s=timeout_s)))

    @router.post("/update_weights_from_disk", **description.route(body=UpdateWeightsBody, errors=(400, 429), tag=ADMIN))
    async def update_weights_from_disk(request: Request) -> Response:
        """Load other weights of the same model and drop the prefix cache; refused as a flush is."""
        body = await read(request, UpdateWeightsBody)
        return _call_answer(
            await front.client.call(
                lambda call_id: UpdateWeights(call_id=call_id, model_path=body.model_path, timeout_s=body.timeout)
            )
        )

    @router.post("/v1/load_lora_adapter", **description.route(body=LoadLoraBody, errors=(400, 429), tag=ADMIN))
    async def load_lora_adapter(request: Request) -> Response:
        """Load a LoRA adapter, which requests then ask for as a model."""
        body = await read(request, LoadLoraBody)
        if body.lora_name == front.model_name:
            raise ApiError.invalid(
                f"lora_name must differ from the served model's name, got {body.lora_name!r}; choose another",
                param="lora_name",
            )
        answer = await front.client.call(
            lambda call_id: LoadAdapter(call_id=call_id, name=body.lora_name, path=body.lora_path)
        )
        if answer.ok:
            front.adapters[body.lora_name] = body.lora_path
        return _call_answer(answer)

    @router.post("/v1/unload_lora_adapter", **description.route(body=UnloadLoraBody, errors=(400, 404, 429), tag=ADMIN))
    async def unload_lora_adapter(request: Request) -> Response:
        """Unload a LoRA adapter; refused with the counts while requests use it."""
        body = await read(request, UnloadLoraBody)
        answer = await front.client.call(
            lambda call_id: UnloadAdapter(call_id=call_id, name=body.lora_name, timeout_s=body.timeout)
        )
        if answer.ok:
            front.adapters.pop(body.lora_name, None)
        return _call_answer(answer)

    @router.post("/start_profile", **description.route(errors=(400, 429), tag=ADMIN))
    async def start_profile() -> Response:
        """Have every stage profile itself into a new folder of profile_dir."""
        folder = new_trace_folder(front.settings.profile_dir)
        return _call_answer(await front.client.call(lambda call_id: StartProfile(call_id=call_id, folder=folder)))

    @router.post("/stop_profile", **description.route(errors=(400, 429), tag=ADMIN))
    async def stop_profile() -> Response:
        """End the profile; the traces are written when the answer comes."""
        return _call_answer(await front.client.call(lambda call_id: StopProfile(call_id=call_id)))

    @router.post("/abort_request", **description.route(body=AbortBody, errors=(429,), tag=ADMIN))
    async def abort_request(request: Request) -> Response:
        """End one request by its exact rid, or all."""
        body = await read(request, AbortBody)
        if body.rid is None:
            return _call_answer(await front.client.call(lambda call_id: AbortAll(call_id=call_id)))
        rid = body.rid
        return _call_answer(await front.client.call(lambda call_id: Abort(rid=rid, call_id=call_id)))

    @router.post(
        "/pause_generation", **description.route(body=PauseBody, body_required=False, errors=(429,), tag=ADMIN)
    )
    async def pause_generation(request: Request) -> Response:
        """Stop planning: live requests go back to the queue, stay where they are, or end."""
        body = await read(request, PauseBody)
        return _call_answer(await front.client.call(lambda call_id: PauseGeneration(call_id=call_id, mode=body.mode)))

    @router.post("/continue_generation", **description.route(errors=(400, 429), tag=ADMIN))
    async def continue_generation() -> Response:
        """Resume after a pause."""
        return _call_answer(await front.client.call(lambda call_id: ContinueGeneration(call_id=call_id)))


def new_trace_folder(parent: str) -> str:
    """The name of a folder for one profile: in ``parent``, or among the temporary files; the stages make it."""
    name = f"profile-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return str(Path(parent or tempfile.gettempdir()).absolute() / name)


def _call_answer(answer: CallAnswer) -> Response:
    return PlainTextResponse(answer.message, status_code=200 if answer.ok else 404 if answer.not_found else 400)
