"""Settings from flags, environment and file: the order, the origins, and errors that name them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine import __version__
from engine.cli import app
from engine.cli.flags import GROUPS, USUAL, kind_of
from engine.core.errors import ConfigError
from engine.core.limits import Limits
from engine.process.settings import ServerSettings
from engine.process.settings_sources import read_settings, trace_settings

ENGINE = Path(__file__).resolve().parents[3] / "engine"
FORMATS = {
    "toml": 'port = 1\npp_size = 2\nmodel = "embedded"\nradix_cache = false\n',
    "yaml": "port: 1\npp_size: 2\nmodel: embedded\nradix_cache: false\n",
    "json": '{"port": 1, "pp_size": 2, "model": "embedded", "radix_cache": false}',
}


@pytest.fixture(autouse=True)
def no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ServerSettings.model_fields:
        monkeypatch.delenv(f"ENGINE_{name.upper()}", raising=False)
    monkeypatch.delenv("ENGINE_CONFIG", raising=False)


def _file(folder: Path, text: str, ending: str = "toml") -> Path:
    path = folder / f"engine.{ending}"
    path.write_text(text)
    return path


@pytest.mark.parametrize("ending", FORMATS)
def test_flags_over_environment_over_file_over_defaults(tmp_path: Path, ending: str) -> None:
    """C09: one definition, three places, and each value's origin."""
    path = _file(tmp_path, FORMATS[ending], ending)
    environment = {"ENGINE_PORT": "2", "ENGINE_SEED": "5", "ENGINE_CONFIG": str(path)}
    traced = trace_settings({"port": "3", "host": None}, environment)
    settings, origins = traced.settings, traced.origins
    assert (settings.port, settings.pp_size, settings.seed, settings.radix_cache) == (3, 2, 5, False)
    assert (origins["port"], origins["pp_size"], origins["seed"]) == ("--port", str(path), "ENGINE_SEED")
    assert origins["host"] == "default"
    assert origins.keys() == ServerSettings.model_fields.keys()


def test_flag_s_file_wins_over_the_variable_s(tmp_path: Path) -> None:
    """A setting has one definition, and its error names field, value, rule and remedy (C09)."""
    path = _file(tmp_path, "pp_size = 2")
    assert read_settings({}, {"ENGINE_CONFIG": "/no/such/file.toml"}, path).pp_size == 2


@pytest.mark.parametrize(
    ("text", "ending", "parts"),
    [
        ("pp_size = 0", "toml", ["engine.toml: pp_size must be >= 1, got 0"]),
        ("pp_size = ", "toml", ["engine.toml must be readable toml"]),
        ("[1, 2]", "json", ["engine.json must be readable json"]),
        ("{", "json", ["engine.json must be readable json"]),
    ],
)
def test_bad_file_is_named(tmp_path: Path, text: str, ending: str, parts: list[str]) -> None:
    """A setting has one definition, and its error names field, value, rule and remedy (C09)."""
    with pytest.raises(ConfigError) as caught:
        read_settings({}, {}, _file(tmp_path, text, ending))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_file_that_is_not_there_is_named() -> None:
    """C09: a misspelled path must not mean the defaults."""
    for flags_file, environment in ((Path("/no/such.toml"), {}), (None, {"ENGINE_CONFIG": "/no/such.toml"})):
        with pytest.raises(ConfigError, match=r"must exist, got /no/such.toml"):
            read_settings({}, environment, flags_file)


def test_config_command_prints_every_field_with_its_origin_and_no_key(tmp_path: Path) -> None:
    """A setting has one definition, and its error names field, value, rule and remedy (C09).

    Loopback by default, and no key is shown (C08).
    """
    path = _file(tmp_path, 'api_key = "hush-hush"\n')
    result = CliRunner().invoke(app, ["config", "--config", str(path), "--pp-size", "3"], env={"ENGINE_PORT": "7"})
    assert result.exit_code == 0
    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines()}
    assert lines.keys() - {"field"} == ServerSettings.model_fields.keys()
    assert lines["pp_size"][1:] == ["3", "--pp-size"]
    assert lines["port"][1:] == ["7", "ENGINE_PORT"]
    assert lines["seed"][1:] == ["0", "default"]
    assert "hush" not in result.stdout


