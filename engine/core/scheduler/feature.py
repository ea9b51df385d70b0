"""A feature of the scheduler as one slice: its state, its rules at each point of a step, its checks and its counters.

LoRA, grammars, drafts, window layers, the host tier, transfers, sleep, profiles and prompt logprobs are one file and
one class each. The core calls the hooks of features and knows no feature by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from engine.core.checkpoint import Checkpoint, CheckpointParts
from engine.core.messages import Completion, Generate, Refusal
from engine.core.plan import Control, Copies, SegmentShare
from engine.core.scheduler.books import Launched
from engine.core.scheduler.ports import StepShare
from engine.core.scheduler.request import Request


class Feature:
    """The hooks of a feature, in the order of a request's life. Each has a neutral default.

    A hook that a feature does not define is never called for it, and no hook is called for a feature that is not
    ``is_on``. ``control`` is the kind of microbatch without tokens that the feature launches, if any.
    """

    is_on: bool = True
    control: ClassVar[type[Control] | None] = None
    # The time in seconds at which the feature needs a step even without events. An attribute, because every step reads
    # it.
    deadline: float | None = None

    # -- messages --

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """Return the handlers of the events that the feature takes, also while it is off."""
        return {}

    # -- admission --

    def refusal_of(self, message: Generate) -> Refusal | None:
        """Return why a request may not enter the queue; None if it may. Called even while the feature is off."""
        del message
        return None

    def enter(self, request: Request, message: Generate) -> None:
        """Record what the feature needs from a request that is about to enter the queue."""

    # -- planning --

    @property
    def is_due(self) -> bool:
        """Return whether the feature decides the next microbatch: it launches its own, or none."""
        return True

    def launch(self, number: int) -> Control | None:
        """Return the microbatch that the feature launches now, under this number; None if it must wait."""
        del number
        return None

    @property
    def has_more(self) -> bool:
        """Return whether the feature could launch another microbatch at once."""
        return False

    def startable(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Return the requests of a queue that may start and may be overtaken, in its order."""
        return waiting

    def holds_back(self, request: Request) -> bool:
        """Return whether a waiting request cannot start yet. It is passed over, which counts as overtaking it."""
        del request
        return False

    def start(self, request: Request) -> None:
        """Act on a request that has just received its memory. It may be moved to a place other than ``CHUNKED``."""

    def bound_prompts(self, room: int, decodes: int) -> int:
        """Return the maximum prompt tokens beside this many decodes, at most ``room``, while requests run."""
        del decodes
        return room

    def draft(self, request: Request, *, spare_pages: int) -> tuple[int, ...]:
        """Return guesses of a decoding request's next tokens, with pages for them; ``spare_pages`` stay free."""
        del request, spare_pages
        return ()

    def fill(self, request: Request, first_page: int, share: SegmentShare) -> None:
        """Add the feature's fields to a segment that carries the request's pages from index ``first_page`` on."""

    def fill_prompt(self, request: Request, start: int, end: int, share: SegmentShare) -> None:
        """Add the feature's fields to a segment with the part of a prompt from ``start`` to ``end``."""

    def copies(self) -> Copies | None:
        """Return the copies for the forward pass that is launched now; None if none are due."""

    # -- landing --

    def land(self, launched: Launched, *, failed: bool) -> None:
        """Act on a microbatch that is back, before its result is read."""

    def finish(self, error: str | None) -> None:
        """Act on the end of the feature's oldest ``control``: all stages have carried it out, or with ``error`` none
        has.
        """

    def take_prompts(self, launched: Launched, completion: Completion) -> None:
        """Take the feature's part of the result of a microbatch with prompts, before its tokens."""

    def take_result(self, launched: Launched, completion: Completion) -> None:
        """Take the feature's part of a result, before its tokens are given to the requests."""

    def confirm(self, request: Request, tokens: int) -> None:
        """Act on a part of a prompt that has come back: the KV of the first ``tokens`` is confirmed."""

    def verify(self, request: Request, drafts: int, held: int) -> None:
        """Act on the verification of a request's drafts, of which the first ``held`` were right."""

    def after_result(self, launched: Launched) -> None:
        """Act after the requests have taken all tokens of a result."""

    def flush(self) -> None:
        """Act on a flush of the cache."""

    def change_weights(self) -> None:
        """Act on a change of the stages' weights."""

    # -- the end of a request --

    def call_back(self, request: Request) -> None:
        """Act on the retraction of a request in flight, which is requeued once nothing with it is in flight."""

    def retract(self, request: Request) -> None:
        """Act on a request that goes back to the queue and has lost its memory."""

    def end(self, request: Request) -> None:
        """Act on the end of a request, which may still be in flight."""

    def forget(self, request: Request) -> None:
        """Drop the state of a request that is gone: it has ended, and nothing with it is in flight."""

    def lose_pipeline(self) -> None:
        """Act on the loss of the stages: nothing in flight will come back."""

    def give_up(self, why: str) -> None:
        """Refuse every open call: nothing more can be launched."""
        del why

    # -- the step --

    def on_time(self, now: float) -> None:
        """Act on a deadline. Called in every step while ``deadline`` is set, also before that time."""

    def report(self, share: StepShare) -> bool:
        """Add the feature's fields to the result of a step. Returns True if they may let the next step do more."""
        del share
        return False

    # -- statistics, audit, checkpoint --

    def sizes(self) -> tuple[int, ...]:
        """Return the sizes that the digest of each step includes."""
        return ()

    def stats(self) -> dict[str, int]:
        """Return the feature's fields of ``EngineStats`` except counters; they have their defaults while it is off."""
        return {}

    @property
    def is_at_rest(self) -> bool:
        """Return whether the feature has no open work, so that a checkpoint can be taken."""
        return True

    def in_flight(self) -> Iterable[Request]:
        """Return the request of each order that the stages have not completed, once for each order."""
        return ()

    def check(self, live: Sequence[Request]) -> None:
        """Raise IntegrityError if the feature's state does not match the live requests or the memory."""

    def snapshot(self, parts: CheckpointParts) -> None:
        """Add the feature's fields to a checkpoint. Only for a scheduler that is idle and at rest."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the state of a checkpoint into a new feature."""


