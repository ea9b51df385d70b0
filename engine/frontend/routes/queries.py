"""The one parameter that routes take in their query, a time, and how a wrong one is refused."""

from __future__ import annotations

from fastapi import Request

from engine.frontend.errors import ApiError

__all__ = ["read_timeout", "timeout_of"]


def read_timeout(request: Request, maximum_s: float) -> float | None:
    """The ``timeout`` of a query in seconds. Raises ApiError (400)."""
    unknown = set(request.query_params) - {"timeout"}
    if unknown:
        message = f"the only parameter here is timeout, got {', '.join(sorted(unknown))}; remove it"
        raise ApiError.invalid(message, param=min(unknown))
    text = request.query_params.get("timeout")
    return None if text is None else timeout_of(text, maximum_s)


def timeout_of(text: str, maximum_s: float) -> float:
    """A time in seconds. Raises ApiError (400)."""
    try:
        timeout_s = float(text)
    except ValueError as exc:
        raise ApiError.invalid(f"timeout must be a number of seconds, got {text!r}", param="timeout") from exc
    if not 0 <= timeout_s <= maximum_s:
        raise ApiError.invalid(f"timeout must be from 0 to {maximum_s:g} seconds, got {text}", param="timeout")
    return timeout_s
