"""The HTTP client of other engines. Limits the time and size of a reply, and decodes it by type.

Turns any other behaviour of a peer into a PartnerError, and raises nothing else. Only this module reads a peer's
replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import httpx
import msgspec
from pydantic import SecretStr

from engine.core.errors import EngineError
from engine.core.frames import BadFrameError, json_decoder_of
from engine.core.limits import Limits
from engine.core.messages import PauseMode
from engine.core.routing.load import MAX_COUNT, Count, Load, SleepLevel
from engine.frontend.schema.errors import ApiError, ErrorBody, shortened
from engine.frontend.schema.native import MAX_PATH_CHARS
from engine.process.settings import ServerSettings

# An engine's longest description has a few thousand bytes.
MAX_PEER_ANSWER_BYTES: Final = 256 * 2**10
MAX_SHOWN_CHARS: Final = 512
KEPT_CONNECTIONS: Final = 64
_ERROR_STATUSES: Final = range(400, 600)
Kind = TypeVar("Kind")


class PartnerError(EngineError):
    """Another engine gave no usable reply. The text continues a sentence that begins with the engine's name.

    ``status`` is the reply's; None without a complete reply, so that the engine may or may not have acted.
    """

    def __init__(self, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    status: int
    body: bytes

    @property
    def is_ok(self) -> bool:
        return self.status == httpx.codes.OK

    @property
    def words(self) -> str:
        """Return the message of an error reply, or its text if it is not an error body."""
        try:
            return shown(_error_in(self.body).error.message)
        except BadFrameError:
            return shown(self.body[: 4 * MAX_SHOWN_CHARS].decode("utf-8", "replace"))


class _Message(msgspec.Struct, frozen=True):
    message: str


class _Error(msgspec.Struct, frozen=True):
    error: _Message


class About(msgspec.Struct, frozen=True):
    """The settings, limits and processes of an engine, from ``/server_info``."""

    settings: dict[str, str | int | float | bool | None]
    limits: Limits
    processes: dict[str, int]

    def __post_init__(self) -> None:
        limits = self.limits
        for name in ("page_size", "total_pages", "vocab_size", "context_length"):
            if getattr(limits, name) < 1:
                raise ValueError(f"limits.{name} must be at least 1, got {getattr(limits, name)}")
        for name, value in msgspec.structs.asdict(limits).items():
            if isinstance(value, int | float) and not abs(value) <= MAX_COUNT:
                raise ValueError(f"limits.{name} must be a number up to 2**53, got another")


class OperatedStats(msgspec.Struct, frozen=True):
    paused: PauseMode | None
    alive: Count
    sleep_level: SleepLevel


class OperatedState(msgspec.Struct, frozen=True):
    """The state of an engine that operators change. ``stats`` is None while its scheduler does not answer."""

    stats: OperatedStats | None
    weights: Annotated[str, msgspec.Meta(max_length=MAX_PATH_CHARS)]
    open_calls: Count


_error_in: Callable[[bytes], _Error] = json_decoder_of(_Error)
_refusal_in: Callable[[bytes], ErrorBody] = json_decoder_of(ErrorBody)
_loads_in: Callable[[bytes], list[Load]] = json_decoder_of(
    Annotated[list[Load], msgspec.Meta(min_length=1, max_length=1)]
)
_about_in: Callable[[bytes], About] = json_decoder_of(About)
_state_in: Callable[[bytes], OperatedState] = json_decoder_of(OperatedState)


class Peer:
    """The engine at ``base_url``. Every method raises PartnerError unless the reply is an engine's.

    Short calls time out after ``patience_s``. Operators' calls do not: the engine limits them, and its end closes the
    connection. httpx limits each read but not the reply, so without the limits here a peer could hold its caller
    forever with a byte now and then, or fill its memory.
    """

    def __init__(
        self,
        base_url: str,
        settings: ServerSettings,
        patience_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._client_headers = _with_key(settings.api_key or settings.admin_key)
        self._operator_headers = _with_key(settings.admin_key or settings.api_key)
        self._patience_s = patience_s
        # No limit on connections, because the engine limits requests and connections.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS)
        timeout = httpx.Timeout(None, connect=patience_s)
        self.client = httpx.AsyncClient(
            base_url=base_url, timeout=timeout, limits=limits, transport=transport, trust_env=False
        )

    async def health(self) -> int:
        """Return the status of ``/health``, which needs no key."""
        return (await self._look("/health", {})).status

    async def load(self) -> Load:
        return load_in(await self._look("/get_load", self._client_headers))

    async def load_for(self, headers: Mapping[str, str]) -> Load:
        """Return the load for a client with these headers. Raises ApiError if the engine refuses the client."""
        answer = await self._look("/get_load", headers)
        if not answer.is_ok and answer.status in _ERROR_STATUSES:
            detail = _read(_refusal_in, answer).error
            raise ApiError(detail.type, detail.message, status=answer.status)
        return load_in(answer)

    async def about(self) -> About:
        return about_in(await self._look("/server_info?timeout=0", self._client_headers))

    async def state(self) -> OperatedState:
        """Return the state that operators change. Has no time limit."""
        return state_in(await self._whole("GET", "/server_info", headers=self._operator_headers))

    async def operate(self, target: str, body: object = None) -> PeerAnswer:
        """Make an operator's call. Has no time limit."""
        content = b"" if body is None else msgspec.json.encode(body)
        headers = self._operator_headers | ({"content-type": "application/json"} if content else {})
        return await self._whole("POST", target, headers=headers, content=content)

    async def close(self) -> None:
        await self.client.aclose()

    async def _look(self, target: str, headers: Mapping[str, str]) -> PeerAnswer:
        return await self._whole("GET", target, headers=headers, within_s=self._patience_s)

    async def _whole(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str],
        content: bytes = b"",
        within_s: float | None = None,
    ) -> PeerAnswer:
        plain = {"accept-encoding": "identity", **headers}
        try:
            async with (
                asyncio.timeout(within_s),
                self.client.stream(method, target, headers=plain, content=content) as answer,
            ):
                return PeerAnswer(answer.status_code, await _body_of(answer))
        except PartnerError:
            raise
        except Exception as exc:  # malformed bytes make an HTTP client raise almost anything
            if isinstance(exc, TimeoutError) and within_s is not None:
                raise PartnerError(f"is gone: its reply was not complete within {within_s:g} s") from exc
            raise PartnerError(f"is gone ({type(exc).__name__})") from exc


