"""``python -m scripted.sdk.live.model FOLDER SERVER ...`` writes a tiny model there and runs the module SERVER."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any, Final

from scripted.sdk.live.weights import VERSIONS

# Token ids of prompts are printable ASCII.
_VOCABULARY: Final = 256


def write_models(folder: Path) -> None:
    """Write a model into a folder for each version of the weights."""
    for seed in VERSIONS:
        write_model(folder / str(seed), seed)


def write_model(folder: Path, seed: int, vocabulary: int = _VOCABULARY, context: int = 4096) -> None:
    """Write a two-layer Llama with random weights from the seed, and a tokenizer with one word per id."""
    # The end of sequence: its logit is 0, so another is always greater and it is never chosen.
    end = vocabulary - 1
    # Imported here because only a live server needs them; transformers makes names on demand.
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=end,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.lm_head.weight.data[end] = 0
    model.save_pretrained(folder)
    words = [f"w{token}" for token in range(vocabulary)]
    known = tokenizers.models.WordLevel({word: token for token, word in enumerate(words)}, unk_token=words[0])
    tokenizer = tokenizers.Tokenizer(known)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": words[0], "eos_token": words[end]}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


if __name__ == "__main__":
    _folder, _server, *_arguments = sys.argv[1:]
    write_models(Path(_folder))
    sys.argv = [_server, *_arguments]
    runpy.run_module(_server, run_name="__main__", alter_sys=True)
