"""Flags of vLLM and SGLang that mean the same as one of ours, or have no effect here.

Translates them before the command line is parsed. Flags with another meaning stay, and are refused with their remedy in
``engine.core.config.ELSEWHERE``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import typer

from engine.core.config import ELSEWHERE

# Their flags, with ours of the same meaning and values.
SAME: Final = {
    "block-size": "page-size",
    "generation-config": "sampling-defaults",
    "lora-modules": "lora",
    "lora-paths": "lora",
    "max-model-len": "context-length",
    "max-num-queued-reqs": "max-queued-requests",
    "max-num-seqs": "max-running-requests",
    "model-path": "model",
    "num-speculative-tokens": "speculative-num-draft-tokens",
    "pipeline-parallel-size": "pp-size",
    "pp": "pp-size",
    "random-seed": "seed",
    "scheduling-policy": "schedule-policy",
    "speculative-draft-model-path": "speculative-draft-model",
}
# Switches, which have no value. An empty translation is for a switch that is always on here.
SWITCHES: Final = {
    "disable-cuda-graph": ("--cuda-graphs", "off"),
    "disable-custom-all-reduce": (),
    "disable-frontend-multiprocessing": (),
    "disable-log-requests": ("--no-log-requests",),
    "disable-log-stats": (),
    "disable-overlap-schedule": ("--no-async-scheduling",),
    "disable-radix-cache": ("--no-radix-cache",),
    "disable-uvicorn-access-log": (),
    "enable-auto-tool-choice": (),
    "enable-cache-report": (),
    "enable-log-requests": ("--log-requests",),
    "enable-metrics": (),
    "enable-mixed-chunk": ("--mixed-chunk",),
    "enable-prefix-caching": ("--radix-cache",),
    "enable-prompt-tokens-details": (),
    "enable-request-id-headers": (),
    "enable-sleep-mode": (),
    "enforce-eager": ("--cuda-graphs", "off"),
    "no-enable-chunked-prefill": ("--chunked-prefill-size", "-1"),
    "no-enable-log-requests": ("--no-log-requests",),
    "no-enable-prefix-caching": ("--no-radix-cache",),
    "skip-server-warmup": (),
}
# The values that each flag may have here.
NEUTRAL: Final = {
    "chat-template-content-format": ("auto",),
    "data-parallel-size": ("1",),
    "dp": ("1",),
    "dp-size": ("1",),
    "ep-size": ("1",),
    "load-format": ("auto", "safetensors"),
    "model-impl": ("auto", "transformers"),
    "nnodes": ("1",),
    "response-role": ("assistant",),
    "runner": ("auto", "generate"),
    "swap-space": ("0",),
    "task": ("auto", "generate"),
    "tensor-parallel-size": ("1",),
    "tokenizer-mode": ("auto",),
    "tp": ("1",),
    "tp-size": ("1",),
}
_ABBREVIATED: Final = {"dp": "dp_size", "tp": "tp_size"}
# Their names for our values, by their flag.
VALUES: Final = {
    "generation-config": {"auto": "model", "vllm": "openai"},
    "dtype": {"half": "float16", "float": "float32"},
    "reasoning-parser": {"deepseek_r1": "deepseek-r1", "openai_gptoss": "gpt-oss"},
    "tool-call-parser": {
        "deepseek_v3": "deepseek",
        "deepseek_v31": "deepseek",
        "deepseekv3": "deepseek",
        "deepseekv31": "deepseek",
        "gpt-oss": "gpt_oss",
        "llama3_json": "llama3",
        "llama4_pythonic": "llama4",
        "openai": "gpt_oss",
        "qwen": "hermes",
        "qwen25": "hermes",
    },
}
# Long flags with one dash, which argparse accepts: -tp.
_LONG_WITH_ONE_DASH: Final = re.compile(r"-[a-zA-Z_]{2,}")


def translated(args: Sequence[str]) -> list[str]:
    """Return the arguments with foreign flags translated or left out.

    Raises typer.BadParameter for a value that is not available here.
    """
    ours: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        flag, equals, value = arg.partition("=")
        name = flag.lstrip("-").replace("_", "-")
        if arg == "--":
            return [*ours, arg, *rest]
        if not flag.startswith("-"):
            ours.append(arg)
        elif name in VALUES and (given := value if equals else "".join(rest[:1])):
            ours += [f"--{SAME.get(name, name)}", VALUES[name].get(given, given)]
            del rest[: not equals]
        elif name in SAME:
            ours.append(f"--{SAME[name]}{equals}{value}")
            while SAME[name] == "lora" and len(rest) > 1 and "=" in rest[1] and not rest[1].startswith("-"):
                ours += [rest.pop(0), "--lora"]  # they list several values after one flag
        elif name in SWITCHES and not equals:
            ours += SWITCHES[name]
        elif name in NEUTRAL and (given := value if equals else "".join(rest[:1])):
            if given not in NEUTRAL[name]:
                rule, remedy = " or ".join(NEUTRAL[name]), ELSEWHERE[_ABBREVIATED.get(name, name.replace("-", "_"))]
                raise typer.BadParameter(f"{flag} must be {rule}, got {given}; {remedy}")
            del rest[: not equals]
        elif flag.startswith("--") or _LONG_WITH_ONE_DASH.fullmatch(flag):
            ours.append(f"--{name}{equals}{value}")
        else:
            ours.append(arg)
    return ours
