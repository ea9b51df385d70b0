"""Mutants of what clients are told when a stage dies."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from typing import Any

from engine.messages import FinishReason, PipelineFailed
from engine.scheduler import Request, Scheduler
from scripted.core.mutant import GALLERY_TESTS, Mutant

__all__ = ["FAULTS"]

_on_pipeline_failed = Scheduler._on_pipeline_failed
_end = Scheduler._end


def _blame_the_last_stage(scheduler: Scheduler, failed: PipelineFailed) -> None:
    last = f"stage-{scheduler.limits.pp_size - 1}"
    _on_pipeline_failed(scheduler, PipelineFailed(process=last, cause=failed.cause))


def _end_as_if_it_had_stopped(
    scheduler: Scheduler, request: Request, reason: FinishReason, *, error: str | None = None, **details: Any
) -> None:
    died = scheduler.failure is not None and error is not None
    _end(scheduler, request, FinishReason.STOP if died else reason, error=None if died else error, **details)


FAULTS = (
    Mutant(
        name="death-blames-another-stage",
        origin="G23: prime-rl pull request 2843",
        bug="the error names the process that noticed, not the one that died",
        signature="does not name the stage that was killed",
        test=f"{GALLERY_TESTS}/test_g23_stage_dies.py::test_every_client_is_told_which_stage_died",
        owner=Scheduler,
        attribute="_on_pipeline_failed",
        replacement=_blame_the_last_stage,
    ),
    Mutant(
        name="death-looks-like-a-normal-end",
        origin="G28: roseinfer",
        bug="the streams of an engine that died end as if the model had stopped",
        signature="ended as if nothing had happened",
        test=f"{GALLERY_TESTS}/test_g28_death_is_an_error.py::test_a_death_ends_streams_with_an_error",
        owner=Scheduler,
        attribute="_end",
        replacement=_end_as_if_it_had_stopped,
    ),
)
