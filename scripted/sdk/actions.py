"""What may happen to a scheduler of the usual shape: requests, aborts, flushes, pauses, batches that fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Final

from scripted.core.action import Action, RunLike, SearchBase, smaller_requests
from scripted.core.common_actions import AdvanceClock, HoldResults, ReleaseResults
from scripted.core.prompts import prompt_ids
from scripted.core.verb import Verb, variable_of
from scripted.sdk.capabilities import Capabilities, Limits
from scripted.sdk.messages import Abort, Add, FlushCache, Pause, Resume

__all__ = ["AbortRequest", "FailBatch", "Flush", "PauseAll", "ResumeAll", "StartRequest", "actions_of", "begin_request"]

_EXTRA_RID: Final = "extra"
_PRESSURE_RID: Final = "pressure"
# Other prompts of a workload have small seeds; a prompt that fills the pool shares no prefix with them.
_PRESSURE_SEED: Final = 97


class StartRequest(Action, frozen=True, kw_only=True, omit_defaults=True, tag="start"):
    """A request of ``prompt`` tokens; equal ``seed`` gives equal prefixes, ``new`` is its max_new_tokens.

    ``stop`` is a token that ends it. ``shared`` tokens are those of ``seed``, unless it is 0; the others of ``tail``.
    """

    rid: str
    prompt: int
    new: int = 2
    seed: int = 0
    priority: int = 0
    stop: int | None = None
    shared: int = 0
    tail: int = 0

    is_start: ClassVar[bool] = True
    examples: ClassVar = ("start b prompt=20 new=3", "start b prompt=40 seed=1 priority=1 stop=7")

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt."""
        return prompt_ids(self.prompt, self.seed, self.shared, self.tail)

    def apply(self, run: RunLike) -> None:
        """The next step sees it, unless one of this name is alive."""
        if not run.is_live(self.rid):
            stops = () if self.stop is None else (self.stop,)
            begin_request(run, self.rid, self.prompt_ids, self.new, stops, self.priority)

    def verbs(self) -> tuple[Verb, ...]:
        """``t.start_req(rid="a", prompt_len=20, prompt_seed=0, max_new_tokens=2)``."""
        more: dict[str, Any] = {"priority": self.priority} if self.priority else {}
        more |= {"stop_token_ids": [self.stop]} if self.stop is not None else {}
        more |= {"shared_len": self.shared, "tail_seed": self.tail} if self.shared else {}
        return (
            Verb(
                "start_req",
                rid=self.rid,
                prompt_len=self.prompt,
                prompt_seed=self.seed,
                max_new_tokens=self.new,
                **more,
            ),
        )

    @property
    def variable(self) -> str:
        """What a script calls its handle."""
        return variable_of(self.rid)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """A twin of each prompt, more urgent where that matters; half of all blocks."""
        limits, can = base.limits
        starts = [start for start in base.starts if isinstance(start, cls)]
        urgent = max((start.priority for start in starts), default=0) + 1 if can.priority else 0
        for prompt, seed in dict.fromkeys((start.prompt, start.seed) for start in starts):
            yield cls(rid=_EXTRA_RID, prompt=prompt, seed=seed, priority=urgent)
        yield cls(rid=_PRESSURE_RID, prompt=_half_of(limits, can), seed=_PRESSURE_SEED, new=3)

    def smaller(self) -> Iterator[Action]:
        """Shorter prompts and outputs, no priority, smaller seeds."""
        return smaller_requests(self)


def begin_request(
    run: RunLike, rid: str, prompt: tuple[int, ...], new: int, stops: tuple[int, ...], priority: int
) -> None:
    """The next step sees a request of these tokens; no other of its rid is alive."""
    message = Add(
        rid=rid,
        prompt_ids=prompt,
        max_new_tokens=new,
        stop_token_ids=stops,
        priority=priority,
        arrival=run.oracle.arrive(rid),
    )
    run.device.begin(message)
    run.give(message)


def _half_of(limits: Limits, can: Capabilities) -> int:
    tokens = min(limits.pool_tokens // 2, limits.context_tokens - 3)
    return max(1, tokens if can.chunked else min(tokens, limits.batch_tokens))


class AbortRequest(Action, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """A client gives a request up."""

    rid: str

    examples: ClassVar = ("abort a",)

    @property
    def target_rid(self) -> str:
        return self.rid

    def apply(self, run: RunLike) -> None:
        run.give(Abort(rid=self.rid))

    def reaches(self, run: RunLike) -> bool:
        return run.is_live(self.rid)

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("abort", self.rid),)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Of each request."""
        return [cls(rid=rid) for rid in base.rids]


class Flush(Action, frozen=True, kw_only=True, omit_defaults=True, tag="flush"):
    """The prefix cache is emptied, if it can be; with ``force`` what runs is preempted for it."""

    force: bool = False

    examples: ClassVar = ("flush", "flush force=True")

    @property
    def kind(self) -> str:
        """A forced one is a kind of its own."""
        return "flush-forced" if self.force else "flush"

    def apply(self, run: RunLike) -> None:
        run.give(FlushCache(call_id=run.new_call_id(), force=self.force))

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("flush_cache", force=True) if self.force else Verb("flush_cache"),)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Both, where both are declared."""
        return (cls(), cls(force=True)) if base.limits[1].forced_flush else (cls(),)

    def smaller(self) -> Iterator[Action]:
        if self.force:
            yield Flush()


class PauseAll(Action, frozen=True, kw_only=True, omit_defaults=True, tag="pause"):
    """Generation is paused in one of the modes that the adapter declares."""

    mode: str

    examples: ClassVar = ("pause mode=keep",)

    @property
    def kind(self) -> str:
        """Each mode is a kind."""
        return f"pause-{self.mode}"

    def apply(self, run: RunLike) -> None:
        run.give(Pause(call_id=run.new_call_id(), mode=self.mode))

    def reaches(self, run: RunLike) -> bool:
        """There is something to pause."""
        return not run.is_settled

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("pause_generation", self.mode),)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """In each mode."""
        return [cls(mode=mode.name) for mode in base.limits[1].pause_modes]


class ResumeAll(Action, frozen=True, kw_only=True, omit_defaults=True, tag="continue"):
    """A pause ends."""

    examples: ClassVar = ("continue",)

    def apply(self, run: RunLike) -> None:
        run.give(Resume(call_id=run.new_call_id()))

    def reaches(self, run: RunLike) -> bool:
        return run.oracle.paused is not None

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("continue_generation"),)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """One, where something pauses."""
        return (cls(),) if PauseAll in base.kinds else ()


class FailBatch(Action, frozen=True, kw_only=True, omit_defaults=True, tag="fail"):
    """The next batch fails; the engine goes on."""

    examples: ClassVar = ("fail",)
    is_extra: ClassVar[bool] = True
    is_control: ClassVar[bool] = True

    def apply(self, run: RunLike) -> None:
        run.device.fail_next_batch()

    def reaches(self, run: RunLike) -> bool:
        """There may be a batch."""
        return not run.is_settled

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("fail_next_batch"),)


def actions_of(can: Capabilities) -> tuple[type[Action], ...]:
    """The actions that such a scheduler knows, in the order in which a search tries them."""
    known: list[type[Action]] = [Flush] if can.flush else []
    known += [PauseAll, ResumeAll] if can.pause_modes else []
    known += [HoldResults, ReleaseResults, AdvanceClock]
    known += [FailBatch] if can.fail else []
    return (*known, AbortRequest, StartRequest)
