"""Runs one script by hand: finds it by file and name, runs it in one tier, shows it on the terminal.

Owns how a target on the command line is read and how an outcome is shown; pytest does both in its own way.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from scripted.api import RecordedRun, run_script
from scripted.cli.console import plain_console
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.mutant import Mutant, switched_on
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.report.trace import write_trace
from scripted.script.loader import find_test, specs_in
from scripted.script.scripted_test import ScriptedTest
from scripted.script.vetting import Vetting
from scripted.search.execution import execute

PLAIN_WIDTH_COLUMNS = 120

console = plain_console(PLAIN_WIDTH_COLUMNS)


def show_run(
    spec: str, *, tier: str | None, given: Sequence[str], mutant: str | None, every_step: bool, trace: Path | None
) -> bool:
    """Run a script, print how it ended, write the trace; True if it passed.

    Raises ScriptDefinitionError or UnknownMutant if it cannot run.
    """
    test = find_test(spec)
    with switched_on(adapter_named(test.adapter), mutant):
        pass  # an unknown name is refused before anything runs
    arguments = read_arguments(test, given)
    words = ["scripted", "run", spec, "--tier", tier or test.tiers[0]]
    for name, value in arguments.items():
        words += ["--arg", f"{name}={json.dumps(value)}"]
    words += [] if mutant is None else ["--mutant", mutant]
    outcome = run_script(
        spec, tier=tier, arguments=arguments, mutant=mutant, every_step=every_step, replay=shlex.join(words)
    )
    if outcome.error is not None and outcome.error.report.ending is None:
        console.print(outcome.error.report.render(), soft_wrap=True)
        console.print()
    console.print("\n".join(_verdict(spec, outcome, mutant)), soft_wrap=True)
    if trace is not None and outcome.trace is None:
        console.print(f"no trace: the run ended before its first step, {trace} was not written", soft_wrap=True)
    elif trace is not None and outcome.trace is not None:
        write_trace(trace, outcome.trace)
        console.print(f"trace: {trace} (scripted view {shlex.quote(str(trace))})", soft_wrap=True)
    return outcome.passed


# Words for the ends of scripts by pytest's calls; the exit status is 1, because such a script did not pass.
_ENDINGS: Final[Mapping[str, str]] = {"skip": "skipped", "xfail": "failed as expected"}


def _verdict(spec: str, outcome: RecordedRun, mutant: str | None) -> Iterator[str]:
    ending = None if outcome.error is None else outcome.error.report.ending
    how = "passed" if outcome.passed else "failed" if ending is None else _ENDINGS[ending.kind]
    where = f"{outcome.tier} tier of {outcome.test.adapter}" + (f", mutant {mutant}" if mutant else "")
    yield f"{how}: {spec} ({where}), {outcome.steps} steps in {outcome.seconds:.2f} s"
    if ending is not None:
        yield f"because: {ending.reason}"
    done = outcome.success
    if done is not None and outcome.trace is not None:
        plans = f", of the plans alone {done.plan_digest}" if done.plan_digest else ""
        yield f"digest {outcome.trace.log.steps[-1].digest}{plans}"
        yield from (f"reached {times} times: {name}" for name, times in done.reached.items())
        yield from (f"{name}: {count}" for name, count in done.loose_ends.items())
        yield f"outputs compared with the same request run alone: {done.compared}"


def read_arguments(test: ScriptedTest, given: Sequence[str]) -> dict[str, object]:
    """Read ``NAME=VALUE`` pairs as the script's parameters; a value is JSON, or text if it isn't JSON.

    Raises ScriptDefinitionError for a name that the script does not take, and for a missing one.
    """
    parameters = list(inspect.signature(test.script).parameters.values())[1:]
    arguments = dict(_read_pair(pair) for pair in given)
    for name in arguments:
        if name not in {parameter.name for parameter in parameters}:
            takes = ", ".join(parameter.name for parameter in parameters) or "none at all"
            raise ScriptDefinitionError(f"{test.script.__name__} takes no parameter {name!r}; it takes {takes}")
    choices = parametrized(test)
    for parameter in parameters:
        if parameter.name not in arguments and parameter.default is inspect.Parameter.empty:
            known = f", one of {', '.join(map(repr, choices[parameter.name]))}" if parameter.name in choices else ""
            raise ScriptDefinitionError(
                f"{test.script.__name__} needs its parameter {parameter.name}{known}; add --arg {parameter.name}=VALUE"
            )
    return arguments


def show_mutant(mutant: Mutant, tier: str | None, adapter: str = DEFAULT_ADAPTER) -> bool:
    """Run a mutant's test without and with it; True if the first passes and the second fails as the bug did."""
    file = mutant.test.partition("::")[0]
    if not Path(file).is_file():
        raise ScriptDefinitionError(
            f"the test of {mutant.name} is {file} of the project's repository, which is not in {Path.cwd()}; run this "
            "in the root of a clone"
        )
    if mutant.schedule:
        return _show_schedule(mutant, mutant.adapter or adapter)
    test = find_test(mutant.test)
    arguments = {name: values[0] for name, values in parametrized(test).items()}
    console.print(f"{mutant.name}: {mutant.bug}", soft_wrap=True)
    tiers = test.tiers if tier is None else (tier,)
    caught = [_show_in(mutant, one, arguments) for one in tiers]
    return all(caught)


