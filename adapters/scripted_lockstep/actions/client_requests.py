"""Actions of clients: start a request, abort it by its rid, hang up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import msgspec

from engine.core.messages import (
    Abort,
    ClientMessage,
    Delivery,
    FinishReason,
    Generate,
    Grammar,
    GrammarKind,
    SamplingParams,
)
from engine.core.scheduler import Scheduler
from engine.frontend.schema.native import MAX_N, MAX_TOP_LOGPROBS
from engine.frontend.sessions.requests import rids_of, sampling_of
from scripted.core.action import Action, Culprit, RequestSoFar, RunLike, SearchBase, takes, verb
from scripted.core.errors import BadCall
from scripted.core.phrases import plural, printable, short_rid
from scripted.core.verb import Code, Verb, variable_of
from scripted.script.clients import Call
from scripted.script.handles import BaseRequest
from scripted.sdk.action_bases import EXTRA_RID, PRESSURE_RID, PRESSURE_SEED, TURN_RID, RequestStart, priority_above
from scripted_lockstep.actions.action import EngineAction, EngineCall, EventReader
from scripted_lockstep.actions.bodies import GenerateArguments, as_sent, given, one_prompt
from scripted_lockstep.simulated.grammar import DEAD_END, regex_before_dead_end

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

# The engines at the other end of transfers.
PREFILL_ENGINE: Final = "p0"
DECODE_ENGINE: Final = "d0"
_ANOTHER_REGEX: Final = "[p-z]{2}"
# Two-byte ids and the ids that their bytes spell: a search by bytes finds one inside the other.
_WIDE_IDS: Final = (256, 256, 258, 256, 260, 256, 0, 1)
# Fields of this action, and the fields of the message and its sampling parameters that they set.
_MESSAGE_FIELDS: Final = {
    "priority": "priority",
    "timeout_s": "timeout_s",
    "waiting_timeout_s": "waiting_timeout_s",
    "lora": "lora",
    "salt": "cache_salt",
}
_SAMPLING_FIELDS: Final = {
    "temperature": "temperature",
    "draw": "seed",
    "penalty": "frequency_penalty",
    "presence": "presence_penalty",
    "repetition": "repetition_penalty",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "new_least": "min_new_tokens",
    "ignore_eos": "ignore_eos",
}


class AbortRequest(EngineCall, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """Aborts one request by its rid."""

    rid: str

    examples: ClassVar = ("abort a",)
    event: ClassVar = Abort
    route: ClassVar = "/abort_request"
    caused_by: ClassVar[Culprit] = Culprit.CLIENT

    @staticmethod
    @verb
    def abort(t: BaseContext, r: Any) -> Call:
        """POST ``/abort_request`` for one request, by its exact rid."""
        return AbortRequest(rid=t.rid_of("abort()", r)).post(t)

    def apply(self, run: RunLike) -> None:
        """Abort all choices of an answer, the last one with the call, as the front end does."""
        *others, last = _choices_of(self.rid, run)
        for rid in others:
            run.give(Abort(rid=rid))
        run.give(msgspec.structs.replace(self.message(run.new_call_id()), rid=last))

    def reaches(self, run: RunLike) -> bool:
        return super().reaches(run) or _choices_of(self.rid, run) != [self.rid]

    @property
    def body(self) -> Mapping[str, object]:
        return {"rid": self.rid}

    def is_sent_as(self, message: ClientMessage) -> bool:
        """Return whether a message is this abort: for several choices, the last choice's abort carries the call."""
        return isinstance(message, Abort) and message.call_id is not None

    @classmethod
    def read_back(cls, event: Abort, reader: EventReader) -> AbortRequest | None:
        return None if event.call_id is None else cls(rid=reader.name_of(event.rid))

    @classmethod
    def words(cls, event: Abort) -> str:
        """Name the request, and the front end's reason for the end, if it gave one."""
        if event.finish_reason is not FinishReason.ABORT:
            return f"end {short_rid(event.rid)} ({event.finish_reason})"
        return f"abort {short_rid(event.rid)}"


def _choices_of(rid: str, run: RunLike) -> list[str]:
    """Return the live choices of an answer of several, in order; otherwise the rid itself."""
    live = run.oracle.account.live
    if rid in live:
        return [rid]
    answers = [life.message for life in live.values() if life.message.first_choice == f"{rid}-0"]
    return [message.rid for message in answers] or [rid]


