"""The listening end: accepts connections, and hands over those whose peers have proved the run's secret.

Never waits for a peer: any number may be slow, silent or malformed, each within bounds of time and bytes.
A peer without proof is dropped, with at most one line a minute in the log of a server.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import time
from dataclasses import dataclass, field
from typing import Final

from engine.core.errors import StartupError
from engine.process.links.connection import tune
from engine.process.links.endpoint import Endpoint
from engine.process.links.proof import ANSWER_BYTES, Challenge, Claim, LinkError
from engine.process.links.secret import Secret

# A peer answers at once, so this is for the network.
PROOF_TIMEOUT_S: Final = 5.0
# More than any engine has machines. Beyond it the oldest peer is dropped, so that silent peers keep nobody out.
MAX_UNPROVED: Final = 64
_BACKLOG: Final = 64
SERVER_BACKLOG: Final = 2048
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Link:
    """A connection whose peer has proved its claim. ``peer`` is its address, for messages."""

    connection: socket.socket
    claim: Claim
    peer: str


# Remedies for errors that choosing any other port would not fix.
_REMEDIES: Final = {
    errno.EADDRNOTAVAIL: "no interface of this machine has it; use 127.0.0.1 for this machine alone, 0.0.0.0 for all",
    errno.EACCES: "ports below 1024 need root; choose a higher one",
}


def bound_at(endpoint: Endpoint, name: str, *, backlog: int | None = None) -> socket.socket:
    """Bind a TCP socket to its port. Without ``backlog`` it does not listen yet: a peer is refused, and may try again.

    Port 0 takes any free port. Raises StartupError, which mentions ``name``, if the socket cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)[
            0
        ]
    except OSError as exc:
        raise StartupError(
            f"{name} must be an address of this machine, got {endpoint} ({exc}); use 127.0.0.1 for this machine alone, "
            "0.0.0.0 for all"
        ) from exc
    listener = socket.socket(family, kind, protocol)
    if endpoint.port:
        # Not with port 0: two sockets that do not listen yet could get the same port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        if backlog is not None:
            listener.listen(backlog)
    except OSError as exc:
        listener.close()
        remedy = _REMEDIES.get(
            exc.errno or 0, "stop the process that uses it, choose another port, or port 0 for any free one"
        )
        raise StartupError(
            f"{name} must be an address of this machine with a free port, got {endpoint}: {exc.strerror or exc}; "
            f"{remedy}"
        ) from exc
    return listener


def bind_server(host: str, port: int) -> socket.socket:
    """Bind the listening socket of a server before anything else starts, so that a port in use is reported before
    loading.

    Port 0 takes any free port. Raises StartupError, which names host and port.
    """
    return bound_at(Endpoint(host, port), "--host and --port", backlog=SERVER_BACKLOG)


def base_url(listener: socket.socket) -> str:
    here = Endpoint(*listener.getsockname()[:2])
    if here.is_wildcard:  # A client cannot connect to a wildcard address.
        here = Endpoint("::1" if ":" in here.host else "127.0.0.1", here.port)
    return f"http://{here}"


class LinkListener:
    """Listens on a bound socket and accepts connections. ``fileno()`` is readable when ``take`` has work.

    A connection fails if its peer acknowledges nothing for ``silence_s`` seconds.
    """

    def __init__(self, listener: socket.socket, secret: Secret, *, silence_s: float) -> None:
        self._listener = listener
        self._secret = secret
        self._silence_s = silence_s
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)
        # By file descriptor, oldest first.
        self._unproved: dict[int, _Unproved] = {}

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(*self._listener.getsockname()[:2])

    def take(self, now: float) -> list[Link]:
        """Return the connections proved since the last call, without waiting. ``now`` is on the monotonic clock."""
        links: list[Link] = []
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept(now)
            # A readable peer may have been dropped for a new one in the same pass.
            elif (one := self._unproved.get(fd)) is not None and (link := self._hear(one)) is not None:
                links.append(link)
        for late in [one for one in self._unproved.values() if one.due <= now]:
            self._drop(late, f"it did not send its proof within {PROOF_TIMEOUT_S} s")
        return links

    def due(self) -> float | None:
        """Return when ``take`` must be called at the latest, to drop a slow peer; None while no peer is awaited."""
        return min((one.due for one in self._unproved.values()), default=None)

    def wait_for(self, wanted: Claim) -> socket.socket:
        """Wait for the peer with this claim, without a time limit, and drop all others. Blocks."""
        while True:
            due = self.due()
            select.select([self], [], [], None if due is None else max(0.0, due - time.monotonic()))
            for link in self.take(time.monotonic()):
                if link.claim == wanted:
                    return link.connection
                logger.warning("dropped %s, which is %s and not %s", link.peer, link.claim, wanted)
                link.connection.close()

    def close(self) -> None:
        """Close every socket that was not handed on; idempotent."""
        for one in self._unproved.values():
            one.connection.close()
        self._unproved.clear()
        self._listener.close()
        self._epoll.close()

    def _accept(self, now: float) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as exc:
            # The peer is gone, or no descriptor is free. A connection that is not accepted keeps the listener readable
            # forever.
            if exc.errno in _NO_DESCRIPTOR and self._unproved:
                self._drop_oldest()
                self._accept(now)
            return
        one = _Unproved(connection, str(Endpoint(*address[:2])), Challenge(self._secret), now + PROOF_TIMEOUT_S)
        if len(self._unproved) >= MAX_UNPROVED:
            self._drop_oldest()
        connection.setblocking(False)
        self._unproved[connection.fileno()] = one
        self._epoll.register(connection, select.EPOLLIN)
        try:
            tune(connection, self._silence_s)
            connection.send(one.challenge.greeting)
        except OSError as exc:
            self._drop(one, f"it is gone: {exc}")

    def _hear(self, one: _Unproved) -> Link | None:
        """Read the rest of a peer's answer, and not a byte more."""
        try:
            data = one.connection.recv(ANSWER_BYTES - len(one.answer))
        except BlockingIOError:
            return None
        except OSError as exc:
            self._drop(one, f"it is gone: {exc}")
            return None
        one.answer += data
        if data and len(one.answer) < ANSWER_BYTES:
            return None
        if not data:
            self._drop(one, "it closed the connection before its proof was complete")
            return None
        try:
            claim, confirmation = one.challenge.judge(bytes(one.answer))
            one.connection.send(confirmation)
        except (LinkError, OSError) as exc:
            self._drop(one, str(exc))
            return None
        self._forget(one)
        one.connection.setblocking(True)
        return Link(one.connection, claim, one.peer)

    def _drop_oldest(self) -> None:
        self._drop(next(iter(self._unproved.values())), "too many other peers connected after it")

    def _drop(self, one: _Unproved, why: str) -> None:
        logger.warning("dropped the peer at %s, which did not prove that it belongs to this run: %s", one.peer, why)
        self._forget(one)
        one.connection.close()

    def _forget(self, one: _Unproved) -> None:
        del self._unproved[one.connection.fileno()]
        self._epoll.unregister(one.connection)


@dataclass(eq=False, slots=True)
class _Unproved:
    """A connected peer that has not proved the secret yet."""

    connection: socket.socket
    peer: str
    challenge: Challenge
    due: float
    answer: bytearray = field(default_factory=bytearray)
