"""One script run by hand: found by file and name, run in one tier, shown on the terminal.

Owns how a target on the command line is read and how an outcome looks; pytest does both in its own way.
"""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from scripted.adapters.lockstep.bugs import Mutant, mutant_named
from scripted.core.refusals import ScriptDefinitionError
from scripted.report.trace import write_trace
from scripted.script.decorator import ScriptedTest
from scripted.script.loader import find_test
from scripted.traced_run import Harness, RecordedRun, run_recorded

__all__ = ["SingleRun", "read_arguments", "show_mutant"]

PLAIN_WIDTH_COLUMNS = 120

console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH_COLUMNS, highlight=False, markup=False)


@dataclass(frozen=True, kw_only=True)
class SingleRun:
    """A script with everything that its run needs."""

    spec: str
    test: ScriptedTest
    tier: str
    arguments: dict[str, Any]
    mutant: str | None
    every_step: bool

    @classmethod
    def of(
        cls, spec: str, *, tier: str | None, arguments: Sequence[str], mutant: str | None, every_step: bool
    ) -> SingleRun:
        """Read a command line. Raises ScriptDefinitionError or UnknownMutant for what cannot be run."""
        if mutant is not None:
            mutant_named(mutant)
        test = find_test(spec)
        if tier is not None and tier not in test.tiers:
            raise ScriptDefinitionError(f"{spec} runs in {' and '.join(test.tiers)} only, got --tier {tier}")
        return cls(
            spec=spec,
            test=test,
            tier=tier or test.tiers[0],
            arguments=read_arguments(test, arguments),
            mutant=mutant,
            every_step=every_step,
        )

    def execute(self, trace: Path | None = None) -> bool:
        """Run it, print how it ended, write the trace; True when it passed."""
        with started(self.test, self.tier, self.mutant) as harness:
            outcome = run_recorded(
                harness,
                self.test,
                title=self.test.script.__name__,
                tier=self.tier,
                mutant=self.mutant,
                every_step=self.every_step,
                arguments=self.arguments,
                replay=self._replay(),
            )
        if outcome.error is not None:
            console.print(outcome.error.report.render(), soft_wrap=True)
            console.print()
        console.print(self._verdict(outcome), soft_wrap=True)
        if trace is not None:
            self._keep(trace, outcome)
        return outcome.passed

    def _verdict(self, outcome: RecordedRun) -> str:
        word = "passed" if outcome.passed else "failed"
        steps = f"{outcome.steps} steps in {outcome.seconds:.2f} s"
        mutant = f", mutant {self.mutant}" if self.mutant else ""
        lines = [f"{word}: {self.spec} ({self.tier} tier{mutant}), {steps}"]
        if outcome.success is not None:
            lines.append(f"digest {outcome.success.digest}, of the plans alone {outcome.success.plan_digest}")
            lines += [f"reached {times} times: {name}" for name, times in outcome.success.reached.items()]
            lines += [f"{name}: {count}" for name, count in outcome.success.loose_ends.items()]
            lines.append(f"outputs compared with the same request run alone: {outcome.success.compared}")
        return "\n".join(lines)

    def _keep(self, path: Path, outcome: RecordedRun) -> None:
        if outcome.trace is None:
            console.print(f"no trace: the run ended before its first step, {path} was not written", soft_wrap=True)
            return
        write_trace(path, outcome.trace)
        console.print(f"trace: {path} (scripted view {shlex.quote(str(path))})", soft_wrap=True)

    def _replay(self) -> str:
        words = ["scripted", "run", self.spec, "--tier", self.tier]
        for name, value in self.arguments.items():
            words += ["--arg", f"{name}={json.dumps(value)}"]
        if self.mutant is not None:
            words += ["--mutant", self.mutant]
        return shlex.join(words)


def read_arguments(test: ScriptedTest, given: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` pairs as the script's parameters; a value is JSON, or else text.

    Raises ScriptDefinitionError for a name that the script does not take, and for one that is missing.
    """
    parameters = list(inspect.signature(test.script).parameters.values())[1:]
    arguments = dict(_read_pair(pair) for pair in given)
    for name in arguments:
        if name not in {parameter.name for parameter in parameters}:
            takes = ", ".join(parameter.name for parameter in parameters) or "none at all"
            raise ScriptDefinitionError(f"{test.script.__name__} takes no parameter {name!r}; it takes {takes}")
    choices = _parametrized(test)
    for parameter in parameters:
        if parameter.name not in arguments and parameter.default is inspect.Parameter.empty:
            known = f", one of {', '.join(map(repr, choices[parameter.name]))}" if parameter.name in choices else ""
            raise ScriptDefinitionError(
                f"{test.script.__name__} needs its parameter {parameter.name}{known}; add --arg {parameter.name}=VALUE"
            )
    return arguments


def show_mutant(mutant: Mutant, tier: str | None) -> bool:
    """Run a mutant's test without it and with it; True when the first passes and the second fails as the bug did."""
    file = mutant.test.partition("::")[0]
    if not Path(file).is_file():
        raise ScriptDefinitionError(
            f"the test of {mutant.name} is {file} of the project's repository, which is not in {Path.cwd()}; run this "
            "in the root of a clone"
        )
    test = find_test(mutant.test)
    arguments = {name: values[0] for name, values in _parametrized(test).items()}
    console.print(f"{mutant.name}: {mutant.bug}", soft_wrap=True)
    tiers = test.tiers if tier is None else (tier,)
    caught = [_show_in(mutant, test, one, arguments) for one in tiers]
    return all(caught)


def started(test: ScriptedTest, tier: str, mutant: str | None) -> AbstractContextManager[Harness]:
    """A harness of the test's configuration in one tier."""
    if tier == "sim":
        from scripted.adapters.lockstep.sim.runner import ScriptedSim

        return ScriptedSim.start(test.config, mutant=mutant)
    from scripted.adapters.lockstep.server.runner import ScriptedServer

    return ScriptedServer.start(test.config, mutant=mutant, placement=test.placement)


def _show_in(mutant: Mutant, test: ScriptedTest, tier: str, arguments: dict[str, Any]) -> bool:
    runs = {}
    for name in (None, mutant.name):
        with started(test, tier, name) as harness:
            runs[name] = run_recorded(
                harness,
                test,
                title=mutant.name,
                tier=tier,
                mutant=name,
                every_step=name is None,
                arguments=arguments,
            )
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


def _read_pair(pair: str) -> tuple[str, Any]:
    name, separator, text = pair.partition("=")
    if not separator or not name:
        raise ScriptDefinitionError(f"--arg takes NAME=VALUE, got {pair!r}; write --arg chunk=4")
    try:
        return name, json.loads(text)
    except json.JSONDecodeError:
        return name, text


def _parametrized(test: ScriptedTest) -> dict[str, list[Any]]:
    """The values that pytest would give each parameter, from the test's own parametrize marks."""
    return {name: values for mark in getattr(test.script, "pytestmark", ()) for name, values in _values_of(mark)}


def _values_of(mark: Any) -> Iterator[tuple[str, list[Any]]]:
    if mark.name != "parametrize":
        return
    names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else list(mark.args[0])
    sets = [getattr(values, "values", values) for values in mark.args[1]]
    for position, name in enumerate(names):
        yield name, [values[position] if isinstance(values, tuple | list) else values for values in sets]
