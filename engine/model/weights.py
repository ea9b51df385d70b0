"""The safetensors files of a checkpoint folder: which file holds which weight, and loading one by name and shape.

Reads only the tensors that it is asked for, so that a stage never touches another stage's layers. Used once, at start.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError
from engine.model.file_pages import forget_pages, mapped_places

if TYPE_CHECKING:
    from engine.model.conversion import Conversion

_INDEX = "model.safetensors.index.json"
# After this many bytes what was read of the files is given back: it was copied by then.
_HELD_BYTES: Final = 64 << 20


class WeightFiles:
    """The open weight files of one folder, sharded or not; a context manager.

    ``model``, of transformers, says what may be kept under other names or in pieces; without it nothing may.
    """

    def __init__(self, folder: Path, model: Any = None) -> None:
        self._folder = folder
        self._model = model
        self._files: dict[str, Any] = {}
        self._open_files = ExitStack()
        self._read_bytes = 0

    def __enter__(self) -> Self:
        for path in self._paths():
            try:
                file = self._open_files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as exc:
                raise CheckpointError(f"{path} must be a whole safetensors file, but: {exc}; fetch it again") from exc
            self._files |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(self, *raised: object) -> None:
        self._open_files.close()

    def load(self, names: tuple[str, ...], shape: torch.Size) -> torch.Tensor:
        """The weight under the first of ``names`` that is there; several names are one tied weight.

        Raises CheckpointError, naming the weight, when it is missing or has another shape.
        """
        name = next((name for name in names if name in self._files), None)
        if name is not None:
            self._require_shape(name, tuple(self._files[name].get_slice(name).get_shape()), shape)
            return self._read(name)
        converted = next((name for name in names if name in self._conversions), None)
        if converted is None:
            raise CheckpointError(
                f"the checkpoint must hold the weight {' or '.join(names)}, but {self._folder} does not; "
                "fetch all of its files"
            )
        weight = self._conversions[converted].apply(self._read, self._model.config)
        self._require_shape(converted, tuple(weight.shape), shape)
        return weight

    @cached_property
    def _conversions(self) -> dict[str, Conversion]:
        from engine.model.conversion import conversions_of  # a second of import, for what few checkpoints need

        return {} if self._model is None else conversions_of(self._model, self._files)

    def _read(self, name: str) -> torch.Tensor:
        """A view of the file, which must be copied, and never written into."""
        if self._read_bytes >= _HELD_BYTES:
            self._read_bytes = 0
            forget_pages(mapped_places([path.resolve() for path in self._paths()], writable=True))
        tensor = self._files[name].get_tensor(name)
        assert isinstance(tensor, torch.Tensor), f"{name} came as {type(tensor)}"
        self._read_bytes += tensor.nbytes
        return tensor

    def _require_shape(self, name: str, found: tuple[int, ...], shape: torch.Size) -> None:
        if found != tuple(shape):
            raise CheckpointError(
                f"the weight {name} must have shape {tuple(shape)} by config.json, but {self._folder} holds {found}; "
                "config and weights are of different models"
            )

    def _paths(self) -> list[Path]:
        index = self._folder / _INDEX
        if not index.is_file():
            return sorted(self._folder.glob("*.safetensors"))
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as exc:
            raise CheckpointError(f"{index} must map each weight to its file, but: {exc!r}; fetch it again") from exc
        return [self._folder / shard for shard in shards]
