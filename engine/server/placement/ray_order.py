"""The supervisor's side of placing stages with Ray: what the driver is told, and how its process begins.

Imports nothing of Ray by itself, whose threads a process that forks must not have.
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

# The driver's process is named so.
RAY: Final = "ray"
# How nice Ray makes its workers, and so what they start: 15 unless a node was started with this.
NICENESS: Final = "RAY_worker_niceness"
DRIVER_MODULE: Final = "engine.server.placement.ray_driver"


class RayOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver needs. ``settings`` is JSON of ServerSettings without keys; ``stages`` has one for each stage.

    The stages must have a place by ``deadline``, on the monotonic clock. The run's secret is in ``secret_file``.
    ``temp_dir`` is an empty folder for a cluster of our own; the supervisor removes it.
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
    """The main function of a forked process that replaces itself with the driver, which has none of its memory."""

    def become(control: Control) -> NoReturn:
        orders, ours = os.pipe()
        # A pipe takes 64 KiB without a reader; an order has a few.
        os.write(ours, msgspec.json.encode(order))
        os.close(ours)
        for fd in (control.fileno(), orders):
            os.set_inheritable(fd, True)
        # A cluster of our own inherits this: its stages share the machine with the scheduler, as forked ones do.
        environment = ray_defaults() | {NICENESS: "0"} | os.environ
        command = [sys.executable, "-m", DRIVER_MODULE, str(control.fileno()), str(orders)]
        os.execve(sys.executable, command, environment)  # noqa: S606 - our own interpreter and module

    return become
