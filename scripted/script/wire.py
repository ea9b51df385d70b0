"""What a test's process and the gate in an engine's process say to each other of scripts, over a private socket.

Typed msgpack structs, never pickle. A script travels as the file and the name of its function, and plain arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from scripted.report.failure import FailureReport
from scripted.script.arguments import check_plain, packed
from scripted.script.options import ScriptOptions
from scripted.script.source import file_of


class RunScript(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run the function ``name`` of the Python file ``file`` with ``t`` and these arguments, which are packed.

    ``import_paths`` are the caller's import paths, so that the file imports in the engine what it imports in the test.
    With ``mutant`` a bug of the engine's adapter is switched on, unless the engine was started with one.
    """

    file: str
    name: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    options: ScriptOptions = ScriptOptions()
    import_paths: tuple[str, ...] = ()
    mutant: str | None = None


class HookReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The server is warmed up, drained and frozen; scripts may come."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the server."""


class ScriptFailedReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    report: FailureReport


def command_to_run(
    script: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: ScriptOptions, mutant: str | None = None
) -> RunScript:
    """The command for a function at the top of its file. Raises ScriptDefinitionError for arguments of other types."""
    check_plain({f"argument {number}": value for number, value in enumerate(args, 1)} | dict(kwargs))
    return RunScript(
        file=file_of(script),
        name=script.__qualname__,
        args=packed(list(args)),
        kwargs=packed(dict(kwargs)),
        options=options,
        import_paths=tuple(sys.path),
        mutant=mutant,
    )
