"""``scripted vet``: what a script would notice: each bug that it can meet, and each of its assertions turned round.

Owns no verdict of a run: a bug is noticed when the run fails. In the sim tier only, in this process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.config import EngineConfig
from scripted.adapters.lockstep.bugs import CONTRACTS, MUTANTS, Mutant
from scripted.adapters.lockstep.sim.runner import ScriptedSim
from scripted.cli.single_run import console, parametrized, read_arguments
from scripted.core.phrases import plural
from scripted.core.refusals import ScriptDefinitionError
from scripted.report.failure import ScriptError
from scripted.script.counted_source import Site
from scripted.script.decorator import ScriptedTest
from scripted.script.loader import find_tests
from scripted.script.measure import Measured, count_assertions, turn_round

# A bug may keep a script from its end.
_TIMEOUT_S: Final = 2.0
# With a bug a script may go on for ever. Without one it took fewer steps than this many times more, and a margin.
_LONGER: Final = 3
_MARGIN_STEPS: Final = 64
_MOST_NAMED: Final = 6


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a script notices. ``failure`` is why it fails without a bug; nothing else is known of it then.

    ``met`` bugs break code that it runs; ``own`` are those that it notices and an empty script does not. ``always`` are
    assertions that hold the other way round as well, ``never`` those of its own that it never reached.
    """

    name: str
    failure: str = ""
    met: int = 0
    noticed: int = 0
    own: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def is_a_test(self) -> bool:
        return not self.failure and bool(self.own) and not self.always

    def lines(self) -> Iterator[str]:
        """The findings in words."""
        yield self.name
        if self.failure:
            yield f"  fails without any bug: {self.failure}"
            return
        if self.own:
            named = ", ".join(self.own[:_MOST_NAMED]) + (", ..." if len(self.own) > _MOST_NAMED else "")
            yield f"  meets {plural(self.met, 'bug')} and notices {self.noticed}, {len(self.own)} by itself: {named}"
        else:
            yield f"  notices only what every script notices: {self.noticed} of {plural(self.met, 'bug')} that it meets"
        yield from (f"  holds both ways, so it can never fail: {assertion}" for assertion in self.always)
        yield from (f"  was never reached: {assertion}" for assertion in self.never)
        yield f"  in {self.seconds:.1f} s"


@dataclass
class _Baseline:
    """Which bugs an empty script notices, by configuration."""

    noticed: dict[tuple[EngineConfig, bool], dict[str, bool]] = field(default_factory=dict)

    def notices(self, test: ScriptedTest, bug: Mutant) -> bool:
        known = self.noticed.setdefault((test.config, test.options.oracle), {})
        if bug.name not in known:
            shortest = msgspec.structs.replace(
                test, script=_empty, options=msgspec.structs.replace(test.options, must_reach=())
            )
            known[bug.name] = not _passes(shortest, {}, bug, _MARGIN_STEPS)
        return known[bug.name]


def vet(spec: str, arguments: Sequence[str] = ()) -> bool:
    """Print what each script of ``FILE`` or ``FILE::NAME`` notices; True when each of them is a test."""
    baseline, good = _Baseline(), True
    for test in find_tests(spec):
        name = f"{Path(spec.partition('::')[0])}::{test.script.__qualname__}"
        if "sim" not in test.tiers:
            console.print(f"{name}\n  runs in the server tier only, and bugs are tried in sim", soft_wrap=True)
            continue
        findings = _vetted(test, name, _arguments_of(test, arguments), baseline)
        console.print("\n".join(findings.lines()), soft_wrap=True)
        good = good and findings.is_a_test
    return good


def vetted(test: ScriptedTest, **arguments: Any) -> Findings:
    """What one script notices."""
    return _vetted(test, test.script.__qualname__, arguments, _Baseline())


def _vetted(test: ScriptedTest, name: str, arguments: dict[str, Any], baseline: _Baseline) -> Findings:
    started = time.perf_counter()
    count_assertions(test.script, turnable=True)
    asked, codes = Measured(test.script), set[int]()
    try:
        with asked:
            steps = _run(test, arguments, None, test.options.max_steps, codes)
    except ScriptError as exc:
        return Findings(name=name, failure=exc.report.headline)
    bugs = [bug for bug in (*MUTANTS, *CONTRACTS) if _is_met(bug, codes)]
    longest = min(test.options.max_steps, _LONGER * steps + _MARGIN_STEPS)
    noticed = [bug for bug in bugs if not _passes(test, arguments, bug, longest)]
    return Findings(
        name=name,
        met=len(bugs),
        noticed=len(noticed),
        own=tuple(bug.name for bug in noticed if not baseline.notices(test, bug)),
        always=tuple(_told(site) for site in asked.executed if _holds_both_ways(test, arguments, site, longest)),
        never=tuple(assertion for assertion, count in asked.own_sites().items() if not count),
        seconds=time.perf_counter() - started,
    )


def _arguments_of(test: ScriptedTest, given: Sequence[str]) -> dict[str, Any]:
    """The first of each parameter's values, where none is given."""
    first = [f"{name}={msgspec.json.encode(values[0]).decode()}" for name, values in parametrized(test).items()]
    return read_arguments(test, [*first, *given])


def _empty(t: Any) -> Iterator[None]:
    """The empty script: one request, to its end."""
    r = t.start_req(prompt_len=8, max_new_tokens=4)
    yield from t.run_until_finished(r)


def _holds_both_ways(test: ScriptedTest, arguments: dict[str, Any], site: Site, max_steps: int) -> bool:
    if not site.is_assertion or site.always_fails:
        return False
    with turn_round(site):
        return _passes(test, arguments, None, max_steps)


def _passes(test: ScriptedTest, arguments: dict[str, Any], bug: Mutant | None, max_steps: int) -> bool:
    try:
        _run(test, arguments, bug, max_steps)
    except (ScriptError, ScriptDefinitionError):
        return False
    return True


def _run(
    test: ScriptedTest,
    arguments: dict[str, Any],
    bug: Mutant | None,
    max_steps: int,
    codes: set[int] | None = None,
) -> int:
    """Run once, with the books audited at the end, as with ``--mutant``; returns the steps.

    ``codes`` gets the ids of the code of what was called.
    """
    options = msgspec.structs.replace(
        test.options, timeout_s=_TIMEOUT_S, max_steps=max_steps, check_every_step=False, must_assert=False
    )
    if codes is not None:
        sys.setprofile(lambda frame, event, _argument: codes.add(id(frame.f_code)) if event == "call" else None)
        options = msgspec.structs.replace(options, timeout_s=test.options.timeout_s)
    try:
        with ScriptedSim.start(test.config, mutant=None if bug is None else bug.name) as sim:
            return sim.run(test.script, options=options, **arguments).steps
    finally:
        sys.setprofile(None)


def _is_met(bug: Mutant, codes: set[int]) -> bool:
    """Whether a run called what the bug breaks; what is no function, such as a limit, may be met by each."""
    code = bug.healthy_code()
    return code is None or id(code) in codes


def _told(site: Site) -> str:
    return f"{Path(site.file).name}:{site.line}: assert {site.text}"
