"""How an adapter starts a live server of its engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class ServerCommand(NamedTuple):
    """A command, and what is added to its environment."""

    command: Sequence[str]
    environment: Mapping[str, str]


# Of a configuration, an empty folder and a free port. Raises ScriptDefinitionError for what the live engine cannot do.
Launcher = Callable[[Any, Path, int], ServerCommand]
