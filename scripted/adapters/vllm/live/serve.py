"""``python -m scripted.adapters.vllm.live.serve FOLDER ...`` writes the tiny model there and runs vLLM's own server."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

# Token ids of prompts are printable ASCII.
_VOCABULARY: Final = 256
_SEED: Final = 0


def write_model(folder: Path) -> None:
    """A Llama of two layers whose random weights are the same in every run, and a tokenizer with a word for each id."""
    # Its names are made when they are asked for.
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(_SEED)
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    words = [f"w{token}" for token in range(_VOCABULARY)]
    known = models.WordLevel({word: token for token, word in enumerate(words)}, unk_token=words[0])
    tokenizer = Tokenizer(known)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=words[0], eos_token=words[1])
    saved.save_pretrained(folder)


if __name__ == "__main__":
    _folder, *_arguments = sys.argv[1:]
    write_model(Path(_folder))
    _server = "vllm.entrypoints.openai.api_server"
    sys.argv = [_server, "--model", _folder, *_arguments]
    runpy.run_module(_server, run_name="__main__", alter_sys=True)
