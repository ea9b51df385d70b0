"""Settings: one definition, read from flags over environment over defaults, with errors that name their origin."""

from __future__ import annotations

import pytest

from engine import EngineConfig
from engine.core.errors import ConfigError
from engine.process.settings import LIVE_GATE, ServerSettings
from engine.process.settings_sources import read_settings, unread_variables


def test_defaults_serve_the_embedded_model_on_loopback() -> None:
    """Loopback by default, and no key is shown (C08)."""
    settings = read_settings({}, {})
    assert (settings.model, settings.host, settings.port, settings.gate) == ("embedded", "127.0.0.1", 30_000, LIVE_GATE)


def test_lists_are_written_with_commas() -> None:
    settings = ServerSettings(
        host="10.0.0.7", allowed_hosts="a.example, b.example,", operator_origins="https://a.example"
    )
    assert settings.hosts == ("10.0.0.7", "a.example", "b.example")
    assert settings.origins == ("https://a.example",)


def _role(role: str, **fields: object) -> ServerSettings:
    return ServerSettings(role=role, **({"prefill_engines": "http://a:1"} if role == "decode" else {}) | fields)


def test_roles_have_their_engines_and_ports() -> None:
    listed = _role(
        "decode", prefill_engines="http://a:1/, http://[::1]:2", kv_listen="10.0.0.7:31000", kv_secret_file="s"
    )
    assert listed.prefill_urls == ("http://a:1", "http://[::1]:2")
    assert _role("prefill").prefill_urls == ()
    assert _role("prefill", kv_secret_file="s").kv_secret_file == "s"
    own = {"host": "10.0.0.7", "port": 30_000}
    assert _role("decode", prefill_engines="http://127.0.0.1:30000", **own).prefill_urls, "another machine's loopback"


@pytest.mark.parametrize(
    ("role", "fields", "message"),
    [
        ("decode", {"prefill_engines": ""}, "role='decode' needs prefill_engines"),
        ("decode", {"prefill_engines": " , "}, "role='decode' needs prefill_engines"),
        (
            "both",
            {"prefill_engines": "http://a:1"},
            "prefill_engines needs role='decode', got 'http://a:1' with 'both'",
        ),
        ("prefill", {"prefill_engines": "http://a:1"}, "prefill_engines needs role='decode'"),
        ("both", {"kv_listen": "a:1"}, "kv_listen needs role='decode', got 'a:1' with 'both'"),
        ("prefill", {"kv_listen": "a:1"}, "kv_listen needs role='decode'"),
        ("both", {"kv_secret_file": "s"}, "kv_secret_file needs role='prefill' or 'decode', got 'both'"),
        ("decode", {"kv_listen": "a:1"}, "kv_listen needs kv_secret_file"),
        ("decode", {"kv_secret_file": "s"}, "kv_secret_file needs kv_listen"),
        ("decode", {"kv_listen": "a", "kv_secret_file": "s"}, "kv_listen must be HOST:PORT"),
        ("decode", {"kv_listen": "0.0.0.0:1", "kv_secret_file": "s"}, "kv_listen must be an address that prefill"),
        ("decode", {"kv_listen": "a:0", "kv_secret_file": "s"}, "kv_listen must leave a port for each of 1 stages"),
        (
            "decode",
            {"kv_listen": "a:65535", "kv_secret_file": "s", "pp_size": 2},
            "kv_listen must leave a port for each",
        ),
        ("decode", {"prefill_engines": "a:1"}, "prefill_engines must be http://HOST:PORT, got 'a:1'"),
        ("decode", {"prefill_engines": "https://a:1"}, "prefill_engines must be http://HOST:PORT"),
        ("decode", {"prefill_engines": "http://a:1/v1"}, "prefill_engines must be http://HOST:PORT"),
        ("decode", {"prefill_engines": "http://a:x"}, "prefill_engines must be http://HOST:PORT"),
        ("decode", {"prefill_engines": "http://a:1,http://a:1/"}, "prefill_engines must be other engines, each once"),
        ("decode", {"prefill_engines": "http://localhost:30000"}, "prefill_engines must be other engines, each once"),
        (
            "decode",
            {"prefill_engines": "http://127.0.0.1:30000", "host": "0.0.0.0"},
            "prefill_engines must be other engines, each once, got this engine itself",
        ),
        ("prefill", {"placement": "join", "pp_size": 2}, "role='prefill' needs placement='local', got 'join'"),
        ("decode", {"placement": "ray", "pp_size": 2}, "role='decode' needs placement='local', got 'ray'"),
    ],
)
def test_what_makes_no_sense_for_a_role_is_refused(role: str, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _role(role, **fields)
    assert str(caught.value).startswith(message)


def test_flag_wins_over_environment_and_environment_over_default() -> None:
    """A setting has one definition, and its error names field, value, rule and remedy (C09)."""
    environment = {"ENGINE_PORT": " 1234 ", "ENGINE_PP_SIZE": "4", "ENGINE_RADIX_CACHE": "false"}
    settings = read_settings({"port": "4321", "pp_size": None}, environment)
    assert (settings.port, settings.pp_size, settings.radix_cache) == (4321, 4, False)


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ({}, {"ENGINE_PORT": "x"}, "ENGINE_PORT must be an integer"),
        ({"port": "99999"}, {"ENGINE_PORT": "1"}, "port must be <= 65535, got '99999'"),
        ({"max_connections": "0"}, {}, "max_connections must be >= 1"),
        ({}, {"ENGINE_HEADER_TIMEOUT_S": "0"}, "ENGINE_HEADER_TIMEOUT_S must be > 0"),
    ],
)
def test_error_names_origin_rule_and_value(flags: dict[str, str], environment: dict[str, str], message: str) -> None:
    """An error names variable, rule and value (A08).

    A setting has one definition, and its error names field, value, rule and remedy (C09).
    """
    with pytest.raises(ConfigError) as caught:
        read_settings(flags, environment)
    assert str(caught.value).startswith(message)


