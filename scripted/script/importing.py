"""Which file of scripts this process imports in order to run one of them, and what that rules out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from scripted.core.refusals import ScriptDefinitionError

_files: list[str] = []


@contextlib.contextmanager
def importing_to_run(file: str) -> Iterator[None]:
    """Note that a file is imported."""
    _files.append(file)
    try:
        yield
    finally:
        _files.pop()


def require_not_importing() -> None:
    """Raise ScriptDefinitionError if a file of scripts starts a server while it is imported to run one of them."""
    if _files:
        raise ScriptDefinitionError(
            f"{_files[-1]} starts a server while it is imported, but its server imports the file again: "
            'servers would start servers for ever; start it in a function, or under `if __name__ == "__main__":`'
        )
