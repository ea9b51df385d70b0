"""Shows a session: the scheduler and its requests as tables, and the answers of clients.

Reads only what a script could read. Fields that an adapter adds to the state are shown too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
from rich.box import ASCII
from rich.table import Table
from rich.text import Text

from scripted.core.phrases import printable
from scripted.script.clients import Call
from scripted.script.handles import BaseRequest
from scripted.script.state import KVState, RowState, Snapshot, State
from scripted.shell.statements import Names

# Titles for parts of the state that differ from the field names.
_NAMES: Final = {"kv": "pages", "tree": "prefix tree", "window": "window pages", "host": "host pages"}


def state_table(state: State) -> Table:
    table = Table(box=ASCII, title=f"step {state.step}, {state.now:g} s", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in state_rows(state):
        table.add_row(Text(name), Text(text))
    return table


def requests_table(handles: Iterable[BaseRequest]) -> Table:
    """Return a table of the session's requests: their state in the scheduler, and their clients' answers."""
    table = Table(box=ASCII)
    for title in ("rid", "status", "prompt left", "chunks", "cached", "pages", "retracted", "tokens", "end", "client"):
        table.add_column(title)
    for r in handles:
        client = "hung up" if r.client.dropped else f"{r.client.status or '-'} {printable(r.client.text)!r}"
        numbers = (r.remaining_prompt_tokens, r.chunks_done, r.cached_tokens, r.kv_pages, r.retractions)
        cells = [r.rid, r.status, *map(str, numbers), str(len(r.output_ids)), r.finish_reason or "", client]
        table.add_row(*map(Text, cells))
    return table


def news_of(names: Names) -> Iterator[str]:
    """Yield a line for each request that has ended and each call that was answered."""
    for name, value in names.items():
        if isinstance(value, BaseRequest) and value.finished:
            yield f"{name} ended: {value.finish_reason}, {len(value.output_ids)} tokens" + (
                f" ({printable(value.error)})" if value.error else ""
            )
        elif isinstance(value, Call) and value.done:
            yield f"{name} {value.name} -> {value.status}" + (f": {printable(value.text)}" if value.text else "")


def state_rows(state: State) -> Iterator[tuple[str, str]]:
    yield "waiting", " ".join(state.waiting) or "-"
    yield "chunked", state.chunked or "-"
    yield "running", " ".join(state.running) or "-"
    flights = [
        f"#{m.id} {m.mode} of {' '.join(m.rids) or 'no request'}, due at step {m.due_at_step}" for m in state.in_flight
    ]
    yield "in flight", "\n".join(flights) or "-"
    yield "paused", state.paused or "no"
    for name, value in msgspec.structs.asdict(state).items():
        if isinstance(value, Snapshot):
            yield _NAMES.get(name, name), _sizes(value)
    if state.counts:
        yield "counts", ", ".join(f"{name} {count}" for name, count in state.counts.items())
    words = [
        word
        for word, holds in (
            ("queues clear", state.queues_clear),
            ("quiescent", state.is_quiescent),
            ("fully idle", state.is_fully_idle),
        )
        if holds
    ]
    yield "so it is", ", ".join(words) or "busy"


def _sizes(part: Snapshot) -> str:
    if isinstance(part, KVState):
        return f"{part.free} free, {part.cached} cached, {part.held} held ({part.reserved} reserved) of {part.total}"
    if isinstance(part, RowState):
        return f"{part.free} free ({part.reserved} reserved) of {part.total}"
    sizes = msgspec.structs.asdict(part).items()
    return ", ".join(f"{size} {name.replace('_', ' ')}" for name, size in sizes)
