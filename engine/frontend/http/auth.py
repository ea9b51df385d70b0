"""Admits clients and operators to their routes, by bearer keys compared in constant time.

Owns the rule for servers without keys, the origins whose pages may operate this server, and the host names that a
server on loopback accepts. Keys are never logged or stored.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from fastapi import Request
from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.frontend.http.responses import JSON_TYPE, error_answer
from engine.frontend.schema.errors import ApiError, ErrorType
from engine.process.settings import ServerSettings

SCHEME = "bearer"
_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{0,5})?")


class Access:
    """The keys that one server requires.

    Clients need the API key if there is one. Operators need the admin key if there is one; without it their routes are
    open to clients on loopback and closed elsewhere. The admin key opens all routes. ``loopback`` is true if the server
    listens on loopback.
    """

    def __init__(self, settings: ServerSettings, address: str) -> None:
        """Take the keys of a server that listens on this IP address."""
        self._api_key = settings.api_key
        self._admin_key = settings.admin_key
        self._origins = frozenset(origin.lower().rstrip("/") for origin in settings.origins)
        self.loopback = _is_loopback(address)

    async def admit_client(self, request: Request) -> None:
        """Admit a client. Raises ApiError (401)."""
        if self._api_key is not None:
            _require_key(request, self._api_key, self._admin_key)

    async def admit_operation(self, request: Request) -> None:
        """Admit an operator's request. Raises ApiError: 401, 403, 415.

        A browser on this machine sends requests on behalf of any page. A page is refused with 403 unless its origin is
        this server's or allowed, and with 415 for a body that needs no preflight, which is any but JSON. Other programs
        pass both checks. A request without a body needs no content type.
        """
        origin = request.headers.get("origin")
        is_allowed = origin is None or origin.lower() in self._origins
        if not is_allowed and _netloc_of(origin or "") != request.headers.get("host", "").lower():
            raise ApiError(
                ErrorType.CLOSED,
                f"{request.url.path} must be called by a program or by a page of this server, but the request comes "
                f"from a page of {origin!r}; name that origin in --operator-origins if its pages may operate this "
                "server",
            )
        await self.admit_operator(request)
        if "content-type" in request.headers:
            require_json(request)

    async def admit_operator(self, request: Request) -> None:
        """Admit an operator. Raises ApiError: 401 for a wrong key, 403 on a closed server without one."""
        if self._admin_key is not None:
            _require_key(request, self._admin_key)
        elif not self.loopback:
            raise ApiError(
                ErrorType.CLOSED,
                f"{request.url.path} needs an admin key on a server that does not listen on loopback, and this one "
                "has none; start it with ENGINE_ADMIN_KEY set",
            )
        else:
            await self.admit_client(request)


def _require_key(request: Request, *keys: SecretStr | None) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != SCHEME:
        # Clients of the Anthropic protocol send this header.
        given = request.headers.get("x-api-key", "")
    if not given:
        raise ApiError(
            ErrorType.UNAUTHENTICATED,
            "the request must send a key as 'Authorization: Bearer KEY', but has none; add the header",
        )
    # Compares every key, so that the time does not reveal which one nearly matched.
    sent = given.strip().encode()
    matches = [hmac.compare_digest(sent, key.get_secret_value().encode()) for key in keys if key is not None]
    if not any(matches):
        raise ApiError(
            ErrorType.UNAUTHENTICATED,
            "the key must be valid for this route, but it is not; ask the server's operator for one",
        )


def require_json(request: Request) -> None:
    """Raise ApiError (415) for a body that is not declared as JSON."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != JSON_TYPE:
        raise ApiError(
            ErrorType.MEDIA_TYPE,
            f"the body must be declared as {JSON_TYPE}, but it is declared as {declared or 'nothing'!r}; send "
            f"'Content-Type: {JSON_TYPE}'",
        )


def _netloc_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


class HostCheck:
    """Refuses requests that name another host, on a server that listens on loopback.

    A page whose host name was rebound to 127.0.0.1 (DNS rebinding) has this server's origin and may read its replies,
    but its browser sends the page's own host name. An address cannot be rebound.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], *, everywhere: bool = True) -> None:
        """Without ``everywhere`` only clients that connect over loopback are checked."""
        self._app = app
        self._everywhere = everywhere
        self._hosts = frozenset(map(str.lower, hosts)) | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host")
            is_held = self._everywhere or _is_loopback((scope.get("server") or ("",))[0])
            name = _name_of(host or "")
            if is_held and host is not None and name not in self._hosts and not _is_loopback(name):
                words = "the Host of a request must name this server, which listens on loopback, got"
                remedy = "use the address with which the server was started, or name the host in --allowed-hosts"
                error = ApiError(ErrorType.CLOSED, f"{words} {host!r}; {remedy}")
                await error_answer(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _name_of(host: str) -> str:
    """Return the name or address in a Host header without its port; empty for a malformed header.

    Parsed by its own grammar, because a URL parser also finds the host localhost in `localhost#x` and `x@localhost`.
    """
    found = _HOST.fullmatch(host)
    return (found["address"] or found["name"]).lower().rstrip(".") if found is not None else ""


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
