"""The server's listening socket: bound before anything else starts, so that a port in use costs no loading time.

The front end accepts on it.
"""

from __future__ import annotations

import socket

from engine.links.endpoint import Endpoint
from engine.links.listener import bound_at

BACKLOG_CONNECTIONS = 2048


def bind_listener(host: str, port: int) -> socket.socket:
    """A bound and listening socket; port 0 takes any free one. Raises StartupError, which names host and port."""
    return bound_at(Endpoint(host, port), "--host and --port", backlog=BACKLOG_CONNECTIONS)


def base_url(listener: socket.socket) -> str:
    here = Endpoint(*listener.getsockname()[:2])
    if here.is_wildcard:  # Clients cannot connect to it.
        here = Endpoint("::1" if ":" in here.host else "127.0.0.1", here.port)
    return f"http://{here}"
