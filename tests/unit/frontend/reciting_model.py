"""A checkpoint whose model recites given texts, one for each turn of the assistant: for tests of what answers become.

Every piece of a text is a token of its own, and the model is a table: a token's embedding is its own direction, the
only layer adds nothing, and the head has for each direction the token that follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

END = "<|im_end|>"
LONGEST_PIECE_CHARS = 5
HEADS, HEAD_DIM, INTERMEDIATE = 2, 8, 8
# Both families of markers are named, so that parsers are found by the template alone.
TEMPLATE = (
    "{% if tools %}{{ '<tools>' + (tools | tojson) + '</tools> call one in <tool_call>' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'].split('</think>')[-1] }}"
    "{% for call in message['tool_calls'] %}"
    "{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{{ '<|turn_' ~ (messages | selectattr('role', 'equalto', 'assistant') | list | length) ~ '|>' }}"
)


def write_reciting_model(folder: Path, texts: Sequence[str], *, special: Sequence[str] = ()) -> None:
    """Write a checkpoint into an empty folder. ``special``: pieces that are special tokens, such as a marker."""
    tokenizer = _tokenizer()
    follows: dict[int, int] = {}
    tokenizer.add_special_tokens([_added(text) for text in (END, "<|im_start|>", *special)])
    for turn, text in enumerate(texts):
        tokenizer.add_special_tokens([_added(f"<|turn_{turn}|>")])
        last = tokenizer.token_to_id(f"<|turn_{turn}|>")
        for piece in _pieces(tokenizer, text, special):
            if piece not in special:
                tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False)])
            follows[last] = last = tokenizer.token_to_id(piece)
        follows[last] = tokenizer.token_to_id(END)
    _write(folder, tokenizer, follows)


def _pieces(tokenizer: Tokenizer, text: str, special: Sequence[str]) -> list[str]:
    """The text in pieces that are not in the vocabulary yet, and special tokens, each of which may stand there once."""
    pieces: list[str] = []

    def is_known(piece: str) -> bool:
        return piece in pieces or tokenizer.token_to_id(piece) is not None

    for part in re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]:
        rest = part
        while rest:
            length = len(part) if part in special else LONGEST_PIECE_CHARS
            while length < len(rest) and is_known(rest[:length]):
                length += 1
            if part not in special and is_known(rest[:length]):
                pieces[-1] += rest  # Nothing new is left, so it belongs to the piece before.
                break
            pieces.append(rest[:length])
            rest = rest[length:]
    return pieces


def _added(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


def _tokenizer() -> Tokenizer:
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def _write(folder: Path, tokenizer: Tokenizer, follows: dict[int, int]) -> None:
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(END)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": size,
        "hidden_size": size,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        "dtype": "float32",
    }
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "model.safetensors").write_bytes(save(_weights(size, follows), metadata={"format": "pt"}))


def _weights(size: int, follows: dict[int, int]) -> dict[str, np.ndarray]:
    head = np.zeros((size, size), np.float32)
    for token_id, next_id in follows.items():
        head[next_id, token_id] = 1.0
    layer, wide = "model.layers.0.", HEADS * HEAD_DIM
    shapes = {
        f"{layer}self_attn.q_proj.weight": (wide, size),
        f"{layer}self_attn.k_proj.weight": (wide, size),
        f"{layer}self_attn.v_proj.weight": (wide, size),
        f"{layer}self_attn.o_proj.weight": (size, wide),
        f"{layer}mlp.gate_proj.weight": (INTERMEDIATE, size),
        f"{layer}mlp.up_proj.weight": (INTERMEDIATE, size),
        f"{layer}mlp.down_proj.weight": (size, INTERMEDIATE),
    }
    norms = {
        "model.norm.weight": size,
        f"{layer}input_layernorm.weight": size,
        f"{layer}post_attention_layernorm.weight": size,
        f"{layer}self_attn.q_norm.weight": HEAD_DIM,
        f"{layer}self_attn.k_norm.weight": HEAD_DIM,
    }
    return {
        "model.embed_tokens.weight": np.eye(size, dtype=np.float32),
        "lm_head.weight": head,
        **{name: np.zeros(shape, np.float32) for name, shape in shapes.items()},
        **{name: np.ones(length, np.float32) for name, length in norms.items()},
    }
