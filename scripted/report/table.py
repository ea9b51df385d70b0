"""The step table: the last steps of a run as text that explains itself, for a terminal, a CI log or a pytest report.

Owns the layout of a row; the words come from the timeline's wording. Never colours what goes into a report.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from typing import Final

from rich.box import Box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from engine.limits import Limits
from engine.scheduler.ports import StepRecord
from scripted.core.phrases import printable, short_rid
from scripted.report.timeline.positions import Launch, controls_of, in_window, launches, pipeline_at, queues_are_clear
from scripted.report.wording import call_names, event_text, microbatch_text, reply_text

__all__ = ["AROUND_STEPS", "render_text", "step_table"]

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
    records: Sequence[StepRecord], limits: Limits, *, last: int | None = None, around: int | None = None
) -> Table:
    """One row a step. ``last`` counts the newest to show; ``around`` shows the steps on both sides of one, marked.

    Give all records of the run: older ones say where microbatches were launched. Raises ValueError for both at once.
    """
    if last is not None and around is not None:
        raise ValueError(f"step_table() takes last or around, got last={last} and around={around}; give one of them")
    shown = _chosen(records, last, around)
    table = Table(box=_BOX, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = _caption(shown, limits), "left"
    _add_columns(table, limits.pp_size)
    launched, calls = launches(records), call_names(records)
    controls = controls_of(launched)
    rows = [(record, _row(record, launched, controls, calls, limits.pp_size, around)) for record in shown]
    for record, cells in _collapsed(rows)[-(last or len(rows)) :]:
        style = "bold red" if record.error else "bold yellow" if record.step == around else None
        table.add_row(*cells, style=style)
    return table


def render_text(renderable: RenderableType, width: int) -> str:
    """Anything that rich can print, as plain text of at most ``width`` columns, without colours or trailing blanks."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False, highlight=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _collapsed(rows: list[tuple[StepRecord, list[Text]]]) -> list[tuple[StepRecord, list[Text]]]:
    """The rows with each long run of steps that show the same told by its first, its last and a count of the others."""
    shown: list[tuple[StepRecord, list[Text]]] = []
    for _, group in itertools.groupby(rows, key=lambda row: _without_step(row[1])):
        run = list(group)
        if len(run) < _LONG_RUN:
            shown += run
            continue
        gap = [Text("") for _ in run[0][1]]
        gap[_STEP_COLUMN], gap[_STEP_COLUMN + 1] = Text(".."), Text(f"{len(run) - 2} steps like these")
        shown += [run[0], (run[-1][0], gap), run[-1]]
    return shown


def _without_step(cells: list[Text]) -> list[str]:
    return [cell.plain for cell in (*cells[:_STEP_COLUMN], *cells[_STEP_COLUMN + 1 :])]


def _chosen(records: Sequence[StepRecord], last: int | None, around: int | None) -> list[StepRecord]:
    if around is not None:
        return [record for record in records if abs(record.step - around) <= AROUND_STEPS]
    # More than the rows that are asked for, because steps that show the same share one.
    return list(records if last is None or last else ())


def _add_columns(table: Table, stages: int) -> None:
    """Narrow columns fold rather than end in an ellipsis, which is no ASCII and loses what a reader looks for."""
    table.add_column("", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
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
    record: StepRecord,
    launched: dict[int, Launch],
    controls: frozenset[int],
    calls: dict[str, str],
    stages: int,
    around: int | None,
) -> list[Text]:
    pipeline = pipeline_at(record, launched, stages)
    cells = [
        _marks(record, around),
        str(record.step),
        "\n".join(event_text(event, controls) for event in record.events),
        microbatch_text(record.microbatch) if record.microbatch else "",
        *_stage_cells(pipeline.stages),
        " ".join(f"#{microbatch_id}" for microbatch_id in pipeline.results),
        _queues(record),
        "\n".join([reply_text(reply, calls) for reply in record.replies] + (["DIED HERE"] if record.error else [])),
    ]
    return [Text(cell) for cell in cells]


def _marks(record: StepRecord, around: int | None) -> str:
    """``X`` the step that failed, ``*`` the window, ``>`` the step asked for."""
    return ("X" if record.error else "") + ("*" if in_window(record) else "") + (">" if record.step == around else "")


def _stage_cells(stages: tuple[int | None, ...]) -> list[str]:
    if len(stages) <= _STAGE_COLUMNS:
        return ["." if microbatch_id is None else f"#{microbatch_id}" for microbatch_id in stages]
    return [" ".join(f"{stage}:#{i}" for stage, i in enumerate(stages) if i is not None) or "."]


def _queues(record: StepRecord) -> str:
    if queues_are_clear(record):
        return "all clear"
    parts = [f"{record.waiting} waiting"] if record.waiting else []
    if record.chunked is not None:
        parts.append(f"chunked {short_rid(record.chunked)}")
    if record.running:
        parts.append(f"{record.running} running")
    return ", ".join(parts)


def _caption(shown: list[StepRecord], limits: Limits) -> Text:
    legend = "#n is a microbatch: in stage 0 (s0) at the step that launches it, one stage further each step; at most"
    lines = [f"{legend} {limits.depth} in flight. Queues are as the step left them."]
    if any(in_window(record) for record in shown):
        lines.append(
            "* the window: no queue holds a request, yet results are in flight and a request still owns memory. "
            "An idle check that asks only the queues is wrong here."
        )
    lines += [f"X step {record.step} failed: {printable(record.error)}" for record in shown if record.error]
    return Text("\n".join(lines), style="default", justify="left")
