"""What every TCP connection between machines is set to: no delay of small frames, and a bound on silence of the path.

Owns the socket options. The bound is the kernel's: it finds a path on which nothing is acknowledged any more.
"""

from __future__ import annotations

import socket

__all__ = ["tune"]

_PROBES = 4


def tune(connection: socket.socket, silence_s: float) -> None:
    """Send small frames at once, and let the connection fail when its peer acknowledges nothing for ``silence_s``."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause_s = max(1, round(silence_s / _PROBES))
    for name, value in (
        ("TCP_KEEPIDLE", pause_s),
        ("TCP_KEEPINTVL", pause_s),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", max(1, round(silence_s * 1000))),
    ):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
