"""Dequantizes weights while they are read, one at a time, from their values, scales and zero points.

Makes a checkpoint's files look as if they held plain weights. Used once, when a stage loads; the layouts are the ones
that the schemes' own libraries write.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from engine.core.errors import CheckpointError
from engine.model.quantization import Quantization

# A function that reads the tensor of a name in the files.
_Reader = Callable[[str], torch.Tensor]

# Scales of activations and KV, which this engine computes in the model's own type.
_UNNEEDED: Final = {
    "input_scale",
    "input_zero_point",
    "activation_scale",
    "activation_scale_ub",
    "input_scale_ub",
    "output_scale",
    "q_scale",
    "k_scale",
    "v_scale",
    "kv_scale",
    "weight_format",
}
# The order of the values in an AWQ word.
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
_INT8_LARGEST: Final = 127.0
_WORD_BITS: Final = 32
_VALUES: Final = ("weight_packed", "qweight", "weight")
# Widths of integers that a graph can keep.
_KEPT_BITS: Final = (4, 8)


@dataclass(frozen=True)
class Integers:
    """A weight as a scheme stores it: ``(values - zeros) * scales``.

    ``values`` [out, in] have ``bits`` bits each. ``zeros`` (None: 0, and values are signed) and ``scales`` are [out,
    groups]; ``groups`` is the group of each input, None if groups are contiguous and of equal size.
    """

    values: torch.Tensor
    bits: int
    zeros: torch.Tensor | None
    scales: torch.Tensor
    groups: torch.Tensor | None = None

    def whole(self) -> torch.Tensor:
        """Return the weight in fp32. Raises ValueError for groups that do not divide its inputs."""
        columns, count = self.values.shape[1], self.scales.shape[1]
        groups = self.groups
        if groups is None:
            if columns % count:
                raise ValueError(f"{columns} inputs cannot be divided into {count} groups")
            groups = torch.arange(columns) // (columns // count)
        values = self.values.float() if self.zeros is None else self.values - self.zeros[:, groups]
        return values * self.scales[:, groups]


@dataclass(frozen=True)
class QuantizedWeight:
    """One quantized weight: the names of its parts in the files, by kind, and its scheme."""

    name: str
    parts: Mapping[str, str]
    scheme: Quantization

    def read(self, read: _Reader) -> torch.Tensor:
        """Read the weight in fp32, [out, in]. Raises CheckpointError, which names it, if its parts do not fit."""
        made = self._made(read)
        return made.whole() if isinstance(made, Integers) else made

    def integers(self, read: _Reader) -> Integers | None:
        """Return the weight's own integers; None for a weight without them, or with groups that are not contiguous."""
        if self.scheme.method == "fp8":
            return None
        made = self._made(read)
        return made if isinstance(made, Integers) and made.groups is None and made.bits in _KEPT_BITS else None

    def _made(self, read: _Reader) -> Integers | torch.Tensor:
        parts = {part: read(name) for part, name in self.parts.items()}
        try:
            if "weight_packed" in parts:
                return _from_compressed_tensors(parts)
            if "qweight" in parts:
                return (_from_awq if self.scheme.method == "awq" else _from_gptq)(parts, self.scheme)
            if "SCB" in parts:
                return Integers(parts["weight"], 8, None, parts["SCB"].float()[:, None] / _INT8_LARGEST)
            return _scaled(parts, self.scheme)
        except (RuntimeError, ValueError, IndexError) as exc:
            raise CheckpointError(
                f"the quantized weight {self.name} must fit together, but of {', '.join(parts)}: {exc}; fetch the "
                "checkpoint again"
            ) from exc


def quantized_weights(names: Iterable[str], scheme: Quantization) -> tuple[dict[str, QuantizedWeight], set[str]]:
    """Return the quantized weights by their names in the model, and the names in the files that these replace."""
    modules: dict[str, set[str]] = defaultdict(set)
    for name in names:
        module, _, part = name.rpartition(".")
        modules[module].add(part)
    made, unneeded = {}, set()
    for module, parts in modules.items():
        unneeded |= {f"{module}.{part}" for part in parts & _UNNEEDED}
        values = next((part for part in _VALUES if part in parts), None)
        others = parts & _companions(values)
        if values is None or not others:
            continue
        name = f"{module}.weight"
        made[name] = QuantizedWeight(name, {part: f"{module}.{part}" for part in {values, *others}}, scheme)
    return made, unneeded


def _companions(values: str | None) -> set[str]:
    match values:
        case "weight_packed":
            return {"weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"}
        case "qweight":
            return {"qzeros", "scales", "g_idx"}
        case _:
            return {"weight_scale", "weight_scale_inv", "weight_zero_point", "SCB"}


