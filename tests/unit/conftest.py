"""How Hypothesis, the garbage collector and inner runs of pytest run here.

Hypothesis has no time limit an example, which a loaded machine breaks, and leaves no database.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings
from scripted_lockstep.tiers.server import growth

# As many are made before the collector looks, where Python would let it look after 700.
GARBAGE_OBJECTS = 50_000

settings.register_profile(
    "lockstep", deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("lockstep")


@pytest.fixture
def settles_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a server that has grown for good: the full time is for a busy machine."""
    monkeypatch.setattr(growth, "SETTLE_TIMEOUT_S", 0.5)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what was collected out of the garbage collector's sight: thousands of items and the modules of all tests.

    It stays to the end, so that every later look through it would be in vain.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        # Searches keep much of what they make.
        gc.set_threshold(GARBAGE_OBJECTS, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def few_plugins() -> Iterator[None]:
    """An inner run of pytest would spend more time on importing unused plugins than on tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_ADDOPTS", "-p no:schemathesis -p no:hypothesispytest -p no:anyio")
        yield


@pytest.fixture(scope="session", autouse=True)
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every HTTP client reads the certificates of all authorities, for 30 ms. Those of tests stay on loopback."""
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text(encoding="utf-8").partition(end)
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    file.write_text(first + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield
