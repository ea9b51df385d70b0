"""Reads a folder's files: JSON of the expected kind, and names, types and shapes of tensors.

Never reads a weight. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open

from engine.core.errors import CheckpointError

# More than the longest index of a checkpoint.
MAX_JSON_BYTES: Final = 64 * 2**20


def path_at(path: str) -> Path | None:
    """Return the file or folder at a path; None if there is none, also for a path that nothing can have."""
    try:
        place = Path(path).expanduser()
        return place if place.exists() else None
    except (OSError, RuntimeError):  # a name that is too long, a closed folder on the way, an unknown user's home
        return None


def folder_at(path: str) -> Path | None:
    """Return the folder at a path; None if there is none."""
    place = path_at(path)
    return place if place is not None and place.is_dir() else None


def read_json(
    path: Path, kind: type = dict, *, remedy: str = "fetch the file again", most_bytes: int = MAX_JSON_BYTES
) -> Any:
    """Read a JSON file. Raises CheckpointError, with a remedy, if it is missing, too long or of another kind."""
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise CheckpointError(f"{path} must have at most {most_bytes} bytes, but has more; {remedy}")
        content = json.loads(data.decode())
    except (OSError, ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path} must be JSON, but: {exc}; {remedy}") from exc
    if not isinstance(content, kind):
        raise CheckpointError(f"{path} must hold a {kind.__name__}, got {content!r:.200}; {remedy}")
    return content


def stored_tensors(folder: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Yield name, type and shape of each tensor in a folder's safetensors. Propagates the library's errors."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - a file of tensors is no mapping
                tensor = file.get_slice(name)
                yield name, tensor.get_dtype(), tensor.get_shape()
