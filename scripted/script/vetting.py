"""Judges a script: by mutants of code that it runs, by changed answers, and by negating each of its assertions.

The script itself notices a mutant if one of its assertions or a window of must_reach fails, or if the run fails and the
baseline passes: the same requests with nothing else, judged by the oracle alone. In the sim tier only, in a child.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import io
import itertools
import logging
import os
import sys
import time
from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import handlers
from pathlib import Path
from queue import Queue, SimpleQueue
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import msgspec

from scripted.core.adapters import adapter_named
from scripted.core.edits import EditDoesNotFit, codes_in
from scripted.core.errors import RequestRefused
from scripted.core.mutant import HasMutants, switched_on
from scripted.core.phrases import plural
from scripted.core.refusals import ScriptDefinitionError
from scripted.report.failure import ScriptError
from scripted.report.tally import ASKED, NOT_COMPARED
from scripted.script.changed_answers import Answers, Change
from scripted.script.child import ChildDied, ChildLate, run_in_child
from scripted.script.context import NEVER_REACHED, BaseContext
from scripted.script.counted_source import Site
from scripted.script.execution import ScriptOutcome
from scripted.script.interruptions import Verdict
from scripted.script.measure import Measured, count_assertions, negate, raises_itself, reading_by
from scripted.script.on_adapters import script_runner
from scripted.script.scripted_test import ScriptedTest
from scripted.script.source import ScriptFunction, code_of

# A mutant may keep a script from ending.
_TIMEOUT_S: Final = 2.0
# With a mutant, a script may never end: it gets this multiple of the steps it takes without one, and a margin.
_LONGER: Final = 3
_MARGIN_STEPS: Final = 64
_MOST_NAMED: Final = 6
# How many edits of the code that ran are tried if no mutant was noticed.
_MOST_EDITS: Final = 120
_MOST_CHANGES: Final = 200
# A child is killed after this multiple of its CPU seconds, plus a margin.
_MARGIN_S: Final = 20.0
_LONGEST_S: Final = 3600.0
_HARNESS: Final = __name__.partition(".")[0]
# The method of each handler that sends a record to another process.
_SENDERS: Final = (
    (handlers.SysLogHandler, "emit"),
    (handlers.SocketHandler, "send"),
    (handlers.DatagramHandler, "send"),
    (handlers.HTTPHandler, "emit"),
    (handlers.SMTPHandler, "emit"),
    (handlers.NTEventLogHandler, "emit"),
)
_PLAIN: Final = (bool, int, float, str, bytes, type(None), tuple, list, dict)


@runtime_checkable
class KnowsModes(Protocol):
    """An adapter that knows which modes the microbatches of a configuration never have."""

    def absent_modes(self, config: Any) -> frozenset[str]: ...


@runtime_checkable
class EditsWhatRan(Protocol):
    """An adapter that draws single edits of the code that a run called."""

    def edits_met(self, codes: Container[int], count: int) -> Sequence[str]:
        """Return the names of at most ``count`` edits, always the same for the same code."""
        ...


class EnginesByName(Protocol):
    """Engines by name; ``fleet[name]`` is the ``t`` of one."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def __getitem__(self, name: str) -> BaseContext: ...


@runtime_checkable
class HasFleet(Protocol):
    """A run whose script may have started a fleet."""

    fleet: EnginesByName | None


@runtime_checkable
class StartsFleets(Protocol):
    """A ``t`` that starts fleets."""

    def engines(self, *names: str) -> EnginesByName: ...


class RequestsOf(NamedTuple):
    """A script's requests to one engine: the prompt of each request, and how many tokens it got.

    ``engine`` is its name in the fleet, empty for the script's own engine.
    """

    engine: str
    requests: list[tuple[object, int]]


