"""The compiled kernels of decode attention: built once by the C++ compiler of this machine, kept in a private folder.

Owns the folder and what is in it; never decides whether kernels are used. Called when a stage starts, never later.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from engine.errors import ConfigError, EngineError

__all__ = ["LANES", "NativeUnavailableError", "default_folder", "native_library"]

_log = logging.getLogger(__name__)

LANES: Final = 8
COMPILE_TIMEOUT_S: Final = 120.0
_SHOWN_ERROR_CHARACTERS: Final = 400
_SOURCE: Final = Path(__file__).with_name("native_kernels.cpp")
# Not -ffast-math: linking with it makes every tiny number of the whole process zero.
_FLAGS: Final = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wno-psabi", "-shared", "-fPIC"),
)


class NativeUnavailableError(EngineError):
    """The kernels cannot be compiled or loaded here; the eager path computes the same."""


def default_folder() -> Path:
    """Where compiled kernels are kept if the configuration names no folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep" / "kernels"


def native_library(folder: Path, head_size: int) -> ctypes.CDLL:
    """The kernels for heads of one size, compiled if they are not in the folder yet.

    Raises NativeUnavailableError without a compiler, or when it fails; ConfigError for a folder of another user.
    """
    if head_size % LANES:
        raise NativeUnavailableError(f"the head size must be a multiple of {LANES}, got {head_size}")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NativeUnavailableError("a C++ compiler must be there, found no g++; install it, or name one in CXX")
    _make_private(folder)
    command = [compiler, *_FLAGS, f"-DHEAD_SIZE={head_size}", str(_SOURCE)]
    target = folder / f"{_key(command)}.so"
    with _locked(folder):
        if not target.exists():
            _log.warning("compiling the attention kernels for heads of %d, kept in %s", head_size, folder)
            _compile(command, target)
    try:
        return ctypes.CDLL(str(target))
    except OSError as exc:
        raise NativeUnavailableError(f"the compiled kernels cannot be loaded, remove {target}: {exc}") from exc


def _make_private(folder: Path) -> None:
    """What lies there is executed, so no other user may write it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
        found = folder.stat()
    except OSError as exc:
        raise ConfigError(f"compile_dir must be a folder that can be made, got {folder}: {exc}; name another") from exc
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"compile_dir must belong to this user and be writable by no other, got {folder}; chmod it or name another"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process compiles, the others wait for it: all stages start at the same time."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(command: list[str], target: Path) -> None:
    """Compile beside the target and move it there, so that a half-written file is never loaded."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        try:
            subprocess.run(  # noqa: S603 - the user's own compiler on a file of this package
                [*command, "-o", str(made)], check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
            )
        except subprocess.CalledProcessError as exc:
            raise NativeUnavailableError(
                f"{command[0]} failed to compile {_SOURCE.name}: {exc.stderr[:_SHOWN_ERROR_CHARACTERS]}"
            ) from exc
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise NativeUnavailableError(f"{command[0]} could not compile {_SOURCE.name}: {exc}") from exc
        made.replace(target)


def _key(command: list[str]) -> str:
    """Source, flags and processor: -march=native means another thing on another one."""
    state = hashlib.blake2b(_SOURCE.read_bytes(), digest_size=16)
    state.update("\0".join([*command, platform.machine(), _processor()]).encode())
    return state.hexdigest()


def _processor() -> str:
    """What the kernel says the first processor is and can."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    told = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "".join(told.get(name, "") for name in ("model name", "model", "stepping", "flags", "Features"))
