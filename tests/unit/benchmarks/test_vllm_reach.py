"""`python -m benchmarks.vllm_reach` counts statements in function bodies, and says which functions were never entered.

Goal: the share that the page states is of statements that can run. Method: a small module, of which some runs. Origin:
issue about the reach of vLLM's adapter. Mutant: count docstrings, or the lines of a body as those of its `if`.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.vllm_reach import Watch, report

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
    assert report(SOURCE, watch.lines[str(file)]) == (2, 4, ["Box.never"])


def test_without_a_run_nothing_is_reached() -> None:
    assert report(SOURCE, set()) == (0, 4, ["Box.first", "Box.never"])
