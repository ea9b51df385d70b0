"""The step table: the last steps of a run as text that explains itself, for a terminal, a CI log or a pytest report.

Owns the layout of a row; the words come from the timeline's wording. Never colours what goes into a report.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Collection, Sequence
from typing import Final

from rich.box import Box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from scripted.core.phrases import printable, short_rid
from scripted.report.step_log import Launch, Note, ShownStep, StepLog, own_file

# Steps shown on each side of the one in question.
AROUND_STEPS: Final = 8
_STEP_COLUMN: Final = 1
# Steps in a row that show the same, from which on those in the middle are only counted.
_LONG_RUN: Final = 4
# More stages than this share one column: each column of its own costs five characters of a CI log.
_STAGE_COLUMNS: Final = 8
# ASCII, because a log may be read in a terminal that shows nothing else.
_BOX: Final = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)


def step_table(
    log: StepLog, *, last: int | None = None, around: int | None = None, notes: Sequence[Note] = ()
) -> Table:
    """One row a step. ``last`` counts the newest to show; ``around`` shows the steps on both sides of one, marked.

    ``notes`` have the lines of a script that acted.

    Give all steps of the run: older ones say where microbatches were launched. Raises ValueError for both at once.
    """
    if last is not None and around is not None:
        raise ValueError(f"step_table() takes last or around, got last={last} and around={around}; give one of them")
    shown = _chosen(log.steps, last, around)
    table = Table(box=_BOX, pad_edge=False, padding=(0, 1, 0, 0))
    lines = _lines_of(notes, {step.step for step in shown})
    _add_columns(table, log.stages, has_lines=bool(lines))
    launched = log.launches()
    marks_window = _is_about_the_window(shown)
    rows = [(step, _row(step, log, launched, around, lines, marks_window=marks_window)) for step in shown]
    rows = _collapsed(rows, _STEP_COLUMN + 1 + bool(lines))[-(last or len(rows)) :]
    for step, cells in rows:
        style = "bold red" if step.error else "bold yellow" if step.step == around else None
        table.add_row(*cells, style=style)
    table.caption, table.caption_justify = _caption([step for step, _ in rows], log, has_lines=bool(lines)), "left"
    return table


def render_text(renderable: RenderableType, width: int) -> str:
    """Anything that rich can print, as plain text of at most ``width`` columns, without colours or blanks around it."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False, highlight=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def _collapsed(rows: list[tuple[ShownStep, list[Text]]], arrived: int) -> list[tuple[ShownStep, list[Text]]]:
    """The rows with each long run of steps that show the same told by its first, its last and a count of the others."""
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
    # More than the rows that are asked for, because steps that show the same share one.
    return list(steps if last is None or last else ())


def _lines_of(notes: Sequence[Note], steps: Collection[int]) -> dict[int, str]:
    """The lines of the script by the step that they acted on."""
    lines: dict[int, list[str]] = {}
    for note in notes:
        if note.line and note.step in steps:
            lines.setdefault(note.step, []).append(note.place(own_file(notes)))
    return {step: "\n".join(places) for step, places in lines.items()}


def _add_columns(table: Table, stages: int, *, has_lines: bool) -> None:
    """Narrow columns fold rather than end in an ellipsis, which is no ASCII and loses what a reader looks for."""
    table.add_column("", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    if has_lines:
        table.add_column("line", justify="right", overflow="fold")
    table.add_column("arrived", ratio=5, overflow="fold")
    table.add_column("launched", ratio=4, overflow="fold")
    for title in _stage_titles(stages):
        table.add_column(title, overflow="fold")
    table.add_column("result\nwaits", overflow="fold")
    table.add_column("queues", min_width=9, ratio=1, overflow="fold")
    table.add_column("answered", ratio=5, overflow="fold")


def _stage_titles(stages: int) -> list[str]:
    if stages <= _STAGE_COLUMNS:
        return [f"s{stage}" for stage in range(stages)]
    return [f"in stages 0 to {stages - 1}"]


def _row(
    step: ShownStep,
    log: StepLog,
    launched: dict[int, Launch],
    around: int | None,
    lines: dict[int, str],
    *,
    marks_window: bool,
) -> list[Text]:
    pipeline = log.pipeline_at(step, launched)
    cells = [
        # The step that failed, the window, the step that was asked for.
        ("X" if step.error else "")
        + ("*" if step.in_window and marks_window else "")
        + (">" if step.step == around else ""),
        str(step.step),
        *([lines.get(step.step, "")] if lines else []),
        "\n".join(said.text for said in step.arrived),
        step.launched.text if step.launched else "",
        *_stage_cells(pipeline.stages),
        " ".join(f"#{batch}" for batch in pipeline.results),
        _queues(step),
        "\n".join([said.text for said in step.answered] + (["DIED HERE"] if step.error else [])),
    ]
    return [Text(cell) for cell in cells]


def _stage_cells(stages: tuple[int | None, ...]) -> list[str]:
    if len(stages) <= _STAGE_COLUMNS:
        return ["." if microbatch_id is None else f"#{microbatch_id}" for microbatch_id in stages]
    return [" ".join(f"{stage}:#{i}" for stage, i in enumerate(stages) if i is not None) or "."]


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
    """Whether anything but a result met a step's end in the window; results alone are how every request ends."""
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
    lines += [f"X step {step.step} failed: {printable(step.error)}" for step in shown if step.error]
    return Text("\n".join(lines), style="default", justify="left")
