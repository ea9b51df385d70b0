"""TCP endpoints as users write them: HOST:PORT, [HOST]:PORT for IPv6, and the URL of an engine.

Owns the syntax and its errors; opens nothing.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from engine.core.errors import ConfigError

MAX_PORT = 65_535
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


class Endpoint(msgspec.Struct, frozen=True):
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """True if, by its name, only this machine can reach it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def is_wildcard(self) -> bool:
        """True for the address of all interfaces: a server can listen there, but nobody can connect to it."""
        return self.host in _WILDCARDS

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, name: str) -> Endpoint:
    """Parse a user's endpoint. Raises ConfigError, which mentions ``name``, for any other text."""
    host, colon, port = text.strip().rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    is_number = port.isascii() and port.isdecimal() and int(port) <= MAX_PORT
    if not colon or not host or not is_number or (":" in host and not is_bracketed):
        raise ConfigError(f"{name} must be HOST:PORT, with brackets around an IPv6 host, got {text!r}; try 127.0.0.1:0")
    return Endpoint(host, int(port))


def parse_engine_url(url: str, name: str) -> Endpoint:
    """Parse the URL of an engine's server. Raises ConfigError, which begins with ``name``, for any other text."""
    parts = urlsplit(url)
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port or parts.path.strip("/") or parts.query:
        raise ConfigError(f"{name} must be http://HOST:PORT, got {url!r}; give the URL that `engine serve` prints")
    return Endpoint(parts.hostname, port)
