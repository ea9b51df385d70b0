"""The embedded checkpoint: a tiny Qwen3 with seeded random weights and a byte-level tokenizer, written at first use.

Owns the folder's location and contents. It is an ordinary checkpoint folder, loaded by the same code as any other.
Never imports torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.core.errors import CheckpointError
from engine.core.limits import EMBEDDED_FACTS, EMBEDDED_WINDOW_FACTS

# Ids from 256 on, in this order; EMBEDDED_FACTS has the id of the end-of-sequence token.
SPECIAL_TOKENS = (
    "<|bos|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
    "<|reserved_0|>",
    "<|reserved_1|>",
    "<|reserved_2|>",
)

_BYTES = 256
_HIDDEN = 64
_INTERMEDIATE = 128
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 16

# Standard deviations relative to 1/sqrt(fan in). Large enough that attention and the MLPs outweigh the token itself:
# with the customary 0.02 a random model repeats one token forever; with these, greedy output varies with the prompt and
# along the output, and the two best logits are far apart compared to fp32 noise.
_LAYER_GAIN = 1.5
_HEAD_GAIN = 2.5
_QK_NORM = 1.5

_CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\\nTools that you may call:\\n<tools>' }}"
    "{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
    "{{ '\\n</tools>\\nCall one so:\\n<tool_call>\\n' }}"
    "{{ {'name': 'NAME', 'arguments': {}} | tojson }}{{ '\\n</tool_call><|im_end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message['tool_calls'] %}"
    "{{ '\\n<tool_call>\\n' + (call['function'] | tojson) + '\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def embedded_folder(seed: int, *, windowed: bool = False) -> Path:
    """Return the embedded checkpoint's folder for ``seed``, with window layers or without; write it if it is missing.

    Several processes may call this at once: each writes its own folder and the first rename wins. Raises
    CheckpointError when the cache folder cannot be written.
    """
    name = f"embedded{'-window' if windowed else ''}-{seed}"
    return kept_folder(name, Path(__file__), lambda folder: write_embedded(folder, seed, windowed=windowed))


def kept_folder(name: str, recipe: Path, write: Callable[[Path], None]) -> Path:
    """Return a cached folder that ``write`` fills at first use. Raises CheckpointError if it cannot be written.

    Its name includes a digest of the file with its recipe, so that a changed recipe is never served from an old folder.
    """
    digest = hashlib.blake2b(recipe.read_bytes(), digest_size=6).hexdigest()
    kind, _, seed = name.rpartition("-")
    folder = _cache_root() / f"{kind}-{digest}-{seed}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix="draft-", dir=folder.parent))
        try:
            write(draft)
            _publish(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as exc:
        raise CheckpointError(
            f"the embedded checkpoint must be written to {folder.parent}, but that failed: {exc}; make the folder "
            "writable, or set XDG_CACHE_HOME to another one"
        ) from exc
    return folder


def write_embedded(folder: Path, seed: int, *, windowed: bool = False) -> None:
    """Write config, generation config, weights and tokenizer into an existing folder; equal seeds give equal bytes."""
    write_json(folder / "config.json", _model_config() | (_windows() if windowed else {}))
    write_json(folder / "generation_config.json", _generation_config())
    write_json(folder / "tokenizer_config.json", _tokenizer_config())
    (folder / "tokenizer.json").write_text(_tokenizer().to_str(), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(save(_weights(seed), metadata={"format": "pt"}))


def _cache_root() -> Path:
    configured = os.environ.get("XDG_CACHE_HOME", "").strip()
    try:
        return (Path(configured) if configured else Path.home() / ".cache") / "lockstep"
    except RuntimeError as exc:
        raise CheckpointError(
            f"the embedded checkpoint needs a cache folder, but this user has no home folder: {exc}; set XDG_CACHE_HOME"
        ) from exc


def _publish(draft: Path, folder: Path) -> None:
    try:
        draft.rename(folder)
    except OSError:
        # Another process was first. Its folder is complete, because it also appeared by a rename.
        if not folder.is_dir():
            raise


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _token_id(special: str) -> int:
    return _BYTES + SPECIAL_TOKENS.index(special)


def _model_config() -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": EMBEDDED_FACTS.vocab_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": EMBEDDED_FACTS.num_layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": EMBEDDED_FACTS.context_length,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": _token_id("<|bos|>"),
        "eos_token_id": EMBEDDED_FACTS.eos_token_ids[0],
        "pad_token_id": _token_id("<|pad|>"),
        "dtype": "float32",
    }


def _windows() -> dict[str, object]:
    return {
        "use_sliding_window": True,
        "sliding_window": EMBEDDED_WINDOW_FACTS.window_tokens,
        "layer_types": ["sliding_attention", "full_attention"] * (EMBEDDED_WINDOW_FACTS.num_layers // 2),
    }


def _generation_config() -> dict[str, object]:
    """Allow only printable ASCII and the line feed: random weights would choose any token sooner or later."""
    printable = {*range(ord(" "), ord("~") + 1), ord("\n")}
    return {
        "bos_token_id": _token_id("<|bos|>"),
        "eos_token_id": EMBEDDED_FACTS.eos_token_ids[0],
        "pad_token_id": _token_id("<|pad|>"),
        "suppress_tokens": sorted(set(range(EMBEDDED_FACTS.vocab_size)) - printable),
    }


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": EMBEDDED_FACTS.context_length,
        "chat_template": _CHAT_TEMPLATE,
    }


def _tokenizer() -> Tokenizer:
    vocab = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    # Without the regex a text is one piece, which is fine because there are no merges.
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _byte_alphabet() -> list[str]:
    """Return the character for each byte in a byte-level vocabulary: itself if visible, else one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(_BYTES) if byte not in visible]
    return [chr(byte) if byte in visible else chr(_BYTES + hidden.index(byte)) for byte in range(_BYTES)]


