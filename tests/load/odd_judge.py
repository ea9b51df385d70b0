"""Judges the answer to an odd request: its status, its shape, its end, and whether it leaks internals.

Owns the rules of judgement; talks to no process. A complaint is a sentence; no complaint is None.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from odd_requests import GENERATING, MESSAGES, RESPONSES, OddRequest

REFUSED = frozenset({400, 404, 405, 409, 413, 415, 429})
# By status: what an error may be called.
TYPES = {
    400: {"invalid_request_error"},
    401: {"authentication_error"},
    404: {"not_found"},
    405: {"invalid_request_error"},
    409: {"duplicate_request"},
    413: {"request_too_large"},
    415: {"unsupported_media_type"},
    429: {"server_busy"},
    504: {"time_limit"},
}
# The same over the Messages protocol, where it has another name.
MESSAGES_TYPES = TYPES | {
    404: {"not_found_error"},
    409: {"invalid_request_error"},
    415: {"invalid_request_error"},
    429: {"rate_limit_error"},
    504: {"timeout_error"},
}
# How an answer of these protocols ends, in its own words.
STATUSES = frozenset({"completed", "incomplete", "cancelled"})
STOPS = frozenset({"end_turn", "max_tokens", "stop_sequence", "tool_use", "abort", "timeout"})
LAST_EVENTS = {RESPONSES: {"response.completed", "response.incomplete"}, MESSAGES: {"message_stop"}}
REASONS = frozenset({"stop", "length", "abort", "timeout", "tool_calls"})
ERROR_FIELDS = {"message", "type", "param", "code", "request_id"}
CODES = {400: {400, "context_length_exceeded"}}
MOST_MESSAGE_CHARS = 4200
# What no client should see: where the server's files are, its code's own words, its objects.
INTERNALS = re.compile(
    r"Traceback|site-packages|File \"|\.py\b|object at 0x|pydantic|Input should|<class |PanicException|NoExtension|"
    r"engine\.(?:frontend|grammar|scheduler|model)\b"
)
# How a message about one field begins.
ABOUT_A_FIELD = re.compile(r"([a-z_]+)(?:\.[\w.]+)? (?:must|needs|is not a field)\b")


@dataclass
class OddAnswer:
    """A client's view of an answer. ``events`` are a stream's; ``cut`` tells how the connection broke."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[str] = field(default_factory=list)
    left: bool = False
    cut: str = ""

    @property
    def streams(self) -> bool:
        """True for an answer of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def __str__(self) -> str:
        said = self.events[-1] if self.events else self.body.decode(errors="replace")
        return f"{self.status} {said[:400]!r}" + (f", cut: {self.cut}" if self.cut else "")


def complaint_about(request: OddRequest, answer: OddAnswer) -> str | None:
    """Return the complaint about an answer of a live server, or None."""
    if answer.cut:
        return f"it was cut off: {answer.cut}"
    if answer.left:
        return None
    allowed = {200, *REFUSED} | ({504} if request.has_limit else set())
    allowed |= {401} if "x-api-key" in request.headers else set()
    if answer.status not in allowed:
        return f"the status must be one of {sorted(allowed)}"
    if "x-request-id" not in answer.headers:
        return "it has no X-Request-Id"
    if answer.status != 200:
        return None if request.method == "HEAD" else _about_error(request, _json(answer.body), answer.status)
    if request.path not in GENERATING:
        return None
    if request.fields is not None and answer.streams is not (request.fields.get("stream") is True):
        return "the answer must be a stream where one was asked for, and only there"
    return _about_stream(request, answer) if answer.streams else _about_whole(request, _json(answer.body))


def _json(data: str | bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _about_error(request: OddRequest, body: Any, status: int) -> str | None:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not set(error) <= ERROR_FIELDS:
        return "an error must have the one shape of errors"
    of_messages = {"type": "error", "request_id": error.get("request_id")}
    if body != {"error": error} | (of_messages if request.path.startswith(MESSAGES) else {}):
        return "an error must have the shape of its protocol"
    message, param = error["message"], error["param"]
    types = (MESSAGES_TYPES if request.path.startswith(MESSAGES) else TYPES)[status]
    if error["code"] not in CODES.get(status, {status}) or error["type"] not in types or not error.get("request_id"):
        return f"the code must be {status}, the type one of {types}, and its request_id must be there"
    if not message or len(message) > MOST_MESSAGE_CHARS:
        return "the message must be there, and short"
    shown = re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "''", message)  # What the client sent itself.
    if (found := INTERNALS.search(shown)) is not None:
        return f"the message must not show {found[0]!r}"
    about = ABOUT_A_FIELD.match(message)
    if status == 400 and about is not None and param is None and about[1] in _keys(request.fields):
        return f"the message is about {about[1]}, so param must name it"
    # A long one is shortened.
    shown_whole = param is not None and not param.endswith(" more)")
    if request.fields is not None and shown_whole and not _has_place(request.fields, param.split(".")[:-1]):
        return f"param must be a place of the body, is {param}"
    return None


def _has_place(fields: Any, keys: list[str]) -> bool:
    """Whether a path leads somewhere in a body."""
    for key in keys:
        if isinstance(fields, list) and key.isdecimal() and int(key) < len(fields):
            fields = fields[int(key)]
        elif isinstance(fields, dict) and key in fields:
            fields = fields[key]
        else:
            return False
    return True


def _keys(fields: Any) -> set[str]:
    if isinstance(fields, dict):
        return set(fields).union(*map(_keys, fields.values()))
    return set[str]().union(*map(_keys, fields)) if isinstance(fields, list) else set()


def _about_whole(request: OddRequest, body: Any) -> str | None:
    if not isinstance(body, dict) or body.get("error") is not None:
        return "an answer must be an object without an error"
    if request.path in LAST_EVENTS:
        return _about_blocks(request, body)
    if "choices" not in body:
        return _about_end(request, body["meta_info"]["finish_reason"], body["text"])
    count = _choices(request)
    if [choice["index"] for choice in body["choices"]] != list(range(count or len(body["choices"]))):
        return f"there must be {count} choices, in order"
    for choice in body["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        if (complaint := _about_end(request, choice["finish_reason"], text)) is not None:
            return complaint
    usage = body["usage"]
    right = usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return None if right else f"the usage must add up: {usage}"


def _about_end(request: OddRequest, reason: str | None, text: str | None) -> str | None:
    if reason not in REASONS:
        return f"the reason must be one of {sorted(REASONS)}, is {reason}"
    if reason == "stop" and request.pattern is not None and not re.fullmatch(request.pattern, text or ""):
        return f"the text must match {request.pattern}, is {text!r}"
    return None


def _about_stream(request: OddRequest, answer: OddAnswer) -> str | None:
    """A stream ends once: by ``[DONE]`` after each choice's one end, or by an error's event."""
    if not answer.events:
        return "a stream must have events"
    if request.path in LAST_EVENTS:
        return _about_named_events(request, answer)
    *before, last = answer.events
    if "[DONE]" in before:
        return "a stream must not go on after [DONE]"
    pieces = [_json(event) for event in before]
    if not all(isinstance(piece, dict) and "error" not in piece for piece in pieces):
        return "each event but the last must be a piece of the answer"
    if last != "[DONE]":
        end = _json(last)
        if not isinstance(end, dict) or "error" not in end:
            return "a stream must end with [DONE] or an error"
        status = end["error"].get("code")
        if status not in REFUSED | ({504} if request.has_limit else set()):
            return f"a stream must not end with {status}"
        return _about_error(request, end, status)
    return _about_ends(request, pieces)


def _about_blocks(request: OddRequest, body: Any) -> str | None:
    """A response or a message: why it ended, and that its numbers add up."""
    usage = body["usage"]
    if request.path == MESSAGES:
        return None if body["stop_reason"] in STOPS else f"the reason must be one of {sorted(STOPS)}"
    if body["status"] not in STATUSES or (body["status"] == "completed") is not (body["incomplete_details"] is None):
        return f"the status must be one of {sorted(STATUSES)}, with details where it is not completed"
    right = usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    return None if right else f"the usage must add up: {usage}"


def _about_named_events(request: OddRequest, answer: OddAnswer) -> str | None:
    """A stream of named events ends once: by its protocol's last event, or by an error."""
    names = [event.removeprefix("event: ") for event in answer.events if event.startswith("event: ")]
    pieces = [_json(event) for event in answer.events if not event.startswith("event: ")]
    if not all(isinstance(piece, dict) for piece in pieces) or names != [piece.get("type") for piece in pieces]:
        return "each event must be an object with its type as its name"
    ends = [index for index, name in enumerate(names) if name in LAST_EVENTS[request.path] | {"error"}]
    if ends != [len(names) - 1]:
        return "a stream must end with the last event of its protocol or an error, and only there"
    if request.path == RESPONSES and [piece["sequence_number"] for piece in pieces] != list(range(len(pieces))):
        return "the events of a response must be counted"
    if (opened := _opened(pieces)) is not None:
        return opened
    last = pieces[-1]
    if names[-1] != "error":
        return _about_blocks(request, last["response"]) if request.path == RESPONSES else None
    status = last["error"].get("code")
    if status not in REFUSED | ({504} if request.has_limit else set()):
        return f"a stream must not end with {status}"
    shown = {name: value for name, value in last.items() if request.path == MESSAGES or name == "error"}
    return _about_error(request, shown, status)


