"""A server whose processes sum up the CPU time of their parts: run by its path, on any source tree of the engine.

The parts are timed from outside: their functions are wrapped before the processes are forked, and write into a mapped
file. Each thread counts its own CPU time; a call into another part counts for that part.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["PARTS", "Part", "marks_of"]

_WORD_BYTES: Final = 8
# The engine imports OpenVINO late; its classes must exist to be wrapped.
_EARLY: Final = ("engine.model.openvino.stage",)


class Part(NamedTuple):
    """A part of one process's work, and its functions. Trees without one of them do the work elsewhere."""

    process: str
    name: str
    functions: tuple[str, ...]


PARTS: Final = (
    Part(
        "scheduler", "gate: waiting, taking events", ("engine.server.scheduler_process.live_gate:LiveGate.next_step",)
    ),
    Part("scheduler", "messages of clients", ("engine.process.inbox:Inbox.drain",)),
    Part("scheduler", "scheduler's step", ("engine.core.scheduler.scheduler:Scheduler.step",)),
    Part("scheduler", "replies: encoding, sending", ("engine.server.scheduler_process.main:ReplySocket.send",)),
    Part("scheduler", "runner", ("engine.model.runner:StageRunner.forward",)),
    Part(
        "scheduler",
        "page tables, metadata",
        ("engine.model.runner:StageRunner._adopt", "engine.model.runner:StageRunner._batch"),
    ),
    Part(
        "scheduler",
        "forward",
        ("engine.model.openvino.compiled:CompiledStage.forward", "engine.model.stage_model:StageModel.forward"),
    ),
    Part("scheduler", "sampling", ("engine.model.sampling:Sampler.sample",)),
    Part(
        "frontend",
        "orders: bodies, tokenizing",
        tuple(
            f"engine.frontend.protocols.openai.requests:{name}"
            for name in ("parse_body", "chat_prompt", "tokenize", "_order")
        ),
    ),
    Part(
        "frontend",
        "replies: decoding, handing out",
        (
            "engine.frontend.http.engine_client:decode_replies",
            "engine.frontend.http.engine_client:EngineClient._deliver",
        ),
    ),
    Part("frontend", "text of tokens", ("engine.frontend.text.answer:Answer.piece",)),
    Part("frontend", "metrics", ("engine.frontend.http.metrics:RequestTimes.note",)),
    Part("frontend", "events as JSON", ("engine.frontend.sessions.sessions:written",)),
    Part("frontend", "HTTP framing", ("h11:Connection.send",)),
    Part("frontend", "writing to sockets", ("asyncio.selector_events:_SelectorSocketTransport.write",)),
)


def marks_of(path: Path) -> memoryview:
    """Map two numbers for each part: its calls, and its nanoseconds of CPU. Makes the file if there is none."""
    size = 2 * len(PARTS) * _WORD_BYTES
    if not path.is_file():
        path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), size)).cast("q")


class _Clock(threading.local):
    """The time that each thread has spent in parts called by its current part."""

    def __init__(self) -> None:
        self.inner_ns = 0


def _wrap(function: Callable[..., Any], marks: memoryview, place: int, clock: _Clock) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **options: Any) -> Any:
        outer_ns, clock.inner_ns = clock.inner_ns, 0
        began = time.thread_time_ns()
        try:
            return function(*args, **options)
        finally:
            spent = time.thread_time_ns() - began
            marks[place] += 1
            marks[place + 1] += spent - clock.inner_ns
            clock.inner_ns = outer_ns + spent

    return timed


def _install(marks: memoryview) -> None:
    clock = _Clock()
    for index, part in enumerate(PARTS):
        for name in part.functions:
            module_name, _, path = name.partition(":")
            *owners, attribute = path.split(".")
            try:
                owner = functools.reduce(getattr, owners, importlib.import_module(module_name))
                function = getattr(owner, attribute)
            except (ImportError, AttributeError):
                continue
            setattr(owner, attribute, _wrap(function, marks, 2 * index, clock))


def main() -> None:
    """``MARKS engine-arguments...``: run the engine's command with its parts timed."""
    marks = marks_of(Path(sys.argv[1]))
    sys.argv = ["engine", *sys.argv[2:]]
    from engine.server.launch.imports import import_engine

    import_engine()
    for name in _EARLY:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    _install(marks)
    from engine.cli import main as engine_main

    engine_main()


if __name__ == "__main__":
    main()
