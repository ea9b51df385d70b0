"""The routes that one engine has, as its application is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.frontend.app import build_app
from engine.frontend.auth import Access
from engine.settings import ServerSettings


@pytest.fixture
def engine_routes() -> frozenset[str]:
    """The paths of an engine's application, without its own pages about itself."""
    settings = ServerSettings()
    # No route is asked: only what the application is built from is there.
    front: Any = SimpleNamespace(
        settings=settings, access=Access.of(settings, "127.0.0.1"), origins=SimpleNamespace(admit=lambda: None)
    )
    return frozenset(build_app(front).openapi()["paths"])
