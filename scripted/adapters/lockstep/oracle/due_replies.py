"""What clients must be told in a step, and whether they are told that: each token, end and refusal once.

The account of clients says what is due. This module hears the replies and names what differs; it knows no plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.messages import ABORT, TIMEOUT, FinishReason, PromptLogprob, RefusalKind, TokenOutput
from scripted.adapters.lockstep.oracle.life import Life
from scripted.core.violation import Violation

__all__ = ["DueReplies", "Said"]


# What a client is told in one step, without the names, which cost as much as all the rest.
Said = tuple[str, tuple[int, ...], FinishReason | None, int, int, int, str | None, tuple[PromptLogprob, ...]]


class Told(NamedTuple):
    """The same with names, for two that differ."""

    rid: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    error: str | None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()


class DueReplies:
    """``told`` are the outputs that are due in this step, ``refused`` the refusals."""

    def __init__(self, most_queued: int) -> None:
        self._most_queued = most_queued
        self.told: list[Said] = []
        self.refused: list[tuple[str, RefusalKind]] = []

    def expect(
        self,
        life: Life,
        tokens: tuple[int, ...] = (),
        reason: FinishReason | None = None,
        error: str | None = None,
        part: tuple[PromptLogprob, ...] = (),
    ) -> None:
        """A client is to be told this in the step, with the counts of its request as they are now."""
        prompt = life.prompt_tokens
        completed = len(life.ids) - prompt
        self.told.append((life.rid, tokens, reason, prompt, completed, life.cached_tokens, error, part))

    def compare(self, told: list[Said], refused: list[tuple[str, RefusalKind]]) -> None:
        """The replies of the step are those that are due, which are forgotten then. Raises Violation."""
        if refused != self.refused:
            self._explain_refusals(refused)
        if told != self.told:
            _compare_told([Told(*one) for one in told], [Told(*one) for one in self.told])
        self.refused.clear()
        self.told.clear()

    @staticmethod
    def said_by(output: TokenOutput) -> Said:
        """What an output tells its client."""
        return (
            output.rid,
            output.token_ids,
            output.finish_reason,
            output.prompt_tokens,
            output.completion_tokens,
            output.cached_tokens,
            _limit_named(output.error) if output.finish_reason is TIMEOUT else output.error,
            output.prompt_logprobs,
        )

    def _explain_refusals(self, refused: Sequence[tuple[str, RefusalKind]]) -> None:
        """Raise Violation with the first difference between who was refused and who had to be."""
        due, most = self.refused, self._most_queued
        for rid, kind in due:
            if (rid, kind) not in refused:
                raise Violation(f"{rid} must be refused as {kind}, but is not: max_queued_requests is {most}")
        for rid, kind in refused:
            if (rid, kind) not in due:
                raise Violation(f"{rid} is refused as {kind}, but nothing is in its way: max_queued_requests is {most}")
        raise Violation(f"the refusals {due} are told as {refused}")


def _limit_named(error: str | None) -> str | None:
    """The time limit that a client is told of."""
    return next((name for name in ("waiting_timeout_s", "timeout_s") if f" {name} is " in (error or "")), error)


def _compare_told(told: list[Told], due: list[Told]) -> None:
    """Every token and every end is told once, as the events of the step say. Raises Violation with what differs."""
    extra, missing = list(told), []
    for one in due:
        if one in extra:
            extra.remove(one)
        else:
            missing.append(one)
    for one in extra:
        same = next((other for other in missing if other.rid == one.rid), None)
        if same is None:
            raise Violation(f"{one.rid} gets a reply after its terminal one, or without being alive: {one}")
        raise Violation(_difference(one, same))
    for one in missing:
        if one.prompt_logprobs:
            count = len(one.prompt_logprobs)
            raise Violation(f"{one.rid} has the logprobs of {count} tokens of its prompt, but its client was not told")
        ends = {ABORT: "was aborted", TIMEOUT: "has no time left"}
        what = "has a result" if one.finish_reason is None else ends.get(one.finish_reason, "has a result")
        raise Violation(f"{one.rid} {what}, but its client was not told: {one}")


def _difference(told: Told, due: Told) -> str:
    """What is wrong with a reply, given the one that the events account for."""
    rid = told.rid
    if told.token_ids != due.token_ids:
        return f"{rid} is told the tokens {told.token_ids}, but its result is {due.token_ids}"
    if told.finish_reason is not due.finish_reason:
        if told.finish_reason is None and due.finish_reason is FinishReason.STOP:
            return f"{rid} goes on after its stop token: {told.token_ids}"
        reason, tokens = told.finish_reason, told.completion_tokens
        return f"{rid} ends with {reason} after {tokens} tokens: nothing explains that, due is {due.finish_reason}"
    if told.prompt_logprobs != due.prompt_logprobs:
        return (
            f"{rid} is told the prompt logprobs {[one.logprob for one in told.prompt_logprobs]}, but its result has "
            f"{[one.logprob for one in due.prompt_logprobs]}"
        )
    if told.error != due.error:
        return f"{rid} ends with the wrong error: {told.error!r}, what happened is {due.error!r}"
    if told.cached_tokens != due.cached_tokens:
        return f"{rid} is told {told.cached_tokens} cached tokens, but began at position {due.cached_tokens}"
    counts = (told.completion_tokens, told.prompt_tokens), (due.completion_tokens, due.prompt_tokens)
    return f"{rid} is told the counts {counts[0]} of output and prompt, but they are {counts[1]}"
