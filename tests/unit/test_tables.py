"""The tables of settings and metrics are made from the code; ``python tests/unit/test_tables.py`` writes them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from mistakes import MISTAKES, answers
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.cli.flags import GROUPS, kind_of, range_of
from engine.cluster.serve_app.options import AppOptions
from engine.core.stats import EngineStats
from engine.frontend.http.metrics import Metrics
from engine.frontend.protocols.openai.bodies import ChatBody, CompletionBody
from engine.frontend.schema.foreign_fields import FOREIGN_FIELDS, GENERATE_FIELDS, SAMPLING_FIELDS, ForeignField
from engine.frontend.schema.native import GenerateBody, SamplingBody
from engine.process.settings import ServerSettings
from scripted.core.clock import VirtualClock

TABLES = Path(__file__).parents[2] / "benchmarks/tables"
HOW = "`python tests/unit/test_tables.py` writes this page from the code."


def settings_page() -> str:
    about = (
        "A setting `pp_size` is the flag `--pp-size` of `engine serve`, the variable `ENGINE_PP_SIZE` and the\n"
        "field of that name in the file that `--config` names. `EngineConfig` takes it as an argument if it\n"
        "changes what the engine computes."
    )
    parts = ["# Settings", about, HOW]
    tables = {
        group: {name: ServerSettings.model_fields[name] for name in names if name in ServerSettings.model_fields}
        for group, names in GROUPS.items()
    }
    tables["Replicas (`engine.cluster.serve_app`, `ENGINE_SERVE_...`)"] = AppOptions.model_fields
    for group, fields in tables.items():
        rows = [
            _row(f"`{name}`", _shown(field.default), _values(field), field.description or "")
            for name, field in fields.items()
        ]
        if rows:
            parts.append("\n".join([f"## {group}\n", *_head("name", "default", "values", "meaning"), *rows]))
    return "\n\n".join(parts) + "\n"


def metrics_page() -> str:
    metrics = Metrics("m", VirtualClock())
    stats = EngineStats(paused=None, **{name: 1 for name in EngineStats.__struct_fields__ if name != "paused"})
    rows = []
    for family in text_string_to_metric_families(metrics.text(stats).decode()):
        if not family.name.endswith("_created"):
            name = family.name + ("_total" if family.type == "counter" else "")
            rows.append(_row(f"`{name}`", family.type, family.documentation))
    about = (
        "All have the label `model_name`. While the scheduler does not answer, `engine_scheduler_up` is 0\n"
        "and its other metrics are missing."
    )
    return "\n\n".join(["# Metrics", about, HOW, "\n".join([*_head("name", "kind", "meaning"), *sorted(rows)])]) + "\n"


def fields_page() -> str:
    about = (
        "Fields of other servers, by route. One that is not served is taken with the values named here,\n"
        "which change nothing, and refused with any other."
    )
    openai = _fields_table(FOREIGN_FIELDS, {"chat": ChatBody, "completion": CompletionBody})
    generate = _fields_table(GENERATE_FIELDS, {"`/generate`": GenerateBody})
    sampling = _fields_table(SAMPLING_FIELDS, {"`sampling_params`": SamplingBody})
    parts = ["# Fields of other servers", about, HOW, "## The OpenAI protocol", openai]
    return "\n\n".join([*parts, "## `/generate`", generate, "## `/generate`: `sampling_params`", sampling]) + "\n"


def _fields_table(fields: Iterable[ForeignField], bodies: Mapping[str, type[BaseModel]]) -> str:
    rows = [*_head("field", "of", *bodies, "taken only as")]
    for field in fields:
        neutral = " or ".join(f"`{json.dumps(value)}`" for value in (None, *field.neutral))
        routes = ["served" if field.name in body.model_fields else "" for body in bodies.values()]
        rows.append(
            _row(f"`{field.name}`", field.servers, *routes, f"{neutral}: {field.reason}" if field.reason else "")
        )
    return "\n".join(rows)


def mistakes_page() -> str:
    about = (
        "What people type by mistake and what they are told, at once: nothing was started or loaded for\n"
        "these answers. `$TMP` is a folder, `$PORT` a port in use; the machine has one GPU."
    )
    parts = ["# Typical mistakes", about, HOW]
    for group, mistakes in MISTAKES.items():
        rows = [_row(f"`{mistake.typed}`", answers()[mistake.typed].replace("<", "&lt;")) for mistake in mistakes]
        parts.append("\n".join([f"## {group}\n", *_head("typed", "told"), *rows]))
    return "\n\n".join(parts) + "\n"


def _values(field: FieldInfo) -> str:
    if field.annotation is bool:
        return "on|off"
    if field.annotation == dict[str, Any] | None:
        return "JSON"
    return range_of(field) or kind_of(field)


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "unset" if default is None or default == "" else str(default)


def _head(*names: str) -> tuple[str, str]:
    return _row(*names), "|" + " --- |" * len(names)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


PAGES = {
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "fields.md": fields_page,
    "mistakes.md": mistakes_page,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_table_is_what_the_code_says(name: str) -> None:
    """A setting or a metric that was added, changed or dropped, and a page that was not written again."""
    assert (TABLES / name).read_text(encoding="utf-8") == PAGES[name](), HOW


if __name__ == "__main__":
    argparse.ArgumentParser(description="Write the pages of tables.").parse_args()
    for written, made in PAGES.items():
        (TABLES / written).write_text(made(), encoding="utf-8")
