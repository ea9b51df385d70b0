"""What tells one checkpoint from another without reading its weights: its configuration and the shapes of its weights.

Owns the digest. Two checkpoints of one model with different weights have the same one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.model.checkpoint import ORIGIN_FIELDS, resolve_folder

_LENGTH_BYTES: Final = 8
# The format's own bound.
_MAX_HEADER_BYTES: Final = 100_000_000
_DIGEST_BYTES: Final = 16


def checkpoint_digest(config: EngineConfig) -> str:
    """The digest of the configured model: what is computed, and names, types and shapes of all weights.

    Raises CheckpointError for a folder without one of them.
    """
    folder = resolve_folder(config)
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            weights |= {name: [entry["dtype"], entry["shape"]] for name, entry in _header(path).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
        raise CheckpointError(f"{folder} must hold config.json and *.safetensors that can be read, but: {exc}") from exc
    described = {name: value for name, value in described.items() if name not in ORIGIN_FIELDS}
    text = json.dumps([described, weights], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"the header of {path} must have at most {_MAX_HEADER_BYTES} bytes, got {length}")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header
