"""Stages that Ray places, as the supervisor starts them: the driver's process, and the folder that it may use.

Owns what must be gone at the end even if the driver was killed. Talks to no cluster.
"""

from __future__ import annotations

import shutil
import tempfile
import time

import msgspec

from engine.launch.child import Child, fork_child
from engine.placement.ray_order import RAY, RayOrder, become_driver
from engine.placement.stage_order import StageWay
from engine.process.control import Gathering
from engine.settings import ServerSettings

__all__ = ["RayStages"]


class RayStages:
    """The driver of one server. ``close`` removes what it left."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._folder = tempfile.mkdtemp(prefix="ray-")

    def start(self, gathering: Gathering) -> Child:
        """Start the driver, which has the stages join there. It cleans up after the end of the supervisor too."""
        order = RayOrder(
            settings=self._settings.model_dump_json(),
            ways=self._ways(gathering),
            secret_file=gathering.secret_file,
            deadline=time.monotonic() + self._settings.start_timeout_s,
            temp_dir=self._folder,
        )
        return fork_child(RAY, become_driver(order), outlives_supervisor=True)

    def close(self) -> None:
        """Remove the folder; idempotent."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ways(self, gathering: Gathering) -> tuple[StageWay, ...]:
        if self._settings.placement_options:
            return msgspec.json.decode(self._settings.placement_options, type=tuple[StageWay, ...])
        return (StageWay(join=gathering.join),) * gathering.stages
