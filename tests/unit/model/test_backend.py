"""Which backend computes: what 'auto' takes, what is refused with which remedy, and that torch needs no OpenVINO."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import transformers
from chained_stages import limits_for
from tiny_checkpoints import SHAPE

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.model.backend import takes_openvino, why_not_openvino, with_its_pages
from engine.model.runner import StageRunner


def found(monkeypatch: pytest.MonkeyPatch, spec: ModuleSpec | None) -> None:
    """Make a search for OpenVINO find ``spec``."""
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return spec if name == "openvino" else find(name, package)

    monkeypatch.setattr("importlib.util.find_spec", find_spec)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that OpenVINO is installed: the choice imports nothing of it."""
    found(monkeypatch, ModuleSpec("openvino", None, origin="here"))


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, None)


def saved(folder: Path, config: transformers.PreTrainedConfig) -> Path:
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_the_embedded_model_is_computed_by_torch_unless_openvino_is_asked_for(installed: None) -> None:
    assert not takes_openvino(EngineConfig(page_size=32))
    assert takes_openvino(EngineConfig(page_size=32, backend="openvino"))
    assert with_its_pages(EngineConfig()).page_size == 16
    config = EngineConfig(device="cpu")
    assert StageRunner(config, Limits.of(config, EMBEDDED_FACTS), 0).model.backend == "torch"


def test_nothing_of_openvino_is_imported_unless_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed or not: an import would be refused here."""
    for name in ("openvino", "engine.model.openvino.stage"):
        monkeypatch.setitem(sys.modules, name, None)
    config = EngineConfig(device="cpu")
    assert StageRunner(config, Limits.of(config, EMBEDDED_FACTS), 0).model.backend == "torch"


def test_without_openvino_auto_is_torch_and_openvino_names_the_extra(
    missing: None, checkpoint_of: Callable[[str], Path]
) -> None:
    folder = str(checkpoint_of("qwen3"))
    config = EngineConfig(model=folder, device="cpu", page_size=32)
    assert not takes_openvino(config)
    assert StageRunner(config, limits_for(config), 0).model.backend == "torch"
    asked = EngineConfig(model=folder, device="cpu", backend="openvino")
    with pytest.raises(ConfigError, match=r"install 'lockstep-engine\[openvino\]'; or use backend='torch'"):
        StageRunner(asked, limits_for(asked), 0)


def test_a_folder_of_that_name_is_not_openvino(
    monkeypatch: pytest.MonkeyPatch, checkpoint_of: Callable[[str], Path]
) -> None:
    found(monkeypatch, ModuleSpec("openvino", None))
    config = EngineConfig(model=str(checkpoint_of("qwen3")), device="cpu", page_size=32)
    assert "is not installed" in str(why_not_openvino(config))


@pytest.mark.parametrize("family", ["qwen3", "qwen2_biased", "llama", "mistral_window", "gemma3_two_ropes"])
def test_auto_takes_openvino_for_the_models_that_it_knows(
    family: str, installed: None, checkpoint_of: Callable[[str], Path]
) -> None:
    config = EngineConfig(model=str(checkpoint_of(family)), device="cpu")
    assert with_its_pages(config).page_size == 32
    assert takes_openvino(with_its_pages(config))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gemma2_softcap"])
def test_another_architecture_is_computed_by_torch(
    family: str, installed: None, checkpoint_of: Callable[[str], Path]
) -> None:
    config = EngineConfig(model=str(checkpoint_of(family)), device="cpu", page_size=64)
    assert not takes_openvino(config)
    with pytest.raises(
        ConfigError, match=r"models of type .*qwen3 can be converted, this one is .*; or use backend='torch'"
    ):
        takes_openvino(config.model_copy(update={"backend": "openvino"}))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"page_size": 16}, r"page_size must be a multiple of 32 for OpenVINO, .* got 16; use 32"),
        ({"dtype": "float16"}, r"dtype must be float32 or bfloat16 .* got 'float16'"),
        ({"device": "cuda"}, r"device must be 'cpu' for OpenVINO, got 'cuda'"),
        ({"attention_backend": "sdpa"}, r"attention_backend must be 'auto' for OpenVINO, got 'sdpa'"),
    ],
)
def test_a_setting_that_openvino_cannot_follow_is_refused_or_leaves_the_model_to_torch(
    values: dict[str, object], reason: str, installed: None, checkpoint_of: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=reason + r".*; or use backend='torch'"):
        EngineConfig(backend="openvino", **values)
    auto = {"model": str(checkpoint_of("qwen3")), "page_size": 32, **values}
    assert not takes_openvino(EngineConfig(**auto))


def test_eight_bits_need_openvino_to_be_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"weights='int8' needs backend='openvino', got backend='auto'; set it"):
        EngineConfig(weights="int8")
    assert EngineConfig(weights="int8", backend="openvino").weights == "int8"
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='u8' needs backend='openvino', got backend='torch'; set it"):
        EngineConfig(kv_cache_dtype="u8", backend="torch")
    assert EngineConfig(kv_cache_dtype="u8", backend="openvino").kv_cache_dtype == "u8"


def test_pages_are_blocks_where_openvino_is_asked_for() -> None:
    assert EngineConfig(backend="openvino").page_size == 32
    assert EngineConfig(backend="openvino", page_size=64).page_size == 64
    assert EngineConfig(backend="torch").page_size == 16


def test_auto_keeps_what_is_configured(installed: None, checkpoint_of: Callable[[str], Path]) -> None:
    model = str(checkpoint_of("qwen3"))
    for values in ({"page_size": 16}, {"max_total_tokens": 16}, {"backend": "torch"}):
        config = EngineConfig(model=model, device="cpu", **values)  # type: ignore[arg-type]
        assert with_its_pages(config) is config


def test_angles_that_depend_on_the_length_are_left_to_torch(tmp_path: Path, installed: None) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    folder = saved(tmp_path, transformers.LlamaConfig(**SHAPE, rope_parameters=rope))
    reason = why_not_openvino(EngineConfig(model=str(folder), device="cpu", page_size=32))
    assert reason is not None
    assert "rope_type is dynamic" in reason


def test_a_processor_without_bf16_arithmetic_is_left_to_torch(
    installed: None, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    config = EngineConfig(model=str(checkpoint_of("qwen3")), device="cpu", page_size=32)
    assert why_not_openvino(config) is None
    reason = why_not_openvino(config.model_copy(update={"dtype": "bfloat16"}))
    assert reason == "this processor has no bfloat16 arithmetic; use dtype='float32'"
