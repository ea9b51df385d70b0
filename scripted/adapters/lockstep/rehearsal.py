"""A schedule performed as a script, to see which of its actions a script can do and which the engine refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

import msgspec

from engine.config import EngineConfig
from scripted.adapters.lockstep.sim.runner import ScriptedSim
from scripted.core.action import Action
from scripted.core.placed import Placed
from scripted.core.verb import Code, Verb, variable_of
from scripted.errors import BadCall, RequestRefused, ScriptError
from scripted.rig.handle import RequestHandle
from scripted.script.options import ScriptOptions

__all__ = ["Line", "rehearse"]

_OPTIONS = ScriptOptions(oracle=False, must_step=False)


class Line(msgspec.Struct, frozen=True):
    """An action as a line of script. ``is_refused``: the engine refuses it; ``impossible``: why no script can do it."""

    step: int
    action: Action
    is_refused: bool = False
    impossible: str | None = None


def rehearse(config: EngineConfig, placed: Iterable[Placed]) -> list[Line]:
    """Perform actions at their steps in the sim tier, in the order of the search: of a step, control comes first.

    What comes after the step in which the engine breaks counts as possible.
    """
    ordered = sorted(placed, key=lambda one: (one.step, not one.action.is_control))
    lines: list[Line] = []

    def script(t: Any) -> Generator[None, None, None]:
        handles: dict[str, RequestHandle] = {}
        step = 1
        for one in ordered:
            while step < one.step:
                step += 1
                yield
            lines.append(_performed(t, one, handles))
        yield

    with contextlib.suppress(ScriptError):
        ScriptedSim(config).run(script, options=_OPTIONS)
    return lines + [Line(one.step, one.action) for one in ordered[len(lines) :]]


def _performed(t: Any, placed: Placed, handles: dict[str, RequestHandle]) -> Line:
    try:
        for verb in placed.action.verbs():
            value = _with_handles(verb, handles).perform(t)
            if isinstance(value, RequestHandle):
                handles[variable_of(value.rid)] = value
    except RequestRefused:
        return Line(placed.step, placed.action, is_refused=True)
    except BadCall as exc:
        return Line(placed.step, placed.action, impossible=str(exc))
    return Line(placed.step, placed.action)


def _with_handles(verb: Verb, handles: dict[str, RequestHandle]) -> Verb:
    """The same call with handles for their names. Raises BadCall for a handle that there is not."""
    arguments = []
    for argument in verb.arguments:
        if isinstance(argument, Code) and argument.value is None:
            if argument.text not in handles:
                raise BadCall(f"{verb.name}() takes a request that was started, and {argument.text} was not")
            argument = handles[argument.text]
        arguments.append(argument)
    return Verb(verb.name, *arguments, **verb.keywords)
