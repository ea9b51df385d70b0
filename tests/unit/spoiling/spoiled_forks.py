"""Imported by the process that tests fork servers from: breaks their processes from outside.

A process of a server runs ``spoil.py`` of its working folder, if that has one, when it is forked. The engine has no
switch for it.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__: list[str] = []

# What is forked from a spoilt process is spoilt.
_spoilt = False


def _spoil() -> None:
    global _spoilt
    file = Path("spoil.py")
    if _spoilt or not file.is_file():
        return
    _spoilt = True
    exec(compile(file.read_text(encoding="utf-8"), str(file.absolute()), "exec"), {"__name__": "spoil"})


os.register_at_fork(after_in_child=_spoil)
