"""The process that the servers of these tests are forked from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.launch.preload import PreloadedParent


@pytest.fixture(scope="session")
def parent() -> Iterator[PreloadedParent]:
    """One a session: it imports torch, which takes longer than to fork a server."""
    with PreloadedParent.start() as started:
        yield started
