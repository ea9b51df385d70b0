"""The course of the demo: both runs on real processes, the terminal and the page.

It fails, with a reason, if a run does not show the expected race: a demo that always passes proves nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from engine.server.launch.preload import PreloadedParent
from lockstep.output_files import write_output
from scripted.api import RecordedRun, run_script
from scripted.core.phrases import printable
from scripted.report.failure import ServerDied
from scripted.report.step_log import Said, ShownStep, StepLog
from scripted.report.table import step_table
from scripted.report.timeline import render_timeline
from scripted.script.decorator import spec_of
from scripted_lockstep.demo.race import flush_race
from scripted_lockstep.mutants import Mutant, mutant_named
from scripted_lockstep.tiers.server.parent import start_parent
from scripted_lockstep.tiers.server.runner import EngineServer


@dataclass(frozen=True, kw_only=True)
class Race:
    """The turning points of one run: the step that opened the window, the flush and its answer, the end."""

    window: ShownStep
    flush: ShownStep
    answer: Said
    end: ShownStep
    last_reply: str

    @classmethod
    def of(cls, log: StepLog) -> Self | None:
        """Find the race in these steps; None if its window never opened or no flush was answered."""
        window = next((step for step in log.steps if step.in_window), None)
        flush = next((step for step in log.steps if any(said.text == "FLUSH" for said in step.arrived)), None)
        replies = [said for step in log.steps for said in step.answered]
        answer = next((said for said in replies if said.text.startswith("flush -> ")), None)
        if window is None or flush is None or answer is None:
            return None
        texts = [said.text for said in replies if said.rid is not None]
        return cls(window=window, flush=flush, answer=answer, end=log.steps[-1], last_reply=(texts or [""])[-1])

    @property
    def flushed_in_the_window(self) -> bool:
        """True if the flush arrived while the queues were empty and the pipeline was busy."""
        return self.flush.step == self.window.step + 1

    def sentences(self) -> Iterator[tuple[int, str]]:
        """Yield the course of the race, one sentence for each step."""
        flights = " and ".join(f"#{batch}" for batch in self.window.in_flight)
        opens = (
            "launches the last chunk of the prompt. Nothing waits, nothing is partly prefilled, nothing runs: every "
            f"queue is empty, but {flights} are in flight and their request owns memory. The window is open."
        )
        yield self.window.step, opens
        answer = self.answer.text.removeprefix("flush -> ")
        sees = (
            f"sees what is in flight. The flush is {answer}, and nothing else changes."
            if self.answer.kind == "refused"
            else "asks the queues alone, finds them empty, and the prefix tree is reset under the request. "
            f"The answer is {answer}."
        )
        yield self.flush.step, f"POST /flush_cache arrives. The idle check {sees}"
        if self.end.error is not None:
            died = printable(self.end.error)
            yield self.end.step, f"a result comes back to a tree that is gone. The scheduler dies: {died}"
        elif self.last_reply:
            yield self.end.step, f"the request is done: {self.last_reply}."


BUG: Final = "flush-ignores-in-flight"
TITLE: Final = "The flush race"
PLAIN_WIDTH_COLUMNS: Final = 118
REFUSED: Final = 400


def run_demo(page: Path) -> bool:
    """Run both halves, print them, and write the timeline to ``page``. Returns whether both went as expected."""
    began = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH_COLUMNS, highlight=False, markup=False)
    with start_parent() as parent:
        # Printed while the parent imports the packages of the servers.
        _introduce(console)
        bug = Half.run("1. An engine with the bug", mutant_named(BUG), parent)
        bug.show(console)
        engine = Half.run("2. This engine", None, parent)
        engine.show(console)
    problems = [*bug.problems(), *engine.problems()]
    traces = [half.outcome.trace for half in (engine, bug) if half.outcome.trace is not None]
    if traces:
        write_output(page, render_timeline(traces))
        console.print(f"Both runs as a timeline, step by step: {page}", soft_wrap=True)
    for problem in problems:
        console.print(f"NOT SHOWN: {problem}", style="bold red", soft_wrap=True)
    console.print(f"{'failed' if problems else 'done'} in {time.monotonic() - began:.1f} s")
    return not problems


@dataclass(frozen=True, kw_only=True)
class Half:
    """One of the two runs; ``mutant`` is None for the engine as it is."""

    title: str
    mutant: Mutant | None
    outcome: RecordedRun
    pids: dict[str, int]

    @classmethod
    def run(cls, title: str, mutant: Mutant | None, parent: PreloadedParent) -> Half:
        """Start a server, run the script in it, end the server."""
        test, name = spec_of(flush_race), None if mutant is None else mutant.name
        with EngineServer.start(test.config, mutant=name, parent=parent) as server:
            pids = {} if server.serving is None else server.serving.pids
            outcome = run_script(flush_race, harness=server, title=TITLE, tier="server", mutant=name)
        return cls(title=title, mutant=mutant, outcome=outcome, pids=pids)

    @functools.cached_property
    def race(self) -> Race | None:
        """Return its turning points, if any."""
        return None if self.outcome.trace is None else Race.of(self.outcome.trace.log)

    def show(self, console: Console) -> None:
        """Print the run's title, the steps around the flush, and the course of the race."""
        console.print()
        console.rule(self.title, align="left", characters="-")
        about = "The engine as it is." if self.mutant is None else f"Mutant {self.mutant.name}: {self.mutant.bug}."
        console.print(about)
        console.print("Processes: " + ", ".join(f"{name} ({pid})" for name, pid in sorted(self.pids.items())))
        race, trace = self.race, self.outcome.trace
        if trace is None or race is None:
            console.print(self.outcome.error.report.render() if self.outcome.error else "no step was recorded")
            return
        console.print(step_table(trace.log, around=race.flush.step))
        story = Table.grid(padding=(0, 2))
        story.add_column(no_wrap=True)
        story.add_column()
        for step, sentence in race.sentences():
            story.add_row(f"step {step}", sentence)
        console.print(Padding(story, (1, 0)))

    def problems(self) -> list[str]:
        """List the expected events that this half did not show."""
        race, error = self.race, self.outcome.error
        if race is None:
            return [f"{self.title}: the window never opened, or the flush was never answered"]
        if self.mutant is None:
            is_refused = race.answer.kind == "refused" and "in_flight=" in race.answer.text
            wanted = {
                "the script passes": self.outcome.passed,
                f"the flush is refused with {REFUSED} for what is in flight": is_refused,
                "the request completes": race.last_reply.endswith("ends: length"),
            }
        else:
            signature = self.mutant.signature
            wanted = {
                "the flush is accepted": race.answer.kind == "answer",
                "the server dies": isinstance(error, ServerDied),
                f"the scheduler dies of {signature!r}": signature in (race.end.error or ""),
            }
        wanted["the flush arrives in the first step of the window"] = race.flushed_in_the_window
        return [f"{self.title}: {what}" for what, shown in wanted.items() if not shown]


def _introduce(console: Console) -> None:
    """Announce the demo, and show the script."""
    script = spec_of(flush_race).script
    body = inspect.getsource(script).partition('"""\n')[2]
    console.print(
        f"{TITLE}, on real processes: an HTTP server, a scheduler and four pipeline stages. A script runs inside the "
        "scheduler, which makes a step only when the script says so:"
    )
    console.print()
    console.print(textwrap.indent(textwrap.dedent(body).rstrip(), "    "), soft_wrap=True)
