"""The quantization in a configuration: its scheme, and whether it can be dequantized while loading.

Owns the list of supported schemes. Reads no weight and imports no torch; ``dequantization`` does the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.core.errors import CheckpointError

SERVED_SCHEMES: Final = (
    "fp8 (also fbgemm_fp8, and FP8 of modelopt) with scales of blocks, channels or tensors; compressed-tensors with "
    "fp8, int8, or packed int4 and int8; awq (gemm, 4 bits); gptq (2, 4 or 8 bits); bitsandbytes int8"
)
_KEYS: Final = ("quantization_config", "compression_config")
_COMPRESSED_FORMATS: Final = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "dense")
_COMPRESSED_BITS: Final = (4, 8)
_GPTQ_BITS: Final = (2, 4, 8)
_GPTQ_FORMATS: Final = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class Quantization:
    """A supported scheme. ``bits`` is the smallest width of values, ``block`` the rows and columns of a scale.

    ``zeros_are_less_one``: the first format of GPTQ stores each zero point minus one.
    """

    method: str
    bits: int = 8
    block: tuple[int, int] | None = None
    zeros_are_less_one: bool = False


def quantization_of(described: Mapping[str, Any], path: Path) -> Quantization | None:
    """Return the scheme of a configuration; None for plain weights. Raises CheckpointError for an unsupported one."""
    texts = described.get("text_config")
    for part in (described, texts if isinstance(texts, dict) else {}):
        for key in _KEYS:
            if part.get(key) is not None:
                return _scheme(part[key], f"{path} ({key})")
    return None


def _scheme(said: Any, where: str) -> Quantization:
    if not isinstance(said, dict):
        raise CheckpointError(f"{where} must be an object, got {said!r:.200}; fetch the checkpoint again")
    method = said.get("quant_method")
    try:
        match method:
            case "fp8" | "fbgemm_fp8":
                return Quantization("fp8", block=_block(said.get("weight_block_size")))
            case "modelopt" if said.get("quant_algo") == "FP8":
                return Quantization("fp8")
            case "compressed-tensors":
                return _compressed_tensors(said, where)
            case "awq":
                _require("version", str(said.get("version", "gemm")).lower(), ("gemm",), where)
                return Quantization("awq", bits=_require("bits", said.get("bits", said.get("w_bit", 4)), (4,), where))
            case "gptq":
                kept = _require("checkpoint_format", said.get("checkpoint_format", "gptq"), _GPTQ_FORMATS, where)
                bits = _require("bits", said.get("bits"), _GPTQ_BITS, where)
                return Quantization("gptq", bits=bits, zeros_are_less_one=kept == "gptq")
            case "bitsandbytes":
                eight = said.get("load_in_8bit", said.get("_load_in_8bit", False))
                _require("load_in_8bit", eight, (True,), where)
                return Quantization("bitsandbytes")
            case _:
                algorithm = f" (quant_algo={said['quant_algo']!r})" if "quant_algo" in said else ""
                raise CheckpointError(_not_served(f"{where} says quant_method={method!r}{algorithm}"))
    except (TypeError, ValueError, AttributeError, KeyError) as exc:
        raise CheckpointError(f"{where} cannot be read: {exc!r:.200}; fetch the checkpoint again") from exc


def _compressed_tensors(said: dict[str, Any], where: str) -> Quantization:
    sparsity = (said.get("sparsity_config") or {}).get("format")
    _require("sparsity_config.format", sparsity, (None, "dense"), where)
    if (said.get("transform_config") or {}).get("config_groups"):
        raise CheckpointError(_not_served(f"{where} has transform_config, which rotates the layers' values"))
    groups = list((said.get("config_groups") or {}).values())
    formats = {group.get("format") or said.get("format") for group in groups}
    bits, blocks = {8}, set()
    for kept in formats:
        _require("format", kept, _COMPRESSED_FORMATS, where)
    for group in groups:
        weights = group.get("weights") or {}
        bits.add(_require("num_bits", weights.get("num_bits", 8), _COMPRESSED_BITS, where))
        blocks.add(_block(weights.get("block_structure")))
    # Packed values include their shape, which gives the width of each weight.
    return Quantization("compressed-tensors", bits=min(bits), block=next(iter(blocks - {None}), None))


def _block(said: Any) -> tuple[int, int] | None:
    if said is None:
        return None
    rows, columns = (int(size) for size in said)
    if rows < 1 or columns < 1:
        raise ValueError(f"a block must have rows and columns, got {said!r}")
    return rows, columns


def _require(field: str, value: Any, served: tuple[Any, ...], where: str) -> Any:
    if value not in served or isinstance(value, bool) != isinstance(served[0], bool):
        raise CheckpointError(_not_served(f"{where} says {field}={value!r:.100}, not {' or '.join(map(repr, served))}"))
    return value


def _not_served(what: str) -> str:
    return (
        f"{what}: weights of this kind are not served; plain ones are, and {SERVED_SCHEMES}; fetch or export the "
        "weights in one of these"
    )