class Hooks:
    """The features that define each hook of a step, in their order. The others are not called."""

    enter: tuple[Feature, ...] = ()
    launch: tuple[Feature, ...] = ()
    has_more: tuple[Feature, ...] = ()
    startable: tuple[Feature, ...] = ()
    holds_back: tuple[Feature, ...] = ()
    start: tuple[Feature, ...] = ()
    bound_prompts: tuple[Feature, ...] = ()
    draft: tuple[Feature, ...] = ()
    fill: tuple[Feature, ...] = ()
    fill_prompt: tuple[Feature, ...] = ()
    copies: tuple[Feature, ...] = ()
    land: tuple[Feature, ...] = ()
    take_prompts: tuple[Feature, ...] = ()
    take_result: tuple[Feature, ...] = ()
    confirm: tuple[Feature, ...] = ()
    verify: tuple[Feature, ...] = ()
    after_result: tuple[Feature, ...] = ()
    flush: tuple[Feature, ...] = ()
    change_weights: tuple[Feature, ...] = ()
    call_back: tuple[Feature, ...] = ()
    retract: tuple[Feature, ...] = ()
    end: tuple[Feature, ...] = ()
    forget: tuple[Feature, ...] = ()
    lose_pipeline: tuple[Feature, ...] = ()
    give_up: tuple[Feature, ...] = ()
    on_time: tuple[Feature, ...] = ()
    report: tuple[Feature, ...] = ()
    sizes: tuple[Feature, ...] = ()
    in_flight: tuple[Feature, ...] = ()
    stats: tuple[Feature, ...] = ()
    check: tuple[Feature, ...] = ()

    def __init__(self, features: Sequence[Feature] = ()) -> None:
        active = [feature for feature in features if feature.is_on]
        for hook, places in _places_of(tuple(map(type, active))):
            setattr(self, hook, tuple(map(active.__getitem__, places)))


@functools.cache
def _places_of(kinds: tuple[type[Feature], ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the classes that define each hook, by its name. Cached, because a search creates many schedulers."""
    found = {
        hook: tuple([place for place, kind in enumerate(kinds) if getattr(kind, hook) is not getattr(Feature, hook)])
        for hook in Hooks.__annotations__
    }
    return tuple([(hook, places) for hook, places in found.items() if places])


# For a scheduler without features yet.
NO_HOOKS: Final = Hooks()