class OutOfTimeError(Exception):
    """The verdict would exceed its time limit."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The verdict on a script. ``failure`` is set if it fails without a mutant; then nothing else is known.

    ``assertions``: how often assertions ran. ``met``: the number of mutants of code that it runs; ``noticed``: the
    mutants with which it fails; ``own``: the mutants that the script itself notices. ``answer``: an engine answer that,
    once changed, fails one of its assertions. ``always``: assertions that also hold negated; ``never``: assertions that
    it never reached; ``absent``: assertions on a mode that the engine never has, which no mutant can fail; ``unused``:
    parameters that it never reads. ``differs``: two runs had different digests. ``left``: counts of possibly mistaken
    leftovers, by name.
    """

    name: str
    failure: str = ""
    assertions: int = 0
    met: int = 0
    noticed: int = 0
    own: tuple[str, ...] = ()
    answer: str = ""
    always: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    differs: bool = False
    left: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def notices_something(self) -> bool:
        return bool(self.own or self.answer)

    @property
    def is_a_test(self) -> bool:
        is_sound = not (self.always or self.absent or self.unused or self.differs)
        return not self.failure and self.notices_something and is_sound

    def lines(self) -> Iterator[str]:
        """Format the findings as lines of a report."""
        yield self.name
        if self.failure:
            yield f"  fails without any bug: {self.failure}"
            return
        yield f"  {self._noticed()}"
        yield from (f"  {remark}" for remark in self._remarks())
        yield f"  in {self.seconds:.1f} s"

    def remarks(self) -> Iterator[str]:
        """Yield everything that may be a mistake of the script."""
        if self.failure:
            yield f"fails without any bug: {self.failure}"
            return
        if not self.notices_something:
            yield self._noticed()
        yield from self._remarks()

    def _noticed(self) -> str:
        if self.own:
            named = ", ".join(self.own[:_MOST_NAMED]) + (", ..." if len(self.own) > _MOST_NAMED else "")
            return f"meets {plural(self.met, 'bug')} and notices {self.noticed}, {len(self.own)} by itself: {named}"
        if self.answer:
            return f"notices no bug by itself, and depends on the engine's answer {self.answer}"
        if not self.met:
            return "meets no known bug, so nothing shows what it notices; give the adapter mutants of that code"
        return f"notices only what every script notices: {self.noticed} of {plural(self.met, 'bug')} that it meets"

    def _remarks(self) -> Iterator[str]:
        yield from (f"holds the other way round as well: {assertion}" for assertion in self.always)
        yield from (f"asks for a mode that this engine never has: {assertion}" for assertion in self.absent)
        yield from (f"never reads its parameter {name}" for name in self.unused)
        if self.differs:
            yield "ran otherwise the second time: give what is random a seed, and take the time from t.clock"
        yield from (f"was never reached: {assertion}" for assertion in self.never)
        yield from (f"leaves {name}: {count}" for name, count in self.left.items())


@dataclass
class Vetting:
    """Vets scripts one after another; results of one speed up the next verdict.

    With ``is_brief``, the first mutant that a script itself notices is enough.
    """

    is_brief: bool = False
    # Mutants that scripts themselves noticed, latest first.
    _telling: list[str] = field(default_factory=list)

    def findings(
        self, test: ScriptedTest, name: str, arguments: Mapping[str, object], *, seconds: float = float("inf")
    ) -> Findings:
        """Vet one script. Raises OutOfTimeError if this takes more than ``seconds`` of CPU time.

        All of its runs share one child process, so a script that harms its process or never ends harms no other.
        """
        limit_s = min(_LONGEST_S, _MARGIN_S + _LONGER * seconds)
        try:
            encoded = run_in_child(lambda: self._encoded(test, name, arguments, seconds), limit_s, is_busy=True)
        except ChildLate:
            raise OutOfTimeError from None
        except ChildDied as died:
            return Findings(name=name, failure=f"its process {died}{died.traceback}")
        findings = msgspec.msgpack.decode(encoded, type=Findings | None)
        if findings is None:
            raise OutOfTimeError
        self._telling[:0] = findings.own[:1]
        return findings

    def _encoded(self, test: ScriptedTest, name: str, arguments: Mapping[str, object], seconds: float) -> bytes:
        _silence()
        try:
            findings = self._findings(test, name, arguments, time.process_time() + seconds)
        except OutOfTimeError:
            findings = None
        return msgspec.msgpack.encode(findings)

    def _findings(self, test: ScriptedTest, name: str, arguments: Mapping[str, object], until: float) -> Findings:
        started = time.perf_counter()
        run = _Runs(test, arguments, until)
        try:
            measured, met = run.measured()
        except (ScriptError, ScriptDefinitionError) as exc:
            return Findings(name=name, failure=exc.report.headline if isinstance(exc, ScriptError) else str(exc))
        own: list[str] = []
        noticed = 0
        answer = run.answer_noticed(measured)
        absent = {site for site in measured.executed if site.is_assertion and _asks_for(site.text, run.absent_modes)}
        is_settled = self.is_brief and bool(answer)
        for bug in sorted(met, key=self._rank) if self.is_brief else met:
            if is_settled and not absent:
                break
            failure = run.failure_with(bug)
            noticed += failure is not None
            if failure is not None and absent and run.last is not None:
                absent -= run.last.failing
            if failure is not None and (run.is_by_the_script(failure) or run.baseline_passes(bug)):
                own.append(bug)
            if self.is_brief and own and not absent:
                break
        if met and not own and not answer and measured.assertions:
            own += run.first_edit_noticed()
        return Findings(
            name=name,
            assertions=measured.assertions,
            met=len(met),
            noticed=noticed,
            own=tuple(own),
            answer=answer,
            always=tuple(_label(site) for site in measured.executed if run.holds_both_ways(site)),
            never=tuple(assertion for assertion, count in measured.own_sites().items() if not count),
            absent=tuple(sorted(map(_label, absent))),
            unused=tuple(_unused(test.script, arguments)),
            differs=run.differs,
            left=run.left,
            seconds=time.perf_counter() - started,
        )

    def _rank(self, bug: str) -> int:
        return self._telling.index(bug) if bug in self._telling else len(self._telling)


