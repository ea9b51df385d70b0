"""The error tree of the engine: every exception that the engine raises on purpose.

Each message names the thing, the rule, the value and the remedy. An error that replaces another one is raised ``from``
it.
"""

from __future__ import annotations

from lockstep.errors import LockstepError


class EngineError(LockstepError):
    """Base class of every exception that the engine raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A configuration value breaks a rule; the text names field, rule, value and remedy."""


class CheckpointError(EngineError):
    """A model folder has a missing or wrong part: config, tokenizer, a weight, a shape."""


class StartupError(EngineError):
    """The server could not start: a port in use, a stage that failed to load, a start that took too long."""


class PlacementError(StartupError):
    """The stages cannot be placed: the cluster does not answer, is too small, or has another engine on a node."""


class ProcessDiedError(EngineError):
    """A process of the engine died. ``process`` is its name, ``cause`` its traceback or its signal.

    ``node`` is the name of its machine, empty for the server's own.
    """

    def __init__(self, process: str, cause: str, node: str = "") -> None:
        super().__init__(death_words(process, cause, node))
        self.process = process
        self.cause = cause
        self.node = node


def death_words(process: str, cause: str, node: str = "") -> str:
    """Describe a death in one line: the process, the cause, and the machine if it is not the server's."""
    return f"the {process} process died: {f'on {node}: ' if node else ''}{cause}"


class OpenVINOError(EngineError):
    """OpenVINO cannot compute this stage here; torch can."""


class StepFailedError(EngineError):
    """One microbatch could not be computed: its requests end with an error, and the engine continues."""


class DeviceLostError(EngineError):
    """The device of a stage accepts no more work. Ends the stage: every later microbatch would fail."""


class IntegrityError(EngineError, AssertionError):
    """The scheduler's own books do not balance. The engine never catches it: continuing would serve wrong tokens."""
