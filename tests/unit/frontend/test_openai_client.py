"""The official OpenAI client, unmodified, against a real server of the embedded model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from real_servers import RealServer

from engine import __version__

GREEDY: dict[str, Any] = {"model": "embedded", "temperature": 0}
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=20) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    """A parameter is honoured or refused by name, in each protocol (C01)."""
    (card,) = client.models.list().data
    assert (card.id, card.object) == ("embedded", "model")
    assert client.models.retrieve("embedded") == card
    with pytest.raises(openai.NotFoundError, match="model must be 'embedded'"):
        client.models.retrieve("other/model")


def test_completion_whole_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    """C01, C03: with usage both ways."""
    whole = client.completions.create(prompt="hello", max_tokens=20, **GREEDY)
    assert (whole.object, whole.choices[0].finish_reason) == ("text_completion", "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (5, 20, 25)
    options = {"include_usage": True}
    with client.completions.create(
        prompt="hello", max_tokens=20, stream=True, stream_options=options, **GREEDY
    ) as stream:
        chunks = list(stream)
    *content, last = chunks
    assert "".join(chunk.choices[0].text for chunk in content) == whole.choices[0].text
    assert content[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in content)
    assert last.choices == []
    assert last.usage.total_tokens == 25
    assert len({chunk.id for chunk in chunks}) == 1


def test_default_lengths_are_the_protocol_s(client: openai.OpenAI) -> None:
    """C01: 16 tokens for a completion."""
    assert client.completions.create(prompt="hello", **GREEDY).usage.completion_tokens == 16


def test_prompts_of_every_form(client: openai.OpenAI) -> None:
    """C01: text, ids, many of either; the choices come in the order of the prompts."""
    one = client.completions.create(prompt="ab", max_tokens=4, **GREEDY).choices[0].text
    other = client.completions.create(prompt=[99, 100], max_tokens=4, **GREEDY).choices[0].text
    for prompts in (["ab", "cd"], [[97, 98], [99, 100]]):
        answer = client.completions.create(prompt=prompts, max_tokens=4, **GREEDY)
        assert [(choice.index, choice.text) for choice in answer.choices] == [(0, one), (1, other)]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 8)


def test_chat_whole_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    """A parameter is honoured or refused by name, in each protocol (C01).

    The chat template is the tokenizer's (C04).
    """
    whole = client.chat.completions.create(messages=HELLO, max_completion_tokens=20, **GREEDY)
    (choice,) = whole.choices
    assert (choice.message.role, choice.finish_reason, whole.object) == ("assistant", "length", "chat.completion")
    template = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    # Each of the five special tokens is one token, every other character is one.
    expected_tokens = len(template) - 5 * (len("<|im_end|>") - 1) - 3 * (len("<|im_start|>") - len("<|im_end|>"))
    assert whole.usage.prompt_tokens == expected_tokens
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        messages=HELLO, max_tokens=20, stream=True, stream_options=options, **GREEDY
    )
    with stream:
        first, *content, last = list(stream)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in content) == choice.message.content
    assert content[-1].choices[0].finish_reason == "length"
    assert last.usage == whole.usage.model_copy(update={"prompt_tokens_details": last.usage.prompt_tokens_details})


def test_chat_goes_on_with_the_answer_as_it_came(client: openai.OpenAI) -> None:
    """C01: an answer's message is a message of the next request."""
    message = client.chat.completions.create(messages=HELLO, max_tokens=4, **GREEDY).choices[0].message
    following = [*HELLO, message, {"role": "user", "content": "go on"}]
    assert client.chat.completions.create(messages=following, max_tokens=4, **GREEDY).usage.completion_tokens == 4


