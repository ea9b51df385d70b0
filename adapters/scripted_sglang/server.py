"""SGLang's server with the adapter's settings: its command line, and the changed settings."""

from __future__ import annotations

import json
import shlex
from typing import ClassVar

import msgspec
from sglang.srt.server_args import ServerArgs

from scripted.core.server_description import ServeLine, ServerDescription
from scripted_sglang.config import SglangSettings


class SglangServer(ServerDescription[SglangSettings]):
    """``sglang.launch_server`` with one scheduler's settings."""

    sizes: ClassVar = (
        "page_size", "max_total_tokens", "chunked_prefill_size", "max_running_requests", "context_length",
        "num_reserved_decode_tokens", "client_rids", "router_tells_both",
    )  # fmt: skip
    token_counts: ClassVar = ("page_size", "max_total_tokens", "chunked_prefill_size", "context_length")
    block_size: ClassVar = "page_size"
    switches: ClassVar = ("disable_overlap_schedule",)
    issue_form: ClassVar = (
        ("Describe the bug", ("what happens", "what should happen", "cause", "who is affected")),
        ("Related issues", ("what is known upstream",)),
        ("Reproduction", ("flags", "script")),
        ("Environment", ("environment",)),
    )

    def command(self, config: SglangSettings) -> ServeLine:
        defaults = {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}
        given = {name: value for name, value in config.of_server.items() if value != defaults[name]}
        words = ["python", "-m", "sglang.launch_server", "--model-path", "MODEL"]
        for name, value in given.items():
            words += [f"--{name.replace('_', '-')}", *(() if value is True else (shlex.quote(_text(value)),))]
        if config.min_new_tokens:
            preferred = json.dumps({"min_new_tokens": config.min_new_tokens})
            words += ["--preferred-sampling-params", shlex.quote(preferred)]
        changed = tuple(f"{name}={_text(value)} (default {defaults[name]})" for name, value in given.items())
        return ServeLine(" ".join(words), changed)


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)
