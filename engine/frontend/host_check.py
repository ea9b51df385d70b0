"""The rule on Host: the names under which a server on loopback answers.

Holds for every route, before any other rule. Knows no keys and no pages.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.frontend.errors import ApiError, ErrorType
from engine.frontend.responses import error_answer

_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{0,5})?")


class HostCheck:
    """Refuses, on a server that listens on loopback, requests that name another host.

    A page whose name was made to lead to 127.0.0.1 (DNS rebinding) is of one origin with this server, and may read its
    answers; but its browser says the page's own name. An address cannot be rebound.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(map(str.lower, hosts)) | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host")
            if host is not None and not self._is_ours(host):
                await error_answer(_refusal(host), scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        name = _name_of(host)
        return name in self._hosts or _is_loopback(name)


def _refusal(host: str) -> ApiError:
    return ApiError(
        403,
        ErrorType.CLOSED,
        f"the Host of a request must name this server, which listens on loopback, got {host!r}; use the address that "
        "the server was started with, or name the host in --allowed-hosts",
    )


def _name_of(host: str) -> str:
    """The name or address in a Host header, without its port; empty for one that is malformed.

    Read by its own grammar: to a URL's `localhost#x` and `x@localhost` have a host too, and it is localhost.
    """
    found = _HOST.fullmatch(host)
    return (found["address"] or found["name"]).lower().rstrip(".") if found is not None else ""


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
