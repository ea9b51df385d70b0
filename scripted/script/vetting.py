"""What a script would notice: each bug of its adapter that it can meet, and each of its assertions turned round.

Owns no verdict of a run: a bug is noticed when the run fails. In the sim tier only, in this process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from scripted.core.adapters import adapter_named
from scripted.core.mutant import HasMutants, MutantDoesNotFit
from scripted.core.phrases import plural
from scripted.core.refusals import ScriptDefinitionError
from scripted.report.failure import ScriptError
from scripted.script.counted_source import Site
from scripted.script.decorator import ScriptedTest
from scripted.script.measure import Measured, count_assertions, numbered, tell_lies, turn_round
from scripted.script.on_adapters import script_runner

# A bug may keep a script from its end.
_TIMEOUT_S: Final = 2.0
# With a bug a script may go on for ever. Without one it took fewer steps than this many times more, and a margin.
_LONGER: Final = 3
_MARGIN_STEPS: Final = 64
_MOST_NAMED: Final = 6


class OutOfTimeError(Exception):
    """The verdict would take longer than it may."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a script notices. ``failure`` is why it fails without a bug; nothing else is known of it then.

    ``assertions`` ran, each as often as it did. ``met`` bugs break code that it runs; ``own`` are those that it notices
    and an empty script does not. ``always`` are assertions that hold the other way round as well, or whatever is
    answered; with ``repeats_waits`` all of them say what the script has waited for. ``never`` are those of its own that
    it never reached.
    """

    name: str
    failure: str = ""
    assertions: int = 0
    met: int = 0
    noticed: int = 0
    own: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    repeats_waits: bool = False
    never: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def is_a_test(self) -> bool:
        return not self.failure and bool(self.own) and not self.always and not self.repeats_waits

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
        yield from (f"  can never fail, whatever the engine does: {assertion}" for assertion in self.always)
        if self.repeats_waits:
            yield "  asserts only what it has waited for"
        yield from (f"  was never reached: {assertion}" for assertion in self.never)
        yield f"  in {self.seconds:.1f} s"


@dataclass
class Vetting:
    """Vets scripts one after the other. What is learnt of one makes the next verdict faster.

    With ``is_brief`` the first bug that a script notices by itself is enough.
    """

    is_brief: bool = False
    # Whether an empty script notices a bug, by configuration.
    _empty: dict[tuple[str, Any, bool], dict[str, bool]] = field(default_factory=dict)
    # Bugs that scripts noticed by themselves, the last one first.
    _telling: list[str] = field(default_factory=list)

    def findings(
        self, test: ScriptedTest, name: str, arguments: Mapping[str, Any], *, seconds: float = float("inf")
    ) -> Findings:
        """What one script notices. Raises OutOfTimeError where this computes for longer than ``seconds``."""
        started = time.perf_counter()
        run = _Runs(test, arguments, time.process_time() + seconds)
        try:
            asked, met = run.measured()
        except (ScriptError, ScriptDefinitionError) as exc:
            return Findings(name=name, failure=exc.report.headline if isinstance(exc, ScriptError) else str(exc))
        known = self._empty.setdefault((test.adapter, test.config, test.options.oracle), {})
        own: list[str] = []
        noticed = 0
        for bug in sorted(met, key=self._rank) if self.is_brief else met:
            if self.is_brief and (own or known.get(bug)):
                continue
            if run.passes(bug):
                continue
            noticed += 1
            if bug not in known:
                known[bug] = not run.empty().passes(bug)
            if not known[bug]:
                own.append(bug)
        self._telling[:0] = own[:1]
        can_fail = frozenset(filter(_can_fail, asked.executed))
        deaf = run.deaf(can_fail)
        return Findings(
            name=name,
            assertions=asked.assertions,
            met=len(met),
            noticed=noticed,
            own=tuple(own),
            always=tuple(_told(site) for site in asked.executed if site in deaf or run.holds_both_ways(site)),
            repeats_waits=bool(can_fail) and not can_fail <= deaf and run.repeats_waits(can_fail),
            never=tuple(assertion for assertion, count in asked.own_sites().items() if not count),
            seconds=time.perf_counter() - started,
        )

    def _rank(self, bug: str) -> int:
        return self._telling.index(bug) if bug in self._telling else len(self._telling)


@dataclass
class _Runs:
    """The runs of one script, until this process has computed for so long."""

    test: ScriptedTest
    arguments: Mapping[str, Any]
    until: float
    longest: int = _MARGIN_STEPS

    def measured(self) -> tuple[Measured, tuple[str, ...]]:
        """Run it as it is: what it asked, and the bugs that break what it called. Raises what it raises."""
        count_assertions(self.test.script, turnable=True)
        asked, codes = Measured(self.test.script), set[int]()
        self.longest = self.test.options.max_steps
        with asked:
            steps = self._run(None, codes)
        self.longest = min(self.longest, _LONGER * steps + _MARGIN_STEPS)
        adapter = adapter_named(self.test.adapter)
        return asked, tuple(adapter.bugs_met(codes)) if isinstance(adapter, HasMutants) else ()

    def empty(self) -> _Runs:
        """The runs of the empty script of the same configuration."""
        options = msgspec.structs.replace(self.test.options, must_reach=())
        return _Runs(msgspec.structs.replace(self.test, script=_empty, options=options), {}, self.until)

    def holds_both_ways(self, site: Site) -> bool:
        if not site.is_assertion or site.always_fails:
            return False
        with turn_round(site):
            return self.passes(None)

    def deaf(self, sites: frozenset[Site]) -> frozenset[Site]:
        """The assertions that hold whatever the engine answers."""
        numbers = numbered(sites)
        with tell_lies(self.test.script) as lies:
            for _ in lies.runs(set(numbers)):
                self.passes(None)
        return frozenset(numbers[number] for number in lies.deaf & numbers.keys())

    def repeats_waits(self, sites: frozenset[Site]) -> bool:
        """Whether all assertions hold whatever the engine answers, once what was waited for is there."""
        with tell_lies(self.test.script, keeps_waits=True) as lies:
            for _ in lies.runs(set(numbered(sites))):
                self.passes(None)
                if lies.has_failure:
                    return False
        return True

    def passes(self, bug: str | None) -> bool:
        if time.process_time() > self.until:
            raise OutOfTimeError
        try:
            self._run(bug)
        except MutantDoesNotFit:
            return True
        except (ScriptError, ScriptDefinitionError):
            return False
        return True

    def _run(self, bug: str | None, codes: set[int] | None = None) -> int:
        """Run once, with the books audited at the end, as with ``--mutant``; returns the steps.

        ``codes`` gets the ids of the code of what was called.
        """
        options = msgspec.structs.replace(
            self.test.options, max_steps=self.longest, check_every_step=False, must_assert=False
        )
        if codes is None:
            options = msgspec.structs.replace(options, timeout_s=_TIMEOUT_S)
        else:
            sys.setprofile(lambda frame, event, _argument: codes.add(id(frame.f_code)) if event == "call" else None)
        runner, config = script_runner(self.test.adapter), self.test.config
        try:
            return runner.run_script(self.test.script, self.arguments, config=config, options=options, mutant=bug).steps
        finally:
            if codes is not None:
                sys.setprofile(None)


def _empty(t: Any) -> Iterator[None]:
    """The empty script: one request, to its end."""
    r = t.start_req(prompt_len=8, max_new_tokens=4)
    yield from t.run_until_finished(r)


def _can_fail(site: Site) -> bool:
    return (site.is_assertion or site.is_statement) and not site.always_fails


def _told(site: Site) -> str:
    return f"{Path(site.file).name}:{site.line}: {'assert ' * site.is_assertion}{site.text}"
