"""Peers are measured as they come and as they are best, in one run."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from benchmarks.machine import Machine
from benchmarks.peers.__main__ import served_peers
from benchmarks.peers.results import PeerResult, PeersRun
from benchmarks.peers.shown import page_block


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


def test_a_page_has_a_column_for_each_load_and_the_tails_at_an_equal_rate() -> None:
    """Every number of clients that was asked for is shown, and the rate that all servers had."""
    ours, theirs = (
        PeerResult(
            name=name,
            tokens_per_s={4: [tokens], 128: [tokens]},
            ttft_p99_ms={4: [10.0], 128: [50.0]},
            gap_p99_ms={4: [5.0], 128: [8.0]},
            longest_gap_ms={4: [gap], 128: [9.0]},
            equal_gap_p99_ms=[gap],
            equal_ttft_p99_ms=[30.0],
        )
        for name, tokens, gap in (("ours", 200.0, 6.0), ("theirs", 100.0, 9.0))
    )
    run = PeersRun(
        machine=Machine.here(),
        began="now",
        shape="S",
        dtype="bfloat16",
        prompt_tokens=128,
        output_tokens=64,
        rounds=1,
        weights_mib=1.0,
        results=[ours, theirs],
        clients=[4, 128],
        equal_rates_per_s=[1.5],
    )
    page = page_block(run)
    assert "128 clients, tok/s" in page
    assert "first token p99 at 4 " in page
    assert "32 clients" not in page
    assert "1.5 requests a second" in page.replace("\n", " ")
    *_, head, _, ratios, _ = page.splitlines()
    shown = dict(zip(head.split("|"), ratios.split("|"), strict=True))
    assert shown[" longest gap, 4 "] == shown[" gap p99, equal rate "] == " 1.50 (1.50 to 1.50) "