def _opened(pieces: list[Any]) -> str | None:
    """Blocks and items begin in order, one at a time, and end before the stream does."""
    begun = ended = 0
    for piece in pieces:
        kind = piece["type"]
        if kind in ("content_block_start", "response.output_item.added"):
            begun += 1
        ended += kind in ("content_block_stop", "response.output_item.done")
        place = piece.get("output_index", piece.get("index"))
        if place is not None and (place != begun - 1 or not begun - 1 <= ended <= begun):
            return f"blocks must begin and end in order, but {kind} is of {place}"
    return None if begun == ended or pieces[-1]["type"] == "error" else "each block must end"


def _about_ends(request: OddRequest, pieces: list[Any]) -> str | None:
    """Each choice of a stream ends once, and nothing of it follows."""
    texts: dict[int, str] = {}
    ended: set[int] = set()
    for piece in pieces:
        for choice in piece.get("choices", [piece]):
            index, meta = choice.get("index", 0), choice.get("meta_info", choice)
            if index in ended:
                return f"choice {index} must not go on after its end"
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[index] = texts.get(index, "") + text
            if meta.get("finish_reason") is not None:
                ended.add(index)
                if (complaint := _about_end(request, meta["finish_reason"], texts[index])) is not None:
                    return complaint
    due = set(range(_choices(request) or len(texts)))
    return None if ended == due else f"each choice must end, {sorted(due)}, but ended are {sorted(ended)}"


def _choices(request: OddRequest) -> int | None:
    """How many choices are asked for, if that can be known."""
    fields = request.fields
    if fields is None:
        return None
    prompt = fields.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return prompts * (fields.get("n") or 1)
