"""Actions on the pipeline and on time: hold results; fail, stall or kill stages; advance the clock.

None of them is a client's message. A recording has results and time in its steps, not as single events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Final

from engine.core.messages import Completion, PipelineFailed
from scripted.core.action import Action, Culprit, RunLike, SearchBase, verb
from scripted.core.common_actions import AdvanceClock, HoldResults, ReleaseResults
from scripted.core.errors import BadCall
from scripted.core.phrases import printable
from scripted.sdk.action_bases import BatchFailure
from scripted_lockstep.actions.action import EngineAction, EventReader, register

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

_STAGE: Final = "stage-"


register(HoldResults, ReleaseResults)


class FailStage(EngineAction, BatchFailure, frozen=True, kw_only=True, omit_defaults=True, tag="fail"):
    """Makes the next microbatch fail on this stage; the engine continues."""

    stage: int = 0

    event: ClassVar = Completion

    @staticmethod
    @verb
    def fail_next_step(t: BaseContext, i: int) -> None:
        """Make the next microbatch that a stage computes fail; the engine continues."""
        t.check_live_stage("fail_next_step", i)
        t.run.act(FailStage(stage=i))
        t.note_failure()

    def apply(self, run: RunLike) -> None:
        run.device.fail_next_step(self.stage % run.machine.limits.pp_size)

    @classmethod
    def read_back(cls, event: Completion, reader: EventReader) -> FailStage | None:
        """Read the action back from a failed result, which does not have the stage."""
        return None if event.error is None else cls()

    @classmethod
    def words(cls, event: Completion) -> str:
        return f"result #{event.microbatch_id} FAILED: {printable(event.error or '')}"


class KillStage(EngineAction, frozen=True, kw_only=True, omit_defaults=True, tag="kill"):
    """Kills a stage; nothing in flight comes back, except with ``late`` one result that was on its way and follows
    the death. Once that stage is dead, kills the next one.
    """

    stage: int = 0
    late: bool = False

    examples: ClassVar = ("kill", "kill stage=1")
    needs_open: ClassVar[bool] = True
    event: ClassVar = PipelineFailed
    is_fatal: ClassVar[bool] = True
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = {"kill": "kill_stage"}
    caused_by: ClassVar[Culprit] = Culprit.HARDWARE

    @staticmethod
    @verb
    def kill_stage(t: BaseContext, i: int) -> None:
        """Kill a stage process: nothing in flight comes back. The server is not reused after this script."""
        t.check_live_stage("kill_stage", i)
        if t.scheduler.limits.pp_size == 1:
            raise BadCall("kill_stage() needs stages in processes of their own, got pp_size=1; use fail_next_step(0)")
        t.run.kill_stage(i)

    def apply(self, run: RunLike) -> None:
        first, stages = run.machine.scheduler.failure, run.machine.limits.pp_size
        stage = self.stage % stages
        if first is not None and first.process == f"{_STAGE}{stage}":
            stage = (stage + 1) % stages  # The stages of a server end one after another, each with its own news.
        on_its_way = run.device.next_completion(0) if self.late and first is None else None
        run.device.kill_stage(stage)
        run.lose_results()
        run.give(run.device.next_completion(0))
        if on_its_way is not None:
            run.give(on_its_way)

    def is_distinct(self, run: RunLike) -> bool:
        """Return whether a result is on its way, if it is to come late."""
        return not self.late or len(run.results) > 0

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        del base
        return cls(), cls(late=True)

    @classmethod
    def read_back(cls, event: PipelineFailed, reader: EventReader) -> KillStage | None:
        stage = event.process.removeprefix(_STAGE)
        return cls(stage=int(stage)) if event.process.startswith(_STAGE) else None

    @classmethod
    def words(cls, event: PipelineFailed) -> str:
        return f"{printable(event.process)} DIED: {printable(event.cause)}"


class StallStage(EngineAction, frozen=True, kw_only=True, omit_defaults=True, tag="stall"):
    """Stalls a stage: nothing completes until it is resumed. A search holds results instead, which has the same
    effect.
    """

    stage: int = 0

    examples: ClassVar = ("stall stage=1",)
    needs_open: ClassVar[bool] = True
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = {"stall": "stall_stage"}
    caused_by: ClassVar[Culprit] = Culprit.HARDWARE

    @staticmethod
    @verb
    def stall_stage(t: BaseContext, i: int) -> None:
        """Stop a stage; nothing completes until it is resumed."""
        t.check_live_stage("stall_stage", i)
        t.run.world.stall_stage(i)
        t.run.act(StallStage(stage=i))

    def apply(self, run: RunLike) -> None:
        run.stalled.add(self.stage % run.machine.limits.pp_size)


class ResumeStage(EngineAction, frozen=True, kw_only=True, omit_defaults=True, tag="resume"):
    stage: int = 0

    examples: ClassVar = ("resume stage=1",)
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = {"resume": "resume_stage"}

    @staticmethod
    @verb
    def resume_stage(t: BaseContext, i: int) -> None:
        """End a stall."""
        t.check_stage(i)
        if i not in t.run.stalled:
            t.count_ineffective("resumes of stages that ran")
        if t.run.failure is None and not t.run.is_dead:
            t.run.world.resume_stage(i)
        t.run.act(ResumeStage(stage=i))

    def apply(self, run: RunLike) -> None:
        run.stalled.discard(self.stage % run.machine.limits.pp_size)

    def reaches(self, run: RunLike) -> bool:
        return self.stage % run.machine.limits.pp_size in run.stalled


register(AdvanceClock)
