"""Writes small files whole: a reader, or the next process after a kill, finds the old content or the new."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lockstep.output_files import open_private

__all__ = ["open_whole", "write_whole"]

_DRAFT_SUFFIX = ".partial"


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


@contextlib.contextmanager
def open_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a private file that appears whole, over an older one, at the end of the block. Raises OSError.

    Its draft has another suffix: a reader that looks for files by their suffix finds none.
    """
    draft = path.with_suffix(_DRAFT_SUFFIX)
    try:
        with open_private(draft) as file:
            yield file
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