def _scaled(parts: Mapping[str, torch.Tensor], scheme: Quantization) -> Integers | torch.Tensor:
    """Multiply 8-bit values by scales for a whole tensor, for rows, for groups in a row or for blocks."""
    weight = parts["weight"]
    scale = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
    of_rows = tuple(scale.shape) in {(len(weight),), (len(weight), 1)}
    if weight.dtype is torch.int8 and of_rows and "weight_zero_point" not in parts:
        return Integers(weight, 8, None, scale.float().reshape(-1, 1))
    weight = weight.float()
    if "weight_zero_point" in parts:
        weight -= _spread(parts["weight_zero_point"].float(), weight.shape, scheme.block)
    return weight * _spread(scale.float(), weight.shape, scheme.block)


def _spread(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int] | None) -> torch.Tensor:
    """Expand scales to one for each value of a matrix of ``shape`` (or one for all)."""
    if scale.numel() == 1:
        return scale.reshape(())
    rows, columns = shape
    if scale.dim() == 1:
        scale = scale[:, None]
    if block is not None and tuple(scale.shape) == (math.ceil(rows / block[0]), math.ceil(columns / block[1])):
        return scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    if scale.shape[0] == rows and columns % scale.shape[1] == 0:
        return scale.repeat_interleave(columns // scale.shape[1], 1)
    raise ValueError(f"scales of shape {tuple(scale.shape)} do not fit a weight of shape {tuple(shape)}")


def _from_compressed_tensors(parts: Mapping[str, torch.Tensor]) -> Integers:
    packed, scale = parts["weight_packed"], parts["weight_scale"].float()
    rows, columns = (int(size) for size in _part(parts, "weight_shape"))
    widths = [bits for bits in (4, 8) if math.ceil(columns * bits / _WORD_BITS) == packed.shape[1]]
    if not widths or packed.shape[0] != rows:
        raise ValueError(f"values packed as {tuple(packed.shape)} do not fit a weight of shape {(rows, columns)}")
    bits = widths[0]
    if scale.dim() < 2:
        scale = scale.reshape(-1, 1)
    scale = scale.expand(rows, -1)
    zeros = torch.full_like(scale, 1 << (bits - 1))
    if "weight_zero_point" in parts:
        zeros = parts["weight_zero_point"]
        is_packed = zeros.dtype is torch.int32
        zeros = _unpacked(zeros, bits, dim=0)[:rows] if is_packed else zeros.to(torch.int32) + (1 << (bits - 1))
    groups = parts["weight_g_idx"].long() if "weight_g_idx" in parts else None
    return Integers(_unpacked(packed, bits, dim=1)[:, :columns], bits, zeros, scale, _unless_neighbours(groups))


def _from_awq(parts: Mapping[str, torch.Tensor], scheme: Quantization) -> Integers:
    unordered = [_unpacked(_part(parts, part), scheme.bits, dim=1) for part in ("qweight", "qzeros")]
    values, zeros = (part.reshape(len(part), -1, len(_AWQ_ORDER))[..., _AWQ_ORDER].flatten(1) for part in unordered)
    return Integers(values.t(), scheme.bits, zeros.t(), _part(parts, "scales").float().t())


def _from_gptq(parts: Mapping[str, torch.Tensor], scheme: Quantization) -> Integers:
    values = _unpacked(parts["qweight"], scheme.bits, dim=0)
    zeros = _unpacked(_part(parts, "qzeros"), scheme.bits, dim=1)
    if scheme.zeros_are_less_one:
        zeros = (zeros + 1) & ((1 << scheme.bits) - 1)
    groups = _unless_neighbours(parts["g_idx"].long() if "g_idx" in parts else None)
    return Integers(values.t(), scheme.bits, zeros.t(), _part(parts, "scales").float().t(), groups)


def _unless_neighbours(groups: torch.Tensor | None) -> torch.Tensor | None:
    """Return the group of each input; None if groups are contiguous and of equal size."""
    if groups is None or not len(groups):
        return None
    count = int(groups.max()) + 1
    is_plain = len(groups) % count == 0 and torch.equal(groups, torch.arange(len(groups)) // (len(groups) // count))
    return None if is_plain else groups


def _part(parts: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in parts:
        raise ValueError(f"there is no {name}")
    return parts[name]


def _unpacked(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unpack the values in 32-bit words along ``dim``, lowest bits first."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    shifts = shifts[:, None] if dim == 0 else shifts
    values = (words.unsqueeze(dim + 1) >> shifts) & ((1 << bits) - 1)
    return values.flatten(dim, dim + 1)
