"""What a server prints when it starts: a bar while the weights load, then what is served, how and where.

Owns the words and who is told: an operator by lines on the terminal, a harness by a call.
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
    """What a start spends its time on. A terminal on stderr is told of each phase when it begins, if ``shown``."""

    def __init__(self, *, shown: bool = False) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._begun: list[tuple[str, float]] = []

    def begin(self, name: str) -> None:
        self._begun.append((name, time.monotonic()))
        if self._shown:
            sys.stderr.write(f"starting: {name}\n")

    def told(self) -> str:
        """Each phase with its seconds, the last one up to now."""
        ends = [when for _, when in self._begun[1:]] + [time.monotonic()]
        return ", ".join(f"{name} {end - begun:.1f} s" for (name, begun), end in zip(self._begun, ends, strict=True))


class StartView:
    """Sees a server start. A person or a log is shown bars on stderr if that is a terminal, then on stdout some lines
    of text, or one of JSON; a harness has ``announce`` called, and is shown nothing.

    ``started_s`` is the start on the monotonic clock. Starts no thread: the bars are drawn when they move.
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
        # What each process has been at while it loaded, and since when.
        self._steps: dict[str, list[tuple[str, float]]] = {}
        self._learned: dict[str, str] = {}
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}

    def gathering(self, gathering: Gathering) -> None:
        """Say what to run on the other machines, if Ray does not."""
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
        """Say these numbers, not those that were known at first."""
        self._limits = limits

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Show a bar for each process that loads, for the length of a block."""
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
        """Learn how far a process is."""
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
        """Learn what a process found out about what it serves."""
        self._learned |= about

    def serving(self, serving: Serving) -> None:
        """Say that every process is ready."""
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

    def _loading_told(self) -> str:
        """What the loading was, each part with its seconds in the process that took longest for it."""
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
        """What an operator wants to see at a glance. Sizes are in tokens."""
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
            "start": self._phases.told() + self._loading_told(),
            "keys": "none" if settings.api_key is None and settings.admin_key is None else "needed",
            **role,
            **lora,
            **self._learned,
        }
