"""What the agent of a stage is started with, whoever starts it: a person, Ray, or a harness."""

from __future__ import annotations

import msgspec

from engine.links.endpoint import Endpoint


class StageOrder(msgspec.Struct, frozen=True, kw_only=True):
    """``join`` is where the server listens; without ``stage`` the agent gets a number that is free.

    ``listen`` is where the stage before connects, unless said the interface by which the server was reached;
    ``advertise`` is what others are told instead. ``model`` is the checkpoint's path here, if it is another one than on
    the server. ``node`` is the name of this machine in causes, its host name if empty, and ``address`` its address in
    its cluster. ``timeout_s`` bounds the wait for a server that is not there yet.
    """

    join: Endpoint
    stage: int | None = None
    listen: Endpoint | None = None
    advertise: Endpoint | None = None
    model: str = ""
    node: str = ""
    address: str = ""
    timeout_s: float = 600.0