def test_misspelled_variable_is_not_ignored() -> None:
    """A setting has one definition, and its error names field, value, rule and remedy (C09)."""
    with pytest.raises(ConfigError, match="ENGINE_PP_SZIE must be spelled ENGINE_PP_SIZE"):
        read_settings({}, {"ENGINE_PP_SZIE": "4"})
    with pytest.raises(ConfigError, match="engine_pp_siz must be spelled ENGINE_PP_SIZE"):
        read_settings({}, {"engine_pp_siz": "4"})
    assert read_settings({}, {"ENGINE_ROOM": "hot", "PP_SIZE": "4"}).pp_size == 1


def test_a_variable_that_sets_nothing_is_told_of() -> None:
    """C09: it may be another program's, so it is no error."""
    read = {"ENGINE_PP_SIZE": "4", "engine_seed": "1", "ENGINE_API_KEY": "k", "ENGINE_CONFIG": "x.toml", "PP_SIZE": "2"}
    others = {"ENGINE_SERVE_REPLICAS": "2", "ENGINE_SERVICE_PORT_HTTP": "1", "ENGINE_PORT_30000_TCP_ADDR": "10.0.0.1"}
    assert unread_variables(read | others) == []
    assert unread_variables({"ENGINE_PREFIX_CACHE": "on", "ENGINE_ROOM": "hot"}) == [
        "ENGINE_PREFIX_CACHE sets nothing: the engine has no such setting; the nearest is ENGINE_RADIX_CACHE",
        "ENGINE_ROOM sets nothing: the engine has no such setting",
    ]


def test_a_variable_of_another_meaning_is_no_misspelt_one() -> None:
    """ENGINE_TP_SIZE had to be spelled ENGINE_PP_SIZE, which means something else."""
    (said,) = unread_variables({"ENGINE_TP_SIZE": "2"})
    assert said == "ENGINE_TP_SIZE sets nothing: the engine has no such setting"
    assert read_settings({}, {"ENGINE_TP_SIZE": "2"}).pp_size == 1
    with pytest.raises(ConfigError, match="must be spelled ENGINE_PP_SIZE"):
        read_settings({}, {"ENGINE_PPSIZE": "2"})


def test_empty_variable_counts_as_unset() -> None:
    assert read_settings({}, {"ENGINE_PP_SIZE": " "}).pp_size == 1


def test_settings_extend_a_configuration_and_survive_json() -> None:
    config = EngineConfig(pp_size=4, pp_async_depth=2)
    settings = ServerSettings(**config.model_dump(), port=0, gate_options='{"a": 1}')
    again = ServerSettings.model_validate_json(settings.model_dump_json())
    assert again == settings
    assert again.depth == 6
    assert hash(again) == hash(settings)