@dataclass
class _Runs:
    """Runs one script with and without mutants until this process has used its CPU time."""

    test: ScriptedTest
    arguments: Mapping[str, object]
    until: float
    longest: int = _MARGIN_STEPS
    # Whether a second run without a mutant had another digest than the first.
    differs: bool = False
    # Whether the oracle judges each step of a run, or only its end.
    is_judged: bool = False
    # The assertions of the last run.
    last: Measured | None = None
    # Leftovers of a run that may be a mistake.
    left: dict[str, int] = field(default_factory=dict)
    # The ids of the code objects that the first run called.
    codes: set[int] = field(default_factory=set)
    # The requests of the script, by engine.
    asked: list[RequestsOf] = field(default_factory=list)

    def measured(self) -> tuple[Measured, tuple[str, ...]]:
        """Run without a mutant; return its assertions and the mutants of the code that ran. May raise ScriptError."""
        count_assertions(self.test.script, negatable=True)
        codes = self.codes
        self.longest = self.test.options.max_steps
        first = self._run(None, codes)
        measured = self.last
        assert measured is not None, "a run sets it"
        self.longest = min(self.longest, _LONGER * first.steps + _MARGIN_STEPS)
        again = self._run(None, is_plain=True)
        self.differs = (again.steps, again.digest) != (first.steps, first.digest)
        self.left = {name: count for name, count in again.counts().items() if _may_be_a_mistake(name)}
        adapter = adapter_named(self.test.adapter)
        return measured, tuple(adapter.bugs_met(codes)) if isinstance(adapter, HasMutants) else ()

    @property
    def absent_modes(self) -> frozenset[str]:
        """The modes that no microbatch of this configuration has, as far as the adapter knows."""
        adapter = adapter_named(self.test.adapter)
        return adapter.absent_modes(self.test.config) if isinstance(adapter, KnowsModes) else frozenset()

    def _noting_requests(self, t: BaseContext, **arguments: object) -> Generator[object, None, object]:
        result = yield from self.test.script(t, **arguments)
        fleet = t.run.fleet if isinstance(t.run, HasFleet) else None
        engines = {"": t} | ({} if fleet is None else {name: fleet[name] for name in fleet.names})
        self.asked = [RequestsOf(name, _requests_of(engine)) for name, engine in engines.items()]
        return result

    def holds_both_ways(self, site: Site) -> bool:
        if not site.is_assertion or site.always_fails:
            return False
        with negate(site):
            return self.failure_with(None) is None

    def failure_with(self, bug: str | None) -> Exception | None:
        """Run with a mutant and return the failure; None if the run passes or the mutant does not fit."""
        if time.process_time() > self.until:
            raise OutOfTimeError
        return self._failure_of(self.test, self.arguments, bug)

    def _failure_of(self, test: ScriptedTest, arguments: Mapping[str, object], bug: str | None) -> Exception | None:
        failure = self._failed(test, arguments, bug)
        if bug is None or not isinstance(failure, ScriptError) or failure.report.begun:
            return failure
        # The mutant breaks the reset before every script, so it is switched on where the script begins.
        return self._failed(msgspec.structs.replace(test, script=_broken_from_its_start(test, bug)), arguments, None)

    def _failed(self, test: ScriptedTest, arguments: Mapping[str, object], bug: str | None) -> Exception | None:
        try:
            self._run(bug, test=test, arguments=arguments)
        except EditDoesNotFit:
            return None
        except (ScriptError, ScriptDefinitionError) as exc:
            return exc
        return None

    def answer_noticed(self, measured: Measured) -> str:
        """Find an engine answer that an assertion of the script depends on; empty if there is none."""
        read = self._answers(None)
        if self._failure_among(read) is not None:
            return ""
        for change in itertools.islice(read.changes(), _MOST_CHANGES):
            failure = self._failure_among(self._answers(change))
            if failure is None or not self.is_by_the_script(failure) or self.last is None:
                continue
            if not self.last.failing or not self.last.failing.isdisjoint(measured.executed):
                return str(change.answer)
        return ""

    def _answers(self, change: Change | None) -> Answers:
        kinds = (type(self.test.config), type(script_runner(self.test.adapter)))
        packages = frozenset(kind.__module__.partition(".")[0] for kind in kinds)
        return Answers(packages | {_HARNESS}, type(self.test.config), self.absent_modes, change)

    def _failure_among(self, answers: Answers) -> Exception | None:
        """Run the script with these answers and return its failure."""
        script = self.test.script

        @functools.wraps(script)
        def answered(t: BaseContext, **arguments: object) -> Generator[object, None, object]:
            answers.begin(t)
            return (yield from script(t, **arguments))

        if time.process_time() > self.until:
            raise OutOfTimeError
        with reading_by(answers.read):
            return self._failed(msgspec.structs.replace(self.test, script=answered), self.arguments, None)

    def first_edit_noticed(self) -> list[str]:
        """Find an edit of the code that ran which an assertion of the script notices and its requests alone do not.

        The gallery may have no mutant of the code that the script tests.
        """
        adapter = adapter_named(self.test.adapter)
        edits = adapter.edits_met(self.codes, _MOST_EDITS) if isinstance(adapter, EditsWhatRan) else ()
        return list(itertools.islice(filter(self._notices, edits), 1))

    def _notices(self, edit: str) -> bool:
        try:
            failure = self.failure_with(edit)
            return (
                failure is not None and self.is_by_the_script(failure) and self.baseline_passes(edit, every_step=True)
            )
        except OutOfTimeError:
            raise
        except Exception:  # noqa: BLE001 - some edits leave no working engine
            return False

    def is_by_the_script(self, failure: Exception) -> bool:
        """Return whether an assertion of the script, or a window of must_reach, failed in the last run."""
        cause = failure.__cause__
        if isinstance(cause, Verdict):
            return cause.ending is None
        if type(cause) is not AssertionError:
            return False
        if bool(self.last and self.last.failing) or str(cause).startswith(NEVER_REACHED):
            return True
        return raises_itself(cause)

    def baseline_passes(self, bug: str, *, every_step: bool = False) -> bool:
        """Return whether the script's requests alone, judged by the oracle, pass with this mutant.

        With ``every_step`` the oracle judges each step, as in a plain run of any script.
        """
        options = msgspec.structs.replace(self.test.options, must_reach=())
        test = msgspec.structs.replace(self.test, script=_only_requests, options=options)
        self.is_judged = every_step
        try:
            return self._failure_of(test, {"asked": self.asked}, bug) is None
        finally:
            self.is_judged = False

    def _run(
        self,
        bug: str | None,
        codes: set[int] | None = None,
        *,
        test: ScriptedTest | None = None,
        arguments: Mapping[str, object] | None = None,
        is_plain: bool = False,
    ) -> ScriptOutcome:
        """Run once, with an audit at the end, as with ``--mutant``. Adds the ids of called code to ``codes``.

        A plain run has the assertions that pytest demands, and the script's own time limit.
        """
        test = test or self.test
        arguments = self.arguments if arguments is None else arguments
        self.last = measured = Measured(test.script)
        script = test.script if codes is None else self._noting_requests
        options = msgspec.structs.replace(
            test.options, max_steps=self.longest, check_every_step=self.is_judged, must_assert=is_plain
        )
        if codes is None and not is_plain:
            options = msgspec.structs.replace(options, timeout_s=_TIMEOUT_S, is_busy=True)
        if codes is not None:
            sys.setprofile(lambda frame, event, _argument: codes.add(id(frame.f_code)) if event == "call" else None)
        runner = script_runner(test.adapter)
        try:
            with measured:
                return runner.run_script(script, arguments, config=test.config, options=options, mutant=bug)
        finally:
            if codes is not None:
                sys.setprofile(None)


