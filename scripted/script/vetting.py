"""Judges a script by seeded bugs: each bug that it can meet, and each of its assertions turned round.

A bug is noticed by the script itself when one of its own assertions fails, or a window that it has to reach; or when
the baseline passes: the same requests with nothing else, judged by the oracle alone. In the sim tier only, in a child.
"""

from __future__ import annotations

import dis
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Final

import msgspec

from scripted.core.adapters import adapter_named
from scripted.core.mutant import HasMutants, MutantDoesNotFit
from scripted.core.phrases import plural
from scripted.core.refusals import ScriptDefinitionError
from scripted.report.failure import ScriptError
from scripted.script.child import ChildDied, ChildLate, run_in_child
from scripted.script.context import NEVER_REACHED, BaseContext
from scripted.script.counted_source import Site
from scripted.script.interruptions import Verdict
from scripted.script.measure import Measured, count_assertions, turn_round
from scripted.script.on_adapters import ScriptEnded, script_runner
from scripted.script.scripted_test import ScriptedTest
from scripted.script.source import ScriptFunction, code_of

# A bug may keep a script from its end.
_TIMEOUT_S: Final = 2.0
# With a bug a script may go on for ever. Without one it took fewer steps than this many times more, and a margin.
_LONGER: Final = 3
_MARGIN_STEPS: Final = 64
_MOST_NAMED: Final = 6
# A child is killed after this many times the seconds of CPU that it may take, and a margin.
_MARGIN_S: Final = 20.0
_LONGEST_S: Final = 3600.0
_PLAIN: Final = (bool, int, float, str, bytes, type(None), tuple, list, dict)


class OutOfTimeError(Exception):
    """The verdict would take longer than it may."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a script notices. ``failure`` is why it fails without a bug; nothing else is known of it then.

    ``assertions`` ran, each as often as it did. ``met`` bugs break code that it runs; ``own`` are those that make an
    assertion of the script fail. ``always`` are assertions that hold the other way round as well, ``never`` those that
    the script never reached, ``unused`` its parameters that it never reads. ``differs``: two runs were not alike.
    """

    name: str
    failure: str = ""
    assertions: int = 0
    met: int = 0
    noticed: int = 0
    own: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    differs: bool = False
    seconds: float = 0.0

    @property
    def is_a_test(self) -> bool:
        return not self.failure and bool(self.own) and not (self.always or self.unused or self.differs)

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
        yield from (f"  holds the other way round as well: {assertion}" for assertion in self.always)
        yield from (f"  never reads its parameter {name}" for name in self.unused)
        if self.differs:
            yield "  ran otherwise the second time: give what is random a seed, and take the time from t.clock"
        yield from (f"  was never reached: {assertion}" for assertion in self.never)
        yield f"  in {self.seconds:.1f} s"


@dataclass
class Vetting:
    """Vets scripts one after the other. What is learnt of one makes the next verdict faster.

    With ``is_brief`` the first bug that a script notices by itself is enough.
    """

    is_brief: bool = False
    # Bugs that scripts noticed by themselves, the last one first.
    _telling: list[str] = field(default_factory=list)

    def findings(
        self, test: ScriptedTest, name: str, arguments: Mapping[str, object], *, seconds: float = float("inf")
    ) -> Findings:
        """The findings of one script. Raises OutOfTimeError where this computes for longer than ``seconds``.

        The runs share a child, so that a script that harms its process, or stays in a loop, harms no other.
        """
        limit_s = min(_LONGEST_S, _MARGIN_S + _LONGER * seconds)
        try:
            encoded = run_in_child(lambda: self._encoded(test, name, arguments, seconds), limit_s)
        except ChildLate:
            raise OutOfTimeError from None
        except ChildDied as died:
            return Findings(name=name, failure=f"its process {died}")
        findings = msgspec.msgpack.decode(encoded, type=Findings | None)
        if findings is None:
            raise OutOfTimeError
        self._telling[:0] = findings.own[:1]
        return findings

    def _encoded(self, test: ScriptedTest, name: str, arguments: Mapping[str, object], seconds: float) -> bytes:
        try:
            findings = self._findings(test, name, arguments, time.process_time() + seconds)
        except OutOfTimeError:
            findings = None
        return msgspec.msgpack.encode(findings)

    def _findings(self, test: ScriptedTest, name: str, arguments: Mapping[str, object], until: float) -> Findings:
        started = time.perf_counter()
        run = _Runs(test, arguments, until)
        try:
            asked, met = run.measured()
        except (ScriptError, ScriptDefinitionError) as exc:
            return Findings(name=name, failure=exc.report.headline if isinstance(exc, ScriptError) else str(exc))
        own: list[str] = []
        noticed = 0
        for bug in sorted(met, key=self._rank) if self.is_brief else met:
            failure = run.failure_with(bug)
            noticed += failure is not None
            if failure is not None and (run.is_by_the_script(failure) or run.baseline_passes(bug)):
                own.append(bug)
                if self.is_brief:
                    break
        return Findings(
            name=name,
            assertions=asked.assertions,
            met=len(met),
            noticed=noticed,
            own=tuple(own),
            always=tuple(_told(site) for site in asked.executed if run.holds_both_ways(site)),
            never=tuple(assertion for assertion, count in asked.own_sites().items() if not count),
            unused=tuple(_unused(test.script, arguments)),
            differs=run.differs,
            seconds=time.perf_counter() - started,
        )

    def _rank(self, bug: str) -> int:
        return self._telling.index(bug) if bug in self._telling else len(self._telling)


