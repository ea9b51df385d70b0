"""Tiny checkpoints of several architectures, made by transformers itself, and one torch thread for everybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

SHAPE = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 198,
    "pad_token_id": None,
}
WINDOW = 9
ALTERNATING = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]

FAMILIES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, tie_word_embeddings=False),
    "qwen3_tied": lambda: transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "llama_sharded": lambda: transformers.LlamaConfig(**SHAPE),
    "mistral_window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=WINDOW),
    "gemma2_softcap": lambda: transformers.Gemma2Config(
        **SHAPE, sliding_window=WINDOW, layer_types=ALTERNATING, attn_logit_softcapping=5.0, final_logit_softcapping=9.0
    ),
    "gemma3_two_ropes": lambda: transformers.Gemma3TextConfig(**SHAPE, sliding_window=WINDOW, layer_types=ALTERNATING),
}


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
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
