"""The body of a request that a script starts, made from the arguments of ``start_req``.

Values of wrong types go to the server unchanged, which reports the right types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engine.frontend.schema.native import MAX_N
from engine.frontend.sessions.requests import rids_of
from scripted.script.clients import ChoicesView, ClientView
from scripted.script.json_values import as_json
from scripted.script.static_checks import bounded
from scripted.sdk.action_bases import check_one_prompt, earlier_turns, made_prompt

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

# Fields of a body whose names differ from the arguments of start_req.
_ARGUMENTS: Final = {"input_ids": "prompt_ids", "lora_path": "lora"}


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """The arguments of ``start_req``, by the names that scripts use."""

    prompt_len: int | None = None
    prompt_ids: Sequence[int] | None = None
    text: str | None = None
    prompt_seed: int = 0
    after: Any = None
    cut: int | None = None
    max_new_tokens: int = 8
    rid: str | None = None
    priority: int = 0
    ignore_eos: bool = False
    temperature: float = 0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0
    frequency_penalty: float = 0
    presence_penalty: float = 0
    repetition_penalty: float = 1
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    min_new_tokens: int = 0
    return_logprob: bool = False
    top_logprobs_num: int = 0
    stream: bool = True
    logprob_start_len: int = -1
    timeout_s: float | None = None
    waiting_timeout_s: float | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    lora: str | None = None
    cache_salt: str | None = None

    def body(self, t: BaseContext) -> dict[str, Any]:
        """Return the body of ``/generate``. Raises BadCall for arguments that no body can express."""
        prompt, sampling = self._prompt(t), self._sampling()
        body = prompt | {
            "rid": self.rid if self.rid is not None else t.next_rid(),
            "sampling_params": sampling,
            "stream": self.stream,
            "priority": self.priority,
            "return_logprob": self.return_logprob,
            "top_logprobs_num": self.top_logprobs_num,
            "logprob_start_len": self.logprob_start_len,
            "timeout_s": self.timeout_s,
            "waiting_timeout_s": self.waiting_timeout_s,
        }
        return as_sent(body | given(lora_path=self.lora, cache_salt=self.cache_salt))

    def _prompt(self, t: BaseContext) -> dict[str, Any]:
        begun = earlier_turns(t, self.after, self.cut)
        own = (self.prompt_len, self.prompt_ids, self.text, self.prompt_seed)
        return one_prompt(*own) if self.after is None else further_turn(begun, *own)

    def _sampling(self) -> dict[str, Any]:
        sampling = {
            "n": self.n,
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens,
            "temperature": number(self.temperature),
            "top_p": number(self.top_p),
            "top_k": self.top_k,
            "min_p": number(self.min_p),
            "frequency_penalty": number(self.frequency_penalty),
            "presence_penalty": number(self.presence_penalty),
            "repetition_penalty": number(self.repetition_penalty),
            "logit_bias": biases(self.logit_bias),
            "stop": items("stop", self.stop),
            "stop_token_ids": items("stop_token_ids", self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
        }
        grammar = {"json_schema": self.json_schema, "regex": self.regex, "ebnf": self.ebnf}
        return sampling | given(seed=self.seed, **grammar)


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
