"""Keys: who may call which route, and that a key is never shown."""

from __future__ import annotations

import asyncio

import pytest

from engine.core.errors import ConfigError
from engine.core.messages import CallAnswer
from engine.process.settings import REVEAL_KEYS, ServerSettings
from engine.process.settings_sources import read_settings

KEY = "client-key-123"
ADMIN = "admin-key-456"
ELSEWHERE = "0.0.0.0"


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("settings", "key", "client", "operator"),
    [
        ({}, None, 200, 200),
        ({"address": ELSEWHERE}, None, 200, 403),
        ({"address": ELSEWHERE, "api_key": KEY}, KEY, 200, 403),
        ({"api_key": KEY}, None, 401, 401),
        ({"api_key": KEY}, KEY, 200, 200),
        ({"api_key": KEY}, KEY + "x", 401, 401),
        ({"admin_key": ADMIN}, None, 200, 401),
        ({"api_key": KEY, "admin_key": ADMIN}, KEY, 200, 401),
        ({"api_key": KEY, "admin_key": ADMIN}, ADMIN, 200, 200),
        ({"address": ELSEWHERE, "api_key": KEY, "admin_key": ADMIN}, ADMIN, 200, 200),
        ({"address": ELSEWHERE, "api_key": KEY, "admin_key": ADMIN}, KEY, 200, 401),
        ({"address": "::1"}, None, 200, 200),
    ],
)
def test_keys_open_their_routes(play, settings: dict[str, str], key: str | None, client: int, operator: int) -> None:
    """Loopback by default, and no key is shown (C08)."""

    async def scene(stage) -> None:
        for path in ("/v1/models", "/model_info"):
            assert (await stage.http.get(path, headers=_bearer(key))).status_code == client
        call = asyncio.create_task(stage.http.post("/continue_generation", headers=_bearer(key)))
        if operator == 200:
            asked = await stage.scheduler.receive()
            await stage.scheduler.reply(CallAnswer(call_id=asked.call_id, ok=True, message="done"))
        assert (await call).status_code == operator
        assert (await stage.http.get("/health")).status_code == 200

    play(scene, **settings)


def test_every_route_but_the_probe_and_the_description_needs_a_key(play) -> None:
    """C08: a route that is added without a key's check is found here."""

    async def scene(stage) -> None:
        paths = (await stage.http.get("/openapi.json")).json()["paths"]
        for path, operations in paths.items():
            for method in operations:
                response = await stage.http.request(method, path.replace("{model}", "m"))
                assert response.status_code == (200 if path == "/health" else 401), path
                assert path == "/health" or response.headers["www-authenticate"] == "Bearer"

    play(scene, api_key=KEY, admin_key=ADMIN)


def test_a_key_may_come_as_clients_of_the_anthropic_protocol_send_it(play) -> None:
    """C08: its header stands in for the other one, and is compared as that is."""

    async def scene(stage) -> None:
        for headers, status in (({"x-api-key": KEY}, 200), ({"x-api-key": f"{KEY}x"}, 401), ({"x-api-key": ""}, 401)):
            assert (await stage.http.get("/v1/models", headers=headers)).status_code == status
        both = {"x-api-key": KEY, **_bearer("other")}
        assert (await stage.http.get("/v1/models", headers=both)).status_code == 401

    play(scene, api_key=KEY)


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY} {KEY}"])
def test_malformed_header_is_401(play, header: str) -> None:
    """Loopback by default, and no key is shown (C08)."""

    async def scene(stage) -> None:
        assert (await stage.http.get("/v1/models", headers={"authorization": header})).status_code == 401

    play(scene, api_key=KEY)


def test_keys_are_never_shown(play) -> None:
    """C08: not in /server_info, not in repr, not in a dump, not in an error or its cause."""
    settings = ServerSettings(api_key=KEY, admin_key=ADMIN)
    shown = [repr(settings), str(settings), settings.model_dump_json(), str(settings.model_dump())]
    for values in ({"api_key": "with space"}, {"api_key": "hush-hush", "port": -1}, {"admin_key": ["hush-hush"]}):
        with pytest.raises(ConfigError) as caught:
            ServerSettings(**values)
        shown += [str(caught.value), str(caught.value.__cause__)]
    with pytest.raises(ConfigError) as caught:
        read_settings({"api_key": "sec ret"}, {})
    shown.append(str(caught.value))

    async def scene(stage) -> None:
        shown.append((await stage.http.get("/server_info", headers=_bearer(KEY))).text)

    stats = "engine.frontend.http.routes.information.STATS_TIMEOUT_S"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, 0.01)
        play(scene, api_key=KEY, admin_key=ADMIN)
    for text in shown:
        for secret in (KEY, ADMIN, "with space", "hush-hush", "sec ret"):
            assert secret not in text, text


def test_keys_travel_to_the_process_that_serves_with_them() -> None:
    """Loopback by default, and no key is shown (C08)."""
    settings = ServerSettings(api_key=KEY)
    assert ServerSettings.model_validate_json(settings.model_dump_json(context=REVEAL_KEYS)) == settings
