"""The run of the programs that people bring: what it counts, and what its table says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from engine.core.messages import FinishReason
from engine.core.stats import EngineStats
from engine.frontend.http.metrics import Metrics
from scripted.core.clock import VirtualClock

PROGRAMS = Path(__file__).parents[1] / "clients/programs.py"


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The program, with a table of its own and no server."""
    monkeypatch.syspath_prepend(PROGRAMS.parent)
    spec = importlib.util.spec_from_file_location("programs", PROGRAMS)
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "programs", module := importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TABLE", tmp_path / "clients.md")
    monkeypatch.setattr(module, "_server", lambda _: nullcontext(("http://unused", tmp_path)))
    module.TABLE.write_text(module.HEAD + "| openai | 1.0 | chats | ok |\n| guidellm | 2.0 | load | ok |\n")
    return module


def test_answers_refusals_and_failures_are_counted(programs: ModuleType) -> None:
    metrics = Metrics("m", VirtualClock())
    for tokens in (3, 4):
        metrics.generated.observe(tokens)
    numbers = dict.fromkeys(EngineStats.__struct_fields__, 0) | {"requests_refused": 5}
    stats = EngineStats(**numbers | {"paused": None})  # type: ignore[arg-type]
    assert programs.counted(metrics.text(stats).decode()) == (2, 5)
    metrics.count_end(FinishReason.ERROR)
    assert programs.counted(metrics.text(stats).decode()) == (2, 6)


def test_a_counter_needs_no_labels_and_must_be_there(programs: ModuleType) -> None:
    head = "# TYPE engine_request_generation_tokens histogram\nengine_request_generation_tokens_count 2.0\n"
    counters = [f"# TYPE {name}_total counter\n{name}_total 1.0\n" for name in programs.FAILED]
    assert programs.counted(head + "".join(counters)) == (2, 2)
    with pytest.raises(KeyError, match="engine_request_failure"):
        programs.counted(head + counters[0])


def test_a_row_says_why_a_program_failed_and_stays_when_it_could_not_be_installed(
    programs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(client, *_: object) -> tuple[str, str | None]:
        if client.name == "openai":
            raise subprocess.CalledProcessError(1, "uv")
        return "3.0", "it ended with 1:\nTraceback\n  File\nValueError: a|b\n"

    monkeypatch.setattr(programs, "_ran", run)
    assert programs.main(["openai", "guidellm"]) == 1
    openai, guidellm = programs.TABLE.read_text().removeprefix(programs.HEAD).splitlines()
    assert openai == "| openai | 1.0 | chats | ok |"
    assert guidellm.startswith("| guidellm | 3.0 | load at its own rate")
    assert guidellm.endswith("| FAILED: it ended with 1: ValueError: a\\|b |")
