"""Flags of vLLM and SGLang that mean the same as one of ours, or that change nothing here.

Owns the translation, before the command line is parsed. A flag of theirs that means something else stays as it is: it
is refused with the sentence that ``engine.config.ELSEWHERE`` has for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# Theirs to ours, with the same values.
SAME: Final = {
    "block-size": "page-size",
    "max-model-len": "context-length",
    "max-num-seqs": "max-running-requests",
    "model-path": "model",
    "pipeline-parallel-size": "pp-size",
    "pp": "pp-size",
    "random-seed": "seed",
}
# Switches, which have no value of their own.
SWITCHES: Final = {
    "disable-cuda-graph": ("--cuda-graphs", "off"),
    "disable-overlap-schedule": ("--no-async-scheduling",),
    "disable-radix-cache": ("--no-radix-cache",),
    "enable-mixed-chunk": ("--mixed-chunk",),
    "enable-prefix-caching": ("--radix-cache",),
    "enforce-eager": ("--cuda-graphs", "off"),
    "no-enable-prefix-caching": ("--no-radix-cache",),
}
# The one value that says what is the case here.
NEUTRAL: Final = {
    "data-parallel-size": "1",
    "dp": "1",
    "dp-size": "1",
    "ep-size": "1",
    "nnodes": "1",
    "tensor-parallel-size": "1",
    "tp": "1",
    "tp-size": "1",
}


def translated(args: Sequence[str]) -> list[str]:
    """The arguments of a command in our own words, those of others left out or translated."""
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
        elif name in SWITCHES and not equals:
            ours += SWITCHES[name]
        elif name in NEUTRAL and (value if equals else "".join(rest[:1])) == NEUTRAL[name]:
            del rest[: not equals]
        else:
            ours.append(arg)
    return ours
