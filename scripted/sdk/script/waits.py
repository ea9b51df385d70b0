"""Waiting in scripts of adapters of the SDK: run steps until something holds, within a budget of steps.

Every wait is used as ``yield from``. A spent budget raises at the script's line with what stands in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from scripted.core.phrases import plural
from scripted.errors import BadCall, BudgetSpent
from scripted.script.asked import check_count, check_predicate, several, truth_of
from scripted.script.wait import DEFAULT_BUDGET_STEPS, HAND_ON, Steps, Wait
from scripted.sdk.script.gate import ScriptGate
from scripted.sdk.script.handles import RequestHandle
from scripted.sdk.script.queries import Queries

__all__ = ["Waits"]


class Waits(Queries):
    """The waits of ``t``."""

    def __init__(self, gate: ScriptGate) -> None:
        super().__init__(gate)
        self._made: list[Wait] = []

    def run_until(self, predicate: Callable[[], object], max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until ``predicate()`` is true; none at all if it is true already."""
        check_predicate(predicate)
        return self._wait(
            "run_until(...)",
            lambda: truth_of(predicate(), "the predicate's answer"),
            max_steps,
            "the predicate never held",
        )

    def run_until_finished(self, r: RequestHandle, max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until the request has ended, for whatever reason."""
        self._check_handle("run_until_finished()", r)
        return self._wait(f"run_until_finished({r.rid})", lambda: r.is_finished, max_steps, f"{r.rid} did not finish")

    def run_until_all_finished(self, rs: Iterable[RequestHandle], max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until every one of these requests has ended."""
        handles = several(rs, RequestHandle)
        for r in handles:
            self._check_handle("run_until_all_finished()", r)
        return self._wait(
            "run_until_all_finished(...)",
            lambda: all(r.is_finished for r in handles),
            max_steps,
            f"not all of {handles} finished",
        )

    def run_until_idle(self, max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until the machine is idle; what has just arrived is work that is still to be done."""
        return self._wait("run_until_idle()", self._is_idle, max_steps, "the scheduler did not get idle")

    def check_waits(self) -> None:
        """Raise BadCall for a wait that was made and never run: without ``yield from`` it does nothing at all."""
        forgotten = next((wait for wait in self._made if not wait.used), None)
        self._made.clear()
        if forgotten is not None:
            raise BadCall(f"t.{forgotten.what} did nothing: write 'yield from t.{forgotten.what}'")

    def obstacles(self) -> str:
        """What is known to stand in the way of an end; empty when nothing is."""
        return "; ".join(self._obstacles())

    # -- inside --

    def _is_idle(self) -> bool:
        return bool(self._gate.machine.is_idle) and not self._gate.arrived

    def _check_handle(self, call: str, r: object) -> None:
        """Raise BadCall for what is no handle of this very script."""
        if not isinstance(r, RequestHandle):
            raise BadCall(f"{call} takes a handle, the value of t.start_req(...), got {r!r}")
        if not any(r is known for known in self._handles):
            raise BadCall(f"{call} takes a handle of this script, got {r!r} of another one")

    def _wait(self, what: str, reached: Callable[[], bool], max_steps: int, goal: str) -> Wait:
        check_count(f"{what.partition('(')[0]}()", "max_steps", max_steps)
        wait = Wait(what, self._until(reached, max_steps, goal))
        self._made.append(wait)
        return wait

    def _until(self, reached: Callable[[], bool], max_steps: int, goal: str) -> Steps:
        first_step = self._gate.step
        for _ in range(max_steps):
            if reached():
                return
            yield
        if not reached() and self._gate.step == first_step:
            raise BudgetSpent(f"{goal}, because no step ran between its questions; {self.state}; {HAND_ON}")
        if not reached():
            why = self.obstacles()
            why = f"because {why}" if why else "and nothing is known to stand in its way; max_steps=N allows more"
            raise BudgetSpent(f"{goal} within {max_steps} steps; {self.state}; {why}")

    def _obstacles(self) -> Iterator[str]:
        gate = self._gate
        if gate.is_holding:
            held = plural(len(gate.due_steps), "batch")
            yield f"results are held, {held} in flight may wait for t.release_results()"
        if gate.oracle.paused is not None:
            yield f"generation is paused ({gate.oracle.paused.name}), until t.continue_generation()"
        last = gate.records[-1].stepped if gate.records else None
        if last is not None and last.deadline is not None:
            yield (
                f"a step is due at {last.deadline:g} s, it is {gate.clock.now():g} s now, and only "
                "t.clock.advance(seconds) moves that"
            )
        if self._is_idle():
            yield "the scheduler is idle, so no further step can change anything"