def _weights(seed: int) -> dict[str, NDArray[np.float32]]:
    """Return all weights by name. They are drawn uniformly, which gives the same bits on every machine."""
    generator = np.random.Generator(np.random.PCG64(seed))

    def draw(rows: int, columns: int, deviation: float) -> NDArray[np.float32]:
        unit = generator.random((rows, columns)) * 2.0 - 1.0
        return np.asarray(unit * (deviation * 3.0**0.5), np.float32)

    weights = {"model.embed_tokens.weight": draw(EMBEDDED_FACTS.vocab_size, _HIDDEN, 1.0)}
    for layer in range(EMBEDDED_FACTS.num_layers):
        weights |= _layer_weights(f"model.layers.{layer}.", draw)
    weights["model.norm.weight"] = np.ones(_HIDDEN, np.float32)
    weights["lm_head.weight"] = draw(EMBEDDED_FACTS.vocab_size, _HIDDEN, _HEAD_GAIN / _HIDDEN**0.5)
    return weights


def projection_shapes() -> dict[str, tuple[int, int]]:
    """Return rows and columns of the matrices of one layer, by name."""
    query, key_value = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    return {
        "self_attn.q_proj": (query, _HIDDEN),
        "self_attn.k_proj": (key_value, _HIDDEN),
        "self_attn.v_proj": (key_value, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, query),
        "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
    }


def _layer_weights(
    prefix: str, draw: Callable[[int, int, float], NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:
    weights = {
        f"{prefix}{name}.weight": draw(rows, columns, _LAYER_GAIN / columns**0.5)
        for name, (rows, columns) in projection_shapes().items()
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{prefix}{norm}.weight"] = np.ones(_HIDDEN, np.float32)
    for norm in ("self_attn.q_norm", "self_attn.k_norm"):
        weights[f"{prefix}{norm}.weight"] = np.full(_HEAD_DIM, _QK_NORM, np.float32)
    return weights
