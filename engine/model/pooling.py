"""The pooling settings of a folder in the layout of sentence-transformers: how a prompt becomes one vector.

Reads configuration files only, never a weight.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from engine.core.errors import CheckpointError
from engine.model.checkpoint_files import read_json

_MODULES: Final = "modules.json"
_POOLING: Final = "config.json"
_SERVED: Final = "last-token and mean pooling, with or without normalization, are served"


class PoolingKind(StrEnum):
    LAST = "last"
    MEAN = "mean"


# The names of the supported modes: older configurations have them as flags, newer ones as a word.
_KINDS: Final = {
    "pooling_mode_lasttoken": PoolingKind.LAST,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "lasttoken": PoolingKind.LAST,
    "mean": PoolingKind.MEAN,
}


class Pooling(NamedTuple):
    """The pooling of a prompt's hidden states: the last token's state or the mean, of length 1 if normalized."""

    kind: PoolingKind
    is_normalized: bool


def read_pooling(folder: Path) -> Pooling | None:
    """Read the folder's pooling; None if its model generates text. Raises CheckpointError for an unsupported mode."""
    path = folder / _MODULES
    if not path.is_file():
        return None
    kind, is_normalized = None, False
    for module in read_json(path, list):
        name = str(module.get("type")).rpartition(".")[2] if isinstance(module, dict) else repr(module)
        if name == "Pooling":
            kind = _kind_of(folder / str(module.get("path", "")) / _POOLING)
        elif name == "Normalize":
            is_normalized = True
        elif name != "Transformer":
            raise CheckpointError(f"{path} must name supported modules, got {name!r:.100}; {_SERVED}")
    if kind is None:
        raise CheckpointError(f"{path} must name a module of type Pooling, but does not; fetch the folder again")
    return Pooling(kind, is_normalized)


def _kind_of(path: Path) -> PoolingKind:
    said = read_json(path)
    mode = said.get("pooling_mode")
    modes = [mode] if mode is not None else [name for name, on in said.items() if name.startswith("pooling_") and on]
    kinds = [_KINDS.get(str(name)) for name in modes]
    if len(kinds) != 1 or kinds[0] is None:
        raise CheckpointError(f"{path} must name a supported pooling, got {modes!r:.200}; {_SERVED}")
    return kinds[0]
