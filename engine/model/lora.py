"""LoRA adapters of one stage: reads them from files, holds them by version, and adds them to the outputs of linears.

Groups the rows of a batch by LoRA, so that each group costs two small products. A batch without LoRAs costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from engine.core.errors import CheckpointError, IntegrityError
from engine.core.plan import Segment
from engine.model.lora_config import WEIGHTS_FILE, LoraConfig, lora_folder
from engine.model.transfer import sent

# Architectures have no common type that declares their parts.
_Transformer = Any

# The size field of a safetensors file, and bounds on its header, which takes about 200 bytes a tensor and may have
# metadata.
_SIZE_BYTES: Final = 8
TENSOR_BYTES: Final = 512
HEADER_BYTES: Final = 2**16
_LAYER_DIGITS: Final = 6
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_KEY: Final = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")


class Pair(NamedTuple):
    """The two matrices of a module, [in, rank] and [rank, out], the second one scaled."""

    down: torch.Tensor
    up: torch.Tensor

    def to(self, device: torch.device) -> Pair:
        return Pair(self.down.to(device), self.up.to(device))


# For each layer of a stage and each product of its forward pass, the pair to add to it.
LoadedLora = list[list[Pair | None]]


class BatchLoras:
    """The LoRAs of one batch, each with its rows of the batch."""

    def __init__(self, groups: Sequence[tuple[LoadedLora, slice | torch.Tensor]]) -> None:
        self._groups = groups

    def add(self, layer: int, product: int, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Add the LoRAs' products with ``inputs`` [tokens, in] to ``outputs`` [tokens, out], in place."""
        for lora, rows in self._groups:
            pair = lora[layer][product]
            if pair is None:
                continue
            if isinstance(rows, slice):
                outputs[rows].addmm_(torch.mm(inputs[rows], pair.down), pair.up)
            else:
                inside = torch.mm(inputs.index_select(0, rows), pair.down)
                outputs.index_add_(0, rows, torch.mm(inside, pair.up))


