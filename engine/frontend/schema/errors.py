"""Errors as clients see them: one body shape and one exception for every route.

Maps kinds of refusal to HTTP statuses. Never holds a traceback of the front end itself.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable

import msgspec

from engine.core.errors import ProcessDiedError
from engine.core.messages import CallAnswer, FinishReason, Refusal, RefusalKind, TokenOutput
from lockstep.errors import without_middle

# A message quotes only a part of the client's text.
MAX_MESSAGE_CHARS = 4096
MAX_PARAM_CHARS = 256
TRACEBACK = "Traceback (most recent call last)"
# Programs that get it shorten the prompt, or use a model with a longer context.
CONTEXT_CODE = "context_length_exceeded"
SEE_LOG = "the server's log says why"
# A death as engine.core.errors.death_words describes it.
_DEATH = re.compile(r"(?P<who>.*? process died(?:: on [^:\n]+)?): (?P<cause>.*)", re.DOTALL)
# The folders of an absolute path.
_FOLDERS = re.compile(r"(?<![\w./:])/(?:[^\s/'\"]+/)+")


class ErrorType:
    """The values of ``type`` in an error body; ``STATUSES`` maps them to HTTP statuses."""

    INVALID = "invalid_request_error"
    UNAUTHENTICATED = "authentication_error"
    CLOSED = "permission_error"
    MEDIA_TYPE = "unsupported_media_type"
    TIMEOUT = "request_timeout"
    TOO_LARGE = "request_too_large"
    NOT_FOUND = "not_found"
    DUPLICATE = "duplicate_request"
    MISDIRECTED = "misdirected_request"
    BUSY = "server_busy"
    UNAVAILABLE = "server_unavailable"
    ENGINE = "engine_error"
    TIME_LIMIT = "time_limit"


STATUSES = {
    ErrorType.INVALID: 400,
    ErrorType.UNAUTHENTICATED: 401,
    ErrorType.CLOSED: 403,
    ErrorType.NOT_FOUND: 404,
    ErrorType.TIMEOUT: 408,
    ErrorType.DUPLICATE: 409,
    ErrorType.TOO_LARGE: 413,
    ErrorType.MEDIA_TYPE: 415,
    ErrorType.MISDIRECTED: 421,
    ErrorType.BUSY: 429,
    ErrorType.ENGINE: 500,
    ErrorType.UNAVAILABLE: 503,
    ErrorType.TIME_LIMIT: 504,
}
_OF_REFUSAL = {
    RefusalKind.INVALID: ErrorType.INVALID,
    RefusalKind.DUPLICATE: ErrorType.DUPLICATE,
    RefusalKind.BUSY: ErrorType.BUSY,
    RefusalKind.UNAVAILABLE: ErrorType.UNAVAILABLE,
    RefusalKind.NOT_FOUND: ErrorType.NOT_FOUND,
}

# The OpenAI protocol names a LoRA in this field.
LORA_PARAM = "model"
_RESTORE = "a LoRA's files must stay in place: put them back, or unload the LoRA"
_PARAM_OF_REFUSAL = {RefusalKind.DUPLICATE: "rid", RefusalKind.NOT_FOUND: LORA_PARAM}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """``param`` is the path of the field at fault, if any; ``code`` is the HTTP status, or ``CONTEXT_CODE`` for a
    request that is too long for the model, which is a 400.

    ``request_id`` is the request's id in the log, set when the error is sent.
    """

    message: str
    type: str
    param: str | None = None
    code: int | str
    request_id: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error reply, and the last event of a broken stream."""

    error: ErrorDetail


