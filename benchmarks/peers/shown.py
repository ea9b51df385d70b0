"""A run as tables: on the console, and on the project's page, one block for each class of machine.

Owns the page's markers. A block is replaced by a newer run of the same class, shape, type and kinds; all others stay.
"""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from benchmarks.peers.results import CLIENTS, FIRST_TOKENS, PeerResult, PeersRun, Ratio, ratios, tail_ratios

__all__ = ["console_tables", "page_block", "write_page"]

_COLUMNS: Final = 100
_BEGIN: Final = "<!-- peers: {} -->"
_END: Final = "<!-- end of peers -->"
_BLOCK: Final = re.compile(r"<!-- peers: (?P<key>.*?) -->\n.*?<!-- end of peers -->\n", re.DOTALL)

_TAILS: Final = "Tails in ms, by clients"

_Rows = list[list[str]]


def console_tables(run: PeersRun) -> Iterator[Table]:
    """Make the tables: the numbers, the tails, then the ratios of each."""
    beside = f"{run.results[0].name} beside"
    titles = _caption(run).replace("*", ""), beside, _TAILS, beside
    contents = _numbers(run), _ratios(run, ratios), _tails(run), _ratios(run, tail_ratios)
    for title, rows in zip(titles, contents, strict=True):
        table = Table(*rows[0], title=title)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows[1:]:
            table.add_row(*row)
        yield table


def page_block(run: PeersRun) -> str:
    """Return the page's section about a run, with its markers."""
    lines = [_BEGIN.format(_key(run)), *textwrap.wrap(_caption(run), _COLUMNS), ""]
    lines += [*_markdown(_numbers(run)), ""]
    lines += textwrap.wrap(
        f"How many times better {run.results[0].name} was in the same round, median (smallest to largest): tokens a "
        "second, first tokens, CPU a token.",
        _COLUMNS,
    )
    lines += ["", *_markdown(_ratios(run, ratios)), ""]
    lines += [*textwrap.wrap(_tails_caption(run), _COLUMNS), "", *_markdown(_tails(run)), ""]
    lines += [*_markdown(_ratios(run, tail_ratios)), _END]
    return "\n".join(lines) + "\n"


def write_page(run: PeersRun, page: Path) -> None:
    """Replace a run's older block, or add one after the last block. Raises ValueError for a page without blocks."""
    text = page.read_text(encoding="utf-8")
    blocks = list(_BLOCK.finditer(text))
    if not blocks:
        raise ValueError(f"{page} must have a block between {_BEGIN.format('...')} and {_END}; write the first by hand")
    own = next((block for block in blocks if block["key"] == _key(run)), None)
    if own is not None:
        text = text[: own.start()] + page_block(run) + text[own.end() :]
    else:
        text = text[: blocks[-1].end()] + "\n" + page_block(run) + text[blocks[-1].end() :]
    page.write_text(text, encoding="utf-8")


def _key(run: PeersRun) -> str:
    loads = [] if run.clients == list(CLIENTS) else [f"{', '.join(map(str, run.clients))} clients"]
    return "; ".join([run.machine.processor_class, run.shape, run.dtype, *loads, *run.kinds])


def _caption(run: PeersRun) -> str:
    after = "" if run.load_after is None else f", {run.load_after:g} after"
    rounds = f"medians of {run.rounds} rounds" if run.rounds > 1 else "one round"
    return (
        f"**{run.machine.processor_class}, {run.shape}, {run.dtype}**: {run.machine}{after}; "
        f"{run.prompt_tokens} prompt and {run.output_tokens} new tokens, {rounds}, {run.began}; "
        f"the weights are {run.weights_mib:,.0f} MiB."
    )


def _numbers(run: PeersRun) -> _Rows:
    counts = [f"{clients} clients, tok/s" if clients > 1 else "1 client, tok/s" for clients in run.clients]
    cpu = [f"CPU ms a token at {clients}" for clients in run.clients]
    others = ["512 cold, ms", "512 again, ms", "first answer, s", "with what is kept, s", "MiB", "idle CPU, %"]
    head = ["", *counts, *cpu, *others]
    return [head, *(_row(result, run.clients) for result in run.results)]


def _row(result: PeerResult, counts: Sequence[int]) -> list[str]:
    return [
        result.name if result.served else f"{result.name}, offline",
        *(_median(result.tokens_per_s.get(clients), ",.0f") for clients in counts),
        *(_median(result.cpu_ms_per_token.get(clients), ".2f") for clients in counts),
        *(_median(result.ttft_ms.get(kind), ".0f") for kind in FIRST_TOKENS),
        _shown(result.first_answer_s, ".1f"),
        _shown(result.kept_answer_s, ".1f"),
        _shown(result.serving_mib, ",.0f"),
        _shown(result.idle_cpu_percent, ".1f"),
    ]


def _tails_caption(run: PeersRun) -> str:
    caption = _TAILS
    if run.equal_rates_per_s:
        rate = statistics.median(run.equal_rates_per_s)
        caption += f"; at an equal rate, {rate:.2g} requests a second arrive at random times at every server"
    if run.slo_first_ms is None or run.slo_gap_ms is None:
        return f"{caption}:"
    return (
        f"{caption}; goodput is the highest rate of Poisson arrivals at which 99 % of the requests have their first "
        f"token within {run.slo_first_ms:g} ms and no gap over {run.slo_gap_ms:g} ms:"
    )


def _tails(run: PeersRun) -> _Rows:
    first = [f"first token p99 at {clients}" for clients in run.clients]
    gaps = [f"{name} at {clients}" for name in ("gap p99", "longest gap") for clients in run.clients]
    equal = ["first token p99 at an equal rate", "gap p99 at an equal rate"]
    rows = [["", *first, *gaps, *equal, "later turns, first token p50", "goodput, requests/s"]]
    for result in run.results:
        if result.served:
            row = [_median(result.ttft_p99_ms.get(clients), ",.0f") for clients in run.clients]
            row += [_median(result.gap_p99_ms.get(clients), ",.1f") for clients in run.clients]
            row += [_median(result.longest_gap_ms.get(clients), ",.0f") for clients in run.clients]
            row += [_median(result.equal_ttft_p99_ms, ",.0f"), _median(result.equal_gap_p99_ms, ",.1f")]
            row += [_median(result.later_ttft_ms, ",.0f"), _median(result.goodput_per_s, ".3g")]
            rows.append([result.name, *row])
    return rows


def _ratios(run: PeersRun, compare: Callable[[PeerResult, PeerResult], Iterable[tuple[str, Ratio]]]) -> _Rows:
    """Make a row of ratios for each peer. Served and offline peers are compared with their own kind."""
    rows = []
    for served in (True, False):
        of_a_kind = [result for result in run.results if result.served is served]
        for other in of_a_kind[1:]:
            own = of_a_kind[0]
            rows.append({"": f"{own.name} to {other.name}"} | {name: str(ratio) for name, ratio in compare(own, other)})
    names = list(dict.fromkeys(name for row in rows for name in row)) or [""]
    return [names, *([row.get(name, "") for name in names] for row in rows)]


def _markdown(rows: _Rows) -> Iterator[str]:
    head, *others = rows
    yield "| " + " | ".join(head) + " |"
    yield "| --- |" + " ---: |" * (len(head) - 1)
    for row in others:
        yield "| " + " | ".join(row) + " |"


def _median(values: Sequence[float] | None, form: str) -> str:
    return format(statistics.median(values), form) if values else ""


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
