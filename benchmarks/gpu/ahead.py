"""Decode steps launched before the previous tokens are known, compared with steps that wait, in one process.

The engines take turns, round by round, over the same prompts. In a dry run the CPU launches too.
"""

from __future__ import annotations

import statistics
from typing import Any, Final

from benchmarks.gpu.results import Table
from benchmarks.gpu.setting import Setting
from benchmarks.measurement import in_turn
from benchmarks.one_process import Run

__all__ = ["measure_ahead"]

_ENGINES: Final[dict[str, dict[str, Any]]] = {
    "waits": {},
    "ahead": {"async_scheduling": True},
    "waits, graphs": {"cuda_graphs": "on"},
    "ahead, graphs": {"async_scheduling": True, "cuda_graphs": "on"},
}


def measure_ahead(setting: Setting) -> list[Table]:
    """Measure the time of a step for each batch, and count the requests with the same output as without."""
    engines = {
        name: setting.engine(early=True, attention_backend="varlen", **values) for name, values in _ENGINES.items()
    }
    steps = Table(title="A decode step, us, medians", columns=("batch", *engines, "ahead / waits", "with graphs"))
    equal = Table(title="Requests that say what those of an engine that waits say", columns=("batch", *engines))
    for rows in setting.batches:
        runs: dict[str, list[Run]] = {name: [] for name in engines}
        for number in range(setting.rounds + 1):
            prompts = setting.prompts(rows, setting.prompt_tokens, number)
            for name in in_turn([*engines], number):
                runs[name].append(engines[name].run(prompts, setting.new_tokens))
        # The first round fills the libraries' caches.
        times = {name: _step_us(done[1:], rows) for name, done in runs.items()}
        ratios = [times[f"ahead{kind}"] / times[f"waits{kind}"] for kind in ("", ", graphs")]
        steps.rows.append((rows, *times.values(), *ratios))
        equal.rows.append((rows, *[_alike(done, runs["waits"]) for done in runs.values()]))
    return [steps, equal]


def _step_us(done: list[Run], rows: int) -> float:
    """Return the median over the runs of the mean decode time."""
    return 1e6 * statistics.median([statistics.mean(step.seconds for step in run.decodes(rows)) for run in done])


def _alike(done: list[Run], others: list[Run]) -> str:
    """Count requests with equal outputs over all rounds."""
    said = [tokens for run in done for tokens in run.tokens.values()]
    expected = [tokens for run in others for tokens in run.tokens.values()]
    same = sum(one == other for one, other in zip(said, expected, strict=True))
    return f"{same} of {len(said)}"
