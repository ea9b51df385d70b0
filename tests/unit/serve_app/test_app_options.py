"""The options of the application: where they come from, what they refuse, and what is left to the engine."""

from __future__ import annotations

import json

import pytest

from engine.cluster.serve_app.options import read_options
from engine.core.errors import ConfigError


def test_arguments_are_texts_and_go_where_they_belong() -> None:
    settings, options = read_options({"pp_size": "2", "replicas": "3", "gpus": "0.5"}, {})
    assert (settings.pp_size, options.replicas, options.gpus) == (2, 3, 0.5)
    # Each engine listens where only its own actor asks.
    assert (settings.host, settings.port) == ("127.0.0.1", 0)


def test_arguments_win_over_variables() -> None:
    environment = {"ENGINE_PP_SIZE": "2", "ENGINE_SERVE_REPLICAS": "4", "ENGINE_SERVE_FRONTS": "2", "ENGINE_PORT": "1"}
    settings, options = read_options({"replicas": "3"}, environment)
    assert (settings.pp_size, options.replicas, options.fronts, settings.port) == (2, 3, 2, 0)


def test_autoscaling_passes_through() -> None:
    wanted = {"min_replicas": 1, "max_replicas": 4}
    assert read_options({"autoscaling_config": json.dumps(wanted)}, {})[1].autoscaling_config == wanted
    # A Serve configuration file has it as it is.
    assert read_options({"autoscaling_config": wanted}, {})[1].autoscaling_config == wanted
    with pytest.raises(ConfigError, match=r"autoscaling_config.*JSON object"):
        read_options({"autoscaling_config": "{4"}, {})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"replica": "2"}, "replica is neither an option .* got '2'"),
        ({"replicas": "0"}, "replicas: .* got '0'"),
        ({"port": "8000"}, "port cannot be set for an engine under Serve.*Serve's proxies listen"),
        ({"record": "x.rec"}, "every replica would write the same file"),
        ({"pp_size": "many"}, "pp.size"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_options(arguments, {})


def test_a_misspelled_variable_is_found() -> None:
    with pytest.raises(ConfigError, match="ENGINE_SERVE_REPLICA "):
        read_options({}, {"ENGINE_SERVE_REPLICA": "2"})
