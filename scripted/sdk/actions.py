"""Actions on a scheduler of the usual shape: requests, aborts, flushes, pauses, batches that fail."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from scripted.core.action import Action, RunLike, SearchBase, verb
from scripted.core.common_actions import AdvanceClock, HoldResults, ReleaseResults
from scripted.core.errors import BadCall
from scripted.core.phrases import nearest, short_rid
from scripted.core.prompts import prompt_ids as prompt_ids_of
from scripted.core.verb import Verb
from scripted.script.clients import Call
from scripted.script.static_checks import check_count
from scripted.sdk.action_bases import (
    EXTRA_RID,
    PRESSURE_RID,
    PRESSURE_SEED,
    TURN_RID,
    AdministrativeCall,
    BatchFailure,
    PauseCall,
    RequestStart,
    ResumeCall,
    check_one_prompt,
    earlier_turns,
    made_prompt,
    priority_above,
    token_ids,
)
from scripted.sdk.capabilities import Capabilities, Limits
from scripted.sdk.images import Image, images_in, with_images
from scripted.sdk.messages import Abort, Add, BatchFailed, FlushCache, Pause, Resume, Sleep, Wake

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

# Fields of a request that have the same name in schedules and scripts and ask for nothing if they are 0.
_NUMBERS: Final = ("priority", "lora", "grammar", "session", "images")
_GRAMMARS: Final = (0, 1, -1)
# Arguments of start_req that matter only to an engine with a model, each with the value that asks for nothing.
_NEUTRAL: Final[Mapping[str, object]] = {
    "ignore_eos": False,
    "stream": True,
    "temperature": 0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0,
    "seed": None,
    "stop": (),
    "min_new_tokens": 0,
    "return_logprob": False,
    "top_logprobs_num": 0,
}
# The simulated device has no end-of-sequence token, and every answer is a stream.
_WITHOUT_EFFECT: Final = ("ignore_eos", "stream", "seed")


class SubmitRequest(RequestStart, frozen=True, kw_only=True, omit_defaults=True, tag="start"):
    """A client sends a request.

    ``lora`` is the number of the LoRA that computes it, 0 for none. ``grammar`` 1 masks its tokens, -1 fails to
    compile. With ``session`` 1 the request keeps its KV for more input. Its ``images`` are numbered from ``seed`` plus
    ``tail``.
    """

    lora: int = 0
    grammar: int = 0
    session: int = 0
    images: int = 0

    examples: ClassVar = (
        "start b prompt=20 new=3",
        "start b prompt=40 seed=1 priority=1 stop=7",
        "start b after=a cut=3 prompt=5",
        "start b prompt=20 parts=1:8,2:4:8",
    )
    event: ClassVar = Add

    @staticmethod
    @verb
    def start_req(
        t: BaseContext,
        *,
        prompt_len: int | None = None,
        prompt_ids: Sequence[int] | None = None,
        text: str | None = None,
        prompt_seed: int = 0,
        shared_len: int = 0,
        tail_seed: int = 0,
        after: Any = None,
        cut: int | None = None,
        max_new_tokens: int = 8,
        rid: str | None = None,
        stop_token_ids: Sequence[int] = (),
        priority: int = 0,
        lora: int = 0,
        grammar: int = 0,
        session: int = 0,
        images: int = 0,
        **others: object,
    ) -> Any:
        """Start a request with exactly one of ``prompt_len``, ``prompt_ids`` and ``text``, whose bytes are its tokens.

        ``prompt_len`` tokens are made from ``prompt_seed``; equal seeds give equal prefixes. With ``shared_len`` only
        that many come from ``prompt_seed``, and the rest from ``tail_seed``. ``after`` is the handle of a request that
        this one continues: its prompt begins with that request's prompt and its output so far, or the first ``cut``
        tokens of the output, and needs no tokens of its own. ``lora`` is the number of the LoRA that computes the
        request; ``grammar=1`` masks its tokens, and a grammar of -1 fails to compile. Its prompt has ``images`` images,
        numbered from ``prompt_seed`` plus ``tail_seed``. A rid is free again once its request has ended. Any other
        argument of ``start_req`` is accepted only at the value that changes nothing.
        """
        _check_neutral(t, others)
        asked = {"priority": priority, "lora": lora, "grammar": grammar, "session": session, "images": images}
        _check_declared(t, asked)
        begun = earlier_turns(t, after, cut)
        own = _prompt_of(prompt_len, prompt_ids, text, prompt_seed, shared_len, tail_seed, continues=after is not None)
        prompt = (*begun, *own)
        check_count("start_req()", "max_new_tokens", max_new_tokens)
        stops = token_ids("stop_token_ids", stop_token_ids)
        name = _free_rid(t, rid)
        more: dict[str, Any] = {"stop_token_ids": stops, "priority": priority, "lora": lora, "grammar": grammar}
        more["session"] = len(prompt) if session else 0
        shown = () if after is None else after.images
        more["images"] = (*shown, *images_in(len(own), images, prompt_seed + tail_seed, behind=len(begun)))
        return t.run.start(message_of(t.run, name, prompt, max_new_tokens, **more))

    def apply(self, run: RunLike) -> None:
        """Give the request to the next step, unless a live request has its rid."""
        if not run.is_live(self.rid):
            prompt = self.whole_prompt(run)
            more: dict[str, Any] = {"stop_token_ids": self.stop_token_ids}
            more |= {"priority": self.priority, "lora": self.lora, "grammar": self.grammar}
            more["session"] = len(prompt) if self.session and not self.grammar else 0
            more["images"] = self._all_images(run, len(prompt))
            message = message_of(run, self.rid, prompt, self.new, **more)
            run.device.begin(message)
            run.give(message)

    def _all_images(self, run: RunLike, prompt: int) -> tuple[Image, ...]:
        """Return the images of this request and of its earlier turn; the whole prompt has ``prompt`` tokens."""
        # A script that passes tokens passes no seeds.
        first = 0 if self.parts else self.seed + self.tail
        own = images_in(self.prompt, self.images, first, behind=max(0, prompt - self.prompt))
        before = run.request_so_far(self.after) if self.after else None
        return own if before is None or not isinstance(before.message, Add) else (*before.message.images, *own)

    def verbs(self) -> tuple[Verb, ...]:
        given = msgspec.structs.asdict(self)
        more: dict[str, Any] = {**self.turn_arguments, **{name: given[name] for name in _NUMBERS if given[name]}}
        more |= {"stop_token_ids": [self.stop]} if self.stop is not None else {}
        own: dict[str, Any] = {"prompt_len": self.prompt, "prompt_seed": self.seed} if self.prompt else {}
        if self.parts and self.prompt:
            own = {"prompt_ids": self.prompt_code}
        elif self.shared or self.tail:
            more |= {"shared_len": self.shared} if self.shared else {}
            more |= {"tail_seed": self.tail}
        return (Verb("start_req", rid=self.rid, **own, max_new_tokens=self.new, **more),)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Yield a twin of each request, a prompt of half the blocks, and a further turn of the first request.

        If there are priorities, the twins have a higher one.
        """
        limits, can = base.limits
        starts = cls.among(base.starts)
        urgent = priority_above(starts) if can.priority else 0
        for twin in dict.fromkeys(cls(rid=EXTRA_RID, priority=urgent, **_content_of(start)) for start in starts):
            yield twin
            if twin.lora:
                yield msgspec.structs.replace(twin, lora=twin.lora % can.loras + 1)
            if twin.images:
                # The same tokens around other images.
                yield msgspec.structs.replace(twin, tail=1)
        yield cls(rid=PRESSURE_RID, prompt=_half_of(limits, can), seed=PRESSURE_SEED, new=3)
        yield from (cls(rid=TURN_RID, prompt=1, after=start.rid, lora=start.lora) for start in starts[:1])

    @classmethod
    def read_back(cls, event: Add, reader: Any) -> SubmitRequest:
        """Return a request as long as the recorded one became, without stop tokens: a schedule has other tokens."""
        recipe = reader.recipe_of(event.prompt_ids)
        return cls(
            rid=reader.name_of(event.rid),
            **cls.prompt_fields(recipe, len(event.prompt_ids)),
            new=max(1, reader.length_of(event.rid, event.max_new_tokens)),
            priority=event.priority,
            lora=event.lora,
            grammar=event.grammar,
            session=min(event.session, 1),
            images=sum(image.start >= recipe.begun for image in event.images),
        )

    @classmethod
    def words(cls, event: Add) -> str:
        given = msgspec.structs.asdict(event)
        said = {name: given[name] for name in _NUMBERS if name != "images"}
        said["images"] = len(event.images)
        more = "".join(f", {name} {value}" for name, value in said.items() if value)
        return f"start {short_rid(event.rid)} ({len(event.prompt_ids)} + {event.max_new_tokens} tokens{more})"


