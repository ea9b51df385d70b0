"""What a command writes: a file that cannot be written is refused before any work, a character is never an error.

Nothing is made before there is something to write.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import BinaryIO

from lockstep.errors import UnwritableFileError


def require_writable(flag: str, path: Path | None) -> None:
    """Raise UnwritableFileError for a file that cannot be written. Its folders need not be there yet."""
    why = None if path is None else _why_not(path)
    if why is not None:
        raise UnwritableFileError(f"{flag} must name a file that can be written, got {path}: {why}; name another one")


def keep_private() -> None:
    """Make all that this process and its children write its user's alone: 0600, in folders of 0700."""
    os.umask(0o077)


def open_private(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a file for writing, over what was there. No other user can read it, even one that all could read before."""
    file = open(path, "wb", buffering, opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
    if path.is_file():
        with contextlib.suppress(PermissionError):  # another user's, who lets this one write
            os.fchmod(file.fileno(), 0o600)
    return file


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file, over what was there, and the folders above it. Raises OSError, which names the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as exc:
        # A full disk is told without the name of the file.
        raise OSError(exc.errno, exc.strerror, str(exc.filename or path)) from exc


def print_every_character() -> None:
    """Make stdout show what its encoding lacks as a question mark: a table's lines, a model's words."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def told_of(exc: OSError) -> str:
    """A file that could not be read or written, in one line; stdout has no name."""
    return f"{exc.filename or 'stdout'}: {exc.strerror}" if exc.strerror else str(exc)


def _why_not(path: Path) -> str | None:
    # Those of os.path, unlike those of Path, are false below a folder that is closed to this user.
    if os.path.isdir(path):  # noqa: PTH112
        return "it is a folder"
    if os.path.exists(path):  # noqa: PTH110
        return None if os.access(path, os.W_OK) else "it is closed to writing"
    above = next(folder for folder in path.absolute().parents if os.path.exists(folder))  # noqa: PTH110
    if not above.is_dir():
        return f"{above} is no folder"
    return None if os.access(above, os.W_OK | os.X_OK) else f"{above} is closed to writing"
