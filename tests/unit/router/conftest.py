"""The routes that one engine has, as its application is built."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from engine.frontend.http.app import build_app
from engine.frontend.http.auth import Access
from engine.process.settings import ServerSettings


@pytest.fixture
def engine_routes() -> frozenset[str]:
    """The paths of an engine's application, without its own pages about itself."""
    settings = ServerSettings()
    # No route is asked: what stands behind them is not there.
    absent: Any = MagicMock()
    access = Access(settings, "127.0.0.1")
    return frozenset(build_app(settings, absent, absent, access, absent, absent).openapi()["paths"])
