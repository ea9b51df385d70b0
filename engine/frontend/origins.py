"""Which web pages may operate this server: a browser on its machine sends any page's requests.

Owns the rules on Origin and Content-Type for the operators' routes. What programs other than browsers send passes
them. ``auth.py`` checks the keys.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from fastapi import Request

from engine.frontend.errors import ApiError, ErrorType

JSON = "application/json"


class Origins:
    """Refuses, on the routes of operators, requests that a page of another server sends."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(origin.lower().rstrip("/") for origin in allowed)

    async def admit(self, request: Request) -> None:
        """Let a request pass. Raises ApiError (403) for a page of an origin that is neither ours nor allowed."""
        origin = request.headers.get("origin")
        if origin is None or origin.lower() in self._allowed:
            return
        if _netloc_of(origin) == request.headers.get("host", "").lower():
            return
        raise ApiError(
            403,
            ErrorType.CLOSED,
            f"{request.url.path} must be called by a program or by a page of this server, but the request comes from a "
            f"page of {origin!r}; name that origin in --operator-origins if its pages may operate this server",
        )


async def admit_json(request: Request) -> None:
    """Let a request pass. Raises ApiError (415) for one that a page may send without a preflight: all but JSON.

    One without a body need not be declared as anything.
    """
    if "content-type" in request.headers:
        require_json(request)


def require_json(request: Request) -> None:
    """Raise ApiError (415) for a body that is not declared as JSON."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != JSON:
        raise ApiError(
            415,
            ErrorType.MEDIA_TYPE,
            f"the body must be declared as {JSON}, but it is declared as {declared or 'nothing'!r}; "
            f"send 'Content-Type: {JSON}'",
        )


def _netloc_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
