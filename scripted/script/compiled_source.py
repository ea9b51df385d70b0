"""Compiled sources of script files, cached beside them in ``__pycache__`` as Python caches its own.

A server's scheduler process compiles the file of each script that it is sent, and every server is a new process. A
cached file is used only for the same source, path, Python, pytest and harness. Where no cache can be written, each
process compiles the source itself.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import marshal
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from lockstep.whole_file import write_whole

_Kept = TypeVar("_Kept")
_DIGEST_BYTES: Final = 16
# The files whose text decides what is compiled.
_COMPILERS: Final = tuple(
    Path(__file__).with_name(name) for name in ("loader.py", "counted_source.py", "refused_scripts.py")
)


class Compiled(msgspec.Struct, frozen=True):
    """A compiled file; ``marshalled`` is its code in the form of Python's own caches."""

    marshalled: bytes

    @property
    def code(self) -> types.CodeType:
        code: types.CodeType = marshal.loads(self.marshalled)  # noqa: S302 - as Python loads its own caches
        return code


def kept(source: bytes, file: str, how: str, kind: type[_Kept], make: Callable[[], _Kept]) -> _Kept:
    """Return a source compiled by ``make``, or the file's cached copy of it.

    ``how`` names the way of compiling, with letters and digits only. Propagates the exceptions of ``make``.
    """
    place = Path(importlib.util.cache_from_source(file, optimization=how))
    digest = hashlib.blake2b(source, digest_size=_DIGEST_BYTES, key=_compiler(), person=how.encode()[:16])
    digest.update(os.fsencode(file))
    head = digest.digest()
    with contextlib.suppress(OSError, msgspec.DecodeError):
        content = place.read_bytes()
        body = content[2 * _DIGEST_BYTES :]
        if content.startswith(head + _digest_of(body)):
            return msgspec.msgpack.decode(body, type=kind)
    made = make()
    if not sys.dont_write_bytecode:
        body = msgspec.msgpack.encode(made)
        with contextlib.suppress(OSError):
            place.parent.mkdir(exist_ok=True)
            write_whole(place, head + _digest_of(body) + body)
    return made


def _digest_of(body: bytes) -> bytes:
    """Digest compiled code: damaged code could end the process that loads it."""
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


@functools.cache
def _compiler() -> bytes:
    """Digest the compilers: Python, pytest where it is installed, and the harness."""
    digest = hashlib.blake2b(sys.version.encode(), digest_size=_DIGEST_BYTES)
    with contextlib.suppress(ImportError):
        import pytest

        digest.update(pytest.__version__.encode())
    for file in _COMPILERS:
        digest.update(file.read_bytes())
    return digest.digest()
