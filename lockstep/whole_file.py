"""Writes small files whole: a reader, or the next process after a kill, finds the old content or the new."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, content: bytes) -> None:
    """Write through a neighbouring file, and leave none of it when the disk is full. Raises OSError."""
    # The suffix stays: who clears the folder knows the file by it.
    draft = path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
