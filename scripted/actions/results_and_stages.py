"""What happens to the pipeline and to time: results that are held, stages that fail, stall or die, virtual seconds.

None of it is a client's message. How results and time came is read from the steps of a recording, not from one event.
"""

from __future__ import annotations

from typing import ClassVar, Final

from engine.messages import Completion, PipelineFailed
from scripted.actions.action import Action, EventReader, SearchedEngine
from scripted.actions.shell_words import ShellWord, alone, numbered, seconds
from scripted.actions.verb import Verb
from scripted.phrases import printable

__all__ = ["AdvanceClock", "FailStage", "HoldResults", "KillStage", "ReleaseResults", "ResumeStage", "StallStage"]

_STAGE: Final = "stage-"


def _read_advance(words: list[str]) -> Verb:
    return Verb("clock.advance", seconds("advance", words))


class HoldResults(Action, frozen=True, kw_only=True, omit_defaults=True, tag="hold"):
    """Results stay away from this step on."""

    examples: ClassVar = ("hold",)
    is_extra: ClassVar[bool] = True
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = (alone("hold", "keep results back", "hold_results"),)

    def apply(self, engine: SearchedEngine) -> None:
        engine.hold_results()

    def reaches(self, engine: SearchedEngine) -> bool:
        """There may be results."""
        return not engine.is_settled

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("hold_results"),)


class ReleaseResults(Action, frozen=True, kw_only=True, omit_defaults=True, tag="release"):
    """``count`` held results may come, oldest first; without a count all of them, and nothing is held any more."""

    count: int | None = None

    examples: ClassVar = ("release", "release count=2")
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = (
        numbered("release", "[N]", "let the oldest N held results, or all, through", "release_results"),
    )

    def apply(self, engine: SearchedEngine) -> None:
        engine.release_results(self.count)

    def reaches(self, engine: SearchedEngine) -> bool:
        return engine.is_holding

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("release_results") if self.count is None else Verb("release_results", self.count),)


class FailStage(Action, frozen=True, kw_only=True, omit_defaults=True, tag="fail"):
    """The next microbatch fails in this stage; the engine goes on."""

    stage: int = 0

    examples: ClassVar = ("fail",)
    event: ClassVar = Completion
    is_extra: ClassVar[bool] = True
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = (numbered("fail", "N", "fail a stage's next microbatch", "fail_next_step"),)

    def apply(self, engine: SearchedEngine) -> None:
        """Fail the stage's next microbatch."""
        engine.fail_next_step(self.stage % engine.limits.pp_size)

    def reaches(self, engine: SearchedEngine) -> bool:
        """There may be a microbatch."""
        return not engine.is_settled

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("fail_next_step", self.stage),)

    @classmethod
    def read_back(cls, event: Completion, reader: EventReader) -> FailStage | None:
        """A result that is an error; it does not name the stage."""
        return None if event.error is None else cls()

    @classmethod
    def words(cls, event: Completion) -> str:
        return f"result #{event.microbatch_id} FAILED: {printable(event.error or '')}"


class KillStage(Action, frozen=True, kw_only=True, omit_defaults=True, tag="kill"):
    """A stage dies; nothing in flight comes back."""

    stage: int = 0

    examples: ClassVar = ("kill", "kill stage=1")
    event: ClassVar = PipelineFailed
    is_extra: ClassVar[bool] = True
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = (numbered("kill", "N", "kill a stage", "kill_stage"),)

    def apply(self, engine: SearchedEngine) -> None:
        engine.kill_stage(self.stage % engine.limits.pp_size)

    def reaches(self, engine: SearchedEngine) -> bool:
        """Something can be lost."""
        return not engine.is_settled

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("kill_stage", self.stage),)

    @classmethod
    def read_back(cls, event: PipelineFailed, reader: EventReader) -> KillStage | None:
        """The stage that died, if it was one."""
        stage = event.process.removeprefix(_STAGE)
        return cls(stage=int(stage)) if event.process.startswith(_STAGE) else None

    @classmethod
    def words(cls, event: PipelineFailed) -> str:
        """Which stage died, and of what."""
        return f"{printable(event.process)} DIED: {printable(event.cause)}"


class StallStage(Action, frozen=True, kw_only=True, omit_defaults=True, tag="stall"):
    """A stage stops: nothing completes until it is resumed. A search adds held results instead, which are the same."""

    stage: int = 0

    examples: ClassVar = ("stall stage=1",)
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = (numbered("stall", "N", "stop a stage", "stall_stage"),)

    def apply(self, engine: SearchedEngine) -> None:
        engine.stall_stage(self.stage % engine.limits.pp_size)

    def reaches(self, engine: SearchedEngine) -> bool:
        """There may be results."""
        return not engine.is_settled

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("stall_stage", self.stage),)


class ResumeStage(Action, frozen=True, kw_only=True, omit_defaults=True, tag="resume"):
    """A stopped stage goes on."""

    stage: int = 0

    examples: ClassVar = ("resume stage=1",)
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = (numbered("resume", "N", "let a stopped stage go on", "resume_stage"),)

    def apply(self, engine: SearchedEngine) -> None:
        """Let it go on."""
        engine.resume_stage(self.stage % engine.limits.pp_size)

    def reaches(self, engine: SearchedEngine) -> bool:
        return self.stage % engine.limits.pp_size in engine.stalled_stages

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("resume_stage", self.stage),)


class AdvanceClock(Action, frozen=True, kw_only=True, omit_defaults=True, tag="advance"):
    """Virtual time moves."""

    seconds: float

    examples: ClassVar = ("advance seconds=1.5",)
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = (ShellWord("advance", "SECONDS", "move virtual time", _read_advance),)

    def apply(self, engine: SearchedEngine) -> None:
        engine.clock.advance(self.seconds)

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("clock.advance", self.seconds),)
