"""Renders traces as one self-contained HTML page: no network, no fonts, no library.

Selects the steps to show and hands them to the template, which escapes everything. Equal traces give equal pages, byte
for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from scripted.core.phrases import printable
from scripted.report.difference import Difference, first_difference
from scripted.report.step_log import FleetLog, ShownStep, StepLog
from scripted.report.timeline.layout import Layout, failed_index
from scripted.report.timeline.palette import Palette
from scripted.report.timeline.view import column_width
from scripted.report.trace import Trace

# The most steps on one page: a step of a full pipeline takes about 4 KB, so two runs of 600 make a page of 5 MB.
MAX_COLUMNS: Final = 600
# More columns would be too narrow on a sheet of paper.
_COLUMNS_ON_PAPER: Final = 18
# The failure's text beside its step: its width with margins, and the narrowest columns that hold it.
_CALLOUT_PX: Final = 250
_CALLOUT_COLUMNS: Final = 3
_TEMPLATE: Final = "page.html.jinja"


def render_timeline(traces: Sequence[Trace], *, step: int | None = None) -> str:
    """Return the page of one run, or of several below each other, with their first difference from the first marked.

    A fleet is shown alone: its engines below each other, with their messages. For a run longer than MAX_COLUMNS the
    page shows the steps around ``step``, or else around the difference, the failure or the first window, and says so.
    Raises ValueError without a trace, and for a step in no trace.
    """
    if not traces:
        raise ValueError("render_timeline() takes at least one trace, got none")
    fleets = [trace for trace in traces if trace.fleet is not None]
    if fleets and len(traces) > 1:
        raise ValueError(f"the run of a fleet is shown alone, got {len(traces)} runs; give one trace at a time")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = printable
    return environment.get_template(_TEMPLATE).render(page=_page(traces, step))


def _page(traces: Sequence[Trace], step: int | None) -> dict[str, object]:
    """Return the template's values: the placed runs, their columns, and the requests for the filter."""
    engines = [""] * len(traces)
    if traces[0].fleet is not None:
        engines = [one.name for one in traces[0].fleet.engines]
        traces = list(_engines_of(traces[0], traces[0].fleet))
    differences = [None if engines[0] else first_difference(traces[0].log, trace.log) for trace in traces]
    focus = _focus(traces, differences) if step is None else _index_of(traces, step)
    longest = max(len(trace.log.steps) for trace in traces)
    first = max(0, min(focus - MAX_COLUMNS // 2, longest - MAX_COLUMNS))
    last = min(longest, first + MAX_COLUMNS)
    palette = Palette.of(traces)
    runs = tuple(
        Layout(trace, number, palette, first, last, difference=difference, engine=engine)
        for number, (trace, difference, engine) in enumerate(zip(traces, differences, engines, strict=True))
    )
    columns = max(last - first, 1)
    # A failure in one of the last columns has its text beside them.
    is_beside = any(run.callout is not None and run.callout.x + _CALLOUT_COLUMNS > columns for run in runs)
    shown = {number for run in runs for box in run.boxes for number in box.requests}
    shown |= {number for run in runs for chip in run.chips for number in chip.requests}
    left_out = f"Steps {first + 1} to {last} of {longest}; scripted view --step N shows others"
    return {
        "title": " / ".join(dict.fromkeys(printable(run.header.title) for run in runs)),
        "columns": columns,
        "callout_px": _CALLOUT_PX if is_beside else 0,
        "width_px": column_width(
            (box for run in runs for box in run.boxes), (one for run in runs for one in run.chips)
        ),
        "requests": [(number, palette.labels[rid], rid) for rid, number in palette.numbers.items() if number in shown],
        "focus": focus - first,
        "cause": min((run.cause for run in runs if run.cause is not None), default=None),
        "left_out": "" if last - first == longest else left_out,
        "fits_on_paper": columns <= _COLUMNS_ON_PAPER,
        "runs": runs,
    }


def _engines_of(trace: Trace, fleet: FleetLog) -> Iterator[Trace]:
    """Yield each engine of a fleet as a run over the steps of all; those in which it was dead are blank."""
    numbers = sorted({step.step for engine in fleet.engines for step in engine.log.steps})
    for engine in fleet.engines:
        there = {step.step: step for step in engine.log.steps}
        steps = [there.get(number) or ShownStep(step=number) for number in numbers]
        log = StepLog(engine.log.stages, engine.log.depth, tuple(steps))
        yield Trace(msgspec.structs.replace(trace.header, died=False), log, engine.notes, fleet)


def _focus(traces: Sequence[Trace], differences: Sequence[Difference | None]) -> int:
    """Return the step at which the page opens: the first difference, else the failure, a window, or the start."""
    apart = [difference.index for difference in differences if difference is not None]
    if apart:
        return min(apart)
    for trace in traces:
        if (failed := failed_index(trace)) is not None:
            return failed
    windows = [index for trace in traces for index, step in enumerate(trace.log.steps) if step.in_window]
    return windows[0] if windows else 0


def _index_of(traces: Sequence[Trace], step: int) -> int:
    """Return the index of a step in the first run that has it. Raises ValueError if none has."""
    for trace in traces:
        for index, one in enumerate(trace.log.steps):
            if one.step == step:
                return index
    ends = [one.step for trace in traces for one in trace.log.steps]
    have = f"have the steps {min(ends)} to {max(ends)}" if ends else "have no steps"
    raise ValueError(f"step must be a step of the traces, got {step}; they {have}")
