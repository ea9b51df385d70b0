"""The order to an agent that a program starts, with the addresses by which it reaches the server and other stages.

Owns the form of the order; starts nothing.
"""

from __future__ import annotations

import msgspec

__all__ = ["StageOrder", "StageWay"]


class StageWay(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of one stage: where it joins, where it listens, and what the stage before is told instead.

    All are HOST:PORT. The agent chooses the last two where they are empty.
    """

    join: str
    listen: str = ""
    advertise: str = ""


class StageOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent needs beside its way: its number, the run's secret, and its node's name and address for people."""

    way: StageWay
    stage: int
    secret: str
    node: str
    address: str = ""
    timeout_s: float = 60.0
