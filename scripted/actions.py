"""Actions: what may happen to an engine from outside, each placed at one step of a schedule.

Owns their text form, ``STEP KIND [RID] [name=value ...]``. It applies nothing: the simulated gate does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.messages import PauseMode
from scripted.errors import ScriptDefinitionError
from scripted.prompts import prompt_ids

__all__ = [
    "AbortEverything",
    "AbortRequest",
    "Action",
    "AdvanceClock",
    "DisconnectClient",
    "Evict",
    "FailStage",
    "Flush",
    "HoldResults",
    "KillStage",
    "Pause",
    "Placed",
    "Press",
    "ReleaseResults",
    "Relieve",
    "Resume",
    "StartRequest",
    "Update",
    "kind_of",
    "parse_placed",
    "target_of",
]


class _Action(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of all actions."""


class StartRequest(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="start"):
    """A greedy request of ``prompt`` tokens; equal ``seed`` gives equal prefixes, ``new`` is its max_new_tokens.

    ``stop`` is a token that ends it. With ``shared`` only so many tokens are those of ``seed``, the others of ``tail``.
    """

    rid: str
    prompt: int
    new: int = 2
    seed: int = 0
    priority: int = 0
    stop: int | None = None
    shared: int = 0
    tail: int = 0

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt."""
        return prompt_ids(self.prompt, self.seed, self.shared, self.tail)


class AbortRequest(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """A client aborts one request by its rid."""

    rid: str


class DisconnectClient(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="disconnect"):
    """A request's client goes away."""

    rid: str


class AbortEverything(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="abort-all"):
    """Somebody aborts everything that is alive."""


class Flush(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="flush"):
    """A flush of the cache; with ``timeout_s`` it waits for its chance."""

    timeout_s: float | None = None


class Update(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="update"):
    """The weights become the embedded ones of ``seed``; with ``timeout_s`` the update waits for its chance."""

    seed: int = 1
    timeout_s: float | None = None


class Pause(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="pause"):
    """Generation is paused."""

    mode: PauseMode = PauseMode.RETRACT


class Resume(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="continue"):
    """Generation goes on."""


class HoldResults(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="hold"):
    """Results stay away from this step on."""


class ReleaseResults(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="release"):
    """``count`` held results may come, oldest first; without a count all of them, and nothing is held any more."""

    count: int | None = None


class Press(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="pressure"):
    """An operator keeps memory from requests until so many pages or rows are free, or tree nodes unlocked."""

    pages: int | None = None
    rows: int | None = None
    unlocked: int | None = None


class Relieve(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="relieve"):
    """The operator gives everything back."""


class Evict(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="evict"):
    """``pages`` pages of unlocked cache are evicted, least recently used first; without a number all."""

    pages: int | None = None


class FailStage(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="fail"):
    """The next microbatch fails in this stage; the engine goes on."""

    stage: int = 0


class KillStage(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="kill"):
    """A stage dies; nothing in flight comes back."""

    stage: int = 0


class AdvanceClock(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="advance"):
    """Virtual time moves."""

    seconds: float


Action = (
    StartRequest
    | AbortRequest
    | DisconnectClient
    | AbortEverything
    | Flush
    | Update
    | Pause
    | Resume
    | HoldResults
    | ReleaseResults
    | Press
    | Relieve
    | Evict
    | FailStage
    | KillStage
    | AdvanceClock
)


class Placed(msgspec.Struct, frozen=True):
    """An action and the step, from 1 on, that sees it, behind the completions of that step."""

    step: int
    action: Action

    def __str__(self) -> str:
        values = msgspec.to_builtins(self.action)
        rid = values.pop("rid", None)
        words = [str(self.step), values.pop("type")] + ([] if rid is None else [rid])
        return " ".join(words + [f"{name}={value}" for name, value in values.items()])


def parse_placed(text: str) -> Placed:
    """The inverse of ``str(placed)``. Raises ScriptDefinitionError that names the clause."""
    step, _, rest = text.strip().partition(" ")
    kind, *words = rest.split()[:1] + rest.split()[1:] or [""]
    values: dict[str, Any] = {"type": kind}
    for word in words:
        name, separator, value = word.partition("=")
        values["rid" if not separator else name] = value if separator else name
    try:
        placed = Placed(int(step), msgspec.convert(values, Action, strict=False))
    except (ValueError, msgspec.ValidationError) as exc:
        raise ScriptDefinitionError(
            f"a clause of a schedule is 'STEP KIND [RID] [name=value ...]', got {text.strip()!r} ({exc}); "
            "write for instance '4 flush' or '1 start a prompt=125 new=2'"
        ) from exc
    if placed.step < 1:
        raise ScriptDefinitionError(f"the steps of a schedule count from 1, got {text.strip()!r}")
    return placed


def kind_of(action: Action) -> str:
    """One word for what an action does: its tag, with the mode or the deferral that makes it another thing."""
    kind = str(type(action).__struct_config__.tag)
    if isinstance(action, Pause):
        return f"pause-{action.mode.value}"
    if isinstance(action, Press):
        given = [name for name in action.__struct_fields__ if getattr(action, name) is not None]
        return "-".join([kind, *given])
    return f"{kind}-later" if isinstance(action, Flush | Update) and action.timeout_s is not None else kind


def target_of(action: Action) -> str | None:
    """The rid that an action aims at, if it aims at one."""
    return action.rid if isinstance(action, AbortRequest | DisconnectClient) else None
