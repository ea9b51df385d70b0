"""One stage farm, a private cache for the embedded checkpoint, short socket folders, one torch thread."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_commands import ForkedCommands
from stage_farm import StageFarm


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True, scope="module")
def _private_cache(cache: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sched_getaffinity", lambda _: {0})
        yield


@pytest.fixture(scope="session")
def farm(commands: ForkedCommands, cache: Path) -> Iterator[StageFarm]:
    farm = StageFarm(commands, cache)
    yield farm
    farm.close()


@pytest.fixture
def private_dir() -> Iterator[Path]:
    """Short, because an ipc path is limited to about 107 bytes and pytest's own folders are long."""
    with tempfile.TemporaryDirectory(prefix="ls-") as folder:
        yield Path(folder)
