"""The server's listening socket: bound before anything else starts, so that a port in use costs no loading time.

Owns the bind and its error; the front end accepts on it.
"""

from __future__ import annotations

import socket

from engine.errors import StartupError

__all__ = ["base_url", "bind_listener"]

BACKLOG_CONNECTIONS = 2048


def bind_listener(host: str, port: int) -> socket.socket:
    """A bound and listening socket; port 0 takes any free one. Raises StartupError, which names host and port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as exc:
        raise StartupError(f"host must be an address of this machine, got {host!r} ({exc}); try 127.0.0.1") from exc
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG_CONNECTIONS)
    except OSError as exc:
        listener.close()
        raise StartupError(
            f"the server must be able to listen on host {host} port {port}, but {exc.strerror or exc}; "
            "stop the process that uses that port, choose another with --port, or take any free one with --port 0"
        ) from exc
    return listener


def base_url(listener: socket.socket) -> str:
    """The URL under which this machine reaches a listening socket."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound: clients cannot connect to a wildcard
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