def test_chat_stream_helper_accumulates(client: openai.OpenAI) -> None:
    """C01: the client's own accumulator finds every field that it wants."""
    text = client.chat.completions.create(messages=HELLO, max_tokens=12, **GREEDY).choices[0].message.content
    stop = text[8:12]
    with client.chat.completions.stream(messages=HELLO, max_tokens=40, stop=stop, logprobs=True, **GREEDY) as stream:
        choice = stream.get_final_completion().choices[0]
    assert (choice.message.content, choice.finish_reason) == (text[: text.index(stop)], "stop")
    assert "".join(entry.token for entry in choice.logprobs.content) == text[: text.index(stop) + 4]


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI, stream: bool) -> None:
    """C02: n, seed"""

    def texts(**more: Any) -> list[str]:
        answer = client.completions.create(model="embedded", prompt="hello", n=3, max_tokens=12, stream=stream, **more)
        found = ["", "", ""]
        for part in answer if stream else [answer]:
            for choice in part.choices:
                found[choice.index] += choice.text
        return found

    first = texts(seed=7)
    assert len(set(first)) == 3
    assert texts(seed=7) == first
    assert texts(seed=8)[0] == first[1]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    """C02: logprobs of the chosen token and of the most likely ones; greedy chooses the first of those it may say."""
    answer = client.chat.completions.create(messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=3, **GREEDY)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
    streamed = client.chat.completions.create(
        messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    with streamed:
        pieces = [chunk.choices[0].logprobs for chunk in streamed]
    assert [entry.token for piece in pieces if piece for entry in piece.content] == [entry.token for entry in entries]


@pytest.mark.parametrize("top", [0, 3])
def test_response_logprobs(client: openai.OpenAI, top: int) -> None:
    """C02: the same numbers as a chat's, in the response, in its deltas and where its text ends."""
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(messages=said, max_tokens=5, logprobs=True, top_logprobs=top, **GREEDY)
    expected = [entry.model_dump() for entry in chat.choices[0].logprobs.content]
    asked: dict[str, Any] = {"input": said, "max_output_tokens": 5, "include": ["message.output_text.logprobs"]}

    def logprobs_of(response: Any) -> list[Any]:
        (message,) = response.output
        return [entry.model_dump() for entry in message.content[0].logprobs]

    response = client.responses.create(**asked, top_logprobs=top, **GREEDY)
    assert (logprobs_of(response), response.top_logprobs) == (expected, top)
    with client.responses.create(**asked, top_logprobs=top, stream=True, **GREEDY) as stream:
        events = list(stream)
    pieces = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    (done,) = [event.logprobs for event in events if event.type == "response.output_text.done"]
    assert len(pieces) > 1
    for entries in ([entry for piece in pieces for entry in piece], done):
        assert [entry.logprob for entry in entries] == [entry["logprob"] for entry in expected]
        assert [len(entry.top_logprobs) for entry in entries] == [top] * 5
    assert logprobs_of(events[-1].response) == expected


def test_completion_logprobs(client: openai.OpenAI) -> None:
    """Sampling, logprobs, stops and choices are what was asked for (C02)."""
    choice = client.completions.create(prompt="hello", max_tokens=6, logprobs=2, **GREEDY).choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == list(range(6))
    assert all(len(top) <= 2 for top in choice.logprobs.top_logprobs)
    assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs)
    chosen_only = client.completions.create(prompt="hello", max_tokens=6, logprobs=0, **GREEDY).choices[0].logprobs
    assert chosen_only.top_logprobs == [{}] * 6


def test_stop_string_and_stop_id(client: openai.OpenAI) -> None:
    """Sampling, logprobs, stops and choices are what was asked for (C02).

    Stop text never leaks, wherever text is cut (C03).
    """
    full = client.completions.create(prompt="hello", max_tokens=40, **GREEDY).choices[0].text
    stop = full[10:13]
    shown = full[: full.index(stop)]
    stopped = client.completions.create(prompt="hello", max_tokens=40, stop=[stop], **GREEDY).choices[0]
    assert (stopped.text, stopped.finish_reason) == (shown, "stop")
    with client.completions.create(prompt="hello", max_tokens=40, stop=stop, stream=True, **GREEDY) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == shown
    byte = ord(full[5])
    by_id = client.completions.create(
        prompt="hello", max_tokens=40, extra_body={"stop_token_ids": [byte]}, **GREEDY
    ).choices[0]
    assert (by_id.text, by_id.finish_reason) == (full[: full.index(chr(byte))], "stop")


@pytest.mark.parametrize(
    "extra",
    [
        {"top_k": 1, "temperature": 1.0},
        {"min_p": 1.0, "temperature": 1.0},
        {"top_p": 0.000001, "temperature": 1.0},
        {"ignore_eos": True, "min_tokens": 3, "priority": 2},
    ],
)
def test_extra_parameters_that_leave_greedy_output_as_it_is(client: openai.OpenAI, extra: dict[str, Any]) -> None:
    """C02: filters that leave one token make any temperature greedy."""
    plain = client.completions.create(prompt="hello", max_tokens=12, **GREEDY).choices[0].text
    body = {"prompt": "hello", "model": "embedded", "max_tokens": 12, "temperature": 0} | extra
    named = {name: body.pop(name) for name in ("prompt", "model", "max_tokens", "temperature")}
    assert client.completions.create(extra_body=body, **named).choices[0].text == plain


