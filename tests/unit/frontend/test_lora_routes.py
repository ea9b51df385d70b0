"""LoRAs as clients see them: asked for by name, listed, loaded and unloaded by operators, and not found."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from real_servers import RealServer, running

from engine.core.messages import CallAnswer, FinishReason, LoadLora, Refusal, RefusalKind, TokenOutput, UnloadLora
from engine.model.embedded_lora import embedded_lora_folder
from engine.server.launch.preload import PreloadedParent

CHAT = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "hi", "lora_path": "x"}),
        ("/v1/completions", {"prompt": "hi", "model": "x"}),
        ("/v1/chat/completions", {"messages": CHAT, "model": "x"}),
    ],
)
def test_a_request_names_its_lora(play, path: str, body: dict[str, Any]) -> None:
    """C01: and the answer names it as its model."""

    async def scene(stage) -> None:
        answer = asyncio.create_task(stage.http.post(path, json=body | {"rid": "r"}))
        assert (await stage.scheduler.receive()).lora == "x"
        output = TokenOutput(rid="r", token_ids=(104,), finish_reason=FinishReason.LENGTH, completion_tokens=1)
        await stage.scheduler.reply(output)
        response = await answer
        assert response.status_code == 200
        assert response.json().get("model", "x") == "x"

    play(scene, max_loras=2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/v1/completions", {"prompt": "hi"}, "model"), ("/generate", {"text": "hi"}, "lora_path")],
)
def test_what_the_scheduler_does_not_know_is_not_found(
    play, stream: bool, path: str, body: dict[str, Any], param: str
) -> None:
    async def scene(stage) -> None:
        answer = asyncio.create_task(stage.http.post(path, json=body | {param: "x", "rid": "r", "stream": stream}))
        await stage.scheduler.receive()
        await stage.scheduler.reply(Refusal(rid="r", kind=RefusalKind.NOT_FOUND, message="the LoRA must be loaded"))
        response = await answer
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "not_found"
        assert response.json()["error"]["param"] == param

    play(scene, max_loras=2)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/generate", {"text": "hi", "lora_path": "x"}), ("/v1/completions", {"prompt": "hi", "model": "x"})],
)
def test_a_server_without_loras_finds_none(play, path: str, body: dict[str, Any]) -> None:
    async def scene(stage) -> None:
        response = await stage.http.post(path, json=body)
        assert response.status_code == 404
        assert stage.client.sessions.open_requests == 0

    play(scene)


def test_loras_are_listed_from_their_load_to_their_unload(play) -> None:
    async def scene(stage) -> None:
        async def names() -> list[str]:
            cards = (await stage.http.get("/v1/models")).json()["data"]
            assert all(card["parent"] == "embedded" for card in cards[1:])
            return [card["id"] for card in cards]

        async def call(path: str, body: dict[str, Any], **answer: Any) -> httpx.Response:
            task = asyncio.create_task(stage.http.post(path, json=body))
            message = await stage.scheduler.receive()
            await stage.scheduler.reply(CallAnswer(call_id=message.call_id, message="said", **answer))
            response = await task
            assert (response.text if response.is_success else response.json()["error"]["message"]) == "said"
            return response

        assert await names() == ["embedded", "x"]
        load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        assert (await call(load, {"lora_name": "y", "lora_path": "/y"}, ok=False)).status_code == 400
        assert await names() == ["embedded", "x"]
        assert (await call(load, {"lora_name": "y", "lora_path": "/y"}, ok=True)).status_code == 200
        assert await names() == ["embedded", "x", "y"]
        assert (await stage.http.get("/v1/models/y")).json()["parent"] == "embedded"
        missing = await call(unload, {"lora_name": "z"}, ok=False, not_found=True)
        assert missing.status_code == 404
        assert (await call(unload, {"lora_name": "x"}, ok=True)).status_code == 200
        assert await names() == ["embedded", "y"]
        assert (await stage.http.get("/v1/models/x")).status_code == 404
        taken = await stage.http.post(load, json={"lora_name": "embedded", "lora_path": "/y"})
        assert taken.status_code == 400
        assert "lora_name must differ" in taken.json()["error"]["message"]

    play(scene, lora="x=/x")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/load_lora_adapter",
            {"lora_name": "x", "lora_path": "/x"},
            LoadLora(call_id="call-0", name="x", path="/x"),
        ),
        (
            "/v1/unload_lora_adapter",
            {"lora_name": "x", "timeout": 2},
            UnloadLora(call_id="call-0", name="x", timeout_s=2.0),
        ),
    ],
)
def test_a_call_is_one_message(play, path: str, body: dict[str, Any], message: object) -> None:
    async def scene(stage) -> None:
        answer = asyncio.create_task(stage.http.post(path, json=body))
        assert await stage.scheduler.receive() == message
        await stage.scheduler.reply(CallAnswer(call_id="call-0", ok=True, message="done"))
        assert (await answer).status_code == 200
        assert (await stage.http.post(path, json=body | {"load_inplace": True})).status_code == 400
        assert (await stage.http.post(path, json={})).status_code == 400

    play(scene)


def test_operators_alone_load_and_unload(play) -> None:
    async def scene(stage) -> None:
        headers = {"authorization": "Bearer client"}
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            response = await stage.http.post(path, json={"lora_name": "x", "lora_path": "/x"}, headers=headers)
            assert response.status_code == 401

    play(scene, api_key="client", admin_key="operator")


@pytest.fixture(scope="module")
def adapted(parent: PreloadedParent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with running(parent, tmp_path_factory.mktemp("s"), lora="x=embedded-lora:1", max_loras=1) as started:
        yield started


def test_the_official_client_asks_for_loras_as_models(adapted: RealServer) -> None:
    """C01: several at once in one place, each as it is alone; loaded, listed, unloaded, gone."""
    with openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        load = {"lora_name": "y", "lora_path": "embedded-lora:2"}
        done = httpx.post(f"{adapted.url}/v1/load_lora_adapter", json=load)
        assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'y' added successfully.")
        assert [card.id for card in client.models.list().data] == ["embedded", "x", "y"]
        said = {}
        for model in ("embedded", "x", "y", "x"):
            whole = client.completions.create(model=model, prompt="hello", **GREEDY)
            assert whole.model == model
            with client.completions.create(model=model, prompt="hello", stream=True, **GREEDY) as stream:
                assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
            assert said.setdefault(model, whole.choices[0].text) == whole.choices[0].text
        assert len(set(said.values())) == 3
        client.chat.completions.create(model="y", messages=CHAT, **GREEDY)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="z", prompt="hello")
        metrics = httpx.get(f"{adapted.url}/metrics").text
        assert 'engine_lora_adapters_resident{model_name="embedded"} 1.0' in metrics
        assert "engine_lora_adapter_evictions_total" in metrics
        bad = httpx.post(f"{adapted.url}/v1/load_lora_adapter", json=load | {"lora_name": "w", "lora_path": "/nowhere"})
        assert bad.status_code == 400
        assert "not a folder here" in bad.json()["error"]["message"]
        assert bad.json()["error"]["param"] == "lora_path"
        gone = httpx.post(f"{adapted.url}/v1/unload_lora_adapter", json={"lora_name": "y"})
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'y' removed successfully.")
        assert httpx.post(f"{adapted.url}/v1/unload_lora_adapter", json={"lora_name": "y"}).status_code == 404
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="y", prompt="hello")


def test_a_lora_whose_files_are_gone_is_unavailable(adapted: RealServer, tmp_path: Path) -> None:
    """Its requests get an error with the missing file and the remedy; after the file is back the next one succeeds."""
    folder, away = tmp_path / "lora", tmp_path / "away"
    shutil.copytree(embedded_lora_folder(3), folder)
    load = {"lora_name": "lost", "lora_path": str(folder)}
    assert adapted.http.post("/v1/load_lora_adapter", json=load).status_code == 200
    native = {"text": "hello", "sampling_params": {"max_new_tokens": 2}}
    assert adapted.http.post("/generate", json=native | {"lora_path": "x"}).status_code == 200
    folder.rename(away)
    for path, body, param in (
        ("/generate", native, "lora_path"),
        ("/v1/completions", {"prompt": "hello"}, "model"),
        ("/v1/chat/completions", {"messages": CHAT}, "model"),
    ):
        for stream in (False, True):
            answer = adapted.http.post(path, json=body | {param: "lost", "stream": stream})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["param"]) == (503, "server_unavailable", param)
            assert "could not load the LoRA 'lost' from lora: " in error["message"]
            assert "put them back, or unload the LoRA" in error["message"]
            assert str(tmp_path) not in error["message"]
    assert f"from {folder}" in adapted.log
    assert adapted.http.post("/generate", json=native | {"lora_path": "x"}).status_code == 200
    away.rename(folder)
    assert adapted.http.post("/generate", json=native | {"lora_path": "lost"}).status_code == 200
    adapted.http.post("/v1/unload_lora_adapter", json={"lora_name": "lost"})


def test_a_lora_that_cannot_be_served_keeps_a_server_from_starting(parent: PreloadedParent, tmp_path: Path) -> None:
    from engine.core.errors import StartupError

    (tmp_path / "a").mkdir()
    with pytest.raises(StartupError, match="not a folder here"), running(parent, tmp_path / "a", lora="x=/nowhere"):
        pass
