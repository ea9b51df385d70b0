"""The OpenAPI description of the routes, generated from the types of bodies and replies in the code.

Owns the schemas of types. Routes read their bodies themselves, with their own limits and errors, so the framework does
not know these types.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from engine.frontend.schema.errors import ErrorBody

SCHEMAS = "#/components/schemas/"
ERRORS = {
    400: "The request breaks a rule; the message gives field, rule and value.",
    401: "The key is missing or wrong.",
    403: "This route is closed here.",
    404: "There is no such model or route.",
    409: "The rid belongs to a live request.",
    408: "The header or the body did not arrive in time.",
    413: "The body is too large for this route.",
    415: "The body is not declared as application/json.",
    421: "This engine computes prompts for decode engines; ask one of those.",
    429: "The queue is full; retry after Retry-After seconds.",
    500: "The engine could not compute this request.",
    503: "The server is starting, draining, or going down.",
    504: "The request timed out before its first token.",
}


class Description:
    """Collects the types of bodies and replies while routes are added."""

    def __init__(self) -> None:
        self._bodies: set[type[BaseModel]] = set()
        self._answers: set[type[msgspec.Struct]] = {ErrorBody}

    def route(
        self,
        *,
        answer: type[msgspec.Struct] | None = None,
        body: type[BaseModel] | None = None,
        body_required: bool = True,
        events: tuple[type[msgspec.Struct], ...] = (),
        query: tuple[tuple[str, float, str], ...] = (),
        errors: tuple[int, ...] = (),
        is_list: bool = False,
        may_be_list: bool = False,
        failure: type[msgspec.Struct] = ErrorBody,
        tag: str,
    ) -> dict[str, Any]:
        """Return keyword arguments for the framework's route decorator.

        ``answer`` is the body of a 200 (None: plain text), with ``is_list`` an item of it, with ``may_be_list`` either.
        ``events`` are the server-sent events of a stream. ``query`` has optional parameters, from 0, as (name, maximum,
        description). ``errors`` are further statuses beside the common ones, with the body ``failure``.
        """
        content = self._content(answer, is_list=is_list, may_be_list=may_be_list)
        if events:
            content["text/event-stream"] = {"schema": self._event(events)}
        responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
        failed = {"application/json": {"schema": self._answer(failure)}}
        for status in sorted({401, 403, 503, *errors, *((400, 408, 413, 429) if body or query else ())}):
            responses[str(status)] = {"description": ERRORS[status], "content": failed}
        operation: dict[str, Any] = {"responses": responses, "security": [{}, {"bearer": []}]}
        if body is not None:
            self._bodies.add(body)
            schema = {"$ref": SCHEMAS + body.__name__}
            operation["requestBody"] = {"required": body_required, "content": {"application/json": {"schema": schema}}}
        if query:
            operation["parameters"] = [_parameter(*one) for one in query]
        return {"openapi_extra": operation, "response_class": Response, "tags": [tag]}

    def _content(self, answer: type[msgspec.Struct] | None, *, is_list: bool, may_be_list: bool) -> dict[str, Any]:
        if answer is None:
            return {"text/plain": {"schema": {"type": "string"}}}
        one = self._answer(answer)
        several = {"type": "array", "items": one}
        if is_list:
            return {"application/json": {"schema": several}}
        return {"application/json": {"schema": {"anyOf": [one, several]} if may_be_list else one}}

    def install(self, app: FastAPI) -> None:
        """Make an application with all its routes describe itself.

        The first request builds the description, in a thread: that takes as long as the rest of a front end's start.
        """
        # FastAPI documents this assignment.
        app.openapi = describe = functools.cache(functools.partial(self._of, app))  # type: ignore[method-assign]
        as_json = functools.cache(lambda: msgspec.json.encode(describe()))

        async def answer(_: Request) -> Response:
            return Response(await asyncio.to_thread(as_json), media_type="application/json")

        app.router.routes.insert(0, Route("/openapi.json", answer))

    def _of(self, app: FastAPI) -> dict[str, Any]:
        description = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for operations in description["paths"].values():
            for operation in operations.values():
                # The framework's schema for refused parameters; the routes here refuse parameters themselves.
                operation["responses"].pop("422", None)
        components = description.setdefault("components", {})
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        components["schemas"] = self._schemas()
        return description

    def _answer(self, answer: type[msgspec.Struct]) -> dict[str, Any]:
        self._answers.add(answer)
        return {"$ref": SCHEMAS + answer.__name__}

    def _event(self, events: tuple[type[msgspec.Struct], ...]) -> dict[str, Any]:
        """Return the schema of one server-sent event.

        The last event's data is ``[DONE]``, or an error's body if the stream broke. In protocols with named events the
        last one is one of ``events``.
        """
        shown = {"oneOf": [*map(self._answer, events), self._answer(ErrorBody)]}
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": shown}
        last = {"const": "[DONE]"}
        return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [last, data]}}}

    def _schemas(self) -> dict[str, Any]:
        bodies = sorted(self._bodies, key=lambda body: body.__name__)
        answers = sorted(self._answers, key=lambda answer: answer.__name__)
        _, taken = models_json_schema([(body, "validation") for body in bodies], ref_template=SCHEMAS + "{model}")
        _, given = msgspec.json.schema_components(answers, ref_template=SCHEMAS + "{name}")
        defined: dict[str, Any] = taken.get("$defs", {})
        overlap = defined.keys() & given.keys()
        assert not overlap, f"a body and a reply must not share a name, got {sorted(overlap)}"
        return defined | given


def _parameter(name: str, maximum: float, text: str) -> dict[str, Any]:
    schema = {"type": "number", "minimum": 0, "maximum": maximum}
    return {"name": name, "in": "query", "required": False, "description": text, "schema": schema}