class FieldError(ValueError):
    """A broken rule between the fields of a body; ``field`` names the field at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ApiError(Exception):
    """Ends the handling of a request with an error body."""

    def __init__(
        self, kind: str, message: str, *, param: str | None = None, code: str | None = None, status: int = 0
    ) -> None:
        """``status`` defaults to the status of the kind."""
        message = without_middle(message, MAX_MESSAGE_CHARS)
        param = None if param is None else shortened(param, MAX_PARAM_CHARS)
        super().__init__(message)
        self.status = status or STATUSES[kind]
        self.body = ErrorBody(ErrorDetail(message=message, type=kind, param=param, code=code or self.status))

    def body_for(self, request_id: str | None) -> ErrorBody:
        """Make the body for one request; the same error may answer many."""
        return ErrorBody(msgspec.structs.replace(self.body.error, request_id=request_id))

    def naming(self, param: str) -> ApiError:
        return ApiError.of_detail(msgspec.structs.replace(self.body.error, param=param))

    def reworded(self, reword: Callable[[str], str]) -> ApiError:
        """Rename the fields in the error's text and in its ``param``."""
        detail = self.body.error
        param = None if detail.param is None else reword(detail.param)
        return ApiError.of_detail(msgspec.structs.replace(detail, message=reword(detail.message), param=param))

    @classmethod
    def invalid(cls, message: str, *, param: str | None = None) -> ApiError:
        """Refuse a request that breaks a rule: 400."""
        return cls(ErrorType.INVALID, message, param=param)

    @classmethod
    def at(cls, param: str, rule: str) -> ApiError:
        """Refuse a field: 400. ``rule`` continues the sentence after the field's name."""
        return cls.invalid(f"{param} {rule}", param=param)

    @classmethod
    def too_long(cls, message: str, *, param: str) -> ApiError:
        """Refuse a request that exceeds the model's context or the server's memory: 400."""
        return cls(ErrorType.INVALID, message, param=param, code=CONTEXT_CODE)

    @classmethod
    def unavailable(cls, message: str) -> ApiError:
        """Refuse because the server is starting, stopping or broken: 503."""
        return cls(ErrorType.UNAVAILABLE, message)

    @classmethod
    def going_down(cls, death: ProcessDiedError) -> ApiError:
        """Refuse because a process of the server died: 503."""
        return cls.unavailable(f"the server is going down because {public(str(death))}")

    @classmethod
    def of_detail(cls, detail: ErrorDetail) -> ApiError:
        if isinstance(detail.code, str):
            return cls(detail.type, detail.message, param=detail.param, code=detail.code, status=400)
        return cls(detail.type, detail.message, param=detail.param, status=detail.code)

    @classmethod
    def rid_is_live(cls, rid: str) -> ApiError:
        """Refuse the rid of a live request: 409."""
        message = f"rid must be unique among live requests, got {rid!r}, which is live; wait for its end or omit rid"
        return cls(ErrorType.DUPLICATE, message, param="rid")

    @classmethod
    def of_refusal(cls, refusal: Refusal) -> ApiError:
        """Turn the scheduler's refusal into an error, with the status of its kind."""
        return cls(_OF_REFUSAL[refusal.kind], refusal.message, param=_PARAM_OF_REFUSAL.get(refusal.kind))

    @classmethod
    def of_call(cls, answer: CallAnswer, *, param: str | None) -> ApiError:
        """Turn the refusal of an operator's call into an error: 400, or 404 for a missing target."""
        if answer.not_found:
            return cls(ErrorType.NOT_FOUND, answer.message, param=param)
        return cls.invalid(answer.message, param=param)

    @classmethod
    def of_failure(cls, output: TokenOutput, grammar_field: str | None) -> ApiError:
        """Turn the failure of a request into an error: 500, 400 for the request's own fault, 503 for a lost file.

        A grammar, in ``grammar_field``, is the only fault of a request that its output reveals. A LoRA is the only file
        that can be lost.
        """
        why = public(output.error or "the engine could not compute this request")
        if output.finish_reason is FinishReason.INVALID:
            return cls.invalid(why if grammar_field is None else f"{grammar_field}: {why}", param=grammar_field)
        if output.finish_reason is FinishReason.UNAVAILABLE:
            return cls(ErrorType.UNAVAILABLE, f"{why}; {_RESTORE}", param=LORA_PARAM)
        return cls(ErrorType.ENGINE, why)


class JsonLiterals(reprlib.Repr):
    """Writes a client's values as Python does, but with JSON's literals, and shortened."""

    def repr_bool(self, value: bool, _level: int) -> str:
        """Write true or false."""
        return str(value).lower()

    def repr_NoneType(self, _value: None, _level: int) -> str:  # noqa: N802 - called by the type's name
        """Write null."""
        return "null"


def shortened(text: str, limit_chars: int) -> str:
    """Shorten a text to its beginning and the number of omitted characters."""
    return text if len(text) <= limit_chars else f"{text[:limit_chars]}... ({len(text) - limit_chars} more)"


def public(text: str) -> str:
    """Reduce an internal error to one line for clients, without tracebacks and folders.

    Keeps the cause of a process's death in the engine's words, 'it was killed by signal 9 (SIGKILL)', and the name of
    a machine other than the server's.
    """
    if (death := _DEATH.match(text)) is not None:
        return text if death["cause"].startswith(("it ", "its ")) and "\n" not in text else f"{death['who']}; {SEE_LOG}"
    before, found, _ = text.partition(TRACEBACK)
    if found:
        return f"{before.rstrip(': ').strip()}; {SEE_LOG}".removeprefix("; ")
    return _FOLDERS.sub("", text.partition("\n")[0])
