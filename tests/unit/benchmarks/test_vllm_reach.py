"""`python -m benchmarks.vllm_reach` counts statements in function bodies, and says why the others did not run.

Goal: the share that the page states is of statements that can run. Method: a small module, of which some runs. Origin:
issue about the reach of vLLM's adapter. Mutant: count docstrings, or the lines of a body as those of its `if`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.vllm_reach import Left, Watch, markdown, reasons, report

SOURCE = '''
LIMIT = 3


class Box:
    def first(self, many):
        """Not a statement."""
        if many:
            return [
                many,
            ]
        return None

    def never(self):
        return 1
'''


def test_statements_that_ran_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "box.py"
    names: dict[str, type] = {}
    exec(compile(SOURCE, str(file), "exec"), names)
    with Watch([str(file)]) as watch:
        names["Box"]().first(1)
    left = [Left("box", "Box.first", (12,), "many is never empty"), Left("box", "Box.never", (15,), "nobody asks")]
    why = {"many$|return None": "many is never empty", r"box\.Box\.never: def never": "nobody asks"}
    assert report("box", SOURCE, watch.lines[str(file)], why) == (2, 4, left)


def test_without_a_run_nothing_is_reached() -> None:
    reached, every, left = report("box", SOURCE, set(), {})
    assert (reached, every, [one.function for one in left]) == (0, 4, ["Box.first", "Box.never"])


def test_the_page_lists_what_is_left_by_its_reason() -> None:
    page = markdown([("box", 2, 4)], [Left("box", "Box.never", (14,), "nobody asks")], "`this`", 3, "vLLM 1.0")
    assert page.startswith("# How much of vLLM's scheduler the search runs\n\n`this` on vLLM 1.0: ")
    assert "| `box` | 2 | 4 | 50% |" in page
    assert "**1: nobody asks**\n\n- `box`: `Box.never` 1\n" in page
    many = [Left("box", f"never_{number}", (number, number + 100), "nobody asks") for number in range(21)]
    page = markdown([("box", 2, 44)], many, "`this`", 3, "vLLM 1.0")
    assert page.endswith("**42: nobody asks**\n\n- `box`: 42 in 21 functions\n")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_each_pattern_of_a_reason_can_be_looked_for(engine: str) -> None:
    assert all(re.compile(pattern) for pattern in reasons(engine))
