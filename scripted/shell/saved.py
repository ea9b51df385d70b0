"""Saves a session as a pytest file: its statements as lines of script, and assertions on the final answers.

The assertions come from another run without the mutant, so a saved file passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripted.core.machine import ConfigT
from scripted.core.protocol import Adapter
from scripted.core.refusals import ScriptDefinitionError
from scripted.report.failure import ScriptError
from scripted.report.new_files import render_source, write_new
from scripted.script.clients import Call
from scripted.script.context import BaseContext
from scripted.script.handles import BaseRequest
from scripted.script.on_adapters import WritesScripts
from scripted.script.options import ScriptOptions
from scripted.script.wait import Steps
from scripted.shell.statements import Names, Statement, lines_of

_TEMPLATE: Final = Path(__file__).with_name("session.py.jinja")


def save_session(
    path: Path, adapter: Adapter[ConfigT], config: ConfigT, statements: list[Statement], *, mutant: str | None = None
) -> None:
    """Write the session as a test that names its ``mutant``.

    Raises ScriptDefinitionError for an existing file, and for a session that fails without the mutant.
    """
    if not isinstance(adapter, WritesScripts):
        raise ScriptDefinitionError(f"{path} was not written: the adapter {adapter.name} writes no tests")
    ending = _Ending(statements)
    try:
        steps = adapter.run_script(ending.script, {}, config=config, options=ScriptOptions(), mutant=None).steps
    except ScriptError as exc:
        raise ScriptDefinitionError(
            f"{path} was not written: the session does not pass on the scheduler as it is: {exc.report.headline}"
        ) from exc
    if not steps:
        raise ScriptDefinitionError(f"{path} was not written: the session runs no step, so it tests nothing; use step")
    text = render_source(
        _TEMPLATE,
        name=path.stem.removeprefix("test_") or "session",
        head=adapter.test_head(config, ""),
        lines=[*lines_of(statements), *ending.assertions],
        mutant=mutant,
    )
    write_new(path, text)


@dataclass
class _Ending:
    """Runs the statements and collects assertions that hold after the last one."""

    statements: list[Statement]
    assertions: tuple[str, ...] = ()

    def script(self, t: BaseContext) -> Steps:
        names: Names = {"t": t}
        for statement in self.statements:
            yield from statement.perform(names)
        self.assertions = tuple(
            assertion for name, value in names.items() if (assertion := _assertion(name, value)) is not None
        )


def _assertion(name: str, value: object) -> str | None:
    if isinstance(value, BaseRequest):
        if value.finish_reason is None:
            return f"assert not {name}.finished"
        return f'assert {name}.finish_reason == "{value.finish_reason}"'
    if isinstance(value, Call):
        return f"assert {name}.status == {value.status}" if value.done else f"assert not {name}.done"
    return None
