"""Mutants of what clients are told when a stage dies."""

from __future__ import annotations

from typing import Final

from scripted.core.mutant import GALLERY_TESTS, Mutant

__all__ = ["FAULTS"]


FAULTS: Final = (
    Mutant(
        name="death-blames-another-stage",
        origin="G23: prime-rl pull request 2843",
        bug="the error names the process that noticed, not the one that died",
        signature="does not name the stage that was killed",
        test=f"{GALLERY_TESTS}/test_g23_stage_dies.py::test_every_client_is_told_which_stage_died",
        target="engine.scheduler.scheduler:Scheduler._on_pipeline_failed",
        cut="self.failure = self.failure or failed",
        becomes=(
            'failed = PipelineFailed(process=f"stage-{self.limits.pp_size - 1}", cause=failed.cause)\n'
            "    self.failure = self.failure or failed"
        ),
    ),
    Mutant(
        name="death-looks-like-a-normal-end",
        origin="G28: roseinfer",
        bug="the streams of an engine that died end as if the model had stopped",
        signature="ended as if nothing had happened",
        test=f"{GALLERY_TESTS}/test_g28_death_is_an_error.py::test_a_death_ends_streams_with_an_error",
        target="engine.scheduler.scheduler:Scheduler._on_pipeline_failed",
        cut="self._end(request, FinishReason.ERROR, error=str(failed))",
        becomes="self._end(request, FinishReason.STOP)",
    ),
)
