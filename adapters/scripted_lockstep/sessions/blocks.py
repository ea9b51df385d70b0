"""Replies of blocks, which Anthropic's messages and OpenAI's responses are: as their client received them, and as they
must be. The form of a stream is checked here: every block begins, grows and ends in order, and the parts add up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from engine.frontend.schema.errors import ErrorType
from scripted.core.violation import Violation
from scripted_lockstep.sessions.texts import CALL_ID, OutputParts

# Anthropic's names of the errors that a reply may end with.
ERRORS_OF_MESSAGES: Final[Mapping[str | None, str]] = {
    ErrorType.BUSY: "rate_limit_error",
    ErrorType.ENGINE: "api_error",
    ErrorType.TIME_LIMIT: "timeout_error",
}
_MESSAGE_ENDS: Final = {"stop": "end_turn", "length": "max_tokens"}
_STATUSES: Final = {"stop": "completed", "abort": "cancelled"}
_LETTERS: Final = {
    "text": "T",
    "thinking": "R",
    "tool_use": "C",
    "message": "T",
    "reasoning": "R",
    "function_call": "C",
}
# Of each kind of block of a message: the type of its deltas, their field, and the field of the block.
_GROWTHS: Final = {
    "text": ("text_delta", "text", "text"),
    "thinking": ("thinking_delta", "thinking", "thinking"),
    "tool_use": ("input_json_delta", "partial_json", "input"),
}
_TEXT, _REASONING, _CALL = "response.output_text", "response.reasoning_text", "response.function_call_arguments"
_PREFIXES: Final = {"message": _TEXT, "reasoning": _REASONING, "function_call": _CALL}


class BlocksView(NamedTuple):
    """A reply of blocks. ``kinds`` has a letter for each block, ``cut`` whether each is said to be incomplete.

    ``texts`` are those of the reasoning and of the text, each joined; calls have a name, arguments and a given id.
    """

    kinds: str
    texts: tuple[str, str]
    calls: list[tuple[str, Any, str]]
    cut: list[bool]
    end: tuple[str | None, str | None]
    logprobs: list[float]
    usage: dict[str, int]


def blocks_of(
    parts: OutputParts, end: str, stop: str | None, logprobs: Sequence[float], protocol: str, *, is_whole: bool
) -> BlocksView:
    """Return how an output must be shown, without its usage."""
    is_message = protocol == "messages"
    shown = [] if is_message else [*logprobs]
    kinds = parts.kinds or "T" * bool(shown)
    of_calls, ends_early = iter(parts.cut), end != "stop"
    cut = [next(of_calls) if kind == "C" else ends_early and place == len(kinds) for place, kind in enumerate(kinds, 1)]
    calls: list[tuple[str, Any, str]] = [*parts.calls]
    if is_message and is_whole:
        calls = [(name, _input(arguments), given) for name, arguments, given in parts.calls]
    ending: tuple[str | None, str | None]
    if is_message:
        is_call = end == "stop" and bool(calls)
        ending = ("stop_sequence", stop) if stop else ("tool_use" if is_call else _MESSAGE_ENDS.get(end, end), None)
    else:
        why = None if end == "stop" else "max_output_tokens" if end == "length" else end
        ending = _STATUSES.get(end, "incomplete"), why
    texts = parts.reasoning, parts.content
    return BlocksView(kinds, texts, calls, [False] * len(cut) if is_message else cut, ending, shown, {})


def usage_of(counts: Mapping[str, int], protocol: str) -> dict[str, int]:
    if protocol == "messages":
        fresh = counts["prompt"] - counts["cached"]
        return {
            "input_tokens": fresh,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts["cached"],
            "output_tokens": counts["output"],
        }
    return {
        "input_tokens": counts["prompt"],
        "cached_tokens": counts["cached"],
        "output_tokens": counts["output"],
        "reasoning_tokens": counts["reasoning"],
        "total_tokens": counts["prompt"] + counts["output"],
    }


def whole_blocks(body: dict[str, Any], protocol: str) -> BlocksView:
    return _message_view(body) if protocol == "messages" else _response_view(body)


def streamed_blocks(events: Sequence[dict[str, Any]], protocol: str) -> BlocksView:
    """Return the reply of a whole stream. Raises Violation for events that are out of order or do not add up."""
    return _message_view(_streamed_message(events)) if protocol == "messages" else _streamed_response(events)


def _require(holds: bool, what: object) -> None:
    if not holds:
        raise Violation(f"a stream of blocks has a wrong event or lacks one: {what}")


def _input(arguments: str) -> dict[str, int]:
    """Return the input of a call in a whole message: its one argument, if some of it was written."""
    written = re.match(r'\{"n": (\d+)', arguments)
    return {} if written is None else {"n": int(written[1])}


# -- messages --


def _message_view(message: dict[str, Any]) -> BlocksView:
    content: list[dict[str, Any]] = message["content"]
    calls = [one for one in content if one["type"] == "tool_use"]
    _require(len({one["id"] for one in calls}) == len(calls) or calls[0]["id"] == CALL_ID, calls)
    return BlocksView(
        kinds="".join([_LETTERS[one["type"]] for one in content]),
        texts=(
            "".join([one["thinking"] for one in content if one["type"] == "thinking"]),
            "".join([one["text"] for one in content if one["type"] == "text"]),
        ),
        calls=[(one["name"], one["input"], _given(one["id"])) for one in calls],
        cut=[False] * len(content),
        end=(message["stop_reason"], message["stop_sequence"]),
        logprobs=[],
        usage=message["usage"],
    )


def _given(call_id: str) -> str:
    return call_id if call_id == CALL_ID else ""


def _streamed_message(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put the events of a message together. The input of a call is then its text."""
    _require(len(events) > 2, events)
    start, *middle, end, stop = events
    message: dict[str, Any] = start["message"]
    head = start["type"], message.get("content"), message.get("stop_reason")
    _require(head == ("message_start", [], None), start)
    _require((end["type"], stop) == ("message_delta", {"type": "message_stop"}), (end, stop))
    content: list[dict[str, Any]] = []
    is_open = False
    for event in middle:
        kind = event["type"]
        begins = kind == "content_block_start"
        _require(event["index"] == len(content) - (not begins) and is_open is not begins, event)
        if begins:
            content.append(dict(event["content_block"]))
            field = _GROWTHS[content[-1]["type"]][2]
            _require(not content[-1][field], event)
            content[-1][field] = ""
        elif kind == "content_block_delta":
            growth, part, field = _GROWTHS[content[-1]["type"]]
            _require(event["delta"]["type"] == growth, event)
            content[-1][field] += event["delta"][part]
        else:
            _require(kind == "content_block_stop", event)
        is_open = kind != "content_block_stop"
    _require(not is_open, middle[-1:])
    message |= end["delta"]
    return message | {"content": content, "usage": end["usage"]}