def _broken_from_its_start(test: ScriptedTest, bug: str) -> ScriptFunction:
    """Return the test's script with a mutant switched on from its first line to its last."""
    script = test.script

    @functools.wraps(script)
    def broken(t: BaseContext, **arguments: object) -> Generator[object, None, object]:
        with switched_on(adapter_named(test.adapter), bug):
            return (yield from script(t, **arguments))

    return broken


def _requests_of(t: BaseContext) -> list[tuple[object, int]]:
    # An aborted request may have asked for more tokens than a run has steps.
    return [(handle.prompt_ids, max(1, len(handle.output_ids))) for handle in t.run.handles.all]


def _only_requests(t: BaseContext, asked: list[RequestsOf]) -> Iterator[None]:
    """Run the baseline: these requests to their end, in the same fleet, without the ones that an engine refuses."""
    names = [one.engine for one in asked if one.engine]
    fleet = t.engines(*names) if names and isinstance(t, StartsFleets) else None
    waits = []
    for name, requests in asked:
        engine, handles = t if fleet is None or not name else fleet[name], []
        for prompt_ids, tokens in requests:
            with contextlib.suppress(RequestRefused):  # a prefill engine generates for no client
                handles.append(engine.start_req(prompt_ids=prompt_ids, max_new_tokens=tokens))
        if handles:
            waits.append((engine, handles))
    for engine, handles in waits:
        yield from engine.run_until_all_finished(handles)
    if not waits:
        yield


