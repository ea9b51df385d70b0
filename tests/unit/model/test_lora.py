"""LoRAs on a stage: a batch of several says what transformers says with merged weights, and what is refused."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from chained_stages import DEVICE, ChainedStages, limits_for
from safetensors.torch import load_file, save_file
from thinned import thinned

from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError, IntegrityError
from engine.core.plan import LoraChange, LoraOrder, LoraUpdate, Segment, WeightUpdate
from engine.model.embedded_lora import embedded_lora_folder
from engine.model.lora_config import LoraConfig, require_lora

TOLERANCE = 1e-4  # fp32; the largest difference seen was 7e-6
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LENGTHS = (27, 20, 25, 22)
CHUNK = 7
# By row: no LoRA, the first, the second, the first again.
VERSIONS = (0, 1, 2, 1)


@functools.cache
def linears_of(model: Path) -> tuple[tuple[str, int, int], ...]:
    """The linear modules of a model: name, features in and out."""
    modules = transformers.AutoModelForCausalLM.from_pretrained(model).named_modules()
    return tuple((name, one.in_features, one.out_features) for name, one in modules if isinstance(one, torch.nn.Linear))


def write_lora(folder: Path, model: Path, seed: int, modules: tuple[str, ...], **config: Any) -> Path:
    """Write a LoRA as peft does: named by the model's own modules, A [rank, in] and B [out, rank]."""
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"} | config
    said["target_modules"] = list(modules)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, features_in, features_out in linears_of(model):
        if name.rpartition(".")[2] not in modules:
            continue
        ranks = said.get("rank_pattern", {})
        rank = next((rank for pattern, rank in ranks.items() if name.endswith(pattern)), said["r"])
        for side, shape in (("A", (rank, features_in)), ("B", (features_out, rank))):
            tensor = torch.randn(shape, generator=generator) * 0.15
            weights[f"base_model.model.{name}.lora_{side}.weight"] = tensor
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def merged(model: Path, lora: Path) -> Any:
    """W + scale * B @ A, by the definition and not by the engine's own code."""
    said = json.loads((lora / "adapter_config.json").read_text())
    weights = load_file(lora / "adapter_model.safetensors")
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    for key in [key for key in weights if ".lora_A." in key]:
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        down, up = weights[key], weights[key.replace("lora_A", "lora_B")]
        alphas = said.get("alpha_pattern", {})
        alpha = next((alpha for pattern, alpha in alphas.items() if name.endswith(pattern)), said["lora_alpha"])
        scale = alpha / (math.sqrt(len(down)) if said.get("use_rslora") else len(down))
        base.get_submodule(name).weight.data += scale * up @ down
    return base


class AdaptedStages(ChainedStages):
    """With a LoRA for each row."""

    def change(self, change: LoraChange) -> list[str | None]:
        """Read and prepare a change on every stage and return their errors; then all of them commit it, or none."""
        order, control = LoraOrder(change.version, change.name, change.path), LoraUpdate(self.launched, change)
        reads = [None if change.path is None else runner.begin_lora(order)() for runner in self.runners]
        if any(reads):
            return reads
        errors = [runner.prepare(control) for runner in self.runners]
        for runner in self.runners:
            runner.settle(control.id, commit=errors == [None] * len(errors))
        return errors

    def of(self, row: int, ids: Any) -> Segment:
        return msgspec.structs.replace(self.segment(row, ids), lora=VERSIONS[row])


def stages(model: Path, pp_size: int = 1, **config: Any) -> AdaptedStages:
    settings = EngineConfig(
        model=str(model), pp_size=pp_size, device=DEVICE, page_size=4, kv_sanitizer=True, max_loras=2, **config
    )
    return AdaptedStages(settings, limits_for(settings))


