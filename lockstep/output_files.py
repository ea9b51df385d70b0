"""Output of commands: an unwritable file is refused before any work, and no character is an error.

No file is created before there is content.
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
    """Raise UnwritableFileError for a file that cannot be written. Its folders need not exist yet."""
    why = None if path is None else _why_not(path)
    if why is not None:
        raise UnwritableFileError(f"{flag} must name a file that can be written, got {path}: {why}; name another one")


def keep_private() -> None:
    """Make files of this process and its children private to its user: 0600, in folders of 0700."""
    os.umask(0o077)


def open_private(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a file for writing, over any older content. Nobody else can read it, even if everybody could before."""
    file = open(path, "wb", buffering, opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
    if path.is_file():
        with contextlib.suppress(PermissionError):  # it belongs to another user, who lets this one write
            os.fchmod(file.fileno(), 0o600)
    return file


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file, over any older content, and its folders. Raises OSError, which names the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as exc:
        # The error of a full disk has no file name.
        raise OSError(exc.errno, exc.strerror, str(exc.filename or path)) from exc


def print_every_character() -> None:
    """Make stdout print characters that its encoding lacks as a question mark: a table's lines, a model's words."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def told_of(exc: OSError) -> str:
    """Describe an error of reading or writing in one line; stdout has no file name."""
    return f"{exc.filename or 'stdout'}: {exc.strerror}" if exc.strerror else str(exc)


def _why_not(path: Path) -> str | None:
    # Unlike Path's, the functions of os.path return False below a folder that is closed to this user.
    if os.path.isdir(path):  # noqa: PTH112
        return "it is a folder"
    if os.path.exists(path):  # noqa: PTH110
        return None if os.access(path, os.W_OK) else "it is closed to writing"
    above = next(folder for folder in path.absolute().parents if os.path.exists(folder))  # noqa: PTH110
    if not above.is_dir():
        return f"{above} is no folder"
    return None if os.access(above, os.W_OK | os.X_OK) else f"{above} is closed to writing"
