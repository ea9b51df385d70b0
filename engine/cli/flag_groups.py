"""How the flags of the settings are shown by ``--help``: in groups, each with its type or its choices and its range.

Owns the groups' names and order. A field that no group names is shown with the rest of its class.
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import typer.core
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from engine.config import EngineConfig

__all__ = ["GROUPS", "GroupedCommand", "group_of", "kind_of", "range_of"]

SCHEDULING, SERVER, HELP = "Scheduling", "Server", "Help"
GROUPS: dict[str, tuple[str, ...]] = {
    "Model": (
        "config",
        "model",
        "served_model_name",
        "device",
        "dtype",
        "seed",
        "context_length",
        "tool_call_parser",
        "reasoning_parser",
    ),
    "Pipeline": (
        "pp_size",
        "pp_async_depth",
        "async_scheduling",
        "pp_max_micro_batch_size",
        "hidden_transport",
        "placement",
        "stage_listen",
        "secret_file",
        "heartbeat_timeout_s",
        "ray_address",
        "ray_cpus_per_stage",
        "attention_backend",
    ),
    SCHEDULING: (),
    "KV cache": ("page_size", "max_total_tokens", "max_window_tokens", "radix_cache", "kv_sanitizer"),
    SERVER: (),
    "LoRA": ("lora", "max_loras", "max_lora_rank"),
    "Access": ("api_key", "admin_key", "cors_origins", "operator_origins", "allowed_hosts"),
    "Logs and recordings": (
        "log_level",
        "log_format",
        "log_requests",
        "record",
        "record_redacted",
        "flight_dir",
        "profile_dir",
    ),
    "Harnesses": ("gate", "gate_options", "placement_options"),
    HELP: ("help",),
}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
_KINDS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", SecretStr: "KEY", bool: ""}


class GroupedCommand(typer.core.TyperCommand):
    """A command whose options are listed by group."""

    # Which library's context and formatter these are depends on the version of typer.
    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group that has options."""
        sections: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for parameter in self.get_params(ctx):
            shown = parameter.get_help_record(ctx)
            if shown is not None:
                sections[group_of(parameter.name or "")].append(shown)
        for group, rows in sections.items():
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows)


def group_of(name: str) -> str:
    """The group of a flag, by its field."""
    return _GROUP_OF.get(name, SCHEDULING if name in EngineConfig.model_fields else SERVER)


def kind_of(field: FieldInfo) -> str:
    """What stands for a flag's value: its choices, or its type."""
    kind = _without_none(field.annotation)
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    return _KINDS[kind]


def range_of(field: FieldInfo) -> str:
    """The numbers that a field takes, such as '1 to 64' or '>= 1'; empty without a bound."""
    bounds = {type(bound): bound for bound in field.metadata}
    low, above = bounds.get(annotated_types.Ge), bounds.get(annotated_types.Gt)
    high, below = bounds.get(annotated_types.Le), bounds.get(annotated_types.Lt)
    if low is not None and high is not None:
        return f"{low.ge} to {high.le}"
    parts = [f">= {low.ge}"] if low is not None else [f"> {above.gt}"] if above is not None else []
    parts += [f"<= {high.le}"] if high is not None else [f"< {below.lt}"] if below is not None else []
    return " and ".join(parts)


def _without_none(annotation: Any) -> Any:
    """The type of a value that is given; every flag has one type only."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    (kind,) = (part for part in get_args(annotation) if part is not NoneType)
    return kind
