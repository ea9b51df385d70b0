"""The endpoints of a stage's connections: to the scheduler, from the stage before, to the stage after.

On one machine these are Unix sockets in the server's private folder, otherwise TCP connections whose peers prove the
server's secret. The frames are the same.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.pipeline.wire import hidden_address, stage_address
from engine.process.links.connection import LinkAddress
from engine.process.links.listener import LinkListener
from engine.process.links.proof import Claim, Role

CONNECT_INTERVAL_S: Final = 0.005
LINK_INTERVAL_S: Final = 0.05

logger = logging.getLogger(__name__)

Address = Path | LinkAddress


@dataclass(frozen=True)
class StageWires:
    """The endpoints of one stage. ``before`` and ``after`` are None if there is no such stage.

    A callable ``before`` opens the TCP listener once the stage is ready for the previous one.
    """

    scheduler: Address
    before: Path | Callable[[], LinkListener] | None
    after: Address | None

    @classmethod
    def local(cls, private_dir: Path, stage: int, pp_size: int) -> StageWires:
        return cls(
            scheduler=stage_address(private_dir, stage),
            before=hidden_address(private_dir, stage) if stage > 0 else None,
            after=hidden_address(private_dir, stage + 1) if stage < pp_size - 1 else None,
        )


def listening(address: Path, *, backlog: int = 1) -> socket.socket:
    """Listen on a Unix socket, replacing the file that a killed server left at its address."""
    address.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(address))
    listener.listen(backlog)
    return listener


def connected(address: Address) -> socket.socket:
    """Connect to an address, waiting until a process listens there.

    Raises LinkError when the listener belongs to another server.
    """
    if isinstance(address, LinkAddress):
        return _linked(address)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    while True:
        try:
            connection.connect(str(address))
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(CONNECT_INTERVAL_S)
        else:
            return connection


def _linked(address: LinkAddress) -> socket.socket:
    """Retry until the stage listens: its machine refuses connections while it loads."""
    has_warned = False
    while True:
        try:
            return address.connect()
        except OSError as exc:
            if not has_warned and not isinstance(exc, ConnectionError):
                logger.warning("%s cannot be reached from here, still trying: %s", address.endpoint, exc)
                has_warned = True
            time.sleep(LINK_INTERVAL_S)


def accepted(listen: Callable[[], LinkListener], stage: int) -> socket.socket:
    """Wait for the connection of the stage that precedes ``stage``, then close the listener."""
    listener = listen()
    connection = listener.wait_for(Claim(Role.HIDDEN, stage - 1))
    listener.close()
    return connection
