"""Scripts on another engine's real server: the cost of its boot and of each script, and whether runs are equal.

`python -m benchmarks.other_servers --runs 10 --write benchmarks/tables/other_servers.md` runs the scripts of
tests/registered/other_servers in an environment with vLLM or SGLang, one server per configuration.
"""

from __future__ import annotations

import argparse
import os
import statistics
import textwrap
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from benchmarks.machine import Machine
from lockstep.output_files import write_output
from scripted.core.adapters import adapter_named
from scripted.report.step_log import StepLog
from scripted.script.loader import find_test, scripts_in
from scripted.script.scripted_test import ScriptedTest
from scripted.sdk.adapter import SchedulerAdapter
from scripted.sdk.live.server import LiveServer

_FILE: Final = Path("tests/registered/other_servers/test_other_servers.py")
_WIDTH: Final = 100
_HEAD: Final = """# Scripts on the servers of other engines

Made by `python -m benchmarks.other_servers --runs 10 --write benchmarks/tables/other_servers.md`, in an
environment of each engine. A run is the same as the first one if it has the same steps, the same
requests and positions in each batch, and the same tokens. Block numbers depend on the scripts
before.
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.other_servers", description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="how often each script runs")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into the engine's section of a page")
    arguments = parser.parse_args()
    tests = [find_test(f"{_FILE}::{name}") for name in scripts_in(_FILE)]
    section = _measured(tests, arguments.runs)
    print(section)  # noqa: T201 - the result
    if arguments.write is not None:
        page = arguments.write.read_text(encoding="utf-8") if arguments.write.exists() else _HEAD
        title = section.splitlines()[0]
        before, _, after = page.partition(title)
        kept = after[after.index("\n## ") + 1 :] if "\n## " in after else ""
        write_output(
            arguments.write, "\n".join([before.rstrip() + "\n", section.rstrip() + "\n", kept]).rstrip() + "\n"
        )


def _measured(tests: Sequence[ScriptedTest], runs: int) -> str:
    adapter = adapter_named(tests[0].adapter)
    assert isinstance(adapter, SchedulerAdapter), f"{adapter.name} is driven by no adapter of the SDK"
    assert adapter.live is not None, f"{adapter.name} starts no server of its own"
    load = os.getloadavg()[0]
    rows = [
        "| script | steps | runs that are the same | seconds | process time |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    boots = []
    # Each configuration has its own server.
    for config in dict.fromkeys(test.config for test in tests):
        begun = time.monotonic()
        with LiveServer(adapter.live, config) as server:
            boots.append((time.monotonic() - begun, _process_s(server)))
            rows += [_row(server, test, runs) for test in tests if test.config == config]
    up, spent = [" and ".join(f"{seconds:.0f}" for seconds in column) for column in zip(*boots, strict=True)]
    [package] = adapter.packages
    name = {"vllm": "vLLM", "sglang": "SGLang"}[adapter.name]
    here = Machine.here()
    text = (
        f"{name} {_version_of(package)} on {here.cores} cores ({here.model}, {here.processor_class}), load average "
        f"{load:.0f} to {os.getloadavg()[0]:.0f}. The server was up after {up} s, {spent} s of process time. Seconds "
        f"are medians of {runs} runs, from the least to the most."
    )
    return "\n".join([f"## {name}", "", *textwrap.wrap(text, _WIDTH), "", *rows])


def _row(server: LiveServer, test: ScriptedTest, runs: int) -> str:
    options = msgspec.structs.replace(test.options, record=True)
    outcomes, walls, processes = [], [], []
    for _ in range(runs):
        begun, used = time.monotonic(), _process_s(server)
        outcomes.append(_essence(server.run(test.script, options=options).log))
        walls.append(time.monotonic() - begun)
        processes.append(_process_s(server) - used)
    same = sum(outcome == outcomes[0] for outcome in outcomes)
    return (
        f"| `{test.script.__name__}` | {len(outcomes[0])} | {same} of {runs} | {_range(walls)} | {_range(processes)} |"
    )


def _essence(log: StepLog | None) -> list[Any]:
    """Reduce each step to its events, its launch and its replies, without blocks."""
    assert log is not None, "the script ran with record=True"
    return [
        (
            [said.in_full for said in step.arrived],
            None if step.launched is None else [(share.rid, share.positions) for share in step.launched.shares],
            [said.in_full for said in step.answered],
        )
        for step in log.steps
    ]


def _range(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def _process_s(server: LiveServer) -> float:
    """Return the CPU seconds of a server's live processes."""
    parent = psutil.Process(server.pid)
    return sum(sum(one.cpu_times()[:2]) for one in (parent, *parent.children(recursive=True)))


def _version_of(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return version(f"{package}-cpu")


if __name__ == "__main__":
    main()