@pytest.mark.parametrize(
    "extra", [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"extra_body": {"repetition_penalty": 2.0}}]
)
def test_penalties_change_the_output(client: openai.OpenAI, extra: dict[str, Any]) -> None:
    """Sampling, logprobs, stops and choices are what was asked for (C02)."""
    plain = client.completions.create(prompt="hello", max_tokens=60, **GREEDY).choices[0].text
    assert client.completions.create(prompt="hello", max_tokens=60, **extra, **GREEDY).choices[0].text != plain


def test_errors_have_the_protocol_s_body_and_exceptions(client: openai.OpenAI) -> None:
    """C01: every parameter is honoured or refused."""
    refused: list[tuple[dict[str, Any], str | None]] = [
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
        ({"extra_body": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
        ({"prompt": "x" * 8000, "n": 8, "stream": True, "echo": True, "logprobs": 20}, "logprobs"),
        ({"extra_body": {"store": True}}, "store"),
        ({"extra_body": {"service_tier": "flex"}}, "service_tier"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"logit_bias": {"264": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"max_tokens": 8192}, "max_tokens"),
        ({"logprobs": 99}, "logprobs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [264]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"n": 1000}, "n"),
        ({"prompt": "x" * 9000}, "prompt"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ]
    for change, param in refused:
        arguments = {"model": "embedded", "prompt": "x", "max_tokens": 2} | change
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**arguments)
        body = caught.value.body
        too_long = change in ({"max_tokens": 8192}, {"prompt": "x" * 9000})
        code = "context_length_exceeded" if too_long else 400
        assert (body["type"], body["param"], body["code"]) == ("invalid_request_error", param, code), change
        # The words that litellm looks for before it asks a model with a longer context.
        assert ("this model's maximum context length is 8192 tokens" in body["message"]) is too_long
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="x")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'system', 'developer', 'user', 'assistant' or 'tool'"),
        ({"store": True}, "store must be false, got true"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"service_tier": "priority"}, "service_tier must be 'auto' or 'default'"),
        ({"verbosity": "loud"}, "verbosity must be 'low', 'medium' or 'high'"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "'text'"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "must agree"),
        ({"top_logprobs": 3}, "needs logprobs"),
        ({"max_tokens": 0}, "max_tokens must be >= 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be >= 1"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "own variables"),
        ({"extra_body": {"min_tokens": 9}, "max_tokens": 4}, "min_tokens must be <= max_tokens=4"),
    ],
)
def test_chat_refuses_what_it_does_not_honour(client: openai.OpenAI, change: dict[str, Any], part: str) -> None:
    """A parameter is honoured or refused by name, in each protocol (C01)."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "embedded", "messages": HELLO, "max_tokens": 2} | change)
    assert part in str(caught.value)


def test_neutral_values_that_clients_send_are_accepted(client: openai.OpenAI) -> None:
    """C01: null means the default."""
    answer = client.chat.completions.create(
        messages=HELLO,
        max_tokens=2,
        n=1,
        logit_bias={},
        tools=[],
        parallel_tool_calls=True,
        response_format={"type": "text"},
        user="a-user",
        safety_identifier="a hash",
        prompt_cache_key="a key",
        prompt_cache_options={"mode": "implicit", "ttl": "30m"},
        prompt_cache_retention="24h",
        store=False,
        metadata={"run": "7"},
        service_tier="auto",
        modalities=["text"],
        reasoning_effort="low",
        verbosity="medium",
        audio=None,
        extra_body={"temperature": None, "stop": None, "seed": None, "skip_special_tokens": True, "moderation": None},
        model="embedded",
    )
    assert answer.usage.completion_tokens == 2
    whole = client.completions.create(prompt="x", max_tokens=2, n=2, best_of=2, suffix="", model="embedded")
    assert len(whole.choices) == 2


def test_a_developer_s_message_is_a_system_message_and_names_are_taken(client: openai.OpenAI) -> None:
    """C01, C04: the template of the embedded model knows no names, so the same is said."""
    texts = [
        client.chat.completions.create(
            messages=[{"role": role, "content": "Be brief."}, {"role": "user", "content": "hello"} | name],
            max_tokens=12,
            **GREEDY,
        )
        .choices[0]
        .message.content
        for role, name in (("system", {}), ("developer", {"name": "ada"}))
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("prompt", ["hello", [104, 101, 108, 108, 111]])
def test_echo_begins_each_choice_with_its_prompt(client: openai.OpenAI, prompt: Any) -> None:
    """C02: whole and streamed, text or ids, and with several prompts."""
    plain = client.completions.create(prompt="hello", max_tokens=6, **GREEDY).choices[0].text
    whole = client.completions.create(prompt=prompt, max_tokens=6, echo=True, **GREEDY)
    assert (whole.choices[0].text, whole.usage.completion_tokens) == ("hello" + plain, 6)
    with client.completions.create(prompt=prompt, max_tokens=6, echo=True, stream=True, **GREEDY) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == "hello" + plain
    many = client.completions.create(prompt=["ab", "cd"], n=2, max_tokens=2, echo=True, model="embedded", seed=1)
    assert [choice.text[:2] for choice in many.choices] == ["ab", "ab", "cd", "cd"]


def test_logit_bias_bans_and_prefers(client: openai.OpenAI) -> None:
    """C02: by token id; a logprob is still the model's own."""

    def texts(bias: dict[str, int]) -> str:
        answer = client.completions.create(prompt="hello", max_tokens=8, logit_bias=bias, **GREEDY)
        return answer.choices[0].text

    plain = texts({})
    assert str(ord("z")) not in plain
    assert texts({str(ord("z")): 100}) == "z" * 8
    banned = texts({str(byte): -100 for byte in set(plain.encode())})
    assert not set(banned) & set(plain)
    chat = client.chat.completions.create(
        messages=HELLO, max_tokens=3, logit_bias={str(ord("z")): 100}, logprobs=True, **GREEDY
    )
    assert chat.choices[0].message.content == "zzz"
    assert all(entry.logprob < -1 for entry in chat.choices[0].logprobs.content)


