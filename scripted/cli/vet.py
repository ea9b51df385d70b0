"""``scripted vet``: what the scripts of a file would notice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from scripted.cli.single_run import console, parametrized, read_arguments
from scripted.script.decorator import ScriptedTest
from scripted.script.loader import find_tests
from scripted.script.vetting import Vetting


def vet(spec: str, arguments: Sequence[str] = ()) -> bool:
    """Print what each script of ``FILE`` or ``FILE::NAME`` notices; True when each of them is a test."""
    vetting, good = Vetting(), True
    for test in find_tests(spec):
        name = f"{Path(spec.partition('::')[0])}::{test.script.__qualname__}"
        if "sim" not in test.tiers:
            console.print(f"{name}\n  runs in the server tier only, and bugs are tried in sim", soft_wrap=True)
            continue
        findings = vetting.findings(test, name, _arguments_of(test, arguments))
        console.print("\n".join(findings.lines()), soft_wrap=True)
        good = good and findings.is_a_test
    return good


def _arguments_of(test: ScriptedTest, given: Sequence[str]) -> dict[str, Any]:
    """The first of each parameter's values, where none is given."""
    first = [f"{name}={msgspec.json.encode(values[0]).decode()}" for name, values in parametrized(test).items()]
    return read_arguments(test, [*first, *given])
