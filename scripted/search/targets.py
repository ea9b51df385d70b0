"""Targets of a search: a base schedule or a registered script, which runs many times with added events.

Both have a number of steps and run with added events. A target's text builds the same target in another process.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from scripted.core.action import Action
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.phrases import nearest
from scripted.core.placed_action import Placed
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.execution import Outcome, Prefixes
from scripted.search.generated import generated_schedule, number_of
from scripted.search.strategies import Drawn

# A file is executed to find a schedule only if it mentions this class.
_SCENARIO: Final = re.compile(r"\bSchedule\b")
# A nondeterministic machine, or a digest that omits a field, shows in many targets: one in this many generated targets
# runs twice without additions and is judged by its records.
_THOROUGH_EVERY: Final = 21
# One in this many targets is restored from a checkpoint, which costs a tenth.
_RESTORED_EVERY: Final = 5


class Target(Protocol):
    """A schedule or script that runs with the additions that ``base`` permits. ``rejoined`` counts the runs that ended
    early because their state was that of the target again.
    """

    base: Schedule
    rejoined: int

    @property
    def outcome(self) -> Outcome:
        """Return the outcome of the target without additions."""
        ...

    @property
    def steps(self) -> int: ...

    def is_distinct(self, step: int, action: Action) -> bool:
        """Return whether an action added before this step can have an effect of its own."""
        ...

    def execute(self, *extra: Placed) -> Outcome: ...

    def execute_drawn(self, drawn: Drawn) -> Outcome: ...


@runtime_checkable
class HasScriptTargets(Protocol):
    """An adapter whose registered scripts can be searched like schedules."""

    def script_target(self, target: str) -> Target:
        """Return the registered script ``FILE::NAME`` as a target. Raises ScriptDefinitionError if there is none."""
        ...


def target_named(target: str, of: str = DEFAULT_ADAPTER, *, is_copied: bool = True) -> Target:
    """Return the target that a text names: a workload, ``generated:NUMBER``, a schedule, or ``FILE::NAME``.

    ``of`` is the searched adapter; with ``is_copied``, many runs will start from copies of the target. Raises
    ScriptDefinitionError for anything else.
    """
    schedule, number = schedule_of(target, of), number_of(target)
    if schedule is None:
        adapter = adapter_named(of)
        if not isinstance(adapter, HasScriptTargets):
            raise ScriptDefinitionError(
                f"the adapter {of} is searched from workloads and schedules, got {target!r}; "
                f"there are {', '.join(adapter.workloads)}"
            )
        return adapter.script_target(target)
    if number is None:
        return Prefixes(schedule)
    return Prefixes(
        schedule,
        is_thorough=not number % _THOROUGH_EVERY,
        is_copied=is_copied,
        is_restored=not number % _RESTORED_EVERY,
    )


def schedule_of(target: str, of: str = DEFAULT_ADAPTER) -> Schedule | None:
    """Return the schedule of a target without running it; None for a script. Raises ScriptDefinitionError."""
    if "::" in target:
        return _schedule_in(target)
    return workload_named(target, of) if is_one_word(target, of) else Schedule.parse(target, of=of)


def workload_named(name: str, of: str = DEFAULT_ADAPTER) -> Schedule:
    """Return the adapter's workload or generated target of this name.

    Raises ScriptDefinitionError with a near name, or with all.
    """
    number = number_of(name)
    if number is not None:
        return generated_schedule(number, of)
    workloads = adapter_named(of).workloads
    if name not in workloads:
        guess = nearest(name, workloads) or f"; there are {', '.join(workloads)}"
        raise ScriptDefinitionError(f"no workload is called {name!r}{guess}")
    try:
        return Schedule.parse(workloads[name], of=of)
    except ScriptDefinitionError as exc:
        raise ScriptDefinitionError(f"the workload {name!r} of {of} cannot be read: {exc}") from exc


def is_one_word(target: str, of: str = DEFAULT_ADAPTER) -> bool:
    """Return whether a target is a name rather than a schedule. Raises ScriptDefinitionError for a missing file."""
    if not target.strip() or target == "default" or any(sign in target for sign in "=; "):
        return False
    if target not in adapter_named(of).workloads and (Path(target).suffix or "/" in target):
        raise ScriptDefinitionError(f"there is no file {target!r} in {Path.cwd()}; give the path of one that is there")
    return True


def _schedule_in(target: str) -> Schedule | None:
    """Return the Schedule with this name in a file, if there is one."""
    file, _, name = target.partition("::")
    if not Path(file).is_file() or not _SCENARIO.search(Path(file).read_text(encoding="utf-8")):
        return None
    value = runpy.run_path(file).get(name)
    return value if isinstance(value, Schedule) else None
