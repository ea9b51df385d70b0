"""The connecting end: opens a connection, proves that it has the run's secret, and checks that the listener has it too.

Blocks, with a bound. Sends nothing but its proof before the listener has confirmed.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final

from engine.process.links.endpoint import Endpoint
from engine.process.links.proof import GREETING_BYTES, Claim, LinkError, answer_to, confirms
from engine.process.links.secret import MAC_BYTES, Secret

CONNECT_TIMEOUT_S: Final = 10.0
_PROBES: Final = 4


@dataclass(frozen=True)
class LinkAddress:
    """A peer's address, with the claim and the secret by which this end proves itself."""

    endpoint: Endpoint
    secret: Secret
    claim: Claim
    silence_s: float

    def connect(self) -> socket.socket:
        """Return a connection whose two ends have proved the secret. Raises OSError if nothing listens (yet).

        Raises LinkError if the listener belongs to another run, or refuses this peer.
        """
        connection = socket.create_connection((self.endpoint.host, self.endpoint.port), CONNECT_TIMEOUT_S)
        try:
            tune(connection, self.silence_s)
            _require_open(connection)
            self._prove(connection)
            connection.settimeout(None)
        except TimeoutError as exc:
            connection.close()
            raise LinkError(
                f"{self.endpoint} must be a listener of this run, but it sent nothing for {CONNECT_TIMEOUT_S} s"
            ) from exc
        except BaseException:
            connection.close()
            raise
        return connection

    def _prove(self, connection: socket.socket) -> None:
        greeting = self._read(connection, GREETING_BYTES, "it did not send the greeting of a listener")
        try:
            answer = answer_to(greeting, self.secret, self.claim)
        except LinkError as exc:
            raise LinkError(f"{self.endpoint} must be a listener of the run that is joined, but {exc}") from exc
        connection.sendall(answer)
        refusal = "it did not accept the proof; give both sides the same secret file"
        confirmation = self._read(connection, MAC_BYTES, refusal)
        if not confirms(confirmation, self.secret, greeting, answer):
            raise LinkError(f"{self.endpoint} must have the run's secret, but {refusal}")

    def _read(self, connection: socket.socket, count: int, without: str) -> bytes:
        data = b""
        while len(data) < count:
            try:
                part = connection.recv(count - len(data))
            except OSError as exc:
                raise LinkError(f"{self.endpoint} must be a listener of this run, but {without} ({exc})") from exc
            if not part:
                raise LinkError(f"{self.endpoint} must be a listener of this run, but {without}")
            data += part
        return data


def _require_open(connection: socket.socket) -> None:
    """Raise ConnectionResetError for a peer that closes without sending anything, as a relay without a target does."""
    if not connection.recv(1, socket.MSG_PEEK):
        raise ConnectionResetError("it closed the connection before it sent anything")


def tune(connection: socket.socket, silence_s: float) -> None:
    """Send small frames at once, and fail the connection if its peer acknowledges nothing for ``silence_s``."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause_s = max(1, round(silence_s / _PROBES))
    for option, value in (
        (socket.TCP_KEEPIDLE, pause_s),
        (socket.TCP_KEEPINTVL, pause_s),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, max(1, round(silence_s * 1000))),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
