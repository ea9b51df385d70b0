"""Addresses at which the stages of a decode engine receive KV: their spelling, and the files that announce them.

Imports no torch and opens nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from engine.core.errors import ConfigError
from engine.process.links.endpoint import Endpoint, parse_endpoint
from engine.process.private_dir import ADDRESS_SUFFIX
from lockstep.whole_file import write_whole

_UNIX: Final = "unix"
_TCP: Final = "tcp"


class KVAddress(msgspec.Struct, frozen=True):
    """A stage's port: a Unix socket or an endpoint. ``run`` is new at each start of the stage."""

    place: Path | Endpoint
    run: str

    def __str__(self) -> str:
        return f"{_UNIX if isinstance(self.place, Path) else _TCP}:{self.place}#{self.run}"


def parse_kv_address(text: str) -> KVAddress:
    """Read an address. Raises ConfigError for any other text."""
    kind, colon, rest = text.partition(":")
    place, mark, run = rest.rpartition("#")
    if not (colon and mark and place and run) or kind not in (_UNIX, _TCP):
        raise ConfigError(f"an address of KV must be unix:PATH#RUN or tcp:HOST:PORT#RUN, got {text!r}")
    return KVAddress(Path(place) if kind == _UNIX else parse_endpoint(place, "an address of KV"), run)


def kv_socket(private_dir: Path, stage: int) -> Path:
    """Return the path of the socket at which a stage listens for KV on its machine."""
    return private_dir / f"kv-{stage}"


def note_kv_address(private_dir: Path, stage: int, address: KVAddress) -> None:
    """Write a stage's address atomically where ``kv_addresses`` finds it."""
    write_whole(_note(private_dir, stage), str(address).encode())


def forget_kv_address(private_dir: Path, stage: int) -> None:
    _note(private_dir, stage).unlink(missing_ok=True)


def kv_addresses(private_dir: Path, stages: int) -> tuple[str, ...]:
    """Return the address of each stage of a decode engine. Call it once all stages are ready.

    Raises FileNotFoundError if a stage receives no KV.
    """
    return tuple(_note(private_dir, stage).read_text(encoding="utf-8") for stage in range(stages))


def _note(private_dir: Path, stage: int) -> Path:
    return private_dir / f"kv-{stage}{ADDRESS_SUFFIX}"
