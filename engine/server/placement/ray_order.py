"""The supervisor's side of placing stages with Ray: the driver's order, and the start of its process.

Never imports Ray: a process that forks must not have Ray's threads.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Final, NoReturn

import msgspec

from engine.core.errors import ConfigError
from engine.process.control import Control
from engine.server.placement.messages import StageOrder
from lockstep.ray_environment import ray_defaults

# The name of the driver's process.
RAY: Final = "ray"
# Ray's variable for the niceness of its workers and their children, 15 by default.
NICENESS: Final = "RAY_worker_niceness"
DRIVER_MODULE: Final = "engine.server.placement.ray_driver"


class RayOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's order. ``settings`` is JSON of ServerSettings without keys; ``stages`` has one entry per stage.

    The stages must be placed by ``deadline``, on the monotonic clock. ``secret_file`` holds the server's secret.
    ``temp_dir`` is an empty folder for a cluster that the driver starts; the supervisor removes it.
    """

    settings: str
    stages: tuple[StageOrder, ...]
    secret_file: str
    deadline: float
    temp_dir: str


def require_ray() -> None:
    """Raise ConfigError when Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "placement='ray' needs Ray, which is not installed; install lockstep-engine[ray], or use placement='join'"
        )


def become_driver(order: RayOrder) -> Callable[[Control], NoReturn]:
    """Return the main function of a forked process, which replaces itself with the driver and frees its memory."""

    def become(control: Control) -> NoReturn:
        orders, ours = os.pipe()
        # A pipe buffers 64 KiB without a reader; an order has a few KiB.
        os.write(ours, msgspec.json.encode(order))
        os.close(ours)
        for fd in (control.fileno(), orders):
            os.set_inheritable(fd, True)
        # A cluster that the driver starts inherits the niceness: its stages share the machine with the scheduler.
        environment = ray_defaults() | {NICENESS: "0"} | os.environ
        command = [sys.executable, "-m", DRIVER_MODULE, str(control.fileno()), str(orders)]
        os.execve(sys.executable, command, environment)  # noqa: S606 - our own interpreter and module

    return become