def test_more_tokens_than_the_context_has_are_refused_with_the_numbers(client: openai.OpenAI) -> None:
    """B03, C01: a number that a client names is honoured or refused; one that it leaves open fits by itself."""
    rule = "must be <= 8187, which context_length=8192 leaves after a prompt of 5 tokens, got"
    for field, tokens in (("max_tokens", 8188), ("min_tokens", 9000)):
        with pytest.raises(openai.BadRequestError, match=f"{field} {rule} {tokens}"):
            client.completions.create(model="embedded", prompt="hello", extra_body={field: tokens})
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens must be <= "):
        client.chat.completions.create(messages=HELLO, max_completion_tokens=8192, **GREEDY)
    near_the_end = "x" * 8190
    answer = client.completions.create(prompt=near_the_end, **GREEDY)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (2, "length")
    assert client.completions.create(prompt=near_the_end, max_tokens=2, **GREEDY).usage.completion_tokens == 2


def test_tokens_of_a_text_and_of_a_conversation(client: openai.OpenAI, server: RealServer) -> None:
    """C01: the ids that generation itself counts, and back."""

    def post(path: str, **body: Any) -> Any:
        return server.http.post(path, json=body).raise_for_status().json()

    text = post("/tokenize", model="embedded", prompt="h\u00e9", return_token_strs=True)
    assert (text["count"], text["tokens"], text["max_model_len"]) == (3, [0x68, 0xC3, 0xA9], 8192)
    assert len(text["token_strs"]) == 3
    assert post("/detokenize", tokens=text["tokens"]) == {"prompt": "h\u00e9"}
    chat = post("/tokenize", messages=HELLO)
    counted = client.chat.completions.create(messages=HELLO, max_tokens=1, **GREEDY).usage.prompt_tokens
    assert chat["count"] == len(chat["tokens"]) == counted
    assert post("/detokenize", tokens=chat["tokens"])["prompt"].endswith("<|im_start|>assistant\n")
    asked_nothing = post("/tokenize", messages=HELLO, add_generation_prompt=False)["tokens"]
    assert chat["tokens"][: len(asked_nothing)] == asked_nothing
    assert asked_nothing != chat["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/tokenize", {}, "exactly one of prompt and messages"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "got both"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model must be 'embedded'"),
        ("/detokenize", {"tokens": [5, 264]}, "0 to 263, got 264"),
        ("/detokenize", {}, "tokens must be given"),
    ],
)
def test_tokens_are_refused_by_a_sentence(server: RealServer, path: str, body: Any, part: str) -> None:
    """A parameter is honoured or refused by name, in each protocol (C01)."""
    response = server.http.post(path, json=body)
    assert response.status_code in (400, 404)
    assert part in response.json()["error"]["message"]


def test_embeddings_are_refused_by_name(client: openai.OpenAI) -> None:
    """C01: by a model that generates, with what to do instead."""
    with pytest.raises(openai.BadRequestError, match="embeddings need an embedding model"):
        client.embeddings.create(model="embedded", input="hello")


def test_version(server: RealServer) -> None:
    assert server.http.get("/version").json() == {"version": __version__}