def _show_schedule(mutant: Mutant, adapter: str) -> bool:
    schedule = Schedule.parse(mutant.schedule, of=adapter)
    with mutant.switched_on():
        with_it = execute(schedule).failure
    without = execute(schedule).failure
    console.print(f"{mutant.name}: {mutant.bug}\n  scripted replay '{schedule}' --mutant {mutant.name}", soft_wrap=True)
    for name, failure in (("without", without), ("with", with_it)):
        console.print(f"  {name}: {'passed' if failure is None else f'FAILED: {failure}'}", soft_wrap=True)
    return without is None and with_it is not None and mutant.signature in with_it.text


def _show_in(mutant: Mutant, tier: str, arguments: dict[str, object]) -> bool:
    runs = {
        name: run_script(mutant.test, tier=tier, arguments=arguments, mutant=name, title=mutant.name)
        for name in (None, mutant.name)
    }
    without, with_it = runs[None], runs[mutant.name]
    report = with_it.error.report.render() if with_it.error is not None else ""
    caught = mutant.signature in report
    console.print(f"  {tier:6} without: {_word(without)}", soft_wrap=True)
    console.print(f"  {tier:6} with:    {_word(with_it)}", soft_wrap=True)
    if without.error is not None:
        console.print(without.error.report.render(), soft_wrap=True)
    if not caught:
        console.print(f"  NOT CAUGHT: {mutant.signature!r} must be in its failure\n{report}", soft_wrap=True)
    return without.passed and caught


def _word(run: RecordedRun) -> str:
    how = "passed" if run.error is None else f"FAILED: {run.error.report.headline}"
    return f"{how} ({run.steps} steps, {run.seconds:.2f} s)"


def _read_pair(pair: str) -> tuple[str, object]:
    name, separator, text = pair.partition("=")
    if not separator or not name:
        raise ScriptDefinitionError(f"--arg takes NAME=VALUE, got {pair!r}; write --arg chunk=4")
    try:
        return name, json.loads(text)
    except json.JSONDecodeError:
        return name, text


def parametrized(test: ScriptedTest) -> dict[str, list[object]]:
    """Return the values that pytest would give each parameter, from the test's parametrize marks."""
    return {name: values for mark in getattr(test.script, "pytestmark", ()) for name, values in _values_of(mark)}


def _values_of(mark: Any) -> Iterator[tuple[str, list[object]]]:
    if mark.name != "parametrize":
        return
    names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else list(mark.args[0])
    sets = [getattr(values, "values", values) for values in mark.args[1]]
    for position, name in enumerate(names):
        yield name, [values[position] if isinstance(values, tuple | list) else values for values in sets]


def vet(spec: str, arguments: Sequence[str] = ()) -> bool:
    """Print what each script of ``FILE`` or ``FILE::NAME`` notices; True if each of them is a test.

    One that cannot run is told with its reason; if it is the only one asked for, raises ScriptDefinitionError.
    """
    vetting, good = Vetting(), True
    for one in specs_in(spec):
        try:
            good = _is_vetted(vetting, one, arguments) and good
        except ScriptDefinitionError as exc:
            if one == spec:
                raise
            console.print(f"{one}\n  is refused: {exc}", soft_wrap=True)
            good = False
    return good


def _is_vetted(vetting: Vetting, spec: str, arguments: Sequence[str]) -> bool:
    test = find_test(spec)
    if "sim" not in test.tiers:
        console.print(f"{spec}\n  runs in the server tier only, and bugs are tried in sim", soft_wrap=True)
        return True
    findings = vetting.findings(test, spec, _arguments_of(test, arguments))
    console.print("\n".join(findings.lines()), soft_wrap=True)
    return findings.is_a_test


def _arguments_of(test: ScriptedTest, given: Sequence[str]) -> dict[str, object]:
    """Return the first value of each parameter that was not given one."""
    first = [f"{name}={msgspec.json.encode(values[0]).decode()}" for name, values in parametrized(test).items()]
    return read_arguments(test, [*first, *given])
