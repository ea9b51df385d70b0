"""Embeddings by real servers of tiny models whose folders say how they embed, against transformers' hidden states."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from real_servers import RealServer, running
from reciting_model import write_reciting_model

from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError, ConfigError
from engine.core.limits import Limits
from engine.model.checkpoint import read_facts
from engine.model.pooling import PoolingKind, read_pooling
from engine.server.launch.preload import PreloadedParent

TEXTS = ["the first text", "x", "another one, longer than a page and than a chunk of the prompt " * 3]
LAST, MEAN = "pooling_mode_lasttoken", "pooling_mode_mean_tokens"


def write_embedding_model(folder: Path, mode: str, *, normalizes: bool, is_headless: bool = True) -> Path:
    """A tiny model in the published layout: decoder weights under their own names, modules.json, 1_Pooling."""
    folder.mkdir()
    write_reciting_model(folder, ["none"])
    said = json.loads((folder / "config.json").read_text())
    config = transformers.Qwen3Config(
        **{name: said[name] for name in ("vocab_size", "eos_token_id")},
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    torch.manual_seed(3)
    whole = transformers.Qwen3ForCausalLM(config)
    (whole.model if is_headless else whole).save_pretrained(folder)
    modules = ["Transformer", "Pooling", *["Normalize"] * normalizes]
    listed = [
        {"idx": index, "path": f"{index}_{name}" if index else "", "type": f"sentence_transformers.models.{name}"}
        for index, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({LAST: mode == LAST, MEAN: mode == MEAN}))
    return folder


def expected(folder: Path, texts: list[str], mode: str, *, normalizes: bool) -> np.ndarray:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    vectors = []
    for text in texts:
        with torch.no_grad():
            states = model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0]
        vectors.append(states[-1] if mode == LAST else states.mean(dim=0))
    found = torch.stack(vectors)
    return (torch.nn.functional.normalize(found, dim=-1) if normalizes else found).numpy()


def embed(client: openai.OpenAI, **more: Any) -> np.ndarray:
    answer = client.embeddings.create(**({"model": "m", "input": TEXTS} | more))
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return np.array([one.embedding for one in answer.data], np.float32)


@pytest.fixture(
    scope="module",
    params=[
        (LAST, True, {}),
        pytest.param((LAST, False, {"pp_size": 2}), marks=pytest.mark.nightly),
        pytest.param((MEAN, True, {}), marks=pytest.mark.nightly),
        (MEAN, False, {"pp_size": 3}),
    ],
    ids=["last", "last-2-stages", "mean", "mean-3-stages"],
)
def served(
    request: pytest.FixtureRequest, parent: PreloadedParent, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RealServer, Path, str, bool]]:
    mode, normalizes, settings = request.param
    folder = tmp_path_factory.mktemp("model") / "m"
    write_embedding_model(folder, mode, normalizes=normalizes, is_headless=normalizes)
    more = {"chunked_prefill_size": 16, "page_size": 8, "served_model_name": "m", **settings}
    with running(parent, tmp_path_factory.mktemp("s"), model=str(folder), **more) as server:
        yield server, folder, mode, normalizes


def client_of(server: RealServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=20)


def test_vectors_equal_those_of_transformers(served: tuple[RealServer, Path, str, bool]) -> None:
    """C11: in chunks, side by side, over stages, with their prefixes cached, as numbers and as bytes."""
    server, folder, mode, normalizes = served
    wanted = expected(folder, TEXTS, mode, normalizes=normalizes)
    with client_of(server) as client:
        first = embed(client)
        assert np.abs(first - wanted).max() < 1e-4
        assert np.abs(embed(client, input=TEXTS[::-1])[::-1] - wanted).max() < 1e-4  # cached where prefixes are shared
        raw = server.http.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"}).json()
        (one,) = raw["data"]
        assert np.abs(np.frombuffer(base64.b64decode(one["embedding"]), "<f4") - wanted[0]).max() < 1e-4
        plain = server.http.post("/v1/embeddings", json={"input": [TEXTS[0]], "encoding_format": "float"}).json()
        assert np.abs(np.array(plain["data"][0]["embedding"]) - wanted[0]).max() < 1e-4
        assert raw["usage"] == plain["usage"] == {"prompt_tokens": (count := len(ids(folder))), "total_tokens": count}
        assert np.abs(embed(client, input=[ids(folder)])[0] - wanted[0]).max() < 1e-4
    stats = server.metrics().text
    hits = next(line for line in stats.splitlines() if line.startswith("engine_prompt_tokens_cached_total"))
    assert (float(hits.split()[-1]) > 0) == (mode == LAST)


def ids(folder: Path) -> list[int]:
    return list(transformers.AutoTokenizer.from_pretrained(folder)(TEXTS[0])["input_ids"])


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_model_that_embeds_generates_nothing(served: tuple[RealServer, Path, str, bool], path: str) -> None:
    refused = served[0].http.post(path, json={})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "'m' is an embedding model, which generates no text; use /v1/embeddings" in refused.text


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "none of them empty"),
        ({"input": ["a", ""]}, "input", "none of them empty"),
        ({"input": "a", "dimensions": 8}, "dimensions", "must be 32"),
        ({"input": ["a"] * 1025}, "input", "at most 1024 texts here (max_queued_requests=1024"),
        ({"input": "a" * 20_000}, "input", "maximum context length"),
        ({"input": [[10**6]]}, "input", "token ids from 0"),
        ({"input": "a", "model": "other"}, "model", "must be 'm'"),
        ({"input": "a", "stream": True}, "stream", "must be false, got true: vectors are not streamed"),
        ({"input": "a", "temperature": 1}, "temperature", "is not a field here"),
    ],
)
def test_an_input_is_refused_by_name(
    served: tuple[RealServer, Path, str, bool], fields: dict[str, Any], param: str, words: str
) -> None:
    refused = served[0].http.post("/v1/embeddings", json=fields)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (404 if param == "model" else 400, param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"pooling_mode_cls_token": True}, "pooling_mode_cls_token"),
        ({LAST: True, MEAN: True}, "must name a supported pooling"),
        ({}, "must name a supported pooling"),
        ([], "must hold a dict"),
    ],
)
def test_another_pooling_is_refused_by_name(tmp_path: Path, said: Any, words: str) -> None:
    folder = write_embedding_model(tmp_path / "m", LAST, normalizes=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=words):
        read_facts(EngineConfig(model=str(folder)))


def test_another_module_is_refused_and_newer_words_are_known(tmp_path: Path) -> None:
    folder = write_embedding_model(tmp_path / "m", LAST, normalizes=False)
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    pooling = read_pooling(folder)
    assert pooling is not None
    assert (pooling.kind, pooling.is_normalized) == (PoolingKind.MEAN, False)
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(CheckpointError, match="got 'Dense'"):
        read_pooling(folder)


@pytest.mark.parametrize(
    ("mode", "setting", "words"),
    [
        (LAST, {"speculative_algorithm": "ngram"}, "speculative_algorithm must be 'off'"),
        (MEAN, {"kv_events": True}, "kv_events must be left out"),
        (MEAN, {"host_kv_tokens": 1024}, "host_kv_tokens must be left out"),
    ],
)
def test_settings_that_need_text_or_prefixes_are_refused(
    tmp_path: Path, mode: str, setting: dict[str, Any], words: str
) -> None:
    folder = write_embedding_model(tmp_path / "m", mode, normalizes=True)
    config = EngineConfig(model=str(folder), **setting)
    with pytest.raises(ConfigError, match=words):
        Limits.of(config, read_facts(config))


@pytest.mark.parametrize(("mode", "is_shared"), [(LAST, True), (MEAN, False)])
def test_a_mean_shares_no_prefix(tmp_path: Path, mode: str, is_shared: bool) -> None:
    config = EngineConfig(model=str(write_embedding_model(tmp_path / "m", mode, normalizes=True)))
    assert Limits.of(config, read_facts(config)).radix_cache is is_shared
