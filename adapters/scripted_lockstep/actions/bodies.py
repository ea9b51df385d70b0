"""The body of a request that a script starts, made from the arguments of ``start_req``.

Values of wrong types go to the server unchanged, which reports the right types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Final

from engine.frontend.schema.native import MAX_N
from engine.frontend.sessions.requests import rids_of
from scripted.script.clients import ChoicesView, ClientView
from scripted.script.json_values import as_json
from scripted.script.static_checks import bounded
from scripted.sdk.action_bases import check_one_prompt, made_prompt

# Fields of a body whose names differ from the arguments of start_req.
_ARGUMENTS: Final = {"input_ids": "prompt_ids", "lora_path": "lora"}


def view_of(rid: str, body: Mapping[str, Any]) -> ClientView:
    """Return its client's view: a reply with as many choices as the server may return."""
    n, streams = body["sampling_params"].get("n"), bool(body.get("stream"))
    if type(n) is int and 1 < n <= MAX_N:
        return ChoicesView(rid, rids_of(rid, n), streams=streams)
    return ClientView(rid, streams=streams)


def one_prompt(
    prompt_len: int | None, prompt_ids: Sequence[int] | None, text: str | None, prompt_seed: int
) -> dict[str, Any]:
    """Return the fields of a body for the prompt. Raises BadCall unless exactly one of the three arguments gives it."""
    check_one_prompt({"prompt_len": prompt_len, "prompt_ids": prompt_ids, "text": text})
    if prompt_len is not None:
        return {"input_ids": made_prompt(prompt_len, prompt_seed)}
    return {"input_ids": items("prompt_ids", prompt_ids)} if prompt_ids is not None else {"text": text}


def further_turn(
    begun: Sequence[int], prompt_len: int | None, prompt_ids: Sequence[int] | None, text: str | None, prompt_seed: int
) -> dict[str, Any]:
    """Return a prompt that begins with these tokens and continues them with at most one of the arguments."""
    if check_one_prompt({"prompt_len": prompt_len, "prompt_ids": prompt_ids, "text": text}, continues=True) is None:
        return {"input_ids": list(begun)}
    own = one_prompt(prompt_len, prompt_ids, None, prompt_seed)["input_ids"]
    return {"input_ids": [*begun, *own] if isinstance(own, list) else own}


def as_sent(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body in JSON types. Raises BadCall for an argument that JSON cannot express."""
    call = "start_req()"
    sampling = {name: as_json(call, name, value) for name, value in body["sampling_params"].items()}
    others = body | {"sampling_params": sampling}
    return {name: as_json(call, _ARGUMENTS.get(name) or name, value) for name, value in others.items()}


def given(**values: Any) -> dict[str, Any]:
    """Return the values that are not None; the server has defaults for the others."""
    return {name: value for name, value in values.items() if value is not None}


def number(value: Any) -> Any:
    """Return a number as the float that JSON would give."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def items(name: str, value: Any) -> Any:
    """Return any sequence as a list, and any other value unchanged. Raises BadCall for an endless sequence."""
    is_sequence = isinstance(value, Iterable) and not isinstance(value, (str, Set, Mapping))
    return bounded("start_req()", name, value) if is_sequence else value


def biases(value: Any) -> Any:
    """Return logit biases with token ids as JSON keys."""
    if not isinstance(value, Mapping):
        return {} if value is None else value
    return {str(token): number(bias) for token, bias in value.items()}
