"""One reply of the front end under the search: its order, its client's input so far, and the expected reply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

from engine.core.messages import FAILURES, Abort, FinishReason, Generate, PromptLogprob
from engine.frontend.schema.errors import ApiError, ErrorType
from engine.frontend.sessions.sessions import Session, Sessions, Shaping
from engine.frontend.text.answer import WholeDecoder
from scripted.core.violation import Violation
from scripted.sdk import Add
from scripted_lockstep.sessions import native
from scripted_lockstep.sessions.blocks import ERRORS_OF_MESSAGES, blocks_of, streamed_blocks, usage_of, whole_blocks
from scripted_lockstep.sessions.orders import SERVED, CountedShape, order_of, shape_of
from scripted_lockstep.sessions.received import ReceivedChoice, choices_in, events_in
from scripted_lockstep.sessions.settings import SessionSettings
from scripted_lockstep.sessions.texts import (
    DECODERS,
    REPLACEMENT,
    OutputParts,
    logprob_of,
    output_parts,
    prompt_logprobs_of,
    reasoning_tokens,
    stop_position,
)

_TIERS: Final = ("device", "host")
# The fields of a chat that are about its prompt, and those of its first choice that they become here.
_OF_A_CHATS_PROMPT: Final = {"prompt_token_ids": "prompt", "prompt_logprobs": "scores"}
# The type of the error that each end of a request becomes; the scheduler refuses replies because it is busy.
_ERRORS: Final = {FinishReason.ERROR: ErrorType.ENGINE, FinishReason.TIMEOUT: ErrorType.TIME_LIMIT}


class OpenAnswer:
    """One reply from its first message to its last byte.

    ``emitted`` has the output tokens of each request, in the order in which the requests were sent; ``scored`` has the
    requests whose prompt logprobs were sent, ``ends`` the scheduler's finish reasons, and ``stopped`` the requests that
    it ended at a stop token; the front end has aborted those ``called_off``. ``is_known``: the search knows it, and the
    device computes its first request, which has the ``number`` 0 then; ``is_reported``: the search was told that it has
    ended. ``is_late``: its time has run out. ``posted`` counts the requests that the front end has sent. A client that
    ``has_left`` reads no more.
    """

    def __init__(
        self, add: Add, settings: SessionSettings, sessions: Sessions, *, is_known: bool = True, number: int = 0
    ) -> None:
        self.add = add
        self.is_known = is_known
        self.number = number
        self._settings = settings
        self._tokens = DECODERS[settings.tools]
        # The decoder of what must be told; the front end takes the one that its order says.
        self._decoder = WholeDecoder(self._tokens) if settings.shows_special else self._tokens
        self.order = order_of(add, settings, number)
        self._shape = CountedShape(shape_of(self.order, settings))
        self.session = Session(
            sessions,
            self.order,
            self._shape,
            WholeDecoder(self._tokens) if self.order.shows_special else self._tokens,
            tokens_a_turn=settings.turn_tokens,
            outputs_a_turn=settings.turn_outputs,
            values_a_turn=settings.turn_values,
        )
        self.emitted: dict[str, list[int]] = {}
        self.scored: set[str] = set()
        self.ends: dict[str, FinishReason] = {}
        self.stopped: set[str] = set()
        self.called_off: set[str] = set()
        self.is_reported = self.is_late = self.is_called_off = False
        self.posted = 0
        self.is_sending = True
        self.has_left = self.is_over = False
        # None until the scheduler has decided.
        self.is_refused: bool | None = None
        # The tokens and ends of the requests before the first failure.
        self._before_failure: dict[str, tuple[int, bool]] | None = None
        self._written = b""
        # A whole reply that is being made, and what had been made when its client left.
        self._making: Shaping[bytes] | None = None
        self._made_before_leaving = 0
        self._error: ApiError | None = None

    def note_end(self, rid: str, end: FinishReason) -> None:
        """Note the terminal reply of a request; its tokens were noted before."""
        if end in FAILURES and self._before_failure is None:
            shown = {rid for rid, end in self.ends.items() if end is not FinishReason.TIMEOUT or self.emitted[rid]}
            self._before_failure = {rid: (len(ids), rid in shown) for rid, ids in self.emitted.items()}
        self.ends[rid] = end

    def check_reason(self, abort: Abort) -> None:
        """Raise Violation for an abort by the front end that says another reason than its own."""
        is_over = self.has_left or self.is_called_off or any(end in FAILURES for end in self.ends.values())
        if not is_over and abort.finish_reason is not FinishReason.STOP:
            raise Violation(f"{abort.rid} reached a stop string, but the scheduler is told {abort.finish_reason}")

    def unneeded_requests(self) -> list[str]:
        """Return the requests that the front end should have aborted: a choice failed, or a stop string was found."""
        over = self.ends.keys() | self.called_off
        going = [one for one in self.order.messages if one.rid in self.emitted and one.rid not in over]
        if self.is_over and any(end in FAILURES for end in self.ends.values()):
            return [one.rid for one in going]
        if self.is_sending or self.has_left or self.session.has_more:
            return []
        return [one.rid for one in going if self._stop_position(one)[0] is not None]

    @property
    def is_done(self) -> bool:
        """True once the reply is complete, or its client has left, and every request that was sent has ended."""
        is_over = self.is_over or (self.has_left and self.session.is_over and self._making is None)
        return is_over and len(self.ends) == self.posted

    @property
    def has_input(self) -> bool:
        """True if ``read`` would take something."""
        return not (self.is_over or self.is_sending) and (self.session.has_more or self._making is not None)

    def cached_tokens_of(self, message: Generate) -> dict[str, int]:
        """Return the cached tokens that the scheduler reports by tier, different for each prompt."""
        prompt = self.order.messages.index(message) // self.order.n
        return dict(zip(_TIERS, (1 + 2 * prompt, 2 + prompt), strict=True))

    def send(self) -> None:
        self.is_sending = self.session.send_some()

    def leave(self) -> None:
        self.has_left, self.is_sending = True, False
        self._made_before_leaving = self._shape.made + len(self._written)
        self.session.leave()

    def read(self) -> None:
        """Read the available output, or make a part of a whole reply, up to the limit of a turn. Raises Violation.

        Checks a finished reply, and that nothing is made for a client that has left.
        """
        if not self.has_input:
            return
        try:
            if self.order.stream:
                self._written += self.session.part()
                self.is_over = self.session.is_told
            elif self._making is not None or self.session.collect():
                self._make()
        except ApiError as exc:
            self._error, self.is_over = exc, True
        if not self.has_left:
            if self.is_over:
                self._check_reply()
        elif self._shape.made + len(self._written) > self._made_before_leaving:
            raise Violation(f"the client of {self.add.rid} has left, but its reply is made")

    def _make(self) -> None:
        self._making = self._making or self.session.body()
        try:
            next(self._making)
        except StopIteration as done:
            self._written, self._making, self.is_over = done.value, None, True

    # -- the expected reply --

    def _check_reply(self) -> None:
        due = self._due_error()
        events, is_closed = events_in(self._written) if self.order.stream else ([], True)
        actual = events[-1]["error"]["type"] if events and events[-1].get("error") else None
        if self._error is not None:
            actual = self._error.body.error.type
        elif self._settings.protocol == "messages":
            due = ERRORS_OF_MESSAGES.get(due, due)
        if actual != due:
            raise Violation(f"{self.add.rid} ended with {self.ends}, an error {due}, but its client was told {actual}")
        if due is not None:
            self._check_broken(events)
            return
        if self._settings.has_blocks:
            self._check_blocks(events)
            return
        if not is_closed:
            raise Violation(f"the stream of {self.add.rid} ends with {self._written[-20:]!r}, which is not [DONE]")
        if not self.order.stream:
            body = json.loads(self._written)
            events = body if isinstance(body, list) else [body]
        if self._settings.is_native:
            self._check_native(events)
            return
        if self.order.stream:
            self._check_usage_of_events(events)
        self._check_whole(events)

    def _check_native(self, events: Sequence[dict[str, Any]]) -> None:
        received = native.received_choices(events, has_indices=self.order.n > 1)
        for index, message in enumerate(self.order.messages):
            ids, parts, end, stop = self._output_of(message)
            # A stop token has no text, and is told by its id.
            stops: list[str | int] = [stop] if stop is not None else [ids[-1]] if end == "stop" else []
            due = native.expected_choice(message, parts.content, ids, end, stops, self.cached_tokens_of(message))
            due |= native.expected_scores(message, self._scores_of(message))
            told = native.with_one_end(received[index]) if index in received else None
            if told != due:
                raise Violation(f"choice {index} of {self.add.rid} is told {told}, but must be {due}")

    def _scores_of(self, message: Generate) -> Sequence[PromptLogprob]:
        """Return the logprobs of a prompt, if they were sent before its request ended."""
        return prompt_logprobs_of(message) if message.rid in self.scored else ()

    def _check_blocks(self, events: Sequence[dict[str, Any]]) -> None:
        """Compare a reply of blocks. Raises Violation."""
        (message,), protocol, is_whole = self.order.messages, self._settings.protocol, not self.order.stream
        actual = whole_blocks(json.loads(self._written), protocol) if is_whole else streamed_blocks(events, protocol)
        ids, parts, end, stop = self._output_of(message)
        shown = [logprob_of(token, place).logprob for place, token in enumerate(ids)] if self.order.logprobs else []
        due = blocks_of(parts, end, stop, shown, protocol, is_whole=is_whole)
        counts = {
            "prompt": len(message.prompt_ids),
            "cached": sum(self.cached_tokens_of(message).values()),
            "output": len(ids),
            "reasoning": reasoning_tokens(ids) if parts.reasoning else 0,
        }
        if actual != (due := due._replace(usage=usage_of(counts, protocol))):
            raise Violation(f"the reply {self.add.rid} is told {actual}, but must be {due}")

    def _due_error(self) -> str | None:
        """Return the type of the error that must end the reply, if any."""
        if self.is_refused:
            return ErrorType.BUSY
        failed = [end for end in self.ends.values() if end in FAILURES]
        has_output = any(self.emitted.values()) or any(end is not FinishReason.TIMEOUT for end in self.ends.values())
        ends = failed or ([] if has_output else [FinishReason.TIMEOUT])
        return _ERRORS[ends[0]] if ends else None

    def _check_broken(self, events: Sequence[dict[str, Any]]) -> None:
        """Check what a reply shows before its error: all that came before it, in a stream, and else nothing."""
        before = self._before_failure or {}
        has_output = any(count or has_ended for count, has_ended in before.values())
        if (self._error is None) is not (self.order.stream and has_output):
            raise Violation(f"{self.add.rid} failed after {before}, but its client was told {self._error}, {events}")
        if self._settings.has_blocks:
            # Its form is that of a whole reply; the texts of what was held back are not due.
            return
        ids_by_choice = self._ids_in(events[:-1])
        for index, message in enumerate(self.order.messages):
            count, _ = before.get(message.rid, (0, False))
            due = self.emitted.get(message.rid, [])[:count][: self._stop_position(message)[0]]
            ids = ids_by_choice.get(index, [])
            if events and ids != due:
                raise Violation(f"choice {index} of {self.add.rid} is told {ids} before an error, and not {due}")

    def _ids_in(self, events: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
        if self._settings.is_native:
            choices = native.received_choices(events, has_indices=self.order.n > 1)
            return {index: one["ids"] for index, one in choices.items()}
        return {index: one.ids for index, one in self._choices_in(events, is_whole=False).items()}

    def _check_whole(self, events: Sequence[dict[str, Any]]) -> None:
        if heads := {(event["id"], event["model"]) for event in events} - {(self.order.rid, SERVED.model_name)}:
            raise Violation(f"the reply {self.order.rid} is told as {sorted(heads)}")
        received = self._choices_in(events, is_whole=True)
        of_all = {field: value for event in events for field, value in event.items() if field in _OF_A_CHATS_PROMPT}
        if 0 in received and of_all:
            received[0] = received[0]._replace(**{_OF_A_CHATS_PROMPT[field]: one for field, one in of_all.items()})
        for index, message in enumerate(self.order.messages):
            expected = self._expected(index, message)
            if received.get(index) != expected:
                raise Violation(
                    f"choice {index} of {self.add.rid} is told {received.get(index)}, but must be {expected}"
                )
        prompts = self.order.messages[:: self.order.n]
        shown = (event["sglext"]["cached_tokens_details"] for event in events if "sglext" in event)
        tiers: dict[str, int] = next(shown, {})
        if tiers != (due := {tier: sum(self.cached_tokens_of(one)[tier] for one in prompts) for tier in _TIERS}):
            raise Violation(f"the cached tokens of {self.add.rid} are {due}, but it says {tiers}")
        if (usage := events[-1].get("usage")) is not None:
            self._check_usage(usage, prompts, list(received.values()))

    def _choices_in(self, events: Sequence[dict[str, Any]], *, is_whole: bool) -> dict[int, ReceivedChoice]:
        return choices_in(
            events,
            is_plain=not self._settings.has_parts,
            gives_ids=self._settings.tools == "mistral",
            is_whole=is_whole,
        )

    def _check_usage(
        self, usage: dict[str, Any], prompts: Sequence[Generate], choices: Sequence[ReceivedChoice]
    ) -> None:
        counts = {
            "prompt_tokens": sum(len(one.prompt_ids) for one in prompts),
            "completion_tokens": sum(len(one.ids) for one in choices),
            "cached_tokens": sum(sum(self.cached_tokens_of(one).values()) for one in prompts),
        }
        counts["total_tokens"] = counts["prompt_tokens"] + counts["completion_tokens"]
        if self._settings.reasoning:
            counts["reasoning_tokens"] = sum(reasoning_tokens(one.ids) for one in choices if one.reasoning)
        found = usage | usage["prompt_tokens_details"] | usage.get("completion_tokens_details", {})
        if wrong := {name: found.get(name) for name, count in counts.items() if found.get(name) != count}:
            raise Violation(f"the usage of {self.add.rid} must have {counts}, but says {wrong}")

    def _stop_position(self, message: Generate) -> tuple[int | None, int, str]:
        return stop_position(self.emitted.get(message.rid, []), message.sampling, self._decoder)

    def _output_of(self, message: Generate) -> tuple[list[int], OutputParts, str, str | None]:
        """Return the ids of an output, its parts, its finish reason, and the stop string that ended it, if any."""
        count, chars, stop = self._stop_position(message)
        ids = self.emitted[message.rid][:count]
        is_models_end = message.rid in self.stopped and count is None
        # A text that ends inside a character ends with a replacement character; a stop token has no text.
        text = self._decoder.decode(ids[:-1] if is_models_end else ids)
        if count is not None:
            text = text[:chars] + (stop if self._settings.shows_stop else "")
        parts = output_parts(text, self._settings, is_models_end=is_models_end)
        end = "stop" if count is not None else self.ends[message.rid].value
        if is_models_end and parts.is_cut:
            end = "length"
        return ids, parts, end, None if count is None else stop

    def _expected(self, index: int, message: Generate) -> ReceivedChoice:
        ids, parts, reason, _ = self._output_of(message)
        is_chat = self._settings.is_chat
        if reason == "stop" and parts.calls and not parts.is_cut:
            reason = "tool_calls"
        echo = self._spelled(message.prompt_ids) if self.order.echo else ""
        view = ReceivedChoice(
            ids=ids,
            text=echo + parts.content,
            reasoning=parts.reasoning,
            calls=parts.calls,
            reason=reason,
            prompt=list(message.prompt_ids) if not is_chat or not index else None,
            roles=int(is_chat),
            scores=self._expected_ranks(index) if not is_chat or not index else None,
        )
        return self._with_logprobs(view, index, message, begin=len(echo))

    def _spelled(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with that of special ones."""
        return self._tokens.decode(ids, skip_special_tokens=False)

    def _with_logprobs(self, view: ReceivedChoice, index: int, message: Generate, *, begin: int) -> ReceivedChoice:
        decode, ids = self._decoder.decode, view.ids
        scores, offsets = self._expected_echo(index)
        logprobs = [None if one is None else one.logprob for one in scores]
        spelled = [self._spelled([token]) for token in message.prompt_ids[: len(logprobs)]]
        tops = [None if one is None else self._tops_of(one.top[: self._settings.tops]) for one in scores]
        if self._settings.logprobs:
            entries = [logprob_of(token, place) for place, token in enumerate(ids)]
            spelled += [self._spelled([token]) for token in ids]
            logprobs += [one.logprob for one in entries]
            tops += [self._tops_of(one.top) for one in entries]
            # A token inside a character has that character's position.
            before = [decode(ids[:place]).rstrip(REPLACEMENT) for place in range(len(ids))]
            offsets += [] if self._settings.is_chat else [begin + len(one) for one in before]
        return view._replace(logprobs=logprobs, offsets=offsets, spelled=spelled, tops=tops)

    def _tops_of(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        # Of tokens with the same text the most likely one, which comes first.
        return {self._spelled([token]): value for token, value in reversed(top)}

    def _expected_echo(self, index: int) -> tuple[list[PromptLogprob | None], list[int]]:
        """Return an echoed prompt's logprobs and their positions; without streaming, they are the first choice's."""
        if not (self.order.echo and self._settings.logprobs):
            return [], []
        scorer = self.order.messages[index if self.order.stream else index - index % self.order.n]
        scores = self._scores_of(scorer)
        return [None, *scores], [len(self._spelled(scorer.prompt_ids[:place])) for place in range(1 + len(scores))]

    def _expected_ranks(self, index: int) -> list[dict[str, Any] | None] | None:
        """Return the ranked logprobs of a choice's prompt, which its first choice computed; None if not requested."""
        most = self.order.prompt_logprobs
        if most is None:
            return None
        scorer = self.order.messages[index - index % self.order.n]
        ranked: list[dict[str, Any] | None] = [None]
        for token, one in zip(scorer.prompt_ids[1:], self._scores_of(scorer), strict=False):
            found = {token: (one.logprob, one.rank)} | {t: (v, rank) for rank, (t, v) in enumerate(one.top[:most], 1)}
            ranked.append(
                {
                    str(t): {"logprob": value, "rank": rank, "decoded_token": self._spelled([t])}
                    for t, (value, rank) in found.items()
                }
            )
        return ranked

    def _prompts_in(self, events: Sequence[dict[str, Any]]) -> list[int]:
        """Return, for each event of a stream, the tokens of the prompts of the choices shown so far."""
        shown: dict[int, int] = {}
        counts = []
        for event in events:
            index = event["choices"][0]["index"]
            shown[index // self.order.n] = len(self.order.messages[index].prompt_ids)
            counts.append(sum(shown.values()))
        return counts

    def _check_usage_of_events(self, events: Sequence[dict[str, Any]]) -> None:
        """Raise Violation unless exactly the requested events of a stream carry the usage."""
        wanted, with_choices = self._settings.usage, [event for event in events if event["choices"]]
        if wanted == "none":
            fits = not any("usage" in event for event in events)
        elif wanted == "end":
            fits = all("usage" in event and event["usage"] is None for event in with_choices)
        else:
            counts = [event["usage"]["completion_tokens"] for event in with_choices]
            so_far = list(accumulate(len(event["choices"][0].get("token_ids") or ()) for event in with_choices))
            fits = all(map(int.__le__, so_far, counts)) and all(one <= after for one, after in pairwise(counts))
            prompts = [event["usage"]["prompt_tokens"] for event in with_choices]
            fits = fits and prompts == self._prompts_in(with_choices)
        if not fits:
            usages = [event.get("usage", "none") for event in events]
            raise Violation(f"the stream of {self.add.rid} was asked for usage={wanted}, but has {usages}")
