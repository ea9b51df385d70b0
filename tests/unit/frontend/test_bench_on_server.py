"""``engine bench`` against a real server, as a user runs it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from real_servers import RealServer
from typer.testing import CliRunner

from engine.cli import app
from engine.cli.bench import goodput
from engine.cli.bench.results import read_result

FAST = ["--requests", "6", "--warmup", "1", "--input-words", "4", "--output-tokens", "8"]


def _bench(server: RealServer, *arguments: str):
    return CliRunner().invoke(app, ["bench", "--url", server.url, *arguments], env={"COLUMNS": "160"})


@pytest.mark.parametrize(
    "arrivals",
    [
        ["--clients", "3"],
        ["--arrivals", "poisson", "--rate", "200"],
        ["--arrivals", "constant", "--rate", "200", "--chat"],
    ],
)
def test_bench_and_compare(server: RealServer, tmp_path: Path, arrivals: list[str]) -> None:
    """C10: JSON, tables, versions, and every token counted."""
    path = tmp_path / "a.json"
    done = _bench(server, *FAST, *arrivals, "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "time to first token" in done.stdout
    result = read_result(path)
    summary = result.summary
    assert (summary.succeeded, summary.failed, summary.output_tokens) == (6, 0, 48)
    assert summary.counted_by_usage
    assert result.model == "embedded"
    assert result.versions["server"] == result.versions["lockstep"]
    for found in (summary.ttft_ms, summary.itl_ms, summary.tpot_ms, summary.e2e_ms):
        assert 0 < found.p50 <= found.p95 <= found.p99 <= found.max
    compared = CliRunner().invoke(app, ["bench", "compare", str(path), str(path)], env={"COLUMNS": "160"})
    assert compared.exit_code == 0
    assert "the plans are equal" in compared.stdout
    assert "+0.0 %" in compared.stdout


def test_refused_requests_are_errors_and_the_exit_status_says_so(server: RealServer, tmp_path: Path) -> None:
    """A benchmark holds its schedule and times no error as a success (C10)."""
    path = tmp_path / "a.json"
    done = _bench(server, *FAST, "--model", "another", "--json", str(path))
    assert done.exit_code == 1
    assert "model must be 'embedded'" in msgspec.json.encode(read_result(path).summary.errors).decode()
    assert (read_result(path).summary.failed, read_result(path).summary.ttft_ms) == (6, None)


def test_conversations_and_goodput(server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C10: later turns continue the first ones and hit their prefixes; a bound that nothing keeps has no goodput."""
    path = tmp_path / "a.json"
    load = ["--turns", "2", "--prefix-words", "3", "--long-percent", "50", "--long-words", "9", "--rate", "200"]
    done = _bench(server, *FAST, *load, "--slo-first-ms", "60000", "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "first token <= 60000 ms" in done.stdout
    assert "100.0 %" in done.stdout
    result = read_result(path)
    assert (result.summary.succeeded, result.summary.later_ttft_ms.count) == (6, 3)
    first, later = ([one for one in result.records if one.turn == turn] for turn in (1, 2))
    assert min(one.prompt_tokens for one in later) > max(one.prompt_tokens for one in first)
    # Else five benchmarks would have 20,000 requests.
    monkeypatch.setattr(goodput, "LEAST_ARRIVALS_S", 0.01)
    few = ["--requests", "2", "--warmup", "0", "--input-words", "2", "--output-tokens", "2", "--rate", "1000"]
    searched = _bench(server, *few, "--goodput", "--slo-first-ms", "0.001", "--json", str(path))
    assert searched.exit_code == 1
    assert "goodput: 0 requests a second" in searched.stdout
    assert len(msgspec.json.decode(path.read_bytes())["probes"]) == 5


def test_bad_arguments_and_dead_servers_are_sentences() -> None:
    """A benchmark holds its schedule and times no error as a success (C10)."""
    bad = CliRunner().invoke(app, ["bench", "--arrivals", "poisson"])
    assert (bad.exit_code, bad.stderr.splitlines()[0][:17]) == (2, "error: rate_per_s")
    dead = CliRunner().invoke(app, ["bench", "--url", "http://127.0.0.1:1"])
    assert dead.exit_code == 1
    assert "is it running?" in dead.stderr
