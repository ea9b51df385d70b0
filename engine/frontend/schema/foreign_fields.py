"""The fields of other servers: supported, accepted with neutral values, or refused.

Owns the lists by route; benchmarks/tables/fields.md is generated from them. Programs send unsupported fields with null
and neutral values, which are accepted. Other values are refused, with the field and the reason.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, Final, NamedTuple

from engine.frontend.schema.errors import FieldError, JsonLiterals

VLLM: Final = "vLLM"
SGLANG: Final = "SGLang"
BOTH: Final = "vLLM, SGLang"


class ForeignField(NamedTuple):
    """``neutral`` lists the values that, like null, have no effect; ``reason`` says why others are refused.

    A field without a reason is supported.
    """

    name: str
    servers: str
    reason: str = ""
    neutral: tuple[Any, ...] = ()


_ONE_TEXT: Final = "this server takes text alone"
_GRAMMAR: Final = "send guided_{} or structured_outputs"
FOREIGN_FIELDS: Final = (
    ForeignField("add_generation_prompt", VLLM),
    ForeignField("add_special_tokens", VLLM),
    ForeignField("cache_salt", BOTH),
    ForeignField("chat_template_kwargs", BOTH),
    ForeignField("continue_final_message", BOTH),
    ForeignField("documents", VLLM),
    ForeignField("guided_choice", VLLM),
    ForeignField("guided_grammar", VLLM),
    ForeignField("guided_json", VLLM),
    ForeignField("guided_regex", VLLM),
    ForeignField("ignore_eos", BOTH),
    ForeignField("include_stop_str_in_output", VLLM),
    ForeignField("min_p", BOTH),
    ForeignField("min_tokens", BOTH),
    ForeignField("priority", BOTH),
    ForeignField("prompt_logprobs", VLLM),
    ForeignField("repetition_penalty", BOTH),
    ForeignField("request_id", VLLM),
    ForeignField("return_cached_tokens_details", SGLANG),
    ForeignField("return_token_ids", VLLM),
    ForeignField("rid", SGLANG),
    ForeignField("skip_special_tokens", BOTH),
    ForeignField("stop_token_ids", BOTH),
    ForeignField("structured_outputs", VLLM),
    ForeignField("top_k", BOTH),
    ForeignField("truncate_prompt_tokens", VLLM),
    ForeignField("allowed_token_ids", VLLM, "no list of tokens is allowed alone; bound the output by a grammar"),
    ForeignField("bad_words", VLLM, "words are not forbidden; forbid tokens by logit_bias", ([],)),
    ForeignField("best_of", BOTH, "every choice that is computed is returned; send n", (1,)),
    ForeignField("bootstrap_host", SGLANG, "prefill and decode run in one server"),
    ForeignField("bootstrap_port", SGLANG, "prefill and decode run in one server"),
    ForeignField("bootstrap_room", SGLANG, "prefill and decode run in one server"),
    ForeignField("chat_template", VLLM, "a client's template would be a program that runs here"),
    ForeignField("custom_logit_processor", SGLANG, "a client's program would run here"),
    ForeignField("custom_params", SGLANG, "there are no custom logit processors", ({},)),
    ForeignField("data_parallel_rank", BOTH, "one server is one replica"),
    ForeignField("early_stopping", VLLM, "there is no beam search", (False,)),
    ForeignField("ebnf", SGLANG, _GRAMMAR.format("grammar")),
    ForeignField("echo", BOTH, "a chat has no text to begin with; use /v1/completions", (False,)),
    ForeignField("extra_key", SGLANG, "send cache_salt"),
    ForeignField("guided_decoding_backend", VLLM, "there is one compiler of grammars", ("auto", "guidance")),
    ForeignField("guided_whitespace_pattern", VLLM, "whitespace in JSON is the compiler's"),
    ForeignField("include_reasoning", VLLM, "reasoning is shown, apart from the answer", (True,)),
    ForeignField("input_ids", SGLANG, "send token ids as the prompt of /v1/completions"),
    ForeignField("json_schema", SGLANG, _GRAMMAR.format("json")),
    ForeignField("kv_transfer_params", VLLM, "KV does not leave a server", ({},)),
    ForeignField("length_penalty", VLLM, "there is no beam search", (1,)),
    ForeignField("logits_processors", VLLM, "a client's program would run here", ([],)),
    ForeignField("lora_path", SGLANG, "name the LoRA as the model"),
    ForeignField("media_io_kwargs", VLLM, _ONE_TEXT, ({},)),
    ForeignField("min_new_tokens", SGLANG, "send min_tokens", (0,)),
    ForeignField("mm_processor_kwargs", VLLM, _ONE_TEXT, ({},)),
    ForeignField("no_stop_trim", SGLANG, "send include_stop_str_in_output", (False,)),
    ForeignField("prompt_embeds", VLLM, "a prompt is text or token ids"),
    ForeignField("regex", SGLANG, _GRAMMAR.format("regex")),
    ForeignField("return_hidden_states", SGLANG, "hidden states do not leave the engine", (False,)),
    ForeignField("return_tokens_as_token_ids", VLLM, "send return_token_ids", (False,)),
    ForeignField("separate_reasoning", SGLANG, "reasoning is shown apart from the answer", (True,)),
    ForeignField("session_params", SGLANG, "a request stands alone; equal prefixes are found by themselves"),
    ForeignField("spaces_between_special_tokens", VLLM, "the tokenizer decides where spaces are", (True,)),
    ForeignField("stop_regex", SGLANG, "send stop strings", ([], "")),
    ForeignField("stream_reasoning", SGLANG, "reasoning streams as it comes", (True,)),
    ForeignField("thinking_token_budget", VLLM, "reasoning is bounded with the output, by max_tokens"),
    ForeignField("use_beam_search", VLLM, "there is no beam search; send n", (False,)),
    ForeignField("vllm_xargs", VLLM, "there are no plugins that would read it", ({},)),
)
_BY_NAME: Final = {field.name: field for field in FOREIGN_FIELDS}
# Fields of SGLang's ``/generate``, without its ``sampling_params``.
GENERATE_FIELDS: Final = (
    ForeignField("audio_data", SGLANG, _ONE_TEXT, ([],)),
    ForeignField("background", SGLANG, "an answer goes to the client that asks for it", (False,)),
    *(_BY_NAME[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_logit_processor")),
    ForeignField("conversation_id", SGLANG, "a request stands alone; equal prefixes are found by themselves"),
    ForeignField("custom_labels", SGLANG, "metrics have the labels of the server", ({},)),
    *(_BY_NAME[name] for name in ("data_parallel_rank", "extra_key")),
    ForeignField("image_data", SGLANG, _ONE_TEXT, ([],)),
    ForeignField("input_embeds", SGLANG, "a prompt is text or token ids"),
    ForeignField("log_metrics", SGLANG, "the metrics count every request", (True,)),
    ForeignField("lora_id", SGLANG, "name the LoRA in lora_path"),
    ForeignField("modalities", SGLANG, _ONE_TEXT, ([],)),
    ForeignField("no_logs", SGLANG, "the server's settings say what is logged", (False,)),
    _BY_NAME["return_hidden_states"],
    ForeignField("return_routed_experts", SGLANG, "routes to experts do not leave the engine", (False,)),
    ForeignField("return_text_in_logprobs", SGLANG, "logprobs name tokens by their ids", (False,)),
    _BY_NAME["session_params"],
    ForeignField("token_ids_logprob", SGLANG, "logprobs are those of chosen and of the most likely tokens", ([],)),
    ForeignField("video_data", SGLANG, _ONE_TEXT, ([],)),
)
# Fields of SGLang's ``sampling_params``.
SAMPLING_FIELDS: Final = (
    _BY_NAME["custom_params"],
    ForeignField("no_stop_trim", SGLANG),
    ForeignField("sampling_seed", SGLANG, "send seed"),
    ForeignField("skip_special_tokens", SGLANG),
    *(_BY_NAME[name] for name in ("spaces_between_special_tokens", "stop_regex")),
    ForeignField("stream_interval", SGLANG, "a stream shows every token as it comes", (1,)),
    ForeignField("structural_tag", SGLANG, "send json_schema, regex or ebnf"),
)
_shown = JsonLiterals()


def without_neutral(data: Any, known: Container[str], fields: Iterable[ForeignField]) -> Any:
    """Drop foreign fields with neutral values from a body. Raises FieldError for any other value.

    ``known`` are the body's own fields. A body that is not an object is returned unchanged.
    """
    if not isinstance(data, dict):
        return data
    found = {field.name: field for field in fields if field.reason and field.name in data and field.name not in known}
    for name, field in found.items():
        value = data[name]
        # Compared with the type, because True must not equal 1.
        same = [one for one in field.neutral if value == one and isinstance(value, bool) == isinstance(one, bool)]
        if value is not None and not same:
            raise FieldError(
                name,
                f"{name} ({field.servers}) is taken only as {_words((None, *field.neutral))}, got "
                f"{_shown.repr(value)}: {field.reason}; or leave it out",
            )
    return {name: value for name, value in data.items() if name not in found} if found else data


def _words(values: tuple[Any, ...]) -> str:
    spelled = {None: "null", True: "true", False: "false"}
    return " or ".join(spelled[value] if value is None or isinstance(value, bool) else repr(value) for value in values)