def _silence() -> None:
    """Drop the script's output and its logging to the outside in this child: it runs a hundred times.

    Logging stays on, and so do handlers that keep records in memory: the script may assert on its own log. Handlers
    that the script makes itself write their files, but send nothing.
    """
    nothing = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the child ends
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in (1, 2):
        os.dup2(nothing.fileno(), descriptor)
    sys.stdout = sys.stderr = nothing
    for handler in _handlers():
        if _leaves(handler):
            handler.addFilter(lambda _: False)
    for kind, sends in _SENDERS:
        setattr(kind, sends, lambda *_: None)


def _handlers() -> Iterator[logging.Handler]:
    """Yield the handlers of all loggers, and the handlers to which buffering ones forward their records."""
    for logger in (logging.getLogger(), *logging.Logger.manager.loggerDict.values()):
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            yield handler
            if isinstance(handler, handlers.MemoryHandler) and handler.target is not None:
                yield handler.target


def _leaves(handler: logging.Handler) -> bool:
    """Return whether a handler's records leave this process's memory: for a stream, a file or a queue."""
    match handler:
        case logging.StreamHandler():
            return not isinstance(handler.stream, io.StringIO)
        case handlers.QueueHandler():
            return not isinstance(handler.queue, Queue | SimpleQueue)
    return False


def _may_be_a_mistake(count: str) -> bool:
    return count not in ("steps", "compared") and not count.startswith((ASKED, NOT_COMPARED))


def _asks_for(text: str, modes: frozenset[str]) -> bool:
    """Return whether an assertion compares anything called a mode with one of these modes."""
    if not modes:
        return False
    compared = (one for one in ast.walk(ast.parse(text, mode="eval")) if isinstance(one, ast.Compare))
    for one in compared:
        words = {inner.value for inner in ast.walk(one) if isinstance(inner, ast.Constant)}
        if not words.isdisjoint(modes) and "mode" in ast.unparse(one):
            return True
    return False


def _unused(script: ScriptFunction, arguments: Mapping[str, object]) -> Iterator[str]:
    """Yield parameters that the script never reads, except fixtures, which may be there for their effect."""
    read = {one.argval for code in codes_in(code_of(script)) for one in dis.get_instructions(code) if _reads(one)}
    yield from (name for name, value in arguments.items() if isinstance(value, _PLAIN) and name not in read)


def _reads(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF"))


def _label(site: Site) -> str:
    return f"{Path(site.file).name}:{site.line}: {'assert ' * site.is_assertion}{site.text}"
