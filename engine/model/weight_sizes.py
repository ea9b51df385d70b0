"""Sizes of a model's weights: in its files, and in the memory of the stages that have loaded them.

Reads names, types and shapes, never a weight.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedConfig

from engine.core.config import EngineConfig
from engine.model.arithmetic import LEAN_ARCHITECTURES, compute_dtype
from engine.model.checkpoint import dtype_name, heads_of, read_model_config, read_quantization, resolve_folder
from engine.model.checkpoint_files import stored_tensors
from engine.model.matrix_product import is_packing_worthwhile
from engine.model.pooling import read_pooling

# Bits of quantized types in a file; a 32-bit word holds several values.
_WORD_BITS: Final = 32
_QUANTIZED_BITS: Final = {"F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "I32": _WORD_BITS}
_EMBEDDING: Final = "embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_ATTENTION: Final = ".self_attn."


def weight_bytes(folder: Path) -> int:
    """Return the size of the weights in the files, but with quantized ones at 16 bits a value."""
    kept = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    bits = _quantized_bits(folder)
    for _, kind, shape in stored_tensors(folder) if bits else ():
        if kind in _QUANTIZED_BITS:
            kept += math.prod(shape) * (2 * _values_each(kind, bits) - _QUANTIZED_BITS[kind] // 8)
    return kept


def held_weight_bytes(config: EngineConfig, *, device_type: str, threads: int) -> int:
    """Return the bytes of the weights that torch holds in all stages; each computes with ``threads``.

    Counts the types in which the lean forward pass computes, and a tied head twice if it cannot be a view of the
    embedding: in another type, packed, or in another stage. The padding of packed weights to 64 rows is left out.
    """
    folder = resolve_folder(config)
    model = read_model_config(folder, trust_remote_code=config.trust_remote_code)
    own, computed = value_types(config, device_type)
    is_lean = model.model_type in LEAN_ARCHITECTURES
    packs = is_lean and is_packing_worthwhile(computed, torch.device(device_type), threads)
    tied, has_head = bool(model.tie_word_embeddings), read_pooling(folder) is None
    copies = _norm_copies(model, folder) if is_lean else {}
    bits = _quantized_bits(folder)
    embedding = others = 0
    for name, kind, shape in stored_tensors(folder):
        values = math.prod(shape) * (_values_each(kind, bits) if bits else 1)
        if name.endswith(_EMBEDDING):
            embedding = values
        elif not name.endswith(_HEAD) or (has_head and not tied):
            others += values * copies.get(name.rpartition(_ATTENTION)[2], 1)
    if has_head and tied and (computed != own or packs or config.pp_size > 1):
        others += embedding
    return embedding * own.itemsize + others * computed.itemsize


def value_types(config: EngineConfig, device_type: str) -> tuple[torch.dtype, torch.dtype]:
    """Return the type of the model's weights, and the type in which torch computes with them."""
    model = read_model_config(resolve_folder(config), trust_remote_code=config.trust_remote_code)
    own: torch.dtype = getattr(torch, dtype_name(config, model))
    return own, compute_dtype(own, device_type) if model.model_type in LEAN_ARCHITECTURES else own


def _norm_copies(model: PreTrainedConfig, folder: Path) -> dict[str, int]:
    """Return how often the lean forward pass holds a norm of queries or keys: once for each head."""
    kv_heads, _ = heads_of(model, folder)
    return {"q_norm.weight": model.num_attention_heads, "k_norm.weight": kv_heads}


def _quantized_bits(folder: Path) -> int:
    """Return the bits of a quantized value; 0 for plain weights."""
    scheme = read_quantization(folder)
    return 0 if scheme is None else scheme.bits


def _values_each(kind: str, bits: int) -> int:
    """Return the values in one element of a quantized file's type."""
    return _WORD_BITS // bits if _QUANTIZED_BITS.get(kind) == _WORD_BITS else 1
