"""The safetensors files of a checkpoint folder: maps weights to files, and loads one by name and shape.

A quantized weight is dequantized when it is read, so it looks like a plain one. Reads only the requested tensors, so
that a stage never touches another stage's layers. Used once, at startup.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open

from engine.core.errors import CheckpointError
from engine.model.checkpoint_files import read_json
from engine.model.dequantization import Integers, QuantizedWeight, quantized_weights
from engine.model.file_pages import forget_pages, mapped_places
from engine.model.quantization import Quantization

if TYPE_CHECKING:
    from engine.model.conversion import Conversion

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PLAIN_TYPES: Final = {"F64", "F32", "F16", "BF16"}
# Rotary frequencies, which old checkpoints store in every layer; they are computed instead.
_COMPUTED: Final = r"rotary_emb\.inv_freq"
_NAMED_UNUSED: Final = 3
# A part of weight names if the text model is a part of another model.
_TEXT_PART: Final = "language_model."
# After this many bytes the pages read from the files are dropped, because their content was copied.
_HELD_BYTES: Final = 64 << 20


_log = logging.getLogger(__name__)


class WeightFiles:
    """The open weight files of one folder, sharded or not; a context manager.

    Weights may have other names or be stored in pieces only as transformers' ``model`` declares, and be quantized only
    with ``quantization``. With ``is_part`` the files hold a multimodal model, of which ``model`` is the text part. With
    ``is_headless`` they may hold only the decoder, under its own names.
    """

    def __init__(
        self,
        folder: Path,
        model: Any = None,
        quantization: Quantization | None = None,
        *,
        is_part: bool = False,
        is_headless: bool = False,
    ) -> None:
        self._folder = folder
        self._model = model
        self._quantization = quantization
        self._is_part = is_part
        self._prefix = f"{model.base_model_prefix}." if is_headless else ""
        self._files: dict[str, Any] = {}
        # The name of each weight in its file.
        self._stored_as: dict[str, str] = {}
        self._quantized: dict[str, QuantizedWeight] = {}
        # The stored weights that the model may use.
        self._names: set[str] = set()
        self._open_files = ExitStack()
        self._read_bytes = 0

    def __enter__(self) -> Self:
        for path in self._paths():
            try:
                file = self._open_files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as exc:
                raise CheckpointError(f"{path} must be a whole safetensors file, but: {exc}; fetch it again") from exc
            for stored in file.keys():  # noqa: SIM118 - a file of tensors is no mapping
                name = stored.replace(_TEXT_PART, "", 1) if self._is_part else stored
                self._files[name], self._stored_as[name] = file, stored
        if self._prefix and not any(name.startswith(self._prefix) for name in self._files):
            self._files = {self._prefix + name: file for name, file in self._files.items()}
            self._stored_as = {self._prefix + name: stored for name, stored in self._stored_as.items()}
        self._names = set(self._files)
        if self._quantization is not None:
            self._quantized, unneeded = quantized_weights(self._files, self._quantization)
            parts = {name for weight in self._quantized.values() for name in weight.parts.values()}
            self._names = (self._names - parts - unneeded) | self._quantized.keys()
        return self

    def __exit__(self, *raised: object) -> None:
        self._open_files.close()

    def load(self, names: tuple[str, ...], shape: torch.Size) -> torch.Tensor:
        """Load the weight under the first of ``names`` that exists; several names mean one tied weight.

        Raises CheckpointError, which names the weight, if it is missing or has another shape.
        """
        name = next((name for name in names if name in self._names), None)
        if name is not None:
            if name not in self._quantized:
                self._require_shape(name, tuple(self._slice(name).get_shape()), shape)
            weight = self._read(name)
            self._require_shape(name, tuple(weight.shape), shape)
            return weight
        converted = next((name for name in names if name in self._conversions), None)
        if converted is None:
            raise CheckpointError(
                f"the checkpoint must hold the weight {' or '.join(names)}, but {self._folder} does not; "
                "fetch all of its files"
            )
        weight = self._conversions[converted].apply(self._read, self._model.config)
        self._require_shape(converted, tuple(weight.shape), shape)
        return weight

    def integers(self, name: str) -> Integers | None:
        """Return a quantized weight's own integers; None for any other weight."""
        weight = self._quantized.get(name)
        return None if weight is None else weight.integers(self._read_stored)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def require_all_used(self, names: Collection[str]) -> None:
        """Raise CheckpointError for stored weights that are neither among ``names`` nor converted into one of them.

        In a multimodal model, only the weights of the text part must be used.
        """
        unused = self._names.difference(names)
        if unused:
            for target, conversion in self._conversions.items():
                if target in names:
                    unused.difference_update(source for source, _ in conversion.sources)
        ignored = [_COMPUTED, *(getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ())]
        found = sorted(name for name in unused if not any(re.search(pattern, name) for pattern in ignored))
        if self._is_part:
            beside = [name for name in found if _TEXT_PART not in self._stored_as.get(name, _TEXT_PART)]
            found = sorted(set(found).difference(beside))
            _log.info("%d weights outside the text model are not used", len(beside))
        if found:
            more = f" and {len(found) - _NAMED_UNUSED} more" if len(found) > _NAMED_UNUSED else ""
            raise CheckpointError(
                f"every weight of a checkpoint must be used, but {type(self._model).__name__} has no place for "
                f"{', '.join(found[:_NAMED_UNUSED])}{more} of {self._folder}; config.json and weights are from "
                "different models, or the weights are quantized without a quantization_config"
            )

    @cached_property
    def _conversions(self) -> dict[str, Conversion]:
        from engine.model.conversion import conversions_of  # takes a second to import, and few checkpoints need it

        return {} if self._model is None else conversions_of(self._model, self._names)

    def _read(self, name: str) -> torch.Tensor:
        """Return a weight as a view of the file, to be copied and never written; a quantized one is dequantized."""
        if name in self._quantized:
            return self._quantized[name].read(self._read_stored)
        kept = self._slice(name).get_dtype()
        if self._model is not None and kept not in _PLAIN_TYPES:
            raise CheckpointError(
                f"the weight {name} must be stored as one of {', '.join(sorted(_PLAIN_TYPES))}, but {self._folder} "
                f"stores {kept}, without scales that config.json (quantization_config) declares; fetch a checkpoint "
                "with a quantization_config"
            )
        return self._read_stored(name)

    def _slice(self, name: str) -> Any:
        return self._files[name].get_slice(self._stored_as[name])

    def _read_stored(self, name: str) -> torch.Tensor:
        if self._read_bytes >= _HELD_BYTES:
            self._read_bytes = 0
            forget_pages(mapped_places([path.resolve() for path in self._paths()], writable=True))
        tensor = self._files[name].get_tensor(self._stored_as[name])
        assert isinstance(tensor, torch.Tensor), f"{name} was read as {type(tensor)}"
        self._read_bytes += tensor.nbytes
        return tensor

    def _require_shape(self, name: str, found: tuple[int, ...], shape: torch.Size) -> None:
        if found != tuple(shape):
            raise CheckpointError(
                f"the weight {name} must have shape {tuple(shape)} by config.json, but {self._folder} holds "
                f"{found}; config and weights are from different models"
            )

    def _paths(self) -> list[Path]:
        index = self._folder / _INDEX
        if not index.is_file():
            if (self._folder / _SINGLE).is_file():
                # Some folders store all weights a second time, under the names of another library.
                return [self._folder / _SINGLE]
            return sorted(self._folder.glob("*.safetensors"))
        files = read_json(index).get("weight_map")
        here = {path.name for path in self._folder.glob("*.safetensors")}
        for file in files.values() if isinstance(files, dict) else [files]:
            if not isinstance(file, str) or file not in here:
                raise CheckpointError(
                    f"{index} must map each weight to a *.safetensors file of its folder, got {file!r:.200}; fetch all "
                    "of the files again"
                )
        return [self._folder / file for file in sorted(set(files.values()))]
