"""The environment of a process that uses Ray. Imports nothing of Ray by itself: it starts threads."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Final

_TOKEN_VARIABLES: Final = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_TOKEN_FILE: Final = Path("~/.ray/auth_token")


def ray_defaults() -> dict[str, str]:
    """Values for variables that the user has not set: no reports of usage, and the token.

    `ray start` asks for a token wherever its user has one, and drivers do not look for it by themselves.
    """
    defaults = {"RAY_USAGE_STATS_ENABLED": "0"}
    if any(name in os.environ for name in _TOKEN_VARIABLES) or _TOKEN_FILE.expanduser().is_file():
        defaults["RAY_AUTH_MODE"] = "token"
    return defaults


def reread_environment() -> None:
    """Make Ray read the environment again, in a process that may have imported it before.

    Ray notes at its import whether it shows a token, and which. Raises ImportError where Ray is not installed.
    """
    raylet: Any = importlib.import_module("ray._raylet")  # compiled, and without types
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