class DisconnectClient(EngineAction, frozen=True, kw_only=True, omit_defaults=True, tag="disconnect"):
    """Disconnects a request's client; the front end then aborts the request."""

    rid: str

    examples: ClassVar = ("disconnect a",)
    event: ClassVar = Abort

    @staticmethod
    @verb
    def disconnect(t: BaseContext, r: BaseRequest) -> None:
        """Drop the connection of a request's client, and wait until the front end's abort has arrived at the gate.

        The front end sends none for a request that an abort or a pause already ends.
        """
        t.check_handle("disconnect()", r)
        if r.finished:
            raise BadCall(f"disconnect() takes a request that is alive, {r.rid} has ended ({r.finish_reason})")
        if r.client.dropped:
            raise BadCall(f"disconnect() takes a request whose client is connected, that of {r.rid} hung up before")
        if (answer := r.client.answer) is not r.client:
            raise BadCall(
                f"disconnect() takes the handle that start_req() returned, got {r.rid}, one of {len(answer.choices)} "
                "choices of one connection; write t.disconnect(r), or end the choice by t.abort()"
            )
        t.run.world.clients.disconnect(r.client)
        live = {choice.rid for choice in r.choices if not (choice.finished or choice.is_ending)}
        t.run.await_arrivals(lambda m: isinstance(m, Abort) and m.rid in live, count=len(live))

    def apply(self, run: RunLike) -> None:
        for rid in _choices_of(self.rid, run):
            run.give(Abort(rid=rid))

    def reaches(self, run: RunLike) -> bool:
        return super().reaches(run) or _choices_of(self.rid, run) != [self.rid]

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("disconnect", Code(variable_of(self.rid))),)

    def perform(self, t: BaseContext) -> bool:
        """Do nothing: the engine sees an abort, which a search adds anyway."""
        del t
        return False

    def smaller(self) -> Iterator[Action]:
        yield AbortRequest(rid=self.rid)

    @classmethod
    def read_back(cls, event: Abort, reader: EventReader) -> DisconnectClient | None:
        return cls(rid=reader.name_of(event.rid)) if event.call_id is None else None

    @classmethod
    def words(cls, event: Abort) -> str:
        return AbortRequest.words(event)


