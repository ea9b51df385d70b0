"""Tables of scripts that are wrong on purpose, each with the error that the harness must give.

A script is run by hand on one engine of a tier. A script marked ``was_green`` passed silently before it was refused.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest

from engine import EngineConfig
from scripted import ScriptFailed, ScriptOptions

__all__ = ["ONE_STAGE", "Script", "Table", "check_refused", "was_green"]

ONE_STAGE = EngineConfig(chunked_prefill_size=64)

Script = Callable[..., Any]


class Table:
    """``cases`` are the parameters of a test: a script and its error."""

    def __init__(self) -> None:
        self.cases: list[Any] = []

    def add(self, *said: Any) -> Callable[[Script], Script]:
        """Decorate a wrong script with its error."""

        def note(script: Script) -> Script:
            self.cases.append(pytest.param(script, *said, id=script.__name__))
            return script

        return note

    def were_green(self) -> int:
        """The number of scripts that passed silently before."""
        return sum(hasattr(case.values[0], "was_green") for case in self.cases)


def was_green(script: Script) -> Script:
    """Mark a script that passed silently before."""
    script.__dict__["was_green"] = True
    return script


def check_refused(engine: Any, script: Script, words: str, *, must_reach: tuple[str, ...] = ()) -> None:
    """Check that the script is refused at its own line with these words, without the harness's lines."""
    with pytest.raises(ScriptFailed) as caught:
        engine.run(script, options=ScriptOptions(must_reach=must_reach, timeout_s=20))
    text = str(caught.value).replace("\n", " ")
    assert all(part in text for part in words.split("|")[-1].split(".*")), text
    assert f"in {script.__name__}" in text
    assert f"{os.sep}scripted{os.sep}" not in text.split("The last steps")[0].replace(f"tests{os.sep}", "")
