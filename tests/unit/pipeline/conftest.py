"""One stage farm, a private cache for the embedded checkpoint, short socket folders, one torch thread, ports of KV."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_commands import ForkedCommands
from kv_peers import Decode, Open, Prefill, SmallStage, no_thread_is_left
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


@pytest.fixture
def opened() -> Iterator[Open]:
    """Close what a test opens, last first; afterwards no thread of a port may be left."""
    ends: list[Any] = []

    def note(end: Any) -> Any:
        ends.append(end)
        return end

    with no_thread_is_left():
        yield note
        for end in reversed(ends):
            end.close()


@pytest.fixture
def decode(opened: Open, private_dir: Path) -> Decode:
    stage = SmallStage()
    return stage, opened(stage.receiver(private_dir))


@pytest.fixture
def prefill(opened: Open) -> Prefill:
    stage = SmallStage()
    return stage, opened(stage.sender())
