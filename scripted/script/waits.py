"""Waiting in scripts: run steps until something holds, within a budget of steps.

Every wait is used as ``yield from``. A spent budget raises at the script's line with the engine's state in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from scripted.core.phrases import nearest
from scripted.errors import BadCall, BudgetSpent
from scripted.rig.handle import RequestHandle
from scripted.rig.rig import Rig
from scripted.script.asked import check_count, check_predicate, several, truth_of
from scripted.script.causes import causes_of
from scripted.script.queries import Queries
from scripted.script.wait import DEFAULT_BUDGET_STEPS, HAND_ON, Steps, Wait

__all__ = ["DEFAULT_BUDGET_STEPS", "STAGES", "Steps", "Wait", "Waits"]

STAGES: Final = ("first_chunk", "last_chunk", "first_decode", "mid_decode", "last_decode")


class Waits(Queries):
    """The waits of ``t``."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self._made: list[Wait] = []

    def run_until(self, predicate: Callable[[], object], max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until ``predicate()`` is true; none at all if it is true already."""
        check_predicate(predicate)
        check_count("run_until()", "max_steps", max_steps)
        return self._wait(
            "run_until(...)",
            self._until(lambda: truth_of(predicate(), "the predicate's answer"), max_steps, "the predicate never held"),
        )

    def run_until_finished(self, r: RequestHandle, max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until the request has ended, for whatever reason."""
        self._check_wait("run_until_finished()", r, max_steps)
        return self._wait(
            f"run_until_finished({r.rid})", self._until(lambda: r.finished, max_steps, f"{r.rid} did not finish")
        )

    def run_until_all_finished(self, rs: Iterable[RequestHandle], max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until every one of these requests has ended."""
        handles = several(rs, RequestHandle)
        for r in handles:
            self._check_wait("run_until_all_finished()", r, max_steps)
        return self._wait(
            "run_until_all_finished(...)",
            self._until(lambda: all(r.finished for r in handles), max_steps, f"not all of {handles} finished"),
        )

    def run_until_idle(self, max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until the engine is fully idle; what has just arrived is work that is still to be done."""
        check_count("run_until_idle()", "max_steps", max_steps)
        return self._wait(
            "run_until_idle()",
            self._until(lambda: self.is_fully_idle, max_steps, "the engine did not get idle"),
        )

    def advance_to_nth_chunk(self, r: RequestHandle, n: int, max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until ``n`` parts of the request's prompt were launched."""
        self._check_wait("advance_to_nth_chunk()", r, max_steps)
        check_count("advance_to_nth_chunk()", "n", n)
        goal = f"{r.rid} never got to chunk {n}"
        return self._wait(
            f"advance_to_nth_chunk({r.rid}, {n})",
            self._live_until(r, lambda: r.chunks_done >= n, max_steps, goal, needs_chunks=True),
        )

    def advance_to_decode_step(self, r: RequestHandle, n: int, max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until the scheduler has emitted ``n`` tokens of the request."""
        self._check_wait("advance_to_decode_step()", r, max_steps)
        check_count("advance_to_decode_step()", "n", n)
        goal = f"{r.rid} never got to {n} tokens"
        return self._wait(
            f"advance_to_decode_step({r.rid}, {n})",
            self._live_until(r, lambda: len(r.output_ids) >= n, max_steps, goal),
        )

    def advance_to_stage(self, r: RequestHandle, stage: str, max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until the request is at a named point of its life.

        ``first_chunk``: a part of its prompt was launched; ``last_chunk``: all of it was launched, no token is there
        yet; ``first_decode``, ``mid_decode``, ``last_decode``: one, half and all but one of its tokens were emitted.
        """
        self._check_wait("advance_to_stage()", r, max_steps)
        reached: dict[str, Callable[[], bool]] = {
            "first_chunk": lambda: r.chunks_done >= 1,
            "last_chunk": lambda: r.req is not None and r.req.lease is not None and not r.is_chunking,
            "first_decode": lambda: len(r.output_ids) >= 1,
            "mid_decode": lambda: len(r.output_ids) >= max(1, r.sampling.max_new_tokens // 2),
            "last_decode": lambda: len(r.output_ids) >= max(1, r.sampling.max_new_tokens - 1),
        }
        if not isinstance(stage, str) or stage not in reached:
            guess = nearest(str(stage), STAGES)
            raise BadCall(f"advance_to_stage() takes one of {', '.join(STAGES)}, got {stage!r}{guess}")
        steps = self._live_until(
            r, reached[stage], max_steps, f"{r.rid} never got to {stage}", needs_chunks=stage == "first_chunk"
        )
        return self._wait(f"advance_to_stage({r.rid}, {stage})", steps)

    def check_waits(self) -> None:
        """Raise BadCall for a wait that was made and never run: without ``yield from`` it does nothing at all."""
        forgotten = next((wait for wait in self._made if not wait.used), None)
        self._made.clear()
        if forgotten is not None:
            raise BadCall(f"t.{forgotten.what} did nothing: write 'yield from t.{forgotten.what}'")

    # -- inside --

    def _check_handle(self, call: str, r: object) -> None:
        """Raise BadCall for what is no handle of this very script."""
        if not isinstance(r, RequestHandle):
            raise BadCall(f"{call} takes a handle, the value of t.start_req(...), got {r!r}")
        if not any(r is known for known in self._rig.handles.all):
            raise BadCall(f"{call} takes a handle of this script, got {r!r} of another one")

    def _check_wait(self, call: str, r: object, max_steps: object) -> None:
        self._check_handle(call, r)
        check_count(call, "max_steps", max_steps)

    def _spent(self, goal: str, max_steps: int, first_step: int) -> BudgetSpent:
        """What was waited for, what stands in its way, the state, and how to allow more."""
        if self.scheduler.step_number == first_step:
            return BudgetSpent(f"{goal}, because no step ran between its questions; {self.state}; {HAND_ON}")
        causes = "; ".join(causes_of(self._rig))
        why = f"because {causes}" if causes else "and nothing is known to stand in its way; max_steps=N allows more"
        return BudgetSpent(f"{goal} within {max_steps} steps; {self.state}; {why}")

    def _wait(self, what: str, generator: Steps) -> Wait:
        wait = Wait(what, generator)
        self._made.append(wait)
        return wait

    def _until(self, predicate: Callable[[], object], max_steps: int, goal: str) -> Steps:
        first_step = self.scheduler.step_number
        for _ in range(max_steps):
            if predicate():
                return
            yield
        if not predicate():
            raise self._spent(goal, max_steps, first_step)

    def _live_until(
        self,
        r: RequestHandle,
        reached: Callable[[], bool],
        max_steps: int,
        goal: str,
        *,
        needs_chunks: bool = False,
    ) -> Steps:
        first_step = self.scheduler.step_number
        for _ in range(max_steps):
            if reached():
                return
            if r.finished:
                whole = needs_chunks and not r.chunks_done
                why = ", and a prompt that is not split counts no chunks" if whole else ""
                raise BudgetSpent(f"{goal}: it ended before ({r.finish_reason}){why}; {self.state}")
            yield
        if not reached():
            raise self._spent(goal, max_steps, first_step)