def test_async_client_streams_side_by_side(server: RealServer) -> None:
    """B01, C01: eight streams at once, each with its own text."""

    async def scene() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:

            async def one(letter: str) -> str:
                stream = await client.completions.create(prompt=letter * 5, max_tokens=16, stream=True, **GREEDY)
                async with stream:
                    return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(letter) for letter in "abcdefgh"))

    texts = asyncio.run(scene())
    assert [len(text) for text in texts] == [16] * 8
    assert len(set(texts)) > 1


def test_client_s_own_id_can_be_aborted(client: openai.OpenAI, server: RealServer) -> None:
    """C06: the id of the answer is the rid."""
    stream = client.completions.create(
        prompt="hello", max_tokens=6000, stream=True, extra_body={"rid": "mine"}, **GREEDY
    )
    with stream:
        first = next(stream)
        assert first.id == "mine"
        assert server.http.post("/abort_request", json={"rid": "mine"}).status_code == 200
        assert list(stream)[-1].choices[0].finish_reason == "abort"


def test_an_echoed_prompt_has_logprobs(client: openai.OpenAI) -> None:
    """C02: those of the prompt come first, the first token of it has none; in a stream they are the same."""
    prompt = "The quick brown fox jumps over the lazy dog. " * 3
    whole = client.completions.create(prompt=prompt, max_tokens=3, echo=True, logprobs=2, **GREEDY).choices[0]
    logprobs = whole.logprobs
    assert whole.text.startswith(prompt)
    assert "".join(logprobs.tokens) == whole.text
    assert logprobs.text_offset == list(range(len(whole.text)))
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    assert all(one < 0 for one in logprobs.token_logprobs[1:])
    assert all(1 <= len(one) <= 2 for one in logprobs.top_logprobs[1:])
    # Cached by now, which changes nothing.
    with client.completions.create(
        prompt=prompt, max_tokens=3, echo=True, logprobs=2, n=2, stream=True, **GREEDY
    ) as stream:
        events = [event.choices[0] for event in stream]
    for index in (0, 1):
        own = [event for event in events if event.index == index]
        assert "".join(event.text for event in own) == whole.text
        assert [one for event in own for one in event.logprobs.text_offset] == logprobs.text_offset
        values = [one for event in own for one in event.logprobs.token_logprobs]
        assert values[1:] == pytest.approx(logprobs.token_logprobs[1:], abs=1e-4)


def test_a_prompt_is_ranked(client: openai.OpenAI) -> None:
    """C02: for completions in each choice, for chats once; the rank of a token is its place among all."""
    answer = client.completions.create(prompt=[97, 98, 99], n=2, extra_body={"prompt_logprobs": 2}, **GREEDY)
    for choice in answer.choices:
        first, *others = choice.prompt_logprobs
        assert first is None
        for token, entries in zip((98, 99), others, strict=True):
            assert entries[str(token)]["decoded_token"] == chr(token)
            ranks = sorted(entry["rank"] for entry in entries.values())
            assert ranks[:2] == [1, 2]
            assert [entries[key]["logprob"] for key in entries if entries[key]["rank"] == 1] == [
                max(entry["logprob"] for entry in entries.values())
            ]
    assert answer.choices[0].logprobs is None
    chat = client.chat.completions.create(
        messages=HELLO, max_tokens=2, n=2, extra_body={"prompt_logprobs": 0}, **GREEDY
    )
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    assert [len(entries) for entries in chat.prompt_logprobs[1:]] == [1] * (chat.usage.prompt_tokens - 1)


def test_no_new_tokens_warm_the_cache(client: openai.OpenAI) -> None:
    """C02: with echo the scores of a text, without it nothing but the counts."""
    prompt = "Nothing is to follow this text, but another request begins with it."
    cold = client.completions.create(prompt=prompt, max_tokens=0, **GREEDY)
    assert (cold.choices[0].text, cold.choices[0].finish_reason, cold.usage.completion_tokens) == ("", "length", 0)
    warm = client.completions.create(prompt=prompt, max_tokens=1, **GREEDY)
    assert warm.usage.prompt_tokens_details.cached_tokens == len(prompt) // 16 * 16
    scored = client.completions.create(prompt=prompt, max_tokens=0, echo=True, logprobs=0, **GREEDY)
    assert scored.choices[0].text == prompt
    assert len(scored.choices[0].logprobs.token_logprobs) == len(prompt)
    with client.completions.create(prompt=prompt, max_tokens=0, stream=True, **GREEDY) as stream:
        (event,) = list(stream)
    assert (event.choices[0].text, event.choices[0].finish_reason) == ("", "length")
