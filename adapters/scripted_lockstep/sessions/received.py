"""A reply as its client received it: parsed from the bytes of all its events, and checked for its form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from scripted.core.violation import Violation

# The parts of a chat's message that are left out if they are empty.
_NEVER_EMPTY: Final = ("reasoning_content", "tool_calls")


class ReceivedChoice(NamedTuple):
    """One choice as its client received it.

    ``offsets`` are the positions of its logprobs in a completion's text, ``spelled`` the texts beside the logprobs,
    ``tops`` the most likely tokens beside each token of the output, ``calls`` the names, arguments and given ids of its
    calls; ``roles`` counts the role fields of a chat; ``scores`` are the ranked logprobs of the prompt.
    """

    ids: list[int]
    text: str
    reasoning: str
    calls: list[tuple[str, str, str]]
    reason: str
    prompt: list[int] | None
    roles: int
    logprobs: Sequence[float | None] = ()
    offsets: Sequence[int] = ()
    spelled: Sequence[str] = ()
    tops: Sequence[dict[str, float] | None] = ()
    scores: list[dict[str, Any] | None] | None = None


def events_in(written: bytes) -> tuple[list[dict[str, Any]], bool]:
    """Parse the events of a stream; return whether it was closed as a complete one."""
    blocks = [block.rpartition(b"data: ")[2] for block in written.split(b"\n\n") if block]
    is_closed = blocks[-1:] == [b"[DONE]"]
    return [json.loads(block) for block in (blocks[:-1] if is_closed else blocks)], is_closed


class _Combined:
    """Concatenates the parts of one choice; a reply without streaming has one part."""

    def __init__(self, *, is_plain: bool, gives_ids: bool) -> None:
        self._is_plain = is_plain
        self._gives_ids = gives_ids
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.logprobs: list[float | None] = []
        self.offsets: list[int] = []
        self.spelled: list[str] = []
        self.tops: list[dict[str, float] | None] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.reasons: list[str | None] = []
        self.prompt: list[int] | None = None
        self.scores: list[dict[str, Any] | None] | None = None
        self.roles = 0

    def add(self, choice: dict[str, Any]) -> None:
        message = self._message_in(choice)
        if self._is_plain and "content" not in choice.get("delta", {"content": ""}) and not choice["finish_reason"]:
            raise Violation(f"{choice} is plain text, but has no content")
        self.ids += choice.get("token_ids") or ()
        self.texts.append(choice.get("text") or message.get("content") or "")
        self.reasoning.append(message.get("reasoning_content") or "")
        self._add_logprobs(choice.get("logprobs") or {})
        for place, call in enumerate(message.get("tool_calls") or ()):
            self._add_call(call, call.get("index", place))
        self.roles += "role" in message
        self.prompt = self.prompt or choice.get("prompt_token_ids")
        self.scores = self.scores or choice.get("prompt_logprobs")
        self.reasons.append(choice["finish_reason"])

    def _message_in(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return the message or delta of a chat. Raises Violation for parts that are there without a content."""
        message: dict[str, Any] = choice.get("message") or choice.get("delta") or {}
        empty: list[str] = [name for name in _NEVER_EMPTY if name in message and not message[name]]
        content = message.get("content", "absent")
        # A plain text may be empty; the content of an output with other parts is null or left out.
        if content in (None, "") and (content is None) is self._is_plain:
            empty.append("content")
        if empty:
            raise Violation(f"{message} of choice {choice['index']} has an empty {', '.join(empty)}")
        return message

    def _add_logprobs(self, values: dict[str, Any]) -> None:
        of_chat = values.get("content") or ()
        self.logprobs += values.get("token_logprobs") or [one["logprob"] for one in of_chat]
        self.offsets += values.get("text_offset") or ()
        self.spelled += values.get("tokens") or _spelled_in_chat(of_chat)
        self.tops += values.get("top_logprobs") or [
            {top["token"]: top["logprob"] for top in reversed(one["top_logprobs"])} for one in of_chat
        ]

    def _add_call(self, call: dict[str, Any], index: int) -> None:
        """Add a call of a message, or a part of one. Only the first part has the name, the id and the type."""
        function = call["function"]
        if index not in self.calls:
            if call.get("type") != "function":
                raise Violation(f"the call {call} has no type")
            self.calls[index] = {"id": call["id"], **function}
        elif {"id", "type"} & {*call} or "name" in function:
            raise Violation(f"the call {self.calls[index]} begins again with {call}")
        else:
            self.calls[index]["arguments"] += function["arguments"]

    def view(self, index: int, *, is_whole: bool) -> ReceivedChoice:
        reasons = [reason for reason in self.reasons if reason]
        if is_whole and (len(reasons) != 1 or not self.reasons[-1]):
            raise Violation(f"choice {index} ends with {reasons}, and must end once, with its last part")
        ids = {one["id"] for one in self.calls.values()}
        if [*self.calls] != [*range(len(self.calls))] or (len(ids) < len(self.calls) and not self._gives_ids):
            raise Violation(f"choice {index} has the calls {self.calls}, which need numbers and ids of their own")
        calls = [(one["name"], one["arguments"], one["id"] if self._gives_ids else "") for one in self.calls.values()]
        return ReceivedChoice(
            ids=self.ids,
            text="".join(self.texts),
            reasoning="".join(self.reasoning),
            logprobs=self.logprobs,
            offsets=self.offsets,
            spelled=self.spelled,
            tops=self.tops,
            calls=calls,
            reason="".join(reasons),
            prompt=self.prompt,
            roles=self.roles,
            scores=self.scores,
        )


def choices_in(
    events: Sequence[dict[str, Any]], *, is_plain: bool, gives_ids: bool, is_whole: bool
) -> dict[int, ReceivedChoice]:
    """Return the choices of a reply, from all its events. Unless it ``is_whole``, they may have no end yet."""
    combined: dict[int, _Combined] = {}
    for choice in (choice for event in events for choice in event.get("choices", ())):
        combined.setdefault(choice["index"], _Combined(is_plain=is_plain, gives_ids=gives_ids)).add(choice)
    return {index: one.view(index, is_whole=is_whole) for index, one in combined.items()}


def _spelled_in_chat(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Return the texts of a chat's tokens. Raises Violation if their bytes spell something else."""
    if wrong := [one for one in entries if bytes(one["bytes"]).decode() != one["token"]]:
        raise Violation(f"the bytes beside logprobs spell other tokens: {wrong}")
    return [one["token"] for one in entries]
