"""The files to deploy with: an image that could start, a dashboard whose every name is exported."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from packaging.specifiers import SpecifierSet
from prometheus_client.parser import text_string_to_metric_families

from engine.cli import app
from engine.core.messages import FinishReason
from engine.core.stats import EngineStats
from engine.frontend.http.metrics import Metrics
from engine.process.settings import ServerSettings
from engine.process.settings_sources import ENVIRONMENT_PREFIX
from scripted.core.clock import VirtualClock

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, each on one line."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines() if line]


def arguments(name: str) -> list[str]:
    return [given for instruction, given in instructions() if instruction == name]


def test_image_has_what_the_installation_needs() -> None:
    """Every file that is copied exists and is let through, and every file that the project names is copied."""
    copied = [source for given in arguments("COPY") for source in given.split()[:-1]]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == allowed
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml"} <= set(copied)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {package.rstrip("*") for package in packages} <= set(copied)
    (install,) = [given for given in arguments("RUN") if given.startswith("pip install")]
    assert install.endswith("--no-deps .")


@pytest.mark.parametrize("extras", [(), ("openvino",), ("openvino", "ray")])
def test_image_installs_what_is_needed_before_the_sources_are_copied(tmp_path: Path, extras: tuple[str, ...]) -> None:
    """Otherwise each change of the sources would install torch again."""
    order = [(instruction, given) for instruction, given in instructions() if instruction in ("COPY", "RUN")]
    place, (_, needed) = next((i, pair) for i, pair in enumerate(order) if "requirements.txt" in pair[1])
    assert ("COPY", "engine ./engine") in order[place:]
    command, install = needed.split(" && ")
    assert install.startswith("pip install ")
    assert "--constraint constraints.txt --requirement requirements.txt" in install
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = os.environ | {"EXTRAS": ",".join(extras), "PATH": path}
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=True)
    of_extras = [text for extra in ("serve", *extras) for text in PROJECT["optional-dependencies"][extra]]
    wanted = [*PROJECT["dependencies"], *(text for text in of_extras if text != "lockstep-engine[serve]")]
    assert (tmp_path / "requirements.txt").read_text().splitlines() == wanted


def test_image_s_user_may_write_where_it_works() -> None:
    folder = arguments("WORKDIR")[-1]
    assert f"useradd --create-home engine && chown engine {folder}" in arguments("RUN")


def test_image_starts_a_command_that_exists_as_nobody_special() -> None:
    (base,) = arguments("FROM")
    python = re.fullmatch(r"python:(\d+\.\d+)-slim", base)
    assert python
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{python[1]}.0")
    (entry,), (command,) = arguments("ENTRYPOINT"), arguments("CMD")
    assert json.loads(entry)[0] in PROJECT["scripts"]
    assert json.loads(command)[0] in typer.main.get_command(app).commands
    order = [instruction for instruction, _ in instructions()]
    assert arguments("USER") == ["engine"]
    assert order.index("USER") < order.index("ENTRYPOINT")


def test_image_s_settings_are_settings() -> None:
    variables = dict(pair.split("=") for given in arguments("ENV") for pair in given.split())
    fields = {name.removeprefix(ENVIRONMENT_PREFIX).lower(): value for name, value in variables.items()}
    assert fields.keys() <= ServerSettings.model_fields.keys()
    settings = ServerSettings(**fields)
    assert arguments("EXPOSE") == [str(settings.port)] == [str(ServerSettings().port)]
    (check,) = arguments("HEALTHCHECK")
    probe = json.loads(check[check.index("[") :])
    compile(probe[2], "HEALTHCHECK", "exec")
    assert "ENGINE_PORT" in probe[2]
    assert "/health" in probe[2]


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The names of all samples that a server can have, each with its labels."""
    numbers = dict.fromkeys((name for name in EngineStats.__struct_fields__ if name != "paused"), 4)
    metrics = Metrics("m", VirtualClock())
    for reason in (FinishReason.STOP, FinishReason.ERROR):
        metrics.count_end(reason)
    text = metrics.text(EngineStats(paused=None, **numbers)).decode()
    families = text_string_to_metric_families(text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def expressions(dashboard: dict[str, Any]) -> list[str]:
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [*queries, *(entry["definition"] for entry in dashboard["templating"]["list"] if "definition" in entry)]


def test_dashboard_names_what_is_exported(dashboard: dict[str, Any], exported: dict[str, set[str]]) -> None:
    """C06: a panel on a name that no server has stays empty, and nobody knows why."""
    for expression in expressions(dashboard):
        named = re.findall(r"\bengine_\w+", expression)
        assert named
        assert [name for name in named if name not in exported] == [], expression
        labels = re.findall(r"by \((\w+)\)", expression) + re.findall(r"(\w+)=~", expression)
        for label in labels:
            assert all(label in exported[name] for name in named), (label, expression)


def test_dashboard_shows_everything(dashboard: dict[str, Any], exported: dict[str, set[str]]) -> None:
    shown = {name for expression in expressions(dashboard) for name in re.findall(r"\bengine_\w+", expression)}
    parts = re.compile(r"_(bucket|count|sum|created|total)$")
    assert {parts.sub("", name) for name in exported} - {parts.sub("", name) for name in shown} == set()


def test_panels_lie_beside_one_another(dashboard: dict[str, Any]) -> None:
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {entry["name"] for entry in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"])))
    assert used - {"__rate_interval"} == variables


def test_prometheus_asks_the_default_port() -> None:
    (job,) = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{ServerSettings().port}"]}]
