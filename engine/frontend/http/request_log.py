"""One id and one log line for each HTTP request: its client, its cost, its end.

Owns the id's rules and the line's fields. Never logs the text of a prompt or an answer.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.core.messages import TokenOutput
from engine.process.clock import Clock
from engine.process.logs import REQUEST_LOGGER, fields_of

REQUEST_ID_HEADER: Final = "x-request-id"
# Which spans a request's own belong to.
TRACE_HEADERS: Final = ("traceparent", "tracestate")
# Routes that a probe asks for every few seconds are logged only when they fail.
QUIET_PATHS: Final = frozenset({"/health", "/metrics"})
SHOWN_RIDS: Final = 4
# The state of a request's scope, which exception handlers see too.
_STATE: Final = "request_id"
_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

logger = logging.getLogger(REQUEST_LOGGER)
_current: ContextVar[RequestRecord | None] = ContextVar("current request", default=None)


class RequestRecord:
    """What is known of one HTTP request so far. Tokens are sums over its choices; each prompt counts once a choice."""

    def __init__(self, request_id: str, begun_s: float, path: str, trace_headers: Mapping[str, str]) -> None:
        self.request_id = request_id
        self.begun_s = begun_s
        self.path = path
        self.trace_headers = trace_headers
        self.status = 500  # What a client gets when nothing was answered.
        self.error: str | None = None
        self._first_token_s: float | None = None
        self._rids: list[str] = []
        self._finish_reasons: dict[str, int] = {}
        self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0

    def note(self, output: TokenOutput, now_s: float) -> None:
        """Take in an output of one of the requests to the engine that this one stands for."""
        if output.token_ids and self._first_token_s is None:
            self._first_token_s = now_s
        if output.finish_reason is None:
            return
        self._rids.append(output.rid)
        reason = output.finish_reason.value
        self._finish_reasons[reason] = self._finish_reasons.get(reason, 0) + 1
        self._prompt_tokens += output.prompt_tokens
        self._cached_tokens += output.cached_tokens
        self._completion_tokens += output.completion_tokens
        self.error = self.error or output.error

    def fields(self, now_s: float) -> dict[str, object]:
        """The line's fields, in their order. Those of tokens are there when the engine answered."""
        shown: dict[str, object] = {"request_id": self.request_id, "status": self.status}
        if self._rids:
            more = ["..."] if len(self._rids) > SHOWN_RIDS else []
            shown |= {
                "rid": ",".join(self._rids[:SHOWN_RIDS] + more),
                "prompt_tokens": self._prompt_tokens,
                "cached_tokens": self._cached_tokens,
                "completion_tokens": self._completion_tokens,
                "finish_reason": ",".join(self._finish_reasons),
            }
        if self._first_token_s is not None:
            shown["first_token_s"] = round(self._first_token_s - self.begun_s, 4)
        shown["total_s"] = round(now_s - self.begun_s, 4)
        if self.error is not None:
            shown["error"] = self.error
        return shown


class RequestLog:
    """Gives every request an id, sends it back with the answer, and writes the line when the answer is out."""

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        trace_headers = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        # The client's own where it is one word of harmless characters.
        given = headers.get(REQUEST_ID_HEADER)
        request_id = given if given is not None and _ID.fullmatch(given) else uuid.uuid4().hex
        record = RequestRecord(request_id, self._clock.now(), scope["path"], trace_headers)
        scope.setdefault("state", {})[_STATE] = record.request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = record.request_id
            await send(message)

        token = _current.set(record)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            _current.reset(token)
            self._write(scope, record)

    def _write(self, scope: Scope, record: RequestRecord) -> None:
        if not logger.isEnabledFor(logging.INFO) or (scope["path"] in QUIET_PATHS and record.status < 400):
            return
        # As it was sent: a decoded path may hold a line of its own.
        path = scope.get("raw_path", b"").decode("ascii", "replace") or repr(scope["path"])
        fields = record.fields(self._clock.now())
        text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        extra = fields_of(method=scope["method"], path=path, **fields)
        logger.info("%s %s %s", scope["method"], path, text, extra=extra)


def current_record() -> RequestRecord | None:
    """The record of the HTTP request that is being handled; None outside of one."""
    return _current.get()


def request_id_of(scope: Scope) -> str | None:
    """The id of a request, also where its record is gone."""
    request_id: str | None = scope.get("state", {}).get(_STATE)
    return request_id


def _shown(value: object) -> str:
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else repr(value)
