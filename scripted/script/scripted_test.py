"""The specification of a decorated test, which ``@scripted`` makes."""

from __future__ import annotations

from typing import Any

import msgspec

from scripted.script.options import ScriptOptions
from scripted.script.source import ScriptFunction, file_of


class ScriptedTest(msgspec.Struct, frozen=True, kw_only=True):
    """A decorated test: the generator function, its options and tiers, its configuration and its adapter's name."""

    config: Any
    adapter: str
    tiers: tuple[str, ...]
    options: ScriptOptions
    script: ScriptFunction
    placement: str = "local"

    @property
    def file(self) -> str:
        return file_of(self.script)
