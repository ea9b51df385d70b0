"""The page "Your scheduler under the search" is true: its code is the example's, its commands do what it says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from forked_commands import ForkedCommands
from thinned import thinned

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/your_scheduler.md").read_text(encoding="utf-8")
ADAPTER = (ROOT / "examples/your_scheduler/adapter.py").read_text(encoding="utf-8")
RACES = (ROOT / "examples/your_scheduler/test_races.py").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ scripted (.*)$", PAGE, re.MULTILINE)
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FOUND = "reads block 0, which was written before the cache was flushed"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n")[0])
def test_its_code_is_that_of_the_example(block: str) -> None:
    # An old bug that is put back is a form to fill in.
    assert block in ADAPTER or block in RACES or block.startswith("Mutant(")


def test_it_has_code_and_commands() -> None:
    assert len(BLOCKS) >= 5
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("command", thinned(COMMANDS, one_in=4))
def test_its_commands_do_what_it_says(command: str, commands: ForkedCommands) -> None:
    """The scheduler with the bug fails with the words of the page; the fixed one passes the corpus's beginning."""
    words = shlex.split(command)
    # What another run has kept would be found first.
    words += ["--no-keep"] if "explore" in words else []
    words += ["--schedules", "600"] if "--corpus" in words and "fixed" in command else []
    done = commands.run("-m", "scripted", *words, cwd=ROOT)
    if "fixed" in command:
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        assert done.returncode == 1, done.stdout + done.stderr
        assert FOUND in " ".join(done.stdout.split())
        assert FOUND in PAGE


@pytest.mark.parametrize("adapter", ["fixed", "adapter"])
def test_its_scripts_pass_or_fail_as_it_says(adapter: str, tmp_path: Path, commands: ForkedCommands) -> None:
    """On the scheduler with the bug the report is that of the page, line by line."""
    file = tmp_path / "test_races.py"
    file.write_text(RACES.replace("fixed.py", f"{adapter}.py"), encoding="utf-8")
    done = commands.run("-m", "pytest", "-p", "no:cacheprovider", file, cwd=ROOT)
    if adapter == "fixed":
        assert "2 passed" in done.stdout, done.stdout + done.stderr
        return
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    report = next(text for _, text in re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL) if text.startswith(">"))
    assert report in done.stdout


def test_a_foreign_adapter_is_searched_without_the_engine() -> None:
    """Neither the engine nor its dependencies are imported."""
    source = (
        "import sys\n"
        "from scripted.search.campaign import Campaign\n"
        "from scripted.search.units import SearchPlan\n"
        "from scripted.core.adapters import adapter_named\n"
        "name = 'examples/your_scheduler/fixed.py'\n"
        "plan = SearchPlan(targets=('twins', 'full'), adapter=name, schedules=200)\n"
        "report = Campaign(plan).run()\n"
        "assert report.schedules == 200 and not report.findings, report.findings\n"
        "heavy = {'engine', 'torch', 'zmq', 'fastapi', 'uvicorn', 'httpx', 'transformers', 'pydantic'}\n"
        "assert heavy.isdisjoint(name.partition('.')[0] for name in sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
