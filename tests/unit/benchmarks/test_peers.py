"""Peers are measured as they come and as they are best, in one run."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from benchmarks.peers.__main__ import served_peers


def test_vllm_is_measured_by_default_and_on_every_core() -> None:
    """The better one of the two is quoted."""
    asked = Namespace(shape="S", dtype="float32", own=[], variant=[], quantized=[], experts=[])
    asked.tree = asked.transformers_python = None
    asked.vllm_python = Path("/an/environment/bin/python")
    default, best = served_peers(asked, Path("model"), Path("scratch"))
    assert default.command == best.command
    cores = best.environment.pop("VLLM_CPU_OMP_THREADS_BIND")
    assert {int(core) for core in cores.split(",")} == os.sched_getaffinity(0)
    assert default.environment == best.environment
