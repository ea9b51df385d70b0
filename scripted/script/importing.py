"""Tracks the script file that this process is importing in order to run it, and refuses to start servers meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from scripted.core.refusals import ScriptDefinitionError

_files: list[str] = []


@contextlib.contextmanager
def importing_to_run(file: str) -> Iterator[None]:
    """Track a file during its import."""
    _files.append(file)
    try:
        yield
    finally:
        _files.pop()


def require_not_importing() -> None:
    """Raise ScriptDefinitionError if a script file starts a server while it is imported to run one of its scripts."""
    if _files:
        raise ScriptDefinitionError(
            f"{_files[-1]} starts a server while it is imported, but its server imports the file again: "
            'servers would start servers without end; start it in a function, or under `if __name__ == "__main__":`'
        )