@pytest.fixture
def loras(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """Two: of all linears, and of a few with ranks and scales of their own."""

    def make(family: str) -> tuple[Path, Path]:
        model = checkpoint_of(family)
        few = {"rank_pattern": {"layers.1.self_attn.q_proj": 3}, "alpha_pattern": {"v_proj": 32}}
        first = write_lora(tmp_path / "first", model, 1, ALL)
        return first, write_lora(
            tmp_path / "second", model, 2, ("q_proj", "v_proj", "down_proj"), use_rslora=True, r=8, **few
        )

    return make


@pytest.mark.parametrize("pp_size", thinned([4, 1], one_in=2))
@pytest.mark.parametrize("family", ["qwen3", "qwen2_biased", "mistral_window", "gemma3_two_ropes"])
def test_a_batch_of_several_loras_equals_merged_weights(
    family: str, pp_size: int, checkpoint_of: Callable[[str], Path], loras: Callable[[str], tuple[Path, Path]]
) -> None:
    """C11: four rows, prefilled in chunks side by side and decoded as one batch; by the lean forward and without it."""
    model, folders = checkpoint_of(family), loras(family)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    models = (base, *[merged(model, folder) for folder in folders])
    ids = torch.randint(0, 198, (4, 31), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = [models[version](row[None]).logits[0] for version, row in zip(VERSIONS, ids, strict=True)]
    chain = stages(model, pp_size)
    assert chain.runners[0].model.is_lean is not family.startswith("gemma")
    for version, folder in enumerate(folders, 1):
        assert chain.change(LoraChange("a", version, str(folder))) == [None] * pp_size
    for first in range(0, max(LENGTHS), CHUNK):
        rows = [row for row in range(4) if first < LENGTHS[row]]
        stops = {row: min(first + CHUNK, LENGTHS[row]) for row in rows}
        logits = chain.logits(*[chain.of(row, ids[row, first : stops[row]].tolist()) for row in rows])
        _assert_equal(logits, [expected[row][stops[row] - 1] for row in rows])
    for step in range(4):
        logits = chain.logits(*[chain.of(row, [int(ids[row, LENGTHS[row] + step])]) for row in range(4)])
        _assert_equal(logits, [expected[row][LENGTHS[row] + step] for row in range(4)])


def test_a_row_alone_says_what_it_says_beside_others(
    checkpoint_of: Callable[[str], Path], loras: Callable[[str], tuple[Path, Path]]
) -> None:
    model, folders = checkpoint_of("qwen3"), loras("qwen3")
    outputs = []
    for groups in ([(0, 1, 2, 3)], [(0,), (1,), (2,), (3,)]):
        chain = stages(model)
        for version, folder in enumerate(folders, 1):
            chain.change(LoraChange("a", version, str(folder)))
        outputs.append(torch.cat([chain.logits(*[chain.of(row, range(9)) for row in rows]) for rows in groups]))
    assert float((outputs[0] - outputs[1]).abs().max()) < TOLERANCE


def test_weights_in_16_bits(checkpoint_of: Callable[[str], Path], loras: Callable[[str], tuple[Path, Path]]) -> None:
    model, folders = checkpoint_of("llama"), loras("llama")
    chain = stages(model, dtype="bfloat16")
    chain.change(LoraChange("a", 1, str(folders[0])))
    logits = chain.logits(chain.of(1, range(20)))
    with torch.inference_mode():
        expected = merged(model, folders[0])(torch.arange(20)[None]).logits[0, -1]
    assert torch.nn.functional.cosine_similarity(logits[0].float(), expected, dim=0) > 0.999


def test_stages_change_together_or_not_at_all(
    checkpoint_of: Callable[[str], Path], loras: Callable[[str], tuple[Path, Path]]
) -> None:
    """A07: one stage that fails keeps all of them as they were."""
    chain, folders = stages(checkpoint_of("qwen3"), 2), loras("qwen3")
    chain.change(LoraChange("a", 1, str(folders[0])))
    chain.runners[1].fail_next()
    errors = chain.change(LoraChange("b", 2, str(folders[1]), drop=1))
    assert errors[0] is None
    assert "injected" in str(errors[1])
    assert [list(runner.model.lora.held) for runner in chain.runners] == [[1], [1]]
    chain.change(LoraChange("b", 2, str(folders[1]), drop=1))
    assert [list(runner.model.lora.held) for runner in chain.runners] == [[2], [2]]
    chain.change(LoraChange("c", 3, str(folders[0]), drop=3))
    assert [list(runner.model.lora.held) for runner in chain.runners] == [[2], [2]]
    chain.change(LoraChange("b", drop=2))
    assert [runner.model.lora.held for runner in chain.runners] == [{}, {}]
    with pytest.raises(IntegrityError, match="must use a loaded LoRA, got version 1"):
        chain.logits(chain.of(1, range(3)))


def test_kv_of_another_lora_is_not_read(
    checkpoint_of: Callable[[str], Path], loras: Callable[[str], tuple[Path, Path]]
) -> None:
    """B11: the sanitizer's chain begins with the LoRA."""
    chain, folders = stages(checkpoint_of("qwen3")), loras("qwen3")
    chain.change(LoraChange("a", 1, str(folders[0])))
    first = chain.of(1, range(8))
    chain.forward(first)
    with pytest.raises(IntegrityError, match="belongs to another LoRA"):
        chain.forward(msgspec.structs.replace(first, start=8, token_ids=(1,), lora=0, pages=()))


def test_an_update_keeps_the_loras(
    checkpoint_of: Callable[[str], Path], loras: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    model, folders = checkpoint_of("qwen3"), loras("qwen3")
    other = tmp_path / "other"
    shutil.copytree(model, other)
    weights = {name: tensor * 0.9 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    chain = stages(model)
    chain.change(LoraChange("a", 1, str(folders[0])))
    assert chain.runners[0].prepare(WeightUpdate(9, str(other))) is None
    chain.runners[0].settle(9, commit=True)
    logits = chain.logits(chain.of(1, range(12)))
    with torch.inference_mode():
        expected = merged(other, folders[0])(torch.arange(12)[None]).logits[0, -1]
    _assert_equal(logits, [expected])


def test_the_embedded_models_loras_are_equal_for_equal_seeds() -> None:
    """C01: made like any other, and the same bytes on every machine."""
    first, second = embedded_lora_folder(1), embedded_lora_folder(2)
    assert embedded_lora_folder(1) == first != second
    assert (first / "adapter_config.json").read_bytes() == (second / "adapter_config.json").read_bytes()
    assert (first / "adapter_model.safetensors").read_bytes() != (second / "adapter_model.safetensors").read_bytes()
    require_lora("embedded-lora:1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"use_dora": True}, "use_dora must be false"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save must be empty"),
        ({"bias": "all"}, "bias must be 'none'"),
        ({"lora_bias": True}, "lora_bias must be False"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights must not change the base model"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out must be unset"),
        ({"something_new": {"a": 1}}, "something_new must be unset"),
        ({"lora_alpha": "much"}, "must give lora_alpha as a number"),
        ({"alpha_pattern": ["q_proj"]}, "must give alpha_pattern as an object"),
        ({"alpha_pattern": {"(": 1}}, "must have regular expressions"),
        ({"alpha_pattern": {r"([a-z_.0-9]+)+!": 1}}, "patterns of at most 256 characters with 3 groups and rep"),
        ({"alpha_pattern": {".?" * 30 + "!": 1}}, "patterns of at most 256 characters with 3 groups and repetitions"),
        ({"alpha_pattern": {"(" + "a|" * 200 + "b)": 1}}, "patterns of at most 256 characters"),
        ({"alpha_pattern": {"(a|a)*b": 1}}, "no group repeated"),
        ({"alpha_pattern": {f"p{number}.*": 1 for number in range(49)}}, "at most 48 groups and repetitions"),
        ({"alpha_pattern": {"a" * 2**20: 1}}, "must have at most 1048576 bytes"),
        ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern\['q_proj'\] as a number"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    content = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "megatron_core": "megatron.core", "eva_config": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    LoraConfig(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(content | change))
    with pytest.raises(CheckpointError, match=said):
        LoraConfig(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_configuration_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(CheckpointError, match="save the LoRA again"):
        LoraConfig(tmp_path)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder here"):
        require_lora("embedded-lora:many")
    with pytest.raises(CheckpointError, match="must hold adapter_config"):
        require_lora(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_text("")
    with pytest.raises(CheckpointError, match="safe_serialization"):
        require_lora(str(tmp_path))


@pytest.mark.parametrize(
    ("renamed", "said"),
    [
        ("base_model.model.lm_head.lora_A.weight", "linear layers in model.layers.0 to model.layers.4"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "only lora_A and lora_B of linear layers"),
        ("base_model.model.model.layers.7.mlp.up_proj.lora_A.weight", "linear layers in model.layers.0 to"),
        ("base_model.model.model.layers.0.mlp.sideways.lora_A.weight", "must be linear layers of this model"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "q_proj of this model has 64 inputs"),
    ],
)
def test_matrices_of_another_model_are_refused(
    renamed: str, said: str, checkpoint_of: Callable[[str], Path], loras: Callable[[str], tuple[Path, Path]]
) -> None:
    folder = loras("qwen3")[0]
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    wide = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    pair = (weights[wide], weights[wide.replace("_A.", "_B.")])
    weights |= {renamed: pair[0].clone(), renamed.replace("lora_A", "lora_B"): pair[1].clone()}
    save_file(weights, file)
    (error,) = stages(checkpoint_of("qwen3")).change(LoraChange("a", 1, str(folder)))
    assert error is not None
    assert said in error


def test_a_rank_above_the_bound_is_refused(
    checkpoint_of: Callable[[str], Path], loras: Callable[[str], tuple[Path, Path]]
) -> None:
    chain, folders = stages(checkpoint_of("qwen3"), max_lora_rank=4), loras("qwen3")
    assert chain.change(LoraChange("a", 1, str(folders[0]))) == [None]
    (error,) = chain.change(LoraChange("b", 2, str(folders[1])))
    assert "must be <= max_lora_rank=4, got 8" in str(error)


@pytest.mark.parametrize(("side", "number"), [("A", math.nan), ("B", math.inf)])
def test_numbers_that_are_none_are_refused(
    side: str, number: float, checkpoint_of: Callable[[str], Path], loras: Callable[[str], tuple[Path, Path]]
) -> None:
    """One NaN in a matrix reaches every logit, and the KV of all requests that share the prefix."""
    folder = loras("qwen3")[0]
    weights = load_file(folder / "adapter_model.safetensors")
    weights[f"base_model.model.model.layers.0.mlp.down_proj.lora_{side}.weight"][1, 2] = number
    save_file(weights, folder / "adapter_model.safetensors")
    (error,) = stages(checkpoint_of("qwen3")).change(LoraChange("a", 1, str(folder)))
    assert "layers.0.mlp.down_proj must be finite in torch.float" in str(error)


@pytest.mark.parametrize("damage", thinned(["torn", "half", "empty"], one_in=3))
def test_a_damaged_file_is_refused(
    damage: str, checkpoint_of: Callable[[str], Path], loras: Callable[[str], tuple[Path, Path]]
) -> None:
    folder = loras("qwen3")[0]
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    if damage == "half":
        del weights["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"]
        save_file(weights, file)
    elif damage == "torn":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        save_file({}, file)
    (error,) = stages(checkpoint_of("qwen3")).change(LoraChange("a", 1, str(folder)))
    expected = {"half": "must hold lora_A and lora_B of", "torn": "whole safetensors", "empty": "holds none"}
    assert expected[damage] in str(error)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (torch.bool, "must be of BF16, F16, F32, F64, got BOOL and F32"),
        (torch.int64, "must be of BF16, F16, F32, F64, got I64 and F32"),
        ("scalar", "has 96 inputs and 64 outputs, the LoRA's matrices are () and (64, 4)"),
        ("no rank", "the LoRA's matrices are (0, 96) and (64, 4)"),
    ],
)
def test_a_matrix_of_another_kind_is_refused_by_name(
    kind: torch.dtype | str, said: str, checkpoint_of: Callable[[str], Path], loras: Callable[[str], tuple[Path, Path]]
) -> None:
    folder = loras("qwen3")[0]
    weights = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    if isinstance(kind, torch.dtype):
        weights[name] = weights[name].to(kind)
    else:
        weights[name] = torch.zeros(()) if kind == "scalar" else weights[name][:0]
    save_file(weights, folder / "adapter_model.safetensors")
    (error,) = stages(checkpoint_of("qwen3")).change(LoraChange("a", 1, str(folder)))
    assert "layers.0.mlp.down_proj" in str(error)
    assert said in str(error)


@pytest.mark.parametrize("number", thinned(["1" * 5000, "\u0661", "\u00b2", "0x1", "-1", "1_0"], one_in=3))
def test_a_layer_whose_number_is_none_is_refused_by_name(
    number: str, checkpoint_of: Callable[[str], Path], loras: Callable[[str], tuple[Path, Path]]
) -> None:
    """Python reads other digits too, and no number of more than 4,300."""
    folder = loras("qwen3")[0]
    weights = load_file(folder / "adapter_model.safetensors")
    pair = [weights[f"base_model.model.model.layers.0.mlp.down_proj.lora_{side}.weight"] for side in "AB"]
    odd = [f"base_model.model.model.layers.{number}.mlp.down_proj.lora_{side}.weight" for side in "AB"]
    save_file(
        weights | dict(zip(odd, (one.clone() for one in pair), strict=True)), folder / "adapter_model.safetensors"
    )
    (error,) = stages(checkpoint_of("qwen3")).change(LoraChange("a", 1, str(folder)))
    assert "a LoRA must be for linear layers in model.layers.0 to" in str(error)
    assert len(str(error)) < 1000


def test_a_list_of_more_tensors_than_the_model_has_is_not_read(
    checkpoint_of: Callable[[str], Path], loras: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million empty ones took 34 s, in which a stage computes nothing."""
    folder = loras("qwen3")[0]
    save_file({f"t{number}": torch.zeros(0) for number in range(20_000)}, folder / "adapter_model.safetensors")
    monkeypatch.setattr("engine.model.lora.safe_open", lambda *_, **__: pytest.fail("the list is read"))
    (error,) = stages(checkpoint_of("qwen3")).change(LoraChange("a", 1, str(folder)))
    assert "save the LoRA without other tensors" in str(error)


def test_a_configuration_nested_without_end_is_refused(
    checkpoint_of: Callable[[str], Path], loras: Callable[[str], tuple[Path, Path]]
) -> None:
    folder = loras("qwen3")[0]
    (folder / "adapter_config.json").write_text("[" * 200_000)
    (error,) = stages(checkpoint_of("qwen3")).change(LoraChange("a", 1, str(folder)))
    assert "must be JSON" in str(error)


def _assert_equal(logits: torch.Tensor, expected: list[torch.Tensor]) -> None:
    difference = float((logits - torch.stack(expected)).abs().max())
    assert difference < TOLERANCE, f"logits differ from transformers' with merged weights by {difference}"