async def _body_of(answer: httpx.Response) -> bytes:
    if "content-encoding" in answer.headers:
        raise PartnerError("sent a compressed reply, which was not requested")
    body = bytearray()
    async for part in answer.aiter_bytes():
        body += part
        if len(body) > MAX_PEER_ANSWER_BYTES:
            raise PartnerError(f"sent more than {MAX_PEER_ANSWER_BYTES} bytes in one reply")
    return bytes(body)


def load_in(answer: PeerAnswer) -> Load:
    """Decode a reply of ``/get_load``. Raises PartnerError."""
    if not answer.is_ok:
        raise PartnerError(f"does not report its load ({answer.status}): {answer.words}", answer.status)
    (load,) = _read(_loads_in, answer)
    return load


def about_in(answer: PeerAnswer) -> About:
    """Decode the description in a reply of ``/server_info``. Raises PartnerError."""
    if answer.status == httpx.codes.UNAUTHORIZED:
        raise PartnerError("asks the router for a key; set ENGINE_API_KEY to its own", answer.status)
    if not answer.is_ok:
        raise PartnerError(f"does not describe itself ({answer.status}): {answer.words}", answer.status)
    return _read(_about_in, answer)


def state_in(answer: PeerAnswer) -> OperatedState:
    """Decode the operators' state in a reply of ``/server_info``. Raises PartnerError."""
    if not answer.is_ok:
        raise PartnerError(answer.words, answer.status)
    return _read(_state_in, answer)


def _read(decode: Callable[[bytes], Kind], answer: PeerAnswer) -> Kind:
    try:
        return decode(answer.body)
    except BadFrameError as exc:
        raise PartnerError(f"is not an engine of this version ({shown(str(exc))})", answer.status) from exc


def shown(text: str) -> str:
    """Shorten a peer's text for a log and replace its control characters."""
    return shortened("".join(one if one.isprintable() else " " for one in text[: 2 * MAX_SHOWN_CHARS]), MAX_SHOWN_CHARS)


def _with_key(key: SecretStr | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
