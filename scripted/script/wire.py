"""Messages about scripts between a test's process and the gate in an engine's process, over a private socket.

Typed msgpack structs, never pickle. A script travels as the file and name of its function, with plain arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import msgspec

from scripted.report.failure import FailureReport
from scripted.script.arguments import check_plain, packed
from scripted.script.options import ScriptOptions
from scripted.script.source import ScriptFunction, file_of


class RunScript(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run the function ``name`` of the Python file ``file`` with ``t`` and these packed arguments.

    ``import_paths`` are the caller's, so that the file imports the same modules in the engine as in the test.
    ``mutant`` is switched on for the script; None for an engine that was started with a mutant.
    """

    file: str
    name: str
    args: list[object] = []
    kwargs: dict[str, object] = {}
    options: ScriptOptions = ScriptOptions()
    import_paths: tuple[str, ...] = ()
    mutant: str | None = None


class HookReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The server is warmed up, drained and frozen, ready for scripts."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the server."""


class ScriptFailedReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    report: FailureReport


def command_to_run(
    script: ScriptFunction,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    options: ScriptOptions,
    mutant: str | None = None,
) -> RunScript:
    """Make the command for a function at the top level of its file. Raises BadCall for arguments of other types."""
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
