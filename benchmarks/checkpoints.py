"""The two checkpoints that benchmarks run on, with random weights: S, tiny, and M, in the shape of Qwen3-0.6B.

Owns their shapes and a tokenizer with one token per word, so that all servers count alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.mixtral import MixtralConfig
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

from engine.cli.bench.plan import WORDS

__all__ = ["EXPERTS", "SHAPES", "checkpoint", "make_checkpoint", "vocabulary_of"]

# Values common to both, by the names of transformers.Qwen3Config.
_COMMON: Final[dict[str, Any]] = {"max_position_embeddings": 8192, "bos_token_id": None}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    # 4.2 million weights in the layers and the head.
    "S": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "initializer_range": 0.08,
        "tie_word_embeddings": False,
    },
    # 0.6 billion weights.
    "M": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
}
# With experts, two of eight active: each has half the dense intermediate size, so that a token needs as many weights as
# in the dense model, out of four times as many.
_EXPERT_COUNT: Final = 8
_EXPERTS_A_TOKEN: Final = 2
EXPERTS: Final = ("qwen3_moe", "mixtral")


def vocabulary_of(shape: str) -> int:
    """Return the size of a shape's vocabulary; its last token ends a text."""
    size: int = SHAPES[shape]["vocab_size"]
    return size


@contextmanager
def checkpoint(dtype: str, shape: str = "S") -> Iterator[Path]:
    """Yield a checkpoint's folder, which exists as long as the block."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        make_checkpoint(Path(name), dtype, shape)
        yield Path(name)


def make_checkpoint(folder: Path, dtype: str, shape: str = "S", experts: str | None = None) -> None:
    """Make a Qwen3 of one of the shapes, or a model with experts, with the same random weights in every run."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    values = _COMMON | SHAPES[shape] | {"eos_token_id": vocabulary_of(shape) - 1}
    config: transformers.PreTrainedConfig
    if experts is None:
        config = Qwen3Config(**values)
    elif experts == "qwen3_moe":
        config = Qwen3MoeConfig(
            **values,
            moe_intermediate_size=values["intermediate_size"] // _EXPERTS_A_TOKEN,
            num_experts=_EXPERT_COUNT,
            num_experts_per_tok=_EXPERTS_A_TOKEN,
        )
    else:
        values["intermediate_size"] //= _EXPERTS_A_TOKEN
        config = MixtralConfig(**values, num_local_experts=_EXPERT_COUNT, num_experts_per_tok=_EXPERTS_A_TOKEN)
    transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    _save_tokenizer(folder, shape)


def _save_tokenizer(folder: Path, shape: str) -> None:
    """Save a tokenizer with one token per word; ids without a word in the workload get their own words."""
    unknown, end = "<unk>", "<eos>"
    others = vocabulary_of(shape) - len(WORDS) - 2
    words = [*WORDS, *[f"w{number}" for number in range(others)], unknown, end]
    known = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=unknown)
    tokenizer = Tokenizer(known)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, eos_token=end)
    saved.save_pretrained(folder)
