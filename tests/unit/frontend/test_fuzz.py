"""The served description, fuzzed: every request gets an answer, and one that the description declares.

Half of the bodies are mended into ones that reach the engine: most random ones break a rule between fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from real_servers import RealServer, running
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from thinned import thinned

from engine.server.launch.preload import PreloadedParent

EXAMPLES = 3
# Far above what the longest answer takes in the small context of this server.
HANG_S = 30.0
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions")
MOST_CHOICES = 3
LONGEST_PROMPT = 12


@pytest.fixture(scope="module")
def small_server(parent: PreloadedParent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Answers are short here, so that one that does not come hangs."""
    traces = str(tmp_path_factory.mktemp("traces"))
    settings = {"context_length": 128, "max_total_tokens": 4096, "profile_dir": traces}
    with running(parent, tmp_path_factory.mktemp("s"), **settings) as started:
        yield started


@pytest.fixture(scope="module")
def schema(small_server: RealServer) -> Any:
    return schemathesis.openapi.from_url(f"{small_server.url}/openapi.json")


def _mended(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The same body with what only a valid one has, as far as this is not left to chance on purpose."""
    # The rules between fields, and ids that are the model's.
    cut = {
        "rid",
        "model",
        "stop_token_ids",
        "min_tokens",
        "max_tokens",
        "max_completion_tokens",
        "stream_options",
        "logit_bias",
        # A time limit that is over at once is a 504, and no fault.
        "timeout_s",
        "waiting_timeout_s",
    }
    body = {name: value for name, value in body.items() if name not in cut}
    if body.get("top_k") == 0:
        del body["top_k"]
    if path == "/generate":
        sampling = body.get("sampling_params") or {}
        cut = {"stop_token_ids", "min_new_tokens", "max_new_tokens", "top_k"}
        body["sampling_params"] = {name: value for name, value in sampling.items() if name not in cut}
        body["sampling_params"]["n"] = min(MOST_CHOICES, sampling.get("n") or 1)
        body |= {"text": str(body.get("text"))[:LONGEST_PROMPT], "input_ids": None}
        body["return_logprob"] = bool(body.get("top_logprobs_num"))
        body["logprob_start_len"] = 0 if body["return_logprob"] and (body.get("logprob_start_len") or 0) > 0 else -1
    else:
        body["n"] = min(MOST_CHOICES, body.get("n") or 1)
        if body.get("stream"):
            body["prompt_logprobs"] = None
    if path == "/v1/completions":
        body["prompt"] = ["x", [1, 2], "\u20ac"][len(str(body.get("prompt"))) % 3]
    elif path == "/v1/chat/completions":
        body["logprobs"] = bool(body.get("top_logprobs"))
        body["messages"] = [_mended_message(message) for message in body["messages"][:2]]
        body["tools"] = [_mended_tool(tool) for tool in (body.get("tools") or [])[:1]]
        if not isinstance(body.get("tool_choice"), str) or not body["tools"]:
            body["tool_choice"] = None
        body["chat_template_kwargs"] = {}
    return body


def _mended_message(message: dict[str, Any]) -> dict[str, Any]:
    mended = {"role": message["role"], "content": str(message.get("content"))[:LONGEST_PROMPT]}
    if message["role"] == "tool":
        mended["tool_call_id"] = "x"
    elif message["role"] == "assistant":
        mended["tool_calls"] = (message.get("tool_calls") or [])[:1]
    return mended


def _mended_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Give it a name that the model can emit, and a schema that it can follow."""
    return {"type": "function", "function": {"name": "f", "strict": tool["function"].get("strict")}}


def _fuzz(operation: Any, mode: GenerationMode, *, mend: bool = False) -> Counter[int]:
    """Send examples of an operation; how often each status came."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        if mend:
            case.body = _mended(case.path, case.body)
        response = case.call(timeout=HANG_S)
        case.validate_response(response, checks=CHECKS)
        statuses[response.status_code] += 1

    send()
    return statuses


@pytest.mark.parametrize("path", thinned(GENERATING, one_in=3))
def test_no_body_breaks_a_generating_route(schema: Any, small_server: RealServer, path: str) -> None:
    """C01, A05: no 500, no hang, no undescribed answer; and the engine is as it was."""
    operation = schema[path]["POST"]
    assert _fuzz(operation, GenerationMode.POSITIVE, mend=True)[200] >= EXAMPLES // 2
    _fuzz(operation, GenerationMode.POSITIVE)
    assert _fuzz(operation, GenerationMode.NEGATIVE)[400] >= EXAMPLES // 2
    info = small_server.info()
    assert info["open_requests"] == 0
    assert (info["stats"]["running"], info["stats"]["waiting"]) == (0, 0)


def test_no_request_breaks_another_route(schema: Any, small_server: RealServer) -> None:
    """C06: with a request through the whole engine at the end."""
    seen = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in GENERATING:
            continue
        assert sum(_fuzz(operation, GenerationMode.POSITIVE).values()), operation.label
        if operation.body or operation.query:
            assert _fuzz(operation, GenerationMode.NEGATIVE)[400], operation.label
        if operation.path == "/sleep":
            small_server.http.post("/update_weights_from_disk", json={"model_path": "embedded:0"}).raise_for_status()
            small_server.http.post("/wake").raise_for_status()
        seen += 1
    assert seen >= 10
    small_server.http.post("/continue_generation").raise_for_status()
    small_server.http.post("/stop_profile")
    body = {"prompt": "x", "max_tokens": 3}
    assert small_server.http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