class StartRequest(EngineAction, RequestStart, frozen=True, kw_only=True, omit_defaults=True, tag="start"):
    """A client sends a request.

    Without a ``temperature`` it is greedy; ``draw`` is the seed that it samples with, restricted by ``top_p``,
    ``top_k`` and ``min_p``. ``penalty``, ``presence`` and ``repetition`` are the frequency, presence and repetition
    penalties. ``bias`` is added to the logit of the token ``biased``. Nothing ends it before ``new_least`` tokens.
    ``logprobs_from`` is the first position of the prompt whose logprobs it wants, ``top_logprobs`` the number of other
    tokens that they list. ``timeout_s`` and ``waiting_timeout_s`` are time limits. Its output must match ``regex``;
    with ``dead_end`` nothing may follow the match, not even an end token. ``lora`` names its LoRA, ``salt`` is its
    cache salt. ``first_page`` is for a prefill engine: a decode engine wants the full pages of the prompt from that
    page on. The token ids of a ``wide`` prompt have one byte or two. With ``n`` > 1 the answer has ``n`` choices, each
    a request of its own.
    """

    temperature: float = 0.0
    draw: int | None = None
    penalty: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    biased: int | None = None
    bias: float = 0.0
    new_least: int = 0
    ignore_eos: bool = False
    logprobs_from: int | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    timeout_s: float | None = None
    waiting_timeout_s: float | None = None
    regex: str | None = None
    lora: str | None = None
    salt: str | None = None
    dead_end: bool = False
    first_page: int | None = None
    wide: bool = False
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] = 1

    examples: ClassVar = (
        "start b prompt=20 new=3",
        "start b prompt=40 seed=1 priority=1 stop=7",
        "start b prompt=40 shared=16 tail=1",
        "start b prompt=40 parts=1:16,2:16:16 seed=3",
        "start b after=a cut=3 prompt=5",
        "start b prompt=9 temperature=0.5 draw=3 penalty=1.5",
        "start b prompt=9 temperature=0.5 min_p=0.25 presence=1.0 repetition=1.5",
        "start b prompt=9 temperature=0.5 draw=1 top_p=0.5 top_k=4",
        "start b prompt=9 new=4 biased=257 bias=100.0 new_least=2",
        "start b prompt=9 new=4 biased=257 bias=100.0 ignore_eos=True",
        "start b prompt=40 new=0 logprobs_from=16",
        "start b prompt=9 logprobs_from=0 top_logprobs=2",
        "start b prompt=9 timeout_s=1.5 waiting_timeout_s=0.5",
        "start b prompt=9 new=8 regex=[a-c]{3}",
        "start b prompt=9 lora=x",
        "start b prompt=40 salt=u",
        "start b prompt=9 new=8 regex=[a-c]{3} dead_end=True",
        "start b prompt=40 first_page=1",
        "start b prompt=9 wide=True",
        "start b prompt=9 n=2",
    )
    event: ClassVar = Generate

    @staticmethod
    @verb
    @takes(GenerateArguments)
    def start_req(t: BaseContext, arguments: GenerateArguments) -> Any:
        """POST ``/generate`` with exactly one of ``prompt_len``, ``prompt_ids`` and ``text``.

        ``prompt_len`` tokens are made from ``prompt_seed``; equal seeds give equal prefixes. ``after`` is the handle of
        a request that this one continues: its prompt begins with that request's prompt and its output so far, or the
        first ``cut`` tokens of it, and needs no tokens of its own. ``logprob_start_len`` asks for the prompt's logprobs
        from that position on, with ``return_logprob``. The time limits are in virtual seconds. ``lora`` names the LoRA
        that computes it; its prefixes are shared with requests of the same ``cache_salt`` only. With ``n`` > 1 the
        handle has ``choices``, a handle for each answer; ``seed`` counts up with them. Raises RequestRefused, with
        status and body, for a request that the server does not admit.
        """
        return t.run.start(arguments.body(t))

    @staticmethod
    @verb
    def prefill(
        t: BaseContext,
        *,
        prompt_len: int | None = None,
        prompt_ids: Sequence[int] | None = None,
        prompt_seed: int = 0,
        first_page: int = 0,
        rid: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Any:
        """Ask a prefill engine, as a decode engine does, for the pages of a prompt from ``first_page`` on.

        Raises RequestRefused.
        """
        if not t.scheduler.limits.prefills:
            raise BadCall("prefill() needs an engine of role='prefill', this one has another; set the role")
        body = one_prompt(prompt_len, prompt_ids, None, prompt_seed) | {
            "rid": rid if rid is not None else t.next_rid(),
            "sampling_params": {"max_new_tokens": 0},
            "priority": priority,
        }
        return t.run.start(as_sent(body | given(cache_salt=cache_salt)), first_page=first_page)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        ids = super().prompt_ids
        return tuple([_WIDE_IDS[one % len(_WIDE_IDS)] for one in ids]) if self.wide else ids

    @property
    def time_limits(self) -> tuple[float, ...]:
        """Its time limits, in seconds."""
        return tuple(one for one in (self.timeout_s, self.waiting_timeout_s) if one is not None)

    @property
    def grammar(self) -> Grammar | None:
        if self.regex is None:
            return None
        if self.dead_end:
            return Grammar(GrammarKind.EBNF, DEAD_END.format(regex=self.regex))
        return Grammar(GrammarKind.REGEX, self.regex)

    def message(self, prompt_ids: tuple[int, ...]) -> Generate:
        sampling = SamplingParams(
            max_new_tokens=self.new,
            stop_token_ids=self.stop_token_ids,
            logit_bias=() if self.biased is None else ((self.biased, self.bias),),
            grammar=self.grammar,
            **{name: getattr(self, field) for field, name in _SAMPLING_FIELDS.items()},
        )
        first = self.logprobs_from
        return Generate(
            rid=self.rid,
            prompt_ids=prompt_ids,
            sampling=sampling,
            return_logprob=first is not None or self.top_logprobs > 0,
            top_logprobs_num=self.top_logprobs,
            prompt_logprobs_from=-1 if first is None else min(first, len(prompt_ids) - 1),
            prompt_top_logprobs_num=0 if first is None else self.top_logprobs,
            **{name: getattr(self, field) for field, name in _MESSAGE_FIELDS.items()},
        )

    def apply(self, run: RunLike) -> None:
        """Give the next step the message that the front end makes for an engine of this role."""
        number = int(run.new_call_id().rpartition("-")[2])
        messages, live = self._messages(self.whole_prompt(run)), run.oracle.account.live
        if self.n > 1 and any(message.rid in live for message in messages):
            return  # The front end sends no choice of an answer whose rids are in use.
        for message in messages:
            at = run.machine.choose_prefill(message) if run.machine.limits.receives else None
            run.give(of_role(message, run.machine.scheduler, self.first_page, number, at))

    def continued(self, run: RunLike) -> RequestSoFar | None:
        """Return the request that this one continues: the first choice of an answer with several."""
        return super().continued(run) or run.request_so_far(rids_of(self.after, 2)[0])

    def _messages(self, prompt: tuple[int, ...]) -> list[Generate]:
        """Return a message for each choice, as the front end sends them."""
        message = self.message(prompt)
        if self.n == 1:
            return [message]
        rids = rids_of(self.rid, self.n)
        return [
            msgspec.structs.replace(
                message, rid=rid, sampling=sampling_of(message.sampling, choice), choices=self.n, first_choice=rids[0]
            )
            for choice, rid in enumerate(rids)
        ]

    def verbs(self) -> tuple[Verb, ...]:
        """Return ``start_req``, or ``prefill`` for a request to a prefill engine."""
        prompt = {**self._prompt_arguments(), **self.turn_arguments}
        changed = self._changed_arguments()
        if self.first_page is not None:
            kept = {name: changed[name] for name in ("priority", "cache_salt") if name in changed}
            return (Verb("prefill", rid=self.rid, **prompt, first_page=self.first_page, **kept),)
        more = changed | self._derived_arguments()
        return (Verb("start_req", rid=self.rid, **prompt, max_new_tokens=self.new, **more),)

    def _prompt_arguments(self) -> dict[str, Any]:
        """Return the length and the seed of the prompt, or its tokens if they are not made from a seed alone."""
        if not self.prompt:
            return {}
        if self.wide:
            return {"prompt_ids": list(self.prompt_ids)}
        if self.shared or self.parts:
            return {"prompt_ids": self.prompt_code}
        return {"prompt_len": self.prompt, "prompt_seed": self.seed}

    def _changed_arguments(self) -> dict[str, Any]:
        """Return the arguments with other values than their defaults, for fields that are one argument each."""
        named = {**_MESSAGE_FIELDS, **_SAMPLING_FIELDS}
        changed = [one.name for one in msgspec.structs.fields(self) if getattr(self, one.name) != one.default]
        return {named[field]: getattr(self, field) for field in changed if field in named}

    def _derived_arguments(self) -> dict[str, Any]:
        """Return the arguments that combine fields, or that have another form than their field."""
        more: dict[str, Any] = {}
        if self.stop is not None:
            more["stop_token_ids"] = [self.stop]
        if self.biased is not None:
            more["logit_bias"] = {self.biased: self.bias}
        if self.logprobs_from is not None or self.top_logprobs:
            more["return_logprob"] = True
        if self.logprobs_from is not None:
            # The prompt of a further turn is longer than its own tokens.
            more["logprob_start_len"] = self.logprobs_from if self.after else min(self.logprobs_from, self.prompt - 1)
        if self.top_logprobs:
            more["top_logprobs_num"] = self.top_logprobs
        if self.n > 1:
            more["n"] = self.n
        if self.grammar is not None:
            more["ebnf" if self.dead_end else "regex"] = self.grammar.text
        return more

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Yield requests that interact with those of the workload.

        A twin of each prompt for each LoRA and cache salt, more urgent if priorities preempt; a rid that is in use; a
        grammar again and a new one; a prompt of half of the pages; a further turn of the first request.
        """
        starts = cls.among(base.starts)
        first = 0 if base.limits.prefills else None
        urgent = priority_above(starts) if base.config.priority_preemption else 0
        owners = dict.fromkeys([(None, None), *[(start.lora, start.salt) for start in starts]])
        for prompt, seed in dict.fromkeys((max(1, start.prompt), start.seed) for start in starts):
            for lora, salt in owners:
                yield cls(
                    rid=EXTRA_RID, prompt=prompt, seed=seed, priority=urgent, lora=lora, salt=salt, first_page=first
                )
        if starts:
            yield cls(rid=starts[0].rid, prompt=max(1, starts[0].prompt), seed=starts[0].seed, first_page=first)
        for regex in dict.fromkeys(start.regex for start in starts if start.regex is not None):
            # The same grammar again, and a new one.
            yield cls(rid=EXTRA_RID, prompt=max(1, starts[0].prompt), new=4, regex=regex)
            yield cls(rid=EXTRA_RID, prompt=max(1, starts[0].prompt), new=4, regex=_ANOTHER_REGEX)
        if any(start.dead_end for start in starts):
            yield cls(rid=EXTRA_RID, prompt=max(1, starts[0].prompt), new=4, regex=_ANOTHER_REGEX, dead_end=True)
        yield cls._of_half_the_pages(base)
        for start in starts[:1] if first is None else ():
            yield cls(rid=TURN_RID, prompt=1, after=start.rid, lora=start.lora, salt=start.salt)

    @classmethod
    def _of_half_the_pages(cls, base: SearchBase) -> StartRequest:
        limits = base.limits
        tokens = min(limits.total_pages * limits.page_size // 2, limits.context_length - 2)
        if not limits.chunking:
            tokens = min(tokens, limits.prefill_budget_tokens)
        first = 0 if limits.prefills else None
        return cls(rid=PRESSURE_RID, prompt=max(1, tokens), seed=PRESSURE_SEED, new=3, first_page=first)

    def smaller(self) -> Iterator[Action]:
        """Yield simpler requests: shorter, with smaller seeds, all logprobs, or no dead end."""
        yield from super().smaller()
        if self.logprobs_from:
            yield msgspec.structs.replace(self, logprobs_from=0)
        if self.dead_end:
            yield msgspec.structs.replace(self, regex=None, dead_end=False)

    @classmethod
    def read_back(cls, event: Generate, reader: EventReader) -> StartRequest:
        """Return a request with the recorded one's output length and sampling, and a prompt that shares as much."""
        recipe, sampling, new = reader.recipe_of(event.prompt_ids), event.sampling, reader.new_tokens_of(event)
        start = cls(
            rid=reader.name_of(event.rid),
            **cls.prompt_fields(recipe, len(event.prompt_ids)),
            **{field: getattr(event, name) for field, name in _MESSAGE_FIELDS.items()},
        )
        if event.deliver is not None:
            return msgspec.structs.replace(start, first_page=event.deliver.first_page)
        regex = None if sampling.grammar is None else regex_before_dead_end(sampling.grammar)
        if regex is not None:
            # If the recorded request reached its dead end, this one must too, and not end by length before.
            new = min(new + 1, sampling.max_new_tokens)
        biased, bias = sampling.logit_bias[0] if len(sampling.logit_bias) == 1 else (None, 0.0)
        sampled = {field: getattr(sampling, name) for field, name in _SAMPLING_FIELDS.items()}
        return msgspec.structs.replace(
            start,
            new=new,
            biased=biased,
            bias=bias,
            logprobs_from=event.prompt_logprobs_from if event.prompt_logprobs_from >= 0 else None,
            top_logprobs=event.top_logprobs_num,
            regex=None if sampling.grammar is None else regex or reader.regex_of(sampling.grammar),
            dead_end=regex is not None,
            **sampled | {"new_least": min(sampling.min_new_tokens, new)},
        )

    @classmethod
    def words(cls, event: Generate) -> str:
        """Name the request, the length of its prompt, its LoRA and its salt."""
        lora = "" if event.lora is None else f", LoRA {printable(event.lora)}"
        salt = "" if event.cache_salt is None else f", salt {printable(event.cache_salt)}"
        return f"generate {short_rid(event.rid)} ({plural(len(event.prompt_ids), 'token')}{lora}{salt})"


def of_role(
    message: Generate, scheduler: Scheduler, first_page: int | None, number: int, at: str | None = PREFILL_ENGINE
) -> Generate:
    """Return a client's request as the scheduler of an engine with a role receives it.

    For a decode engine the request names the prefill engine ``at``. A prefill engine is asked for the full pages of
    the prompt from ``first_page`` on; ``number`` is the transfer's number at the decode engine.
    """
    limits = scheduler.limits
    if limits.receives:
        return msgspec.structs.replace(message, prefill_at=at)
    if not limits.prefills or first_page is None:
        return message
    pages = max(1, len(message.prompt_ids) // limits.page_size)
    return Generate(
        rid=message.rid,
        prompt_ids=message.prompt_ids[: pages * limits.page_size],
        sampling=SamplingParams(max_new_tokens=0, temperature=0.0),
        priority=message.priority,
        timeout_s=message.timeout_s,
        waiting_timeout_s=message.waiting_timeout_s,
        cache_salt=message.cache_salt,
        deliver=Delivery(
            to=(DECODE_ENGINE,) * limits.pp_size,
            transfer=number,
            first_page=min(first_page, pages - 1),
            weights=scheduler.books.weights,
        ),
    )
