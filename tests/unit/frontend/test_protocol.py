"""Bodies: what is accepted, and one clear sentence for each thing that is not."""

from __future__ import annotations

import pytest

from engine.core.messages import PauseMode, SamplingParams
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.native import GenerateBody, SamplingBody, parse_body
from engine.frontend.schema.operator_routes import AbortBody, PauseBody


def test_defaults_are_those_of_the_engine() -> None:
    assert parse_body(GenerateBody, b'{"text": "x"}').sampling_params.params({}) == SamplingParams()


def test_every_sampling_parameter_reaches_the_engine() -> None:
    """C02: a parameter missing here would be unusable, one missing in the engine ignored."""
    # Three fields say what the output must be, the engine has one for it. Each of n choices is a request. Two say what
    # the text shows.
    fields = set(SamplingBody.model_fields) - {"json_schema", "regex", "ebnf", "n"}
    fields -= {"skip_special_tokens", "no_stop_trim"}
    assert fields | {"grammar"} == set(SamplingParams.__struct_fields__)
    body = b"""{"text": "x", "sampling_params": {"max_new_tokens": 5, "min_new_tokens": 1, "temperature": 0,
        "top_p": 0.5, "top_k": 3, "min_p": 0.1, "frequency_penalty": 1, "presence_penalty": -1,
        "repetition_penalty": 1.5, "seed": 7, "stop": "END", "stop_token_ids": [1], "ignore_eos": true,
        "logit_bias": {"9": 1, "2": -0.5}}}"""
    assert parse_body(GenerateBody, body).sampling_params.params({}) == SamplingParams(
        max_new_tokens=5,
        min_new_tokens=1,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        frequency_penalty=1.0,
        presence_penalty=-1.0,
        repetition_penalty=1.5,
        seed=7,
        stop=("END",),
        stop_token_ids=(1,),
        ignore_eos=True,
        logit_bias=((2, -0.5), (9, 1.0)),
    )


@pytest.mark.parametrize(
    ("body", "param", "parts"),
    [
        ("", None, ["exactly one of text and input_ids", "neither"]),
        ("{", None, ["the body must be JSON"]),
        ("[]", None, ["the body"]),
        ('{"text": "x", "input_ids": [1]}', None, ["exactly one", "both"]),
        ('{"text": 5}', "text", ["text must be a string", "5"]),
        ('{"input_ids": ["1"]}', "input_ids.0", ["input_ids.0 must be an integer", "'1'"]),
        ('{"text": "x", "strem": true}', "strem", ["strem is not a field", "did you mean 'stream'"]),
        ('{"text": "x", "rid": ""}', "rid", ["rid"]),
        ('{"text": "x", "top_logprobs_num": 3}', "top_logprobs_num", ["top_logprobs_num needs return_logprob"]),
        ('{"text": "x", "top_logprobs_num": 99, "return_logprob": true}', "top_logprobs_num", ["20", "99"]),
        ('{"text": "x", "logprob_start_len": 0}', "logprob_start_len", ["logprob_start_len needs return_logprob"]),
        ('{"text": "x", "logprob_start_len": -2, "return_logprob": true}', "logprob_start_len", ["-1", "-2"]),
    ],
)
def test_bad_body_is_one_clear_sentence(body: str, param: str | None, parts: list[str]) -> None:
    """A parameter is honoured or refused by name, in each protocol (C01)."""
    with pytest.raises(ApiError) as caught:
        parse_body(GenerateBody, body.encode())
    assert caught.value.status == 400
    assert caught.value.body.error.param == param
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("temperature", "-0.1", "must be >= 0, got -0.1"),
        ("temperature", "NaN", "must be a finite number, got nan"),
        ("temperature", '"hot"', "must be a number, got 'hot'"),
        ("top_p", "0", "must be > 0, got 0"),
        ("top_p", "1.1", "must be <= 1, got 1.1"),
        ("top_k", "-2", "must be >= -1, got -2"),
        ("top_k", "1.5", "must be an integer"),
        ("min_p", "2", "must be <= 1"),
        ("max_new_tokens", "-1", "must be >= 0, got -1"),
        ("max_new_tokens", "true", "must be an integer, got true"),
        ("min_new_tokens", "999", "min_new_tokens must be <= max_new_tokens=128, got 999"),
        ("repetition_penalty", "0", "must be > 0"),
        ("seed", "-1", "must be >= 0"),
        ("stop", '""', "must have >= 1 characters"),
        ("stop", '["a", ""]', "must have >= 1 characters"),
        ("stop", str(["x"] * 17).replace("'", '"'), "at most 16 strings, got 17"),
        ("stop_token_ids", '["a"]', "must be an integer"),
        ("ignore_eos", "1", "must be true or false, got 1"),
        (
            "logit_bias",
            '{"a": 1}',
            "keys of logit_bias must be token ids in decimal digits without leading zeros, got 'a'",
        ),
        ("logit_bias", '{"5": 1, "05": 2}', "without leading zeros, got '05'"),
        ("logit_bias", '{"5": null}', "must be a number, got null"),
        ("stop_token_ids", "[[null, true]]", "must be an integer, got [null, true]"),
        ("stop_regex", "[null]", "got [null]"),
        ("logit_bias", '{"5": 101}', "must be <= 100, got 101"),
        ("temprature", "1", "did you mean 'temperature'"),
    ],
)
def test_bad_sampling_parameter_names_rule_and_value(field: str, value: str, rule: str) -> None:
    """Sampling, logprobs, stops and choices are what was asked for (C02)."""
    with pytest.raises(ApiError) as caught:
        parse_body(GenerateBody, f'{{"text": "x", "sampling_params": {{"{field}": {value}}}}}'.encode())
    assert rule in str(caught.value), str(caught.value)


@pytest.mark.parametrize("body", [b"{}", b'{"rid": "a", "abort_all": true}', b'{"rid": 5}'])
def test_abort_takes_exactly_one_target(body: bytes) -> None:
    with pytest.raises(ApiError):
        parse_body(AbortBody, body)


def test_pause_mode_is_a_word() -> None:
    assert parse_body(PauseBody, b"").mode is PauseMode.RETRACT
    assert parse_body(PauseBody, b'{"mode": "in_place"}').mode is PauseMode.IN_PLACE
    with pytest.raises(ApiError, match="'retract', 'in_place' or 'abort'"):
        parse_body(PauseBody, b'{"mode": "sideways"}')
