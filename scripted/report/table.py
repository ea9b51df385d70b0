"""The step table: the last steps of a run as self-explanatory text for a terminal, a CI log or a pytest report.

Owns the layout of a row; the words come from the step log. Never colours a report.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from rich.box import Box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from scripted.core.phrases import printable, short_rid
from scripted.report.step_log import Note, ShownPipeline, ShownStep, StepLog, own_file

# How many steps are shown on each side of the one in question.
AROUND_STEPS: Final = 8
_STEP_COLUMN: Final = 1
_ARRIVED: Final = "arrived"
# A request and its positions are one word, uncut if there is room; a column has room for its title.
_MOST_WORD: Final = 24
_LEAST_WIDTH: Final = 8
# In runs of at least this many equal steps, only the first and the last are shown and the others counted.
_LONG_RUN: Final = 4
# Beyond this many, stages share one column: a column costs five characters of a CI log.
_STAGE_COLUMNS: Final = 8
# ASCII, because a terminal may show nothing else.
_BOX: Final = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)


def step_table(
    log: StepLog, *, last: int | None = None, around: int | None = None, notes: Sequence[Note] = ()
) -> Table:
    """Return a table with one row per step: the ``last`` newest steps, or the steps ``around`` one, which is marked.

    ``notes`` has the script's lines that acted. ``log`` must have all steps of the run, because older steps say where
    microbatches were launched. Raises ValueError if both ``last`` and ``around`` are given.
    """
    if last is not None and around is not None:
        raise ValueError(f"step_table() takes last or around, got last={last} and around={around}; give one of them")
    shown = _chosen(log.steps, last, around)
    table = Table(box=_BOX, pad_edge=False, padding=(0, 1, 0, 0))
    lines = _lines_of(notes, {step.step for step in shown})
    columns = _columns(shown, log, around, lines, marks_window=_is_about_the_window(shown))
    for title, style, _ in columns:
        table.add_column(title, **style)
    launched = log.launches()
    rows = []
    for step in shown:
        pipeline = log.pipeline_at(step, launched)
        rows.append((step, [Text(cell(step, pipeline)) for _, _, cell in columns]))
    arrived = [title for title, _, _ in columns].index(_ARRIVED)
    rows = _collapsed(rows, arrived)[-(last or len(rows)) :]
    for step, cells in rows:
        table.add_row(*cells, style=_style(step, around))
    table.caption, table.caption_justify = _caption([step for step, _ in rows], log, has_lines=bool(lines)), "left"
    return table


def _style(step: ShownStep, around: int | None) -> str | None:
    if step.failure:
        return "bold red"
    return "bold yellow" if step.step == around else None


def render_text(renderable: RenderableType, width: int) -> str:
    """Render with rich to plain text of at most ``width`` columns, without colours or surrounding blanks."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False, highlight=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def _collapsed(rows: list[tuple[ShownStep, list[Text]]], arrived: int) -> list[tuple[ShownStep, list[Text]]]:
    """Shorten each long run of equal rows to its first, its last and a count of the others."""
    shown: list[tuple[ShownStep, list[Text]]] = []
    for _, group in itertools.groupby(rows, key=lambda row: _without_step(row[1])):
        run = list(group)
        if len(run) < _LONG_RUN:
            shown += run
            continue
        gap = [Text("") for _ in run[0][1]]
        gap[_STEP_COLUMN], gap[arrived] = Text(".."), Text(f"{len(run) - 2} steps like these")
        shown += [run[0], (run[-1][0], gap), run[-1]]
    return shown


def _without_step(cells: list[Text]) -> list[str]:
    return [cell.plain for cell in (*cells[:_STEP_COLUMN], *cells[_STEP_COLUMN + 1 :])]


def _chosen(steps: Sequence[ShownStep], last: int | None, around: int | None) -> list[ShownStep]:
    if around is not None:
        return [step for step in steps if abs(step.step - around) <= AROUND_STEPS]
    # Possibly more steps than rows, because equal steps share a row.
    return list(steps if last is None or last else ())


def _lines_of(notes: Sequence[Note], steps: Collection[int]) -> dict[int, str]:
    """Return the script's lines by the step on which they acted."""
    lines: dict[int, list[str]] = {}
    for note in notes:
        if note.line and note.step in steps:
            lines.setdefault(note.step, []).append(note.place(own_file(notes)))
    return {step: "\n".join(places) for step, places in lines.items()}