class StageLoras:
    """The LoRAs that one stage holds, by version. Built from the stage's model before that model is freed.

    ``first`` is the number of its first layer in the whole model of ``total`` layers. Each linear is a separate product
    until ``fuse``.
    """

    def __init__(self, model: _Transformer, *, first: int, total: int, max_rank: int, dtype: torch.dtype) -> None:
        decoder = model.base_model
        self._prefix = next(name for name, module in model.named_modules() if module is decoder.layers)
        self._first, self._total, self._max_rank = first, total, max_rank
        self._dtype = dtype
        self._shapes = [_linears_of(layer) for layer in decoder.layers]
        self._products: list[list[tuple[str, ...]]] = [[(name,) for name in linears] for linears in self._shapes]
        self._device = next(decoder.layers.parameters()).device
        self.held: dict[int, LoadedLora] = {}
        # The LoRAs of the current batch: transformers' forward pass has no argument for them.
        self.present: BatchLoras | None = None
        for index, layer in enumerate(decoder.layers):
            for product, (name,) in enumerate(self._products[index]):
                layer.get_submodule(name).register_forward_hook(self._hook(index, product))

    def fuse(self, products: Sequence[tuple[str, ...]], dtype: torch.dtype) -> None:
        """Set the linears that each product of a layer computes side by side, and its type. Call it before ``load``."""
        assert not self.held, "products are fused before a LoRA is loaded"
        self._products = [list(products) for _ in self._shapes]
        self._dtype = dtype

    def become(self, other: StageLoras) -> None:
        """Take over the LoRAs of another object with the same layers and products."""
        self.held = other.held

    def has_the_products_of(self, other: StageLoras) -> bool:
        """Return whether this stage can compute with the LoRAs that ``other`` has loaded."""
        return self._products == other._products and self._dtype == other._dtype

    def of(self, segments: Sequence[Segment]) -> BatchLoras | None:
        """Return the LoRAs of a batch's segments; None if no segment has one."""
        if not any(segment.lora for segment in segments):
            return None
        rows: dict[int, list[int]] = {}
        start = 0
        for segment in segments:
            end = start + len(segment.token_ids)
            if segment.lora:
                rows.setdefault(segment.lora, []).extend(range(start, end))
            start = end
        return BatchLoras([(self._held(version), self._rows(chosen)) for version, chosen in rows.items()])

    def load(self, path: str) -> LoadedLora:
        """Read this stage's share of a LoRA into host memory. Raises CheckpointError, which names the misfit.

        Any thread may call it: it changes no state and does not touch the device.
        """
        folder = lora_folder(path)
        config = LoraConfig(folder)
        file = folder / WEIGHTS_FILE
        self._require_small_header(file)
        try:
            with safe_open(file, framework="pt") as tensors:
                modules = self._modules_of(str(file), list(tensors.keys()))
                for module, (_, keys) in modules.items():
                    _require_floats(str(file), module, [tensors.get_slice(key).get_dtype() for key in keys])
                pairs = {
                    place: self._pair(str(file), module, place, config, *[tensors.get_tensor(key) for key in keys])
                    for module, (place, keys) in modules.items()
                }
        except (SafetensorError, OSError) as exc:
            raise CheckpointError(f"{file} must be a whole safetensors file, but: {exc}; save it again") from exc
        return [
            [self._fused(pairs, layer, names) for names in products] for layer, products in enumerate(self._products)
        ]

    def on_device(self, loaded: LoadedLora) -> LoadedLora:
        """Copy a share to the stage's device, if that has its own memory."""
        if self._device.type == "cpu":
            return loaded
        return [[None if pair is None else pair.to(self._device) for pair in layer] for layer in loaded]

    # -- inside --

    def _require_small_header(self, file: Path) -> None:
        """Raise CheckpointError for a header that is too long for all layers, because reading it blocks the stage.

        Measured: a million empty tensors took 34 s.
        """
        most = HEADER_BYTES + TENSOR_BYTES * 2 * self._total * max(map(len, self._shapes), default=0)
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(_SIZE_BYTES), "little")
        except OSError as exc:
            raise CheckpointError(f"{file} must be a whole safetensors file, but: {exc}; save it again") from exc
        if size > most:
            raise CheckpointError(
                f"{file} must have a header of at most {most} bytes for {self._total} layers, got {size}; save the "
                "LoRA without other tensors"
            )

    def _hook(self, layer: int, product: int) -> Any:
        def add(_module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if self.present is not None:
                self.present.add(layer, product, inputs[0].flatten(0, -2), output.flatten(0, -2))

        return add

    def _held(self, version: int) -> LoadedLora:
        lora = self.held.get(version)
        if lora is None:
            raise IntegrityError(
                f"a plan must use a loaded LoRA, got version {version}, but versions {list(self.held)} are loaded"
            )
        return lora

    def _rows(self, chosen: list[int]) -> slice | torch.Tensor:
        if chosen[-1] - chosen[0] == len(chosen) - 1:
            return slice(chosen[0], chosen[-1] + 1)
        return sent([np.array(chosen, np.int64)], self._device)[0]

    def _modules_of(self, file: str, keys: Sequence[str]) -> dict[str, tuple[tuple[int, str], list[str]]]:
        """Map this stage's modules to their layer and name in the stage, and the keys of their two tensors."""
        found: dict[str, dict[str, str]] = {}
        for key in keys:
            match = _KEY.fullmatch(key)
            if match is None:
                raise CheckpointError(
                    f"{file} must hold only lora_A and lora_B of linear layers, got {key!r:.200}; train the LoRA "
                    "without it, or merge it into the model and serve that"
                )
            found.setdefault(match[1], {})[match[2]] = key
        if not found:
            raise CheckpointError(f"{file} must hold the matrices of a LoRA, but holds none; save it again")
        modules = {}
        for module, parts in found.items():
            place = self._place_of(file, module)
            if parts.keys() != {"A", "B"}:
                raise CheckpointError(f"{file} must hold lora_A and lora_B of {module}, got {sorted(parts.values())}")
            if place is not None:
                modules[module] = (place, [parts["A"], parts["B"]])
        return modules

    def _place_of(self, file: str, module: str) -> tuple[int, str] | None:
        """Return the layer in this stage and the name in the layer; None for a layer of another stage."""
        match = re.fullmatch(rf"{re.escape(self._prefix)}\.([0-9]{{1,{_LAYER_DIGITS}}})\.(.+)", module)
        if match is None or int(match[1]) >= self._total:
            raise CheckpointError(
                f"{file}: a LoRA must be for linear layers in {self._prefix}.0 to {self._prefix}.{self._total - 1}, "
                f"got {module!r:.200}; train it without that module, or serve the model that it was trained on"
            )
        layer, name = int(match[1]) - self._first, match[2]
        if not 0 <= layer < len(self._shapes):
            return None
        if name not in self._shapes[layer]:
            raise CheckpointError(
                f"{file}: a LoRA's modules must be linear layers of this model ({', '.join(self._shapes[layer])}), "
                f"got {module!r:.200}; serve the model that it was trained on"
            )
        return layer, name

    def _pair(
        self, file: str, module: str, place: tuple[int, str], config: LoraConfig, down: torch.Tensor, up: torch.Tensor
    ) -> Pair:
        rank = down.shape[0] if down.dim() else 0
        layer, name = place
        inputs, outputs = self._shapes[layer][name]
        if not rank or (tuple(down.shape), tuple(up.shape)) != ((rank, inputs), (outputs, rank)):
            raise CheckpointError(
                f"{file}: {module} of this model has {inputs} inputs and {outputs} outputs, the LoRA's matrices are "
                f"{tuple(down.shape)} and {tuple(up.shape)}; serve the model that it was trained on"
            )
        if rank > self._max_rank:
            raise CheckpointError(
                f"{file}: the rank of {module} must be <= max_lora_rank={self._max_rank}, got {rank}; start the server "
                "with a larger --max-lora-rank"
            )
        # Scaled before rounding. Copied, because the tensors are views of the file, which may be overwritten.
        scaled = up.to(torch.float32) * config.scale(module, rank)
        kept = [matrix.t().to(self._dtype, copy=True).contiguous() for matrix in (down, scaled)]
        if not all(bool(torch.isfinite(matrix).all()) for matrix in kept):
            raise CheckpointError(
                f"{file}: the matrices of {module} must be finite in {self._dtype}, but have infinite numbers or "
                "NaN; train the LoRA again, or serve the model in a wider dtype"
            )
        return Pair(*kept)

    def _fused(self, pairs: dict[tuple[int, str], Pair], layer: int, names: tuple[str, ...]) -> Pair | None:
        """Combine the pairs of linears that are computed side by side; None if no linear has one."""
        present = [(name, pairs[layer, name]) for name in names if (layer, name) in pairs]
        if not present:
            return None
        if len(names) == 1:
            return present[0][1]
        widths = [self._shapes[layer][name][1] for name in names]
        down = torch.cat([pair.down for _, pair in present], dim=1)
        up = torch.zeros((down.shape[1], sum(widths)), dtype=self._dtype)
        rank = 0
        for name, pair in present:
            left = sum(widths[: names.index(name)])
            up[rank : rank + pair.up.shape[0], left : left + pair.up.shape[1]] = pair.up
            rank += pair.up.shape[0]
        return Pair(down, up)


class ReadLoras:
    """The shares that a thread has read and no ``LoraUpdate`` has taken, each with the stage's LoRAs for which it was
    read.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # A version that is no longer wanted when its read ends is dropped.
        self._wanted: set[int] = set()
        self._read: dict[int, tuple[StageLoras, LoadedLora]] = {}

    def want(self, version: int) -> None:
        with self._lock:
            self._wanted.add(version)

    def read(self, version: int, path: str, loras: StageLoras) -> None:
        """Read a share in any thread. Raises CheckpointError."""
        loaded = loras.load(path)
        with self._lock:
            if version in self._wanted:
                self._read[version] = loras, loaded

    def take(self, version: int, loras: StageLoras) -> LoadedLora:
        """Take a share for ``loras``. Raises IntegrityError if it was not read, CheckpointError if it does not fit."""
        with self._lock:
            self._wanted.discard(version)
            found = self._read.pop(version, None)
        if found is None:
            raise IntegrityError(f"version {version} of a LoRA must be read before it is taken")
        read_for, loaded = found
        if not loras.has_the_products_of(read_for):
            raise CheckpointError(
                "the weights changed while the LoRA was read, and need it in another form; load it again"
            )
        return loaded

    def forget(self, version: int) -> None:
        """Drop a share, even if it is still being read."""
        with self._lock:
            self._wanted.discard(version)
            self._read.pop(version, None)

    def clear(self) -> None:
        with self._lock:
            self._wanted.clear()
            self._read.clear()


def _require_floats(file: str, module: str, types: Sequence[str]) -> None:
    if not _FLOATS.issuperset(types):
        raise CheckpointError(
            f"{file}: the matrices of {module} must be of {', '.join(sorted(_FLOATS))}, got {' and '.join(types)}; "
            "save the LoRA in one of these types"
        )


def _linears_of(layer: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of a layer's linears, by name."""
    return {
        name: (module.in_features, module.out_features)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
