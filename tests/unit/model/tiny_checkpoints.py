"""The architectures that the tests make tiny checkpoints of; the windows are shorter than the sequences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import transformers
from safetensors.numpy import save_file

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
    "qwen2_biased": lambda: transformers.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=WINDOW, layer_types=ALTERNATING
    ),
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "llama_sharded": lambda: transformers.LlamaConfig(**SHAPE),
    "mistral_window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=WINDOW),
    "gemma2_softcap": lambda: transformers.Gemma2Config(
        **SHAPE, sliding_window=WINDOW, layer_types=ALTERNATING, attn_logit_softcapping=5.0, final_logit_softcapping=9.0
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, moe_intermediate_size=24, num_experts=12, num_experts_per_tok=3, norm_topk_prob=True
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=3, num_experts_per_tok=2),
    "gemma3_two_ropes": lambda: transformers.Gemma3TextConfig(**SHAPE, sliding_window=WINDOW, layer_types=ALTERNATING),
}


def save_weights(folder: Path, weight_bytes: int) -> None:
    """Save a Llama's configuration, and an fp32 weight of this size in place of all others."""
    transformers.LlamaConfig(**SHAPE, dtype="float32").save_pretrained(folder)
    save_file({"model.norm.weight": np.zeros(weight_bytes // 4, np.float32)}, folder / "model.safetensors")
