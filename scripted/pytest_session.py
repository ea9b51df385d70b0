"""The scripted tests of one pytest process: where they run, with which mutant, on which servers.

The plugin sets it up. Servers start at first use, are shared by equal configurations, and are gone at the end.
"""

from __future__ import annotations

import gc
import hashlib
import os
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from scripted.core.adapters import adapter_for, adapter_named
from scripted.core.mutant import refusal_of_mutant
from scripted.core.phrases import path_of
from scripted.core.refusals import ScriptDefinitionError
from scripted.report.failure import ServerDied, ServerDirty
from scripted.script.arguments import check_plain
from scripted.script.decorator import run_tests_with
from scripted.script.harness import Harness, ServerPool, servers_of, sims_of
from scripted.script.isolation import run_isolated
from scripted.script.on_adapters import script_runner
from scripted.script.scripted_test import ScriptedTest

# CPU seconds for vetting the scripts of one session, and for one script.
_VETTING_S = 10.0
_VETTING_ONE_S = 5.0
_DEBUG_S = 1e6

if TYPE_CHECKING:
    from scripted.script.execution import ScriptOutcome
    from scripted.script.options import ScriptOptions
    from scripted.script.vetting import Findings


@dataclass(kw_only=True)
class ScriptedSession:
    """Runs decorated tests, and audits the engine after each step if ``every_step``.

    ``mutant`` is switched on in the adapters that know it; the others run unchanged. Servers compute on ``device`` if
    one is given. With a ``placement`` other than local, every multi-stage engine of the server tier places its stages
    there. ``long_options`` are short option names that mean something else in this project. ``isolates``: scripts in
    sim run in a forked process.
    """

    mutant: str | None = None
    every_step: bool = True
    device: str | None = None
    placement: str = "local"
    long_options: Collection[str] = ()
    isolates: bool = True
    node_id: str = field(default="", init=False)
    # Why no script can run in this process; None if scripts can.
    refusal: str | None = field(default=None, init=False)
    # The comparisons and leftovers of the current test's script, if it passed.
    counts: dict[str, int] | None = field(default=None, init=False)
    # The scripts that passed and can run in sim, by the names that vetting uses; of a parametrized script, the first.
    _passed: dict[str, tuple[ScriptedTest, dict[str, Any]]] = field(default_factory=dict, init=False)
    # The servers of the last used adapter, by its name: servers of two adapters never run at once.
    _servers: dict[str, ServerPool] = field(default_factory=dict, init=False)

    def run(self, test: ScriptedTest, tier: str, arguments: dict[str, Any]) -> None:
        """Run one test in one tier. Raises its ScriptError if it does not pass."""
        __tracebackhide__ = True
        if self.refusal is not None:
            raise ScriptDefinitionError(self.refusal)
        if "server" in test.tiers:
            check_plain(arguments)
        self.counts = self._run(test, tier, arguments)
        if "sim" in test.tiers:
            self._passed.setdefault(f"{path_of(test.file)}::{test.script.__qualname__}", (test, arguments))

    def _run(self, test: ScriptedTest, tier: str, arguments: dict[str, Any]) -> dict[str, int]:
        __tracebackhide__ = True
        options = msgspec.structs.replace(
            test.options, check_every_step=self.every_step, replay=self._replay_command(test, tier)
        )
        if tier == "sim":
            return self._run_in_sim(test, options, arguments)
        with self._harness_for(test) as harness:
            # The previous script's failure has been reported. Its leftovers may be more than a reset can clear.
            again = harness.has_failed
            before, harness.used_by = harness.used_by, self.node_id
            try:
                return harness.run(test.script, options=options, **arguments).counts()
            except (ServerDirty, ServerDied) as exc:
                left_broken = before and not exc.report.begun
                if not left_broken and not (again and isinstance(exc, ServerDirty)):
                    raise
        with self._harness_for(test) as fresh:
            fresh.used_by = self.node_id
            counts = fresh.run(test.script, options=options, **arguments).counts()
        blame = {f"servers that {before} left broken, found before other scripts": 1} if left_broken else {}
        return counts | blame

    def _run_in_sim(self, test: ScriptedTest, options: ScriptOptions, arguments: dict[str, Any]) -> dict[str, int]:
        __tracebackhide__ = True
        runner, mutant = script_runner(test.adapter), self._mutant_of(test.adapter)
        if not self.isolates:  # for a debugger, whose user needs time
            options = msgspec.structs.replace(options, timeout_s=_DEBUG_S)

        def run() -> ScriptOutcome:
            return runner.run_script(test.script, arguments, config=test.config, options=options, mutant=mutant)

        # A tracer measures coverage or is a debugger; both need the script in this process.
        if self.isolates and sys.gettrace() is None:
            return run_isolated(test, options, run)
        return run().counts()

    def _harness_for(self, test: ScriptedTest) -> AbstractContextManager[Harness[object, ScriptOutcome]]:
        return self.harness(test.config, "server", adapter=test.adapter, placement=test.placement)

    def take_counts(self) -> dict[str, int] | None:
        """Take the counts of the current test's script by name; None if none has passed."""
        counts, self.counts = self.counts, None
        return counts

    def vet(self, known: Mapping[str, Any], *, is_whole: bool = False) -> dict[str, tuple[str, dict[str, int]]]:
        """Vet the scripts that passed: return, by script name, the file's digest and counts by name.

        A result that is ``known`` for the same file stands. The others are vetted, newest files first, for a while or
        until all are done.
        """
        from scripted.report.tally import NOT_VETTED
        from scripted.script.vetting import Vetting

        gc.collect()  # finalizes what scripts have left here, and not inside an import
        verdicts: dict[str, tuple[str, dict[str, int]]] = {}
        until = _computed_s() + (float("inf") if is_whole else _VETTING_S)
        vetting = Vetting(is_brief=True)
        for name, (test, arguments) in sorted(self._passed.items(), key=lambda one: -_changed_at(one[1][0].file)):
            digest = _digest(test.file)
            if known.get(name, ("",))[0] == digest:
                verdicts[name] = (digest, known[name][1])
                continue
            one_s = float("inf") if is_whole else min(until - _computed_s(), _VETTING_ONE_S)
            if one_s <= 0:
                verdicts[name] = ("", {NOT_VETTED: 1})
                continue
            try:
                findings = vetting.findings(test, name, arguments, seconds=one_s)
            except (Exception, SystemExit):  # noqa: BLE001  (out of time; or broken by what the script left)
                verdicts[name] = ("", {NOT_VETTED: 1})
            else:
                verdicts[name] = (digest, dict(_faults(findings, has_windows=bool(test.options.must_reach))))
        return verdicts

    @contextmanager
    def harness(
        self,
        config: object,
        tier: str,
        *,
        mutant: str | None = None,
        adapter: str | None = None,
        placement: str = "local",
    ) -> Iterator[Harness[object, ScriptOutcome]]:
        """Lend an engine of this tier while the context is open: a server is shared, and replaced when unusable."""
        adapter = adapter or adapter_for(config)
        mutant = mutant or self._mutant_of(adapter)
        if tier == "sim":
            with sims_of(adapter).start_sim(config, mutant=mutant) as sim:
                yield sim
            return
        if self.placement != "local":
            placement = self.placement
        servers = self._servers_of(adapter)
        with servers.lend(config, mutant=mutant, placement=placement, device=self.device) as server:
            yield server

    def close(self) -> None:
        """End all servers."""
        while self._servers:
            self._servers.popitem()[1].close()

    def _servers_of(self, adapter: str) -> ServerPool:
        if adapter not in self._servers:
            offers = servers_of(adapter)
            self.close()
            self._servers[adapter] = offers.new_servers()
        return self._servers[adapter]

    def _mutant_of(self, adapter: str) -> str | None:
        known = self.mutant is not None and refusal_of_mutant(adapter_named(adapter), self.mutant) is None
        return self.mutant if known else None

    def _replay_command(self, test: ScriptedTest, tier: str) -> str:
        node = self.node_id or f"{path_of(test.file)}::{test.script.__name__}[{tier}]"
        options = {"--tier": tier}
        if (mutant := self._mutant_of(test.adapter)) is not None:
            options["--mutant"] = mutant
        if self.every_step == (self.mutant is not None):  # differs from the default
            options["--invariants"] = "step" if self.every_step else "end"
        if tier == "server" and self.device is not None:
            options["--device"] = self.device
        if tier == "server" and self.placement != "local":
            options["--placement"] = self.placement
        words = ["pytest", node]
        for name, value in options.items():
            words += [name.replace("--", "--scripted-") if name in self.long_options else name, value]
        return shlex.join(words)


def _faults(findings: Findings, *, has_windows: bool) -> Iterator[tuple[str, int]]:
    """Yield the findings as counts for the summary.

    Yields nothing for a script that fails when it runs again, which says nothing about it, and nothing about bugs if it
    meets none.
    """
    from scripted.report.tally import NEVER_FAILS, NOT_REPEATABLE, NOTICES_NOTHING, UNUSED

    if findings.met and (findings.assertions or has_windows) and not findings.notices_something:
        yield NOTICES_NOTHING, 1
    if findings.differs:
        yield NOT_REPEATABLE, 1
    yield from ((f"{UNUSED}{name}", 1) for name in findings.unused)
    yield from ((f"{NEVER_FAILS}{assertion}", 1) for assertion in (*findings.always, *findings.absent))


def _computed_s() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    return sum(os.times()[:4])


def _digest(file: str) -> str:
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()


def _changed_at(file: str) -> float:
    return Path(file).stat().st_mtime


_session = ScriptedSession()
run_tests_with(_session.run)


def current_session() -> ScriptedSession:
    return _session


def set_session(session: ScriptedSession) -> None:
    """Make this the session of this process, and close the previous one."""
    global _session
    _session.close()
    _session = session
    run_tests_with(session.run)
