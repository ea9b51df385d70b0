"""The OpenAPI description of the routes: bodies and answers by the types that the code itself uses.

Owns how types become schemas. The routes read their bodies themselves, within a bound and with errors of their own, so
the framework cannot see these types by itself.
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
    400: "The request breaks a rule; the message names field, rule and value.",
    401: "The key is missing or wrong.",
    403: "This route is closed here.",
    404: "There is no such model or route.",
    409: "The rid belongs to a live request.",
    408: "The header or the body did not arrive in time.",
    413: "The body is larger than this route takes.",
    415: "The body is not declared as application/json.",
    421: "This engine computes prompts for decode engines; ask one of those.",
    429: "The queue is full; come back after Retry-After seconds.",
    500: "The engine could not compute this request.",
    503: "The server is starting, draining, or going down.",
    504: "The time of the request was over before its first token.",
}


class Description:
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
        """Keyword arguments for the framework's route decorator.

        ``answer`` is the body of a 200 (None: plain text), or with ``is_list`` each part of it, or with ``may_be_list``
        one or the other; ``events`` are those of the server-sent events of a stream; ``query`` are optional parameters
        from 0 as (name, maximum, description); ``errors`` are the statuses beyond those that any route may have, and
        ``failure`` is the body of them.
        """
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}} if answer is None else {}
        if answer is not None:
            one = self._answer(answer)
            several = {"type": "array", "items": one}
            shown = several if is_list else one
            if may_be_list and not is_list:
                shown = {"anyOf": [one, several]}
            content["application/json"] = {"schema": shown}
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
            operation["requestBody"] = {
                "required": body_required,
                "content": {"application/json": {"schema": schema}},
            }
        if query:
            operation["parameters"] = [
                {
                    "name": name,
                    "in": "query",
                    "required": False,
                    "description": text,
                    "schema": {"type": "number", "minimum": 0, "maximum": maximum},
                }
                for name, maximum, text in query
            ]
        return {"openapi_extra": operation, "response_class": Response, "tags": [tag]}

    def install(self, app: FastAPI) -> None:
        """Have an application describe itself, once all its routes are there.

        It is made when it is first asked for, which takes as long as all the rest of a front end's start; so it is made
        in a thread, and the event loop goes on.
        """
        # As documented.
        app.openapi = describe = functools.cache(functools.partial(self._of, app))  # type: ignore[method-assign]
        as_json = functools.cache(lambda: msgspec.json.encode(describe()))

        async def answer(_: Request) -> Response:
            return Response(await asyncio.to_thread(as_json), media_type="application/json")

        app.router.routes.insert(0, Route("/openapi.json", answer))

    def _of(self, app: FastAPI) -> dict[str, Any]:
        description = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for operations in description["paths"].values():
            for operation in operations.values():
                # The framework's own refusal of a parameter, which no route here leaves to it.
                operation["responses"].pop("422", None)
        components = description.setdefault("components", {})
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        components["schemas"] = self._schemas()
        return description

    def _answer(self, answer: type[msgspec.Struct]) -> dict[str, Any]:
        self._answers.add(answer)
        return {"$ref": SCHEMAS + answer.__name__}

    def _event(self, events: tuple[type[msgspec.Struct], ...]) -> dict[str, Any]:
        """One server-sent event. The last one's data is ``[DONE]``, of an answer that broke it is an error's body.

        Where events have names, the last one is one of them in either case.
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
        assert not overlap, f"a body and an answer must not share a name, got {sorted(overlap)}"
        return defined | given
