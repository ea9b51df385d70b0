"""One id and one log line for each HTTP request: status, tokens, times, error.

Owns the id's rules and the line's fields. Never logs the text of a prompt or an output.
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
from engine.frontend.schema.errors import shortened
from engine.process.clock import Clock
from engine.process.logs import REQUEST_LOGGER, fields_of

REQUEST_ID_HEADER: Final = "x-request-id"
# The W3C headers that name the parent of a request's spans.
TRACE_HEADERS: Final = ("traceparent", "tracestate")
# Paths that probes call every few seconds, of which only failures are logged.
QUIET_PATHS: Final = frozenset({"/health", "/metrics"})
SHOWN_RIDS: Final = 4
# A request line may have as many bytes as a header.
SHOWN_PATH_CHARS: Final = 512
SHOWN_METHOD_CHARS: Final = 32
# The key in the state of a request's scope, which exception handlers can read too.
_STATE: Final = "request_id"
_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

logger = logging.getLogger(REQUEST_LOGGER)
_current: ContextVar[RequestRecord | None] = ContextVar("current request", default=None)


class RequestRecord:
    """The record of one HTTP request. Token counts are sums over its choices; a prompt counts once for each choice."""

    def __init__(self, request_id: str, begun_s: float, path: str, trace_headers: Mapping[str, str]) -> None:
        self.request_id = request_id
        self.begun_s = begun_s
        self.path = path
        self.trace_headers = trace_headers
        self.status = 500  # The status that the client gets if the application sends none.
        self.error: str | None = None
        self._first_token_s: float | None = None
        self._rids: list[str] = []
        self._finish_reasons: dict[str, int] = {}
        self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0

    def note(self, output: TokenOutput, now_s: float) -> None:
        """Add an output of one of this request's engine requests."""
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
        """Return the line's fields in order. The token fields are present once an engine request has ended."""
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
    """Gives every request an id, returns it with the reply, and writes the log line once the reply is sent."""

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        trace_headers = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        # The client's id is kept if it is one word of safe characters.
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
        # The raw path, because a decoded one may contain a line feed and forge a log line.
        path = scope.get("raw_path", b"").decode("ascii", "replace") or repr(scope["path"])
        path, method = shortened(path, SHOWN_PATH_CHARS), shortened(scope["method"], SHOWN_METHOD_CHARS)
        fields = record.fields(self._clock.now())
        text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        extra = fields_of(method=method, path=path, **fields)
        logger.info("%s %s %s", method, path, text, extra=extra)


def current_record() -> RequestRecord | None:
    """Return the record of the current HTTP request; None outside one."""
    return _current.get()


def request_id_of(scope: Scope) -> str | None:
    """Return the id of a request, even after its record is gone."""
    request_id: str | None = scope.get("state", {}).get(_STATE)
    return request_id


def _shown(value: object) -> str:
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else repr(value)
