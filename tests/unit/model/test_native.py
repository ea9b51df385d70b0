"""Compiled decode attention: that it equals the eager one, is compiled once and at start only, and may be missing."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chained_stages import ChainedStages, limits_for

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model import native_build
from engine.model.native import NativeAttention
from engine.model.native_build import NativeUnavailableError, native_library
from engine.plan import SamplingSpec

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
GREEDY = SamplingSpec(seed=0)
HEAD_SIZE = 16

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler here")


@pytest.fixture(scope="session")
def kernels_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests, so that the kernels are compiled once."""
    return tmp_path_factory.mktemp("kernels") / "made"


def config_of(folder: Path, kernels: Path, **values: object) -> EngineConfig:
    given = {"device": "cpu", "page_size": 4, "compile": True, "compile_dir": str(kernels)} | values
    return EngineConfig(model=str(folder), **given)


def chain_of(config: EngineConfig, *, lean: bool = True) -> ChainedStages:
    return ChainedStages(config, limits_for(config), lean=lean)


def is_native(chain: ChainedStages) -> bool:
    return all(isinstance(layer, NativeAttention) for runner in chain.runners for layer in runner._model._paged)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "mistral_window", "gemma2_softcap"])
def test_compiled_and_eager_compute_the_same(
    family: str, lean: bool, dtype: str, checkpoint_of: Callable[[str], Path], kernels_folder: Path
) -> None:
    """C11: rows of several lengths in one batch, alone and beside a chunk, with and without a window or a cap."""
    config = config_of(checkpoint_of(family), kernels_folder, pp_size=2, dtype=dtype)
    chains = [chain_of(config.model_copy(update={"compile": wanted}), lean=lean) for wanted in (False, True)]
    assert [is_native(chain) for chain in chains] == [False, True]
    ids = torch.randint(0, 198, (3, 64), generator=torch.Generator().manual_seed(5)).tolist()
    plans = (
        [(0, ids[0][:30]), (1, ids[1][:13]), (2, ids[2][:1])],
        [(0, ids[0][30:31]), (1, ids[1][13:14]), (2, ids[2][1:2])],
        [(0, ids[0][31:32]), (1, ids[1][14:17]), (2, ids[2][2:3])],
    )
    for plan in plans:
        eager, compiled = [chain.logits(*[chain.segment(*part) for part in plan]) for chain in chains]
        torch.testing.assert_close(compiled, eager, atol=TOLERANCE[dtype] * float(eager.abs().max()), rtol=0)


@needs_compiler
def test_greedy_outputs_are_equal(checkpoint_of: Callable[[str], Path], kernels_folder: Path) -> None:
    """C11: not only close, but the same tokens."""
    config = config_of(checkpoint_of("qwen3"), kernels_folder)
    outputs = [
        chain_of(config.model_copy(update={"compile": wanted})).generate(0, range(20, 61), 40, chunk=16, spec=GREEDY)
        for wanted in (False, True)
    ]
    assert outputs[0] == outputs[1]


@needs_compiler
def test_it_is_compiled_once_and_never_while_serving(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was compiled is kept for all later starts, and no shape of a batch needs the compiler again."""
    runs = []
    run = subprocess.run

    def counted(*args: object, **rest: object) -> object:
        runs.append(args)
        return run(*args, **rest)  # type: ignore[call-overload]

    monkeypatch.setattr("engine.model.native_build.subprocess.run", counted)
    config = config_of(checkpoint_of("qwen3"), tmp_path / "kernels", pp_size=2)
    chain = chain_of(config)
    assert len(runs) == 1
    for rows in (1, 2, 5, 8):
        for row in range(rows):
            chain.forward(chain.segment(row, range(1 + 3 * row)))
        chain.forward(*[chain.segment(row, [7]) for row in range(rows)])
    chain_of(config)
    assert len(runs) == 1


def test_without_a_compiler_the_eager_path_computes(
    checkpoint_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A missing compiler is a line in the log, and no reason not to serve."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        chain = chain_of(config_of(checkpoint_of("qwen3"), tmp_path / "kernels"))
    assert not is_native(chain)
    assert "the eager forward computes: a C++ compiler must be there" in caplog.text
    assert len(chain.generate(0, range(5), 3, chunk=8, spec=GREEDY)) == 3


@needs_compiler
def test_a_compiler_that_fails_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler said is in the error, and no half-made file in the folder."""
    monkeypatch.setattr(native_build, "_FLAGS", ("-no-such-flag",))
    with pytest.raises(NativeUnavailableError, match="no-such-flag"):
        native_library(tmp_path, HEAD_SIZE)
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]


def test_heads_that_fill_no_vector_are_refused(tmp_path: Path) -> None:
    """The rule and the value; nothing is compiled."""
    with pytest.raises(NativeUnavailableError, match="multiple of 8, got 20"):
        native_library(tmp_path / "kernels", 20)


@needs_compiler
@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    """Who can write there would run their code in this process."""
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="writable by no other"):
        native_library(tmp_path, HEAD_SIZE)