@pytest.mark.parametrize("command", ["serve", "config"])
def test_help_lists_every_flag_once_in_groups_with_its_kind(command: str) -> None:
    """C09: choices, types, ranges and defaults, as the settings have them."""
    shown = CliRunner().invoke(app, [command, "--help-all"], env={"COLUMNS": "200"}).stdout
    groups = re.findall(r"^(\w[\w ]*):$", shown, re.MULTILINE)
    assert groups == list(GROUPS)
    flags = re.findall(r"^  (?:-h, )?--([a-z-]+)", shown, re.MULTILINE)
    expected = {name.replace("_", "-") for name in ServerSettings.model_fields}
    assert sorted(flags) == sorted(expected | {"config", "help", "help-all"})
    for line in (
        "--schedule-policy fcfs|lpm|dfs-weight|priority",
        "--pp-size INTEGER",
        "--start-timeout-s NUMBER",
        "--api-key KEY",
        "(1 to 64; default: 1)",
        "(> 0 and <= 86400; default: 600.0)",
        "(default: on)",
    ):
        assert line in shown


@pytest.mark.parametrize("command", ["serve", "config"])
def test_help_shows_what_people_use(command: str) -> None:
    """C09: a screen of flags, and the one that shows all."""
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "120"}).stdout
    flags = re.findall(r"^  (?:-h, )?--([a-z-]+)", shown, re.MULTILINE)
    assert {flag.replace("-", "_") for flag in flags} == (USUAL - {"path"}) | {"help_all"}
    assert " [MODEL]" in shown
    assert len(shown.splitlines()) < 75


def test_groups_name_fields_that_exist() -> None:
    known = ServerSettings.model_fields.keys() | {"path", "config", "help", "allowed_hosts", "operator_origins"}
    named = [name for names in GROUPS.values() for name in names]
    assert set(named) <= known
    assert len(set(named)) == len(named)


def test_every_field_has_a_kind() -> None:
    """C09: a new field of a new type is noticed here, not by the first who asks for help."""
    assert all(kind_of(field) or field.annotation is bool for field in ServerSettings.model_fields.values())


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"engine {__version__}\n")


def test_json_of_the_settings_is_a_configuration_file(tmp_path: Path) -> None:
    """C09: what was in force can be put in force again."""
    settings = ServerSettings(pp_size=2, schedule_policy="lpm", drain_timeout_s=3.5)
    values = {name: value for name, value in json.loads(settings.model_dump_json()).items() if value is not None}
    assert read_settings({}, {}, _file(tmp_path, json.dumps(values), "json")) == settings


def test_every_field_has_a_reader() -> None:
    """C09: a field that no code reads would be accepted and ignored."""
    read = set()
    # The harness is another program that is handed settings, by the gate that it chooses.
    for path in [*ENGINE.rglob("*.py"), *(ENGINE.parent / "adapters" / "scripted_lockstep").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and _is_settings(node.value):
                read.add(node.attr)
    # Read by their property.
    assert {"depth", "most_loras", "prefill_urls"} <= read
    by_property = {"pp_async_depth", "allowed_hosts", "max_loras", "max_gap_ms", "max_gap_steps", "prefill_engines"}
    # The limits take those of the same name.
    unread = ServerSettings.model_fields.keys() - read - by_property - set(Limits.__struct_fields__)
    assert not unread


def _is_settings(node: ast.expr) -> bool:
    """Whether an expression is called settings or config."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.strip("_") in {"settings", "config"}


def test_stages_that_join_are_processes_of_their_own() -> None:
    with pytest.raises(ConfigError, match="placement='join' needs pp_size >= 2, got 1"):
        ServerSettings(placement="join")