# -- responses --


def _response_view(body: dict[str, Any]) -> BlocksView:
    output: list[dict[str, Any]] = body["output"]
    contents = {place: one["content"] for place, one in enumerate(output) if one["type"] != "function_call"}
    calls = [one for one in output if one["type"] == "function_call"]
    _require(len({one["id"] for one in output}) == len(output), output)
    texts = {"message": "", "reasoning": ""}
    for place, content in contents.items():
        texts[output[place]["type"]] += "".join([one["text"] for one in content])
    usage, why = body["usage"], body["incomplete_details"]
    return BlocksView(
        kinds="".join([_LETTERS[one["type"]] for one in output]),
        texts=(texts["reasoning"], texts["message"]),
        calls=[(one["name"], one["arguments"], _given(one["call_id"])) for one in calls],
        cut=[{"incomplete": True, "completed": False}[one["status"]] for one in output],
        end=(body["status"], None if why is None else why["reason"]),
        logprobs=[one["logprob"] for part in contents.values() for text in part for one in text.get("logprobs", ())],
        usage={
            "input_tokens": usage["input_tokens"],
            "cached_tokens": usage["input_tokens_details"]["cached_tokens"],
            "output_tokens": usage["output_tokens"],
            "reasoning_tokens": usage["output_tokens_details"]["reasoning_tokens"],
            "total_tokens": usage["total_tokens"],
        },
    )


def _streamed_response(events: Sequence[dict[str, Any]]) -> BlocksView:
    """Return the reply of a stream, whose last event repeats all of it."""
    _require([one["sequence_number"] for one in events] == [*range(len(events))] and len(events) > 2, events)
    created, going, *middle, last = events
    _require((created["type"], going["type"]) == ("response.created", "response.in_progress"), (created, going))
    begun = created["response"]
    _require(begun == going["response"] and (begun["status"], begun["output"]) == ("in_progress", []), begun)
    body = last["response"]
    name = "completed" if body["status"] == "completed" else "incomplete"
    _require(last["type"] == f"response.{name}", last)
    items: list[dict[str, Any]] = []
    while middle:
        count = next((place for place, one in enumerate(middle, 1) if one["type"] == "response.output_item.done"), 0)
        _require(count > 0, middle)
        items.append(_streamed_item(middle[:count], len(items)))
        middle = middle[count:]
    _require(items == body["output"], (items, body["output"]))
    return _response_view(body)


def _streamed_item(events: Sequence[dict[str, Any]], place: int) -> dict[str, Any]:
    """Check the events of one item, and return it."""
    added, *middle, last = events
    item: dict[str, Any] = last["item"]
    prefix = _PREFIXES[item["type"]]
    begun = (added["type"], added["item"]["status"]) == ("response.output_item.added", "in_progress")
    _require(begun and added["item"]["id"] == item["id"], added)
    _require(not added["item"].get("content") and not added["item"].get("arguments"), added)
    _require(all(one["output_index"] == place for one in events), events)
    _require(all(one["item_id"] == item["id"] for one in middle), middle)
    if prefix == _CALL:
        *deltas, done = middle
        _require((done["name"], done["arguments"]) == (item["name"], item["arguments"]), done)
        text = item["arguments"]
    else:
        first, *deltas, done, part = middle
        ends = first["type"], part["type"]
        _require(ends == ("response.content_part.added", "response.content_part.done"), ends)
        _require(not first["part"]["text"] and [part["part"]] == item["content"], (first, part))
        text = part["part"]["text"]
        _require(done["text"] == text, done)
        values = [one for delta in deltas for one in delta.get("logprobs", ())]
        _require(values == done.get("logprobs", []) == part["part"].get("logprobs", []), deltas)
    _require(done["type"] == f"{prefix}.done" and all(one["type"] == f"{prefix}.delta" for one in deltas), middle)
    _require("".join([one["delta"] for one in deltas]) == text, deltas)
    return item
