"""The report of ``scripted stuck`` on a live server that ``benchmarks.live_hang`` or its SGLang twin has made hang."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.checkpoints import make_checkpoint
from benchmarks.live_flight import Server
from scripted.reruns import stands_in

SHAPE: Final = "S"


async def lines_of_stuck(folder: Path) -> list[str]:
    """Return the report of the running server that writes its flights into this folder, and the flight's name."""
    path, _, lines = await asyncio.to_thread(stands_in, str(folder))
    return [*lines, f"from {path.name}"]


def print_stuck(
    engine: str,
    port: int,
    stuck: Callable[[Server, Path], Awaitable[list[str]]],
    words: Sequence[str],
    environment: Mapping[str, str],
) -> None:
    """Start a recorded server of a small checkpoint, and print the lines that ``stuck`` returns while it hangs."""

    async def report() -> list[str]:
        return await stuck(server, folder)

    with tempfile.TemporaryDirectory() as there:
        model, folder = Path(there) / SHAPE, Path(there) / "flights"
        make_checkpoint(model, "float32", SHAPE)
        server = Server(engine, model, port, folder, words, environment)
        try:
            server.await_ready()
            sys.stdout.write("\n".join([*asyncio.run(report()), ""]))
        finally:
            server.stop()