def _columns(
    shown: Sequence[ShownStep], log: StepLog, around: int | None, lines: dict[int, str], *, marks_window: bool
) -> list[tuple[str, dict[str, Any], Callable[[ShownStep, ShownPipeline], str]]]:
    """Return the title, style and cell function of each column.

    Narrow columns fold: an ellipsis is not ASCII and would hide the text.
    """
    folds: dict[str, Any] = {"overflow": "fold"}
    arrived = [said.text for step in shown for said in step.arrived]
    launched = [step.launched.text for step in shown if step.launched is not None]
    arrives = folds | {"ratio": 5, "min_width": _widest(arrived)}
    launches = folds | {"ratio": 4, "min_width": _widest(launched)}
    if log.stages <= _STAGE_COLUMNS:
        stages = [(f"s{stage}", folds, functools.partial(_in_stage, stage)) for stage in range(log.stages)]
    else:
        stages = [(f"in stages 0 to {log.stages - 1}", folds, functools.partial(_in_all_stages))]
    return [
        ("", {"no_wrap": True}, functools.partial(_marks, around, marks_window)),
        ("step", {"justify": "right", "no_wrap": True}, lambda step, _: str(step.step)),
        *([("line", folds | {"justify": "right"}, lambda step, _: lines.get(step.step, ""))] if lines else []),
        (_ARRIVED, arrives, lambda step, _: "\n".join(said.text for said in step.arrived)),
        ("launched", launches, lambda step, _: step.launched.text if step.launched else ""),
        *stages,
        ("result\nwaits", folds, lambda _, pipeline: " ".join(f"#{batch}" for batch in pipeline.results)),
        ("queues", folds | {"min_width": 9, "ratio": 1}, lambda step, _: _queues(step)),
        ("answered", folds | {"ratio": 5}, _answers),
    ]


def _marks(around: int | None, marks_window: bool, step: ShownStep, _: ShownPipeline) -> str:
    """Mark the failed step, the window, and the requested step."""
    in_window = step.in_window and marks_window
    return "X" * bool(step.failure) + "*" * in_window + ">" * (step.step == around)


def _answers(step: ShownStep, _: ShownPipeline) -> str:
    said = [one.text for one in step.answered]
    if step.failure:
        said.append("DIED HERE" if step.error else "FAILED HERE")
    return "\n".join(said)


def _widest(texts: Sequence[str]) -> int:
    """Return the smallest width that cuts no word of these texts, up to a bound."""
    return max(_LEAST_WIDTH, min(_MOST_WORD, max((len(word) for text in texts for word in text.split()), default=0)))


def _in_stage(stage: int, _: ShownStep, pipeline: ShownPipeline) -> str:
    batch = pipeline.stages[stage]
    return "." if batch is None else f"#{batch}"


def _in_all_stages(_: ShownStep, pipeline: ShownPipeline) -> str:
    return " ".join(f"{stage}:#{batch}" for stage, batch in enumerate(pipeline.stages) if batch is not None) or "."


def _queues(step: ShownStep) -> str:
    if step.queues_are_clear and not step.transferring:
        return "all clear"
    parts = [f"{len(step.waiting)} waiting"] if step.waiting else []
    if step.chunked is not None:
        parts.append(f"chunked {short_rid(step.chunked)}")
    if step.running:
        parts.append(f"{len(step.running)} running")
    if step.transferring:
        parts.append(f"{len(step.transferring)} transferring")
    return ", ".join(parts)


def _is_about_the_window(shown: list[ShownStep]) -> bool:
    """Return whether an event other than a result follows an open window; a normal end has only results."""
    return any(
        before.in_window and not all(said.of_pipeline for said in step.arrived)
        for before, step in itertools.pairwise(shown)
    )


def _caption(shown: list[ShownStep], log: StepLog, *, has_lines: bool) -> Text:
    legend = "#n is a microbatch: in stage 0 (s0) at the step that launches it, one stage further each step; at most"
    acted = " A line is the script's that acted." if has_lines else ""
    lines = [f"{legend} {log.depth} in flight. Queues are as the step left them.{acted}"]
    if shown and shown[0].step > 1:
        lines.append(f"Steps before {shown[0].step} are left out.")
    if _is_about_the_window(shown):
        lines.append("* the window: no queue holds a request, yet results are in flight.")
    lines += [f"X step {step.step} failed: {printable(step.failure)}" for step in shown if step.failure]
    return Text("\n".join(lines), style="default", justify="left")
