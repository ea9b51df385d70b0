"""Announces a server's start: a progress bar while the weights load, then the model, its limits and its URL.

Owns the text: an operator reads lines on the terminal, a harness gets a call.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from engine.core.limits import Limits, ModelFacts
from engine.process.control import Gathering, Loading, Serving
from engine.process.logs import JsonFormatter, fields_of
from engine.process.settings import ServerSettings

Announce = Callable[[Serving | Gathering], None]


class Phases:
    """The phases of a start and their durations. With ``shown``, a terminal on stderr sees each phase begin."""

    def __init__(self, *, shown: bool = False) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._begun: list[tuple[str, float]] = []

    def begin(self, name: str) -> None:
        self._begun.append((name, time.monotonic()))
        if self._shown:
            sys.stderr.write(f"starting: {name}\n")

    def summary(self) -> str:
        """List each phase with its seconds; the last phase is still running."""
        ends = [when for _, when in self._begun[1:]] + [time.monotonic()]
        return ", ".join(f"{name} {end - begun:.1f} s" for (name, begun), end in zip(self._begun, ends, strict=True))


class StartView:
    """The display of a server's start: bars on stderr if that is a terminal, then lines of text or one line of JSON
    on stdout. With ``announce`` it prints nothing and calls that instead.

    ``started_s`` is the start on the monotonic clock. Starts no thread: a bar is redrawn when it moves.
    """

    def __init__(
        self,
        settings: ServerSettings,
        facts: ModelFacts,
        limits: Limits,
        started_s: float,
        phases: Phases,
        announce: Announce | None = None,
    ) -> None:
        self._announce = announce
        self._settings = settings
        self._facts = facts
        self._limits = limits
        self._started_s = started_s
        self._phases = phases
        self._loads: dict[str, Loading] = {}
        # For each process, the loading phases that it reported, with their start times.
        self._steps: dict[str, list[tuple[str, float]]] = {}
        self._learned: dict[str, str] = {}
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}

    def gathering(self, gathering: Gathering) -> None:
        """Print the command to run on the other machines, unless Ray starts the stages."""
        if self._announce is not None:
            self._announce(gathering)
            return
        if self._settings.placement == "ray":
            return
        command = f"engine stage --join {gathering.join} --secret-file {gathering.secret_file}"
        line = f"Waiting for {gathering.stages} stages; start each on its machine, with a copy of the secret file"
        if self._settings.log_format == "json":
            self._write_json(line, join=str(gathering.join), secret_file=gathering.secret_file, command=command)
        else:
            sys.stdout.write(f"{line}:\n  {command}\n")
        sys.stdout.flush()

    def resolved(self, limits: Limits) -> None:
        """Announce these limits instead of the preliminary ones."""
        self._limits = limits

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Show a bar for each loading process while the block runs."""
        console = Console(stderr=True)
        if self._announce is not None or not console.is_terminal or self._settings.log_format == "json":
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True, auto_refresh=False) as self._progress:
            yield
        self._progress = None

    def loaded(self, name: str, progress: Loading) -> None:
        """Record a process's progress."""
        self._loads[name] = progress
        steps = self._steps.setdefault(name, [])
        if not steps or steps[-1][0] != progress.doing:
            steps.append((progress.doing, time.monotonic()))
        if self._progress is None:
            return
        if name not in self._bars:
            self._bars[name] = self._progress.add_task("", total=None, count="")
        bar = self._bars[name]
        if progress.total:
            count = f"{progress.done}/{progress.total}"
            self._progress.update(bar, completed=progress.done, total=progress.total, count=count)
        self._progress.update(bar, description=f"{name}: {progress.doing}", refresh=True)

    def learned(self, about: Mapping[str, str]) -> None:
        """Record facts that a process reported, such as its kernels."""
        self._learned |= about

    def serving(self, serving: Serving) -> None:
        """Announce that every process is ready."""
        if self._announce is not None:
            self._announce(serving)
            return
        stages = "1 stage" if self._limits.pp_size == 1 else f"{self._limits.pp_size} stages"
        ready_s = time.monotonic() - self._started_s
        line = f"Serving {self._facts.name} with {stages} on {serving.base_url} (ready in {ready_s:.1f} s)"
        about = self._about()
        if self._settings.log_format == "json":
            self._write_json(line, base_url=serving.base_url, ready_s=round(ready_s, 1), **about)
        else:
            rows = [f"  {name.replace('_', ' '):<16} {value}\n" for name, value in about.items()]
            sys.stdout.write("".join([f"{line}\n", *rows]))
        sys.stdout.flush()

    def _write_json(self, line: str, **fields: object) -> None:
        record = logging.LogRecord("engine", logging.INFO, __file__, 0, line, (), None)
        vars(record).update(fields_of(**fields))
        sys.stdout.write(f"{JsonFormatter().format(record)}\n")

    def _loading_summary(self) -> str:
        """List the loading phases, each with the seconds of its slowest process."""
        longest: dict[str, float] = {}
        now = time.monotonic()
        for steps in self._steps.values():
            ends = [when for _, when in steps[1:]] + [now]
            spent: dict[str, float] = {}
            for (doing, begun), end in zip(steps, ends, strict=True):
                spent[doing] = spent.get(doing, 0.0) + end - begun
            longest |= {doing: max(seconds, longest.get(doing, 0.0)) for doing, seconds in spent.items()}
        parts = ", ".join(f"{doing} {seconds:.1f} s" for doing, seconds in longest.items())
        return f" ({parts})" if parts else ""

    def _about(self) -> dict[str, str | int]:
        """Collect the facts that an operator needs at a glance. Sizes are in tokens."""
        limits, settings = self._limits, self._settings
        loads = self._loads.values()
        names = ", ".join(name for name, _ in limits.loras) or "none yet"
        lora = {"lora": f"{names}; {limits.max_loras} at once, computed by torch"} if limits.max_loras else {}
        asks = f", asks {' '.join(settings.prefill_urls)}" if settings.prefill_urls else ""
        role = {} if settings.role == "both" else {"role": f"{settings.role}{asks}"}
        return {
            "model": settings.served_model_name or self._facts.name,
            "dtype": ", ".join(dict.fromkeys(load.dtype for load in loads)),
            "device": ", ".join(dict.fromkeys(load.device for load in loads)),
            "stages": limits.pp_size,
            "kv_tokens": limits.total_pages * limits.page_size,
            "page_size": limits.page_size,
            "context_length": limits.context_length,
            "running_requests": limits.rows,
            "start": self._phases.summary() + self._loading_summary(),
            "keys": "none" if settings.api_key is None and settings.admin_key is None else "needed",
            **role,
            **lora,
            **self._learned,
        }
