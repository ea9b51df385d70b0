"""Reads a folder's files: JSON of the expected kind; names, types and shapes of tensors; a digest of the weights.

Never reads a whole weight. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open

from engine.core.errors import CheckpointError

# More than the longest index of a checkpoint.
MAX_JSON_BYTES: Final = 64 * 2**20
# What a digest reads of a weight, and of all of them together: 32 MiB, unless there are more weights than that has
# parts. Another revision of a model has other values almost everywhere.
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096
_MOST_SAMPLES: Final = 8192
_DIGEST_BYTES: Final = 16
_HEADER_LENGTH_BYTES: Final = 8


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


def weights_digest(folder: Path) -> str:
    """Return a digest of a folder's safetensors: names, types and shapes, and up to 16 parts of 4 KiB of each weight.

    The parts are evenly spaced, fewer of each weight if there are many; a weight of no more bytes is read whole. Does
    not depend on how the weights are divided into files. Propagates the library's errors.
    """
    paths, samples = sorted(folder.glob("*.safetensors")), {}
    parts = min(_SAMPLES, max(1, _MOST_SAMPLES // max(1, sum(1 for _ in stored_tensors(folder)))))
    for path in paths:
        with safe_open(path, framework="numpy") as checked, path.open("rb") as file:
            length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
            data = _HEADER_LENGTH_BYTES + length
            for name in checked.keys():  # noqa: SIM118 - a file of tensors is no mapping
                start, end = header[name]["data_offsets"]
                about = json.dumps([header[name]["dtype"], header[name]["shape"]]).encode()
                values = _sampled(file.fileno(), data + start, data + end, parts)
                samples[name] = hashlib.blake2b(about + values).digest()
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name, sample in sorted(samples.items()):
        state.update(f"{name}\0".encode() + sample)
    return state.hexdigest()


def _sampled(file: int, start: int, end: int, parts: int) -> bytes:
    """Read evenly spaced ``parts`` of a file's bytes, or all if they are few."""
    if end - start <= parts * _SAMPLE_BYTES:
        return os.pread(file, end - start, start)
    last = end - start - _SAMPLE_BYTES
    places = [start + last * part // (parts - 1) for part in range(parts)] if parts > 1 else [start + last // 2]
    return b"".join(os.pread(file, _SAMPLE_BYTES, place) for place in places)