@dataclass
class _Runs:
    """The runs of one script, until this process has computed for so long."""

    test: ScriptedTest
    arguments: Mapping[str, object]
    until: float
    longest: int = _MARGIN_STEPS
    # Whether a second run without a bug had another digest than the first.
    differs: bool = False
    # Of the last run.
    asked: Measured | None = None
    # The prompt of each request, and how many tokens it got.
    requests: list[tuple[object, int]] = field(default_factory=list)

    def measured(self) -> tuple[Measured, tuple[str, ...]]:
        """Run it as it is: what it asked, and the bugs that break what it called. Raises what it raises."""
        count_assertions(self.test.script, turnable=True)
        codes = set[int]()
        self.longest = self.test.options.max_steps
        first = self._run(None, codes)
        asked = self.asked
        assert asked is not None
        self.longest = min(self.longest, _LONGER * first.steps + _MARGIN_STEPS)
        self.differs = _digest_of(self._run(None)) != _digest_of(first)
        adapter = adapter_named(self.test.adapter)
        return asked, tuple(adapter.bugs_met(codes)) if isinstance(adapter, HasMutants) else ()

    def _noting_requests(self, t: BaseContext, **arguments: object) -> Generator[object, None, object]:
        result = yield from self.test.script(t, **arguments)
        # An aborted request may have asked for more tokens than a run has steps.
        self.requests = [(handle.prompt_ids, max(1, len(handle.output_ids))) for handle in t.run.handles.all]
        return result

    def holds_both_ways(self, site: Site) -> bool:
        if not site.is_assertion or site.always_fails:
            return False
        with turn_round(site):
            return self.failure_with(None) is None

    def failure_with(self, bug: str | None) -> Exception | None:
        """The failure of a run with this bug; None where it passes, and for a bug that does not fit."""
        if time.process_time() > self.until:
            raise OutOfTimeError
        return self._failure_of(self.test, self.arguments, bug)

    def _failure_of(self, test: ScriptedTest, arguments: Mapping[str, object], bug: str | None) -> Exception | None:
        try:
            self._run(bug, test=test, arguments=arguments)
        except MutantDoesNotFit:
            return None
        except (ScriptError, ScriptDefinitionError) as exc:
            return exc
        return None

    def is_by_the_script(self, failure: Exception) -> bool:
        """Whether an assertion of the script failed in the last run, or a window that it has to reach."""
        cause = failure.__cause__
        if isinstance(cause, Verdict):
            return cause.ending is None
        if type(cause) is not AssertionError:
            return False
        return bool(self.asked and self.asked.failing) or str(cause).startswith(NEVER_REACHED)

    def baseline_passes(self, bug: str) -> bool:
        """Whether the oracle says nothing of this bug with the script's own requests alone."""
        options = msgspec.structs.replace(self.test.options, must_reach=())
        test = msgspec.structs.replace(self.test, script=_only_requests, options=options)
        return self._failure_of(test, {"requests": self.requests}, bug) is None

    def _run(
        self,
        bug: str | None,
        codes: set[int] | None = None,
        *,
        test: ScriptedTest | None = None,
        arguments: Mapping[str, object] | None = None,
    ) -> ScriptEnded:
        """Run once, with the books audited at the end, as with ``--mutant``.

        ``codes`` gets the ids of the code of what was called.
        """
        test = test or self.test
        arguments = self.arguments if arguments is None else arguments
        self.asked = Measured(test.script)
        script = test.script if codes is None else self._noting_requests
        options = msgspec.structs.replace(
            test.options, max_steps=self.longest, check_every_step=False, must_assert=False
        )
        if codes is None:
            options = msgspec.structs.replace(options, timeout_s=_TIMEOUT_S)
        else:
            sys.setprofile(lambda frame, event, _argument: codes.add(id(frame.f_code)) if event == "call" else None)
        runner = script_runner(test.adapter)
        try:
            with self.asked:
                return runner.run_script(script, arguments, config=test.config, options=options, mutant=bug)
        finally:
            if codes is not None:
                sys.setprofile(None)


def _only_requests(t: BaseContext, requests: list[tuple[object, int]]) -> Iterator[None]:
    """The baseline: these requests, to their end."""
    handles = [t.start_req(prompt_ids=prompt_ids, max_new_tokens=tokens) for prompt_ids, tokens in requests]
    if handles:
        yield from t.run_until_all_finished(handles)
    else:
        yield


def _digest_of(ended: ScriptEnded) -> tuple[int, object]:
    return ended.steps, getattr(ended, "digest", None)


def _unused(script: ScriptFunction, arguments: Mapping[str, object]) -> Iterator[str]:
    """Plain parameters that the script never reads: a fixture may be there for its effect."""
    read = {one.argval for code in _codes_of(code_of(script)) for one in dis.get_instructions(code) if _reads(one)}
    yield from (name for name, value in arguments.items() if isinstance(value, _PLAIN) and name not in read)


def _codes_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_of(constant)


def _reads(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF"))


def _told(site: Site) -> str:
    return f"{Path(site.file).name}:{site.line}: {'assert ' * site.is_assertion}{site.text}"
