"""A native reply: as its client received it, and as it must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine.core.messages import Generate, PromptLogprob
from engine.frontend.schema.native import META_LISTS
from scripted.core.violation import Violation
from scripted_lockstep.sessions.texts import logprob_of

_COUNTS: Final = ("prompt_tokens", "cached_tokens", "cached_tokens_details")


def received_choices(events: Sequence[dict[str, Any]], *, has_indices: bool) -> dict[int, dict[str, Any]]:
    """Join the pieces of each choice. Raises Violation for counts that are not of its ids so far."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        meta = event["meta_info"]
        if ("index" in event) is not has_indices:
            raise Violation(f"{event} must have an index if and only if its reply has several choices")
        one = choices.setdefault(event.get("index", 0), {"text": "", "ids": [], "reasons": [], "stops": []})
        one["text"] += event["text"]
        one["ids"] += event["output_ids"]
        one["reasons"].append(meta["finish_reason"])
        one["stops"] += [meta["matched_stop"]] if "matched_stop" in meta else []
        one |= {name: one.get(name, []) + meta[name] for name in META_LISTS if name in meta}
        one |= {"id": meta["id"], **{name: meta[name] for name in _COUNTS}}
        if meta["completion_tokens"] != len(one["ids"]):
            raise Violation(f"{event} counts other tokens than the {len(one['ids'])} that were shown")
    return choices


def with_one_end(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice with the finish reason of its last piece. Raises Violation unless it alone has one."""
    *before, last = choice["reasons"]
    if any(before) or not last:
        raise Violation(f"{choice} must end once, with its last piece")
    return choice | {"reasons": [last]}


def expected_choice(
    message: Generate, text: str, ids: list[int], end: str, stops: list[str | int], cached: Mapping[str, int]
) -> dict[str, Any]:
    """Return how a choice must be shown, without the logprobs of its prompt."""
    shown: dict[str, Any] = {
        "id": message.rid,
        "text": text,
        "ids": ids,
        "reasons": [end],
        "stops": stops,
        "prompt_tokens": len(message.prompt_ids),
        "cached_tokens": sum(cached.values()),
        "cached_tokens_details": cached,
    }
    if message.return_logprob:
        entries = [(token, logprob_of(token, place)) for place, token in enumerate(ids)]
        shown["output_logprobs"] = [
            {"token_id": token, "logprob": one.logprob, "top": [[*top] for top in one.top]} for token, one in entries
        ]
    return shown


def expected_scores(message: Generate, scores: Sequence[PromptLogprob]) -> dict[str, Any]:
    """Return how the logprobs of a prompt must be shown, from the first requested token on, which has none."""
    start = message.prompt_logprobs_from
    if start < 0:
        return {}
    first, *ids = message.prompt_ids[start:]
    of_tokens = [[one.logprob, token, None] for one, token in zip(scores, ids, strict=False)]
    shown: dict[str, Any] = {
        "input_token_logprobs": [[None, first, None], *of_tokens],
        "input_token_ranks": [None, *(one.rank for one in scores)],
    }
    if message.prompt_top_logprobs_num:
        shown["input_top_logprobs"] = [None, *([[value, token, None] for token, value in one.top] for one in scores)]
    return shown
