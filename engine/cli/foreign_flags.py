"""Flags of vLLM and SGLang that mean the same as one of ours, or that change nothing here.

Owns the translation, before the command line is parsed. A flag of theirs that means something else stays as it is: it
is refused with the sentence that ``engine.config.ELSEWHERE`` has for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import typer

from engine.config import ELSEWHERE

# Theirs to ours, with the same values.
SAME: Final = {
    "block-size": "page-size",
    "lora-modules": "lora",
    "lora-paths": "lora",
    "max-model-len": "context-length",
    "max-num-seqs": "max-running-requests",
    "model-path": "model",
    "num-speculative-tokens": "speculative-num-draft-tokens",
    "pipeline-parallel-size": "pp-size",
    "pp": "pp-size",
    "random-seed": "seed",
    "speculative-draft-model-path": "speculative-draft-model",
}
# Switches, which have no value of their own; those of nothing say what is the case here.
SWITCHES: Final = {
    "disable-cuda-graph": ("--cuda-graphs", "off"),
    "disable-log-requests": ("--no-log-requests",),
    "disable-log-stats": (),
    "disable-overlap-schedule": ("--no-async-scheduling",),
    "disable-radix-cache": ("--no-radix-cache",),
    "enable-auto-tool-choice": (),
    "enable-log-requests": ("--log-requests",),
    "enable-metrics": (),
    "enable-mixed-chunk": ("--mixed-chunk",),
    "enable-prefix-caching": ("--radix-cache",),
    "enforce-eager": ("--cuda-graphs", "off"),
    "no-enable-prefix-caching": ("--no-radix-cache",),
}
# Their only value here is 1.
NEUTRAL: Final = {
    "data-parallel-size": "dp_size",
    "dp": "dp_size",
    "dp-size": "dp_size",
    "ep-size": "ep_size",
    "nnodes": "nnodes",
    "tensor-parallel-size": "tp_size",
    "tp": "tp_size",
    "tp-size": "tp_size",
}
# As argparse takes them: -tp.
_LONG_WITH_ONE_DASH: Final = re.compile(r"-[a-zA-Z_]{2,}")


def translated(args: Sequence[str]) -> list[str]:
    """The arguments of a command in our own words, those of others left out or translated.

    Raises typer.BadParameter for one whose only value here is another one.
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
        elif name in SAME:
            ours.append(f"--{SAME[name]}{equals}{value}")
            while SAME[name] == "lora" and len(rest) > 1 and "=" in rest[1] and not rest[1].startswith("-"):
                ours += [rest.pop(0), "--lora"]  # they list several after one flag
        elif name in SWITCHES and not equals:
            ours += SWITCHES[name]
        elif name in NEUTRAL and (given := value if equals else "".join(rest[:1])):
            if given != "1":
                raise typer.BadParameter(f"{flag} must be 1, got {given}; {ELSEWHERE[NEUTRAL[name]]}")
            del rest[: not equals]
        elif flag.startswith("--") or _LONG_WITH_ONE_DASH.fullmatch(flag):
            ours.append(f"--{name}{equals}{value}")
        else:
            ours.append(arg)
    return ours
