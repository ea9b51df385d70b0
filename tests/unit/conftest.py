"""How Hypothesis runs here, and the process that tests with real servers fork them from.

Hypothesis has no time limit an example, which a loaded machine breaks, and leaves no database.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from engine.launch.preload import PreloadedParent

settings.register_profile(
    "lockstep", deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("lockstep")


@pytest.fixture(scope="session")
def parent() -> Iterator[PreloadedParent]:
    """One a session: it imports torch, which takes longer than to fork a server."""
    with PreloadedParent.start() as started:
        yield started
