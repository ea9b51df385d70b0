"""Tiny checkpoints of several architectures, made by transformers itself, and one torch thread for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import chained_stages
import pytest
import torch
import transformers
from tiny_checkpoints import FAMILIES


def pytest_configure(config: pytest.Config) -> None:
    """Take the device of ``--device`` before the tests are imported."""
    chained_stages.DEVICE = config.getoption("scripted_device") or "cpu"


@pytest.fixture(autouse=True)
def _one_torch_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("engine.model.runner.stage_threads", lambda *_: 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's checkpoint, saved once a session."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            torch.manual_seed(7)
            model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
            model.save_pretrained(folder, max_shard_size="60KB" if family == "llama_sharded" else "5GB")
            made[family] = folder
        return made[family]

    return make
