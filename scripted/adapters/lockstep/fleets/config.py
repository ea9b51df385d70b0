"""The configuration of a fleet."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig


class FleetConfig(msgspec.Struct, frozen=True):
    """Engines of these names, all of one configuration but for their roles."""

    engine: EngineConfig
    names: tuple[str, ...]
