"""Converted graphs in the user's cache folder, one for each checkpoint, slice and converter version.

Owns the folder, its names and its permissions. A graph serves a checkpoint only if it was converted from files with the
same contents.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Final

import openvino as ov

from engine.model.openvino.paging import StageGraph
from engine.model.stage_slice import StageFacts

_log = logging.getLogger(__name__)

_NAME: Final = "stage.xml"
_LIBRARIES: Final = ("openvino", "torch", "transformers")
_RECIPE: Final = (
    "conversion.py",
    "paging.py",
    "../stage_slice.py",
    "../weights.py",
    "../conversion.py",
    "../dequantization.py",
)
_PATTERNS: Final = ("config.json", "*.safetensors", "*.safetensors.index.json")


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep" / "openvino"


@contextmanager
def stage_graph(
    facts: StageFacts, convert: Callable[[], StageGraph], *, weights: str
) -> Iterator[tuple[StageGraph, bool]]:
    """Return a stage's graph, cached or newly converted, and whether it is new.

    A new graph is cached at the end of the block, unless the block raises. No other user may write the cache folder;
    without such a folder nothing is cached.
    """
    place = default_folder() / _key(facts, weights)
    try:
        _make_private(place.parent)
        kept = _read(place)
        draft = None if kept is not None else Path(tempfile.mkdtemp(prefix="draft-", dir=place.parent))
    except OSError as exc:
        _log.warning("the model is converted for OpenVINO at every start, because it cannot be cached: %s", exc)
        kept = draft = None
    if draft is None:
        yield (convert(), True) if kept is None else (kept, False)
        return
    _log.info("converting layers %d to %d for OpenVINO", facts.layers.start, facts.layers.stop - 1)
    try:
        yield _written(convert(), draft), True
        _keep(draft, place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _written(converted: StageGraph, draft: Path) -> StageGraph:
    """Write a graph and read it back; return the graph itself if it cannot be written.

    The file is mapped, so the memory of the conversion can be freed.
    """
    try:
        ov.save_model(converted.graph, draft / _NAME, compress_to_fp16=False)
        return _open(draft)
    except (OSError, RuntimeError) as exc:  # OpenVINO raises the latter for a full disk.
        _log.warning("the converted model cannot be cached in %s: %s", draft.parent, exc)
        (draft / _NAME).unlink(missing_ok=True)
        return converted


def _keep(draft: Path, place: Path) -> None:
    """Move a graph to its place atomically, so that nobody reads an incomplete one; the first of several wins."""
    if not (draft / _NAME).is_file():
        return
    try:
        draft.rename(place)
    except OSError as exc:
        if not (place / _NAME).is_file():
            _log.warning("the converted model cannot be cached in %s: %s", place, exc)


def _read(place: Path) -> StageGraph | None:
    """Read a cached graph; None without one. Removes an unreadable one."""
    if not (place / _NAME).is_file():
        return None
    try:
        return _open(place)
    except RuntimeError as exc:
        _log.warning("the model is converted for OpenVINO again, because %s cannot be read: %s", place, exc)
        shutil.rmtree(place)
        return None


def _open(place: Path) -> StageGraph:
    weights = (place / _NAME).with_suffix(".bin").resolve()
    return StageGraph(ov.Core().read_model(place / _NAME), file=weights)


def _make_private(folder: Path) -> None:
    """Keep other users from writing graphs, because these decide the output. Raises OSError if that fails."""
    folder.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} must belong to this user and be writable by no other; chmod it")


def _key(facts: StageFacts, weights: str) -> str:
    """Digest all that determines a graph: the checkpoint's contents, the slice, the type, code and libraries."""
    state = hashlib.sha256()
    for pattern in _PATTERNS:
        for path in sorted(facts.folder.glob(pattern)):
            state.update(f"{path.name}\0{_digest(path)}\0".encode())
    for name in _RECIPE:
        state.update(_digest(Path(__file__).parent / name).encode())
    cut = (facts.layers, facts.is_first, facts.is_last, facts.windowed, facts.dtype, weights)
    libraries = [f"{name} {version(name)}" for name in _LIBRARIES]
    state.update(repr((cut, libraries)).encode())
    return state.hexdigest()[:32]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
