"""What may happen to a scheduler of the usual shape: requests, aborts, flushes, pauses, batches that fail."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import msgspec

from scripted.core.action import Action, RunLike, SearchBase, smaller_requests, verb
from scripted.core.common_actions import AdvanceClock, HoldResults, ReleaseResults
from scripted.core.errors import BadCall
from scripted.core.phrases import nearest
from scripted.core.prompts import prompt_ids as prompt_ids_of
from scripted.core.verb import Verb, variable_of
from scripted.script.clients import Call
from scripted.script.static_checks import bounded, check_count, check_prompt_len
from scripted.sdk.capabilities import Capabilities, Limits
from scripted.sdk.images import images_in, with_images
from scripted.sdk.messages import Abort, Add, BatchFailed, FlushCache, Pause, Resume

_EXTRA_RID: Final = "extra"
_PRESSURE_RID: Final = "pressure"
# Other prompts of a workload have small seeds; a prompt that fills the pool shares no prefix with them.
_PRESSURE_SEED: Final = 97
# Of a request, what is said in a schedule and in a script by the same name, and is 0 without it.
_NUMBERS: Final = ("priority", "lora", "grammar", "session", "images")
_GRAMMARS: Final = (0, 1, -1)
# Arguments of start_req that say something to an engine with a model, at the value that says nothing.
_NEUTRAL: Final[Mapping[str, Any]] = {
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
# Here nothing is an end of sequence, and every answer is a stream.
_WITHOUT_EFFECT: Final = ("ignore_eos", "stream", "seed")


class SubmitRequest(Action, frozen=True, kw_only=True, omit_defaults=True, tag="start"):
    """A request of ``prompt`` tokens; equal ``seed`` gives equal prefixes, ``new`` is its max_new_tokens.

    ``stop`` is a token that ends it. ``shared`` tokens are those of ``seed``, unless it is 0; the others of ``tail``.
    ``lora`` computes it, 0 is none; ``grammar`` masks its tokens with 1, and does not compile with -1.
    With ``session`` 1 it keeps its KV for more input. Its ``images`` are numbered from ``seed`` and ``tail`` together.
    """

    rid: str
    prompt: int
    new: int = 2
    seed: int = 0
    priority: int = 0
    stop: int | None = None
    shared: int = 0
    tail: int = 0
    lora: int = 0
    grammar: int = 0
    session: int = 0
    images: int = 0

    is_start: ClassVar[bool] = True
    examples: ClassVar = ("start b prompt=20 new=3", "start b prompt=40 seed=1 priority=1 stop=7")
    shell_words: ClassVar = {"start": "start_req"}
    event: ClassVar = Add

    @staticmethod
    @verb
    def start_req(
        t: Any,
        *,
        prompt_len: int | None = None,
        prompt_ids: Sequence[int] | None = None,
        text: str | None = None,
        prompt_seed: int = 0,
        shared_len: int = 0,
        tail_seed: int = 0,
        max_new_tokens: int = 8,
        rid: str | None = None,
        stop_token_ids: Sequence[int] = (),
        priority: int = 0,
        lora: int = 0,
        grammar: int = 0,
        session: int = 0,
        images: int = 0,
        **others: Any,
    ) -> Any:
        """Begin a request with exactly one of ``prompt_len``, ``prompt_ids`` and ``text``, whose bytes are its tokens.

        ``prompt_len`` tokens are made from ``prompt_seed``; equal seeds give equal prefixes. With ``shared_len`` only
        that many are those of ``prompt_seed``, and the others are those of ``tail_seed``. ``lora`` is the number of the
        LoRA that computes it; with ``grammar=1`` its tokens are masked, and with -1 its grammar does not compile. It
        has so many ``images``, numbered from ``prompt_seed`` and ``tail_seed`` together. A rid is free again when its
        request has ended. Other arguments of ``start_req`` are taken at the value that changes nothing.
        """
        _check_neutral(t, others)
        asked = {"priority": priority, "lora": lora, "grammar": grammar, "session": session, "images": images}
        _check_declared(t, asked)
        prompt = _prompt_of(prompt_len, prompt_ids, text, prompt_seed, shared_len, tail_seed)
        check_count("start_req()", "max_new_tokens", max_new_tokens)
        stops = _tokens("stop_token_ids", stop_token_ids)
        name = _free_rid(t, rid)
        more: dict[str, Any] = {"stop_token_ids": stops, "priority": priority, "lora": lora, "grammar": grammar}
        more["session"] = len(prompt) if session else 0
        more["images"] = images_in(len(prompt), images, prompt_seed + tail_seed)
        return t.run.start(message_of(t.run, name, prompt, max_new_tokens, **more))

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return prompt_ids_of(self.prompt, self.seed, self.shared, self.tail)

    def apply(self, run: RunLike) -> None:
        """The next step sees it, unless one of this name is alive."""
        if not run.is_live(self.rid):
            more: dict[str, Any] = {"stop_token_ids": () if self.stop is None else (self.stop,)}
            more |= {"priority": self.priority, "lora": self.lora, "grammar": self.grammar}
            more["session"] = self.prompt if self.session and not self.grammar else 0
            more["images"] = images_in(self.prompt, self.images, self.seed + self.tail)
            message = message_of(run, self.rid, self.prompt_ids, self.new, **more)
            run.device.begin(message)
            run.give(message)

    def verbs(self) -> tuple[Verb, ...]:
        more: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS if getattr(self, name)}
        more |= {"stop_token_ids": [self.stop]} if self.stop is not None else {}
        more |= {"shared_len": self.shared} if self.shared else {}
        more |= {"tail_seed": self.tail} if self.shared or self.tail else {}
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
        return variable_of(self.rid)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """A twin of each prompt, more urgent where that matters; half of all blocks."""
        limits, can = base.limits
        starts = [start for start in base.starts if isinstance(start, cls)]
        urgent = max((start.priority for start in starts), default=0) + 1 if can.priority else 0
        for twin in dict.fromkeys(cls(rid=_EXTRA_RID, priority=urgent, **_content_of(start)) for start in starts):
            yield twin
            if twin.lora:
                yield msgspec.structs.replace(twin, lora=twin.lora % can.loras + 1)
            if twin.images:
                # The same tokens around other images.
                yield msgspec.structs.replace(twin, tail=1)
        yield cls(rid=_PRESSURE_RID, prompt=_half_of(limits, can), seed=_PRESSURE_SEED, new=3)

    def smaller(self) -> Iterator[Action]:
        return smaller_requests(self)

    @classmethod
    def read_back(cls, event: Add, reader: Any) -> SubmitRequest:
        """As long as it became, without its stop tokens: the text of a schedule is another one."""
        recipe = reader.recipe_of(event.prompt_ids)
        return cls(
            rid=reader.new_name_of(event.rid),
            prompt=len(event.prompt_ids),
            new=max(1, reader.length_of(event.rid, event.max_new_tokens)),
            seed=recipe.seed,
            shared=recipe.shared,
            tail=recipe.tail,
            priority=event.priority,
            lora=event.lora,
            grammar=event.grammar,
            session=min(event.session, 1),
            images=len(event.images),
        )


def message_of(run: RunLike, rid: str, prompt: tuple[int, ...], new: int, **more: Any) -> Add:
    """The message of a request; no other of its rid is alive."""
    prompt = with_images(prompt, more.get("images", ()))
    return Add(rid=rid, prompt_ids=prompt, max_new_tokens=new, arrival=run.oracle.arrive(rid), **more)


def _content_of(start: SubmitRequest) -> Mapping[str, int]:
    """What makes another request a twin of this one."""
    return {name: getattr(start, name) for name in ("prompt", "seed", "lora", "grammar", "images")}


def _half_of(limits: Limits, can: Capabilities) -> int:
    tokens = min(limits.pool_tokens // 2, limits.context_tokens - 3)
    return max(1, tokens if can.chunked else min(tokens, limits.batch_tokens))


class CancelRequest(Action, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """A client gives a request up."""

    rid: str

    examples: ClassVar = ("abort a",)
    event: ClassVar = Abort

    @staticmethod
    @verb
    def abort(t: Any, r: Any) -> None:
        """Its client gives a request up, by handle or exact rid."""
        t.run.act(CancelRequest(rid=t.rid_of("abort()", r)))

    def apply(self, run: RunLike) -> None:
        run.give(Abort(rid=self.rid))

    @classmethod
    def read_back(cls, event: Abort, reader: Any) -> CancelRequest:
        return cls(rid=reader.name_of(event.rid))


class FlushPrefixes(Action, frozen=True, kw_only=True, omit_defaults=True, tag="flush"):
    """The prefix cache is emptied, if it can be; with ``force`` what runs is preempted for it."""

    force: bool = False

    examples: ClassVar = ("flush", "flush force=True")
    shell_words: ClassVar = {"flush": "flush_cache"}
    event: ClassVar = FlushCache

    @staticmethod
    @verb
    def flush_cache(t: Any, timeout_s: float | None = None, *, force: bool = False) -> Call:
        """Empty the prefix cache, if it can be; with ``force`` what runs is preempted for it."""
        if timeout_s is not None:
            raise BadCall(f"flush_cache() takes no timeout_s, because {t.run.adapter.name} defers no flush")
        if force and not t.run.adapter.limits_of(t.run.config)[1].forced_flush:
            raise BadCall(f"flush_cache() takes no force=True, because {t.run.adapter.name} declares none")
        call: Call = t.run.call("/flush_cache", FlushPrefixes(force=force))
        return call

    @property
    def kind(self) -> str:
        return "flush-forced" if self.force else "flush"

    def apply(self, run: RunLike) -> None:
        run.give(FlushCache(call_id=run.new_call_id(), force=self.force))

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("flush_cache", force=True) if self.force else Verb("flush_cache"),)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return (cls(), cls(force=True)) if base.limits[1].forced_flush else (cls(),)


class PauseAll(Action, frozen=True, kw_only=True, omit_defaults=True, tag="pause"):
    """Generation is paused in one of the modes that the adapter declares."""

    mode: str

    examples: ClassVar = ("pause mode=keep",)
    needs_open: ClassVar[bool] = True
    shell_words: ClassVar = {"pause": "pause_generation"}
    event: ClassVar = Pause

    @staticmethod
    @verb
    def pause_generation(t: Any, mode: str) -> Call:
        """Pause in one of the modes that the adapter declares."""
        modes = [known.name for known in t.run.adapter.limits_of(t.run.config)[1].pause_modes]
        if mode not in modes:
            raise BadCall(f"pause_generation() takes one of {', '.join(modes)}, got {mode!r}")
        call: Call = t.run.call("/pause_generation", PauseAll(mode=mode))
        return call

    @property
    def kind(self) -> str:
        return f"pause-{self.mode}"

    def apply(self, run: RunLike) -> None:
        run.give(Pause(call_id=run.new_call_id(), mode=self.mode))

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return [cls(mode=mode.name) for mode in base.limits[1].pause_modes]


class ResumeAll(Action, frozen=True, kw_only=True, omit_defaults=True, tag="continue"):
    """A pause ends."""

    examples: ClassVar = ("continue",)
    added_beside: ClassVar = "pause"
    shell_words: ClassVar = {"continue": "continue_generation"}
    event: ClassVar = Resume

    @staticmethod
    @verb
    def continue_generation(t: Any) -> Call:
        """End a pause."""
        call: Call = t.run.call("/continue_generation", ResumeAll())
        return call

    def apply(self, run: RunLike) -> None:
        run.give(Resume(call_id=run.new_call_id()))

    def reaches(self, run: RunLike) -> bool:
        return run.oracle.paused is not None


class FailBatch(Action, frozen=True, kw_only=True, omit_defaults=True, tag="fail"):
    """The next batch fails; the engine goes on."""

    examples: ClassVar = ("fail",)
    needs_open: ClassVar[bool] = True
    is_extra: ClassVar[bool] = True
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = {"fail": "fail_next_step"}
    event: ClassVar = BatchFailed

    @staticmethod
    @verb
    def fail_next_step(t: Any, i: int = 0) -> None:
        """Make the next batch fail; the scheduler goes on. There is one stage, 0."""
        if i != 0:
            raise BadCall(f"stage must be 0, because the device of {t.run.adapter.name} has one stage, got {i!r}")
        t.run.act(FailBatch())
        t.note_failure()

    def apply(self, run: RunLike) -> None:
        run.device.fail_next_batch()


# Whatever an adapter of the SDK may declare.
ACTIONS: Final = (
    FlushPrefixes,
    PauseAll,
    ResumeAll,
    HoldResults,
    ReleaseResults,
    AdvanceClock,
    FailBatch,
    CancelRequest,
    SubmitRequest,
)


def actions_of(can: Capabilities) -> tuple[type[Action], ...]:
    """The actions that such a scheduler knows, in the order in which a search tries them."""
    known: list[type[Action]] = [FlushPrefixes] if can.flush else []
    known += [PauseAll, ResumeAll] if can.pause_modes else []
    known += [HoldResults, ReleaseResults, AdvanceClock]
    known += [FailBatch] if can.fail else []
    return (*known, CancelRequest, SubmitRequest)


# -- what start_req takes --


def _check_declared(t: Any, asked: Mapping[str, int]) -> None:
    can: Capabilities = t.run.adapter.limits_of(t.run.config)[1]
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


def _check_neutral(t: Any, others: Mapping[str, Any]) -> None:
    """Raise BadCall for what such a scheduler has no part in, unless it is at the value that changes nothing."""
    for name, value in others.items():
        if name not in _NEUTRAL:
            known = [*inspect.signature(SubmitRequest.start_req).parameters, *_NEUTRAL]
            raise BadCall(f"t.start_req() takes no {name!r}{nearest(name, known)}")
        if value != _NEUTRAL[name] and name not in _WITHOUT_EFFECT:
            raise BadCall(
                f"start_req() takes {name}={_NEUTRAL[name]!r} alone on {t.run.adapter.name}, whose device has no such "
                f"sampling, got {value!r}"
            )


def _free_rid(t: Any, rid: str | None) -> str:
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
    length: int | None, ids: Sequence[int] | None, text: str | None, seed: int, shared: int, tail: int
) -> tuple[int, ...]:
    given = {"prompt_len": length, "prompt_ids": ids, "text": text}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise BadCall(f"start_req() takes exactly one of {', '.join(given)}, got {', '.join(names) or 'none of them'}")
    if length is None and (seed or shared or tail):
        raise BadCall("start_req() takes prompt_seed, shared_len and tail_seed with prompt_len only")
    if length is None:
        prompt = tuple(text.encode()) if text is not None else _tokens("prompt_ids", ids or ())
        if not prompt:
            raise BadCall(f"start_req() takes {names[0]} that is not empty")
        return prompt
    check_prompt_len(length)
    if not isinstance(seed, int):
        raise BadCall(f"start_req() takes prompt_seed, a whole number, got {seed!r}")
    if not isinstance(shared, int) or not 0 <= shared <= length:
        raise BadCall(f"start_req() takes shared_len from 0 to prompt_len={length}, got {shared!r}")
    if tail and not shared:
        raise BadCall(f"start_req() takes tail_seed={tail!r} with shared_len only; write prompt_seed={tail!r}")
    return prompt_ids_of(length, seed, shared, tail)


def _tokens(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    ids = ids if isinstance(ids, (str, bytes)) else bounded("start_req()", name, ids)
    if isinstance(ids, (str, bytes)) or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise BadCall(f"start_req() takes {name} that are whole numbers >= 0, got {ids!r}")
    return tuple(ids)