def message_of(run: RunLike, rid: str, prompt: tuple[int, ...], new: int, **more: Any) -> Add:
    """Make the message of a request whose rid no other live request has."""
    prompt = with_images(prompt, more.get("images", ()))
    return Add(rid=rid, prompt_ids=prompt, max_new_tokens=new, arrival=run.oracle.arrive(rid), **more)


def _content_of(start: SubmitRequest) -> Mapping[str, Any]:
    """The fields that a twin of this request shares."""
    # A further turn may add no tokens; a prompt has at least one.
    fields = {**msgspec.structs.asdict(start), "prompt": max(1, start.prompt)}
    return {name: fields[name] for name in ("prompt", "seed", "lora", "grammar", "images")}


def _half_of(limits: Limits, can: Capabilities) -> int:
    tokens = min(limits.pool_tokens // 2, limits.context_tokens - 3)
    return max(1, tokens if can.chunked else min(tokens, limits.batch_tokens))


class CancelRequest(Action, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """A client aborts a request."""

    rid: str

    examples: ClassVar = ("abort a",)
    event: ClassVar = Abort

    @staticmethod
    @verb
    def abort(t: BaseContext, r: Any) -> None:
        """Abort a request, by handle or by its exact rid."""
        t.run.act(CancelRequest(rid=t.rid_of("abort()", r)))

    def apply(self, run: RunLike) -> None:
        run.give(Abort(rid=self.rid))

    @classmethod
    def read_back(cls, event: Abort, reader: Any) -> CancelRequest:
        return cls(rid=reader.name_of(event.rid))

    @classmethod
    def words(cls, event: Abort) -> str:
        return f"abort {short_rid(event.rid)}"


class FlushPrefixes(AdministrativeCall, frozen=True, kw_only=True, omit_defaults=True, tag="flush"):
    """Empties the prefix cache, if nothing uses it; with ``force`` running requests are preempted first."""

    force: bool = False

    examples: ClassVar = ("flush", "flush force=True")
    route: ClassVar = "/flush_cache"
    shell_words: ClassVar = {"flush": "flush_cache"}
    event: ClassVar = FlushCache

    @staticmethod
    @verb
    def flush_cache(t: BaseContext, timeout_s: float | None = None, *, force: bool = False) -> Call:
        """Empty the prefix cache, if nothing uses it; with ``force`` running requests are preempted first."""
        if timeout_s is not None:
            raise BadCall(f"flush_cache() takes no timeout_s, because {t.run.adapter.name} defers no flush")
        if force and not _declared(t).forced_flush:
            raise BadCall(f"flush_cache() takes no force=True, because {t.run.adapter.name} declares none")
        return FlushPrefixes(force=force).post(t)

    @property
    def kind(self) -> str:
        return "flush-forced" if self.force else "flush"

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("flush_cache", force=True) if self.force else Verb("flush_cache"),)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return (cls(), cls(force=True)) if base.limits[1].forced_flush else (cls(),)

    @classmethod
    def words(cls, event: FlushCache) -> str:
        return "forced flush" if event.force else "flush"


class PauseAll(PauseCall, frozen=True, kw_only=True, omit_defaults=True, tag="pause"):
    """Pauses generation in one of the modes that the adapter declares."""

    mode: str

    examples: ClassVar = ("pause mode=keep",)
    event: ClassVar = Pause

    @staticmethod
    @verb
    def pause_generation(t: BaseContext, mode: str) -> Call:
        """Pause generation in one of the modes that the adapter declares."""
        modes = [known.name for known in _declared(t).pause_modes]
        if mode not in modes:
            raise BadCall(f"pause_generation() takes one of {', '.join(modes)}, got {mode!r}")
        return PauseAll(mode=mode).post(t)

    @property
    def kind(self) -> str:
        return f"pause-{self.mode}"

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return [cls(mode=mode.name) for mode in base.limits[1].pause_modes]


class ResumeAll(ResumeCall, frozen=True, kw_only=True, omit_defaults=True, tag="continue"):
    event: ClassVar = Resume

    @staticmethod
    @verb
    def continue_generation(t: BaseContext) -> Call:
        """End a pause."""
        return ResumeAll().post(t)


class SleepAll(AdministrativeCall, frozen=True, kw_only=True, omit_defaults=True, tag="sleep"):
    """Releases the device's memory in one of the sleep modes that the adapter declares, or one part of it."""

    mode: str = ""
    level: int = 1
    part: str = ""

    examples: ClassVar = ("sleep", "sleep mode=abort", "sleep mode=keep level=0", "sleep part=kv_cache")
    event: ClassVar = Sleep
    route: ClassVar = "/sleep"
    shell_words: ClassVar = {"sleep": "sleep"}

    @staticmethod
    @verb
    def sleep(t: BaseContext, mode: str = "", *, level: int = 1, part: str = "") -> Call:
        """Release the device's memory, in a mode and to a level that the adapter declares; or one part of it."""
        can = _declared(t)
        modes = ("",) if part else can.sleep_modes
        if mode not in modes:
            raise BadCall(f"sleep() takes {_one_of(modes)} as mode in this configuration, got {mode!r}")
        if level not in can.sleep_levels:
            raise BadCall(f"sleep() takes {_one_of(can.sleep_levels)} as level, got {level!r}")
        if part and part not in can.sleep_parts:
            raise BadCall(f"sleep() takes {_one_of(('', *can.sleep_parts))} as part, got {part!r}")
        return SleepAll(mode=mode, level=level, part=part).post(t)

    @property
    def kind(self) -> str:
        level = "" if self.level == 1 else str(self.level)
        return "-".join(filter(None, ("sleep", self.mode, level, self.part)))

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Yield a sleep of each mode and level, and of each part. Deep levels differ in no mode for a scheduler."""
        can: Capabilities = base.limits[1]
        for level in can.sleep_levels:
            yield from (cls(mode=mode, level=level) for mode in can.sleep_modes[: None if level <= 1 else 1])
        yield from (cls(part=part) for part in can.sleep_parts)

    @classmethod
    def words(cls, event: Sleep) -> str:
        level = "" if event.level == 1 else f"level={event.level}"
        said = ", ".join(filter(None, (event.mode, level, event.part)))
        return f"sleep ({said})" if said else "sleep"


class WakeAll(AdministrativeCall, frozen=True, kw_only=True, omit_defaults=True, tag="wake"):
    """Takes back the device's memory, or one part of it."""

    part: str = ""

    examples: ClassVar = ("wake", "wake part=weights")
    event: ClassVar = Wake
    route: ClassVar = "/wake"
    shell_words: ClassVar = {"wake": "wake"}

    @staticmethod
    @verb
    def wake(t: BaseContext, part: str = "") -> Call:
        """Take back the device's memory, or one of the parts that the adapter declares."""
        can = _declared(t)
        if not can.sleep_modes:
            raise BadCall(
                f"wake() needs a device that sleeps, which {t.run.adapter.name} does not have in this configuration"
            )
        if part and part not in can.wake_parts:
            raise BadCall(f"wake() takes {_one_of(('', *can.wake_parts))} as part, got {part!r}")
        return WakeAll(part=part).post(t)

    @property
    def kind(self) -> str:
        return f"wake-{self.part}" if self.part else "wake"

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Yield a wake of everything and of each part, also without a preceding sleep."""
        can: Capabilities = base.limits[1]
        return [cls(part=part) for part in ("", *can.wake_parts)] if can.sleep_modes else ()

    @classmethod
    def words(cls, event: Wake) -> str:
        return f"wake ({event.part})" if event.part else "wake"


def _declared(t: BaseContext) -> Capabilities:
    """Return what the adapter declares for the configuration of this script."""
    can: Capabilities = t.run.adapter.limits_of(t.run.config)[1]
    return can


def _one_of(known: Sequence[object]) -> str:
    return f"one of {', '.join(map(repr, known))}" if known else "none"


class FailBatch(BatchFailure, frozen=True, kw_only=True, omit_defaults=True, tag="fail"):
    event: ClassVar = BatchFailed

    @staticmethod
    @verb
    def fail_next_step(t: BaseContext, i: int = 0) -> None:
        """Make the next batch fail; the scheduler continues. The only stage is 0."""
        if i != 0:
            raise BadCall(f"stage must be 0, because the device of {t.run.adapter.name} has one stage, got {i!r}")
        t.run.act(FailBatch())
        t.note_failure()

    def apply(self, run: RunLike) -> None:
        run.device.fail_next_batch()


# All actions that an SDK adapter may declare.
ACTIONS: Final = (
    FlushPrefixes,
    PauseAll,
    ResumeAll,
    SleepAll,
    WakeAll,
    HoldResults,
    ReleaseResults,
    AdvanceClock,
    FailBatch,
    CancelRequest,
    SubmitRequest,
)


def actions_of(can: Capabilities) -> tuple[type[Action], ...]:
    """The actions of a scheduler with these capabilities, in the order in which a search tries them."""
    known: list[type[Action]] = [FlushPrefixes] if can.flush else []
    known += [PauseAll, ResumeAll] if can.pause_modes else []
    known += [SleepAll, WakeAll] if can.sleep_modes else []
    known += [HoldResults, ReleaseResults, AdvanceClock]
    known += [FailBatch] if can.fail else []
    return (*known, CancelRequest, SubmitRequest)


# -- arguments of start_req --


def _check_declared(t: BaseContext, asked: Mapping[str, int]) -> None:
    can = _declared(t)
    known = {"priority": can.priority, "lora": can.loras, "grammar": can.grammars, "session": can.sessions}
    known["images"] = can.images
    lora, grammar, session = asked["lora"], asked["grammar"], asked["session"]
    for name, value in asked.items():
        if value and not known[name]:
            raise BadCall(
                f"start_req() takes no {name}, because {t.run.adapter.name} declares none in this configuration"
            )
    if not isinstance(lora, int) or not 0 <= lora <= can.loras:
        raise BadCall(f"start_req() takes a lora from 0 to {can.loras}, got {lora!r}")
    if grammar not in _GRAMMARS:
        raise BadCall(f"start_req() takes grammar 0, 1 or -1, got {grammar!r}")
    if session not in (0, 1) or (session and grammar):
        raise BadCall(f"start_req() takes session 0 or 1, and no grammar with it, got {session!r} and {grammar!r}")


def _check_neutral(t: BaseContext, others: Mapping[str, object]) -> None:
    """Raise BadCall for an argument that means nothing to the scheduler, unless its value asks for nothing."""
    for name, value in others.items():
        if name not in _NEUTRAL:
            known = [*inspect.signature(SubmitRequest.start_req).parameters, *_NEUTRAL]
            raise BadCall(f"t.start_req() takes no {name!r}{nearest(name, known)}")
        if value != _NEUTRAL[name] and name not in _WITHOUT_EFFECT:
            raise BadCall(
                f"start_req() takes {name}={_NEUTRAL[name]!r} alone on {t.run.adapter.name}, whose device has no such "
                f"sampling, got {value!r}"
            )


def _free_rid(t: BaseContext, rid: str | None) -> str:
    rid = t.next_rid() if rid is None else rid
    if not isinstance(rid, str) or not rid:
        raise BadCall(f"start_req() takes a rid that is a text and not empty, got {rid!r}")
    before = t.run.handles.latest(rid)
    if before is not None and not before.finished:
        raise BadCall(
            f"start_req() takes the rid of no request that is alive, and {before!r} is; wait for its end: "
            f"yield from t.run_until_finished(...)"
        )
    return rid


def _prompt_of(
    length: int | None,
    ids: Sequence[int] | None,
    text: str | None,
    seed: int,
    shared: int,
    tail: int,
    *,
    continues: bool,
) -> tuple[int, ...]:
    """Return the tokens that the arguments give; none if the request only ``continues`` another one."""
    name = check_one_prompt({"prompt_len": length, "prompt_ids": ids, "text": text}, continues=continues)
    if length is None and (seed or shared or tail):
        raise BadCall("start_req() takes prompt_seed, shared_len and tail_seed with prompt_len only")
    if name is None:
        return ()
    if length is None:
        prompt = tuple(text.encode()) if text is not None else token_ids("prompt_ids", ids or ())
        if not prompt:
            raise BadCall(f"start_req() takes {name} that is not empty")
        return prompt
    made = made_prompt(length, seed)
    if not isinstance(shared, int) or not 0 <= shared <= length:
        raise BadCall(f"start_req() takes shared_len from 0 to prompt_len={length}, got {shared!r}")
    if tail and not shared:
        raise BadCall(f"start_req() takes tail_seed={tail!r} with shared_len only; write prompt_seed={tail!r}")
    return prompt_ids_of(length, seed, shared, tail) if shared else tuple(made)
