"""The configuration of a fleet."""

from __future__ import annotations

from typing import Any

import msgspec


class FleetConfig(msgspec.Struct, frozen=True):
    """Engines of these names, all of one configuration of their adapter but for their roles."""

    engine: Any
    names: tuple[str, ...]
