"""Checks that a checkpoint has the whole state: the restored engine caches, evicts, hits and continues alike.

The engine itself is only read; all actions happen on a restored copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from engine.core.audit import audit
from engine.core.checkpoint import Checkpoint
from engine.core.errors import EngineError
from engine.core.instruments import SilentDigests
from engine.core.limits import Limits
from engine.core.messages import Event, Generate, SamplingParams, salt_key
from engine.core.recording.checkpoint import checkpoint_of, restored
from engine.core.scheduler import Scheduler, StepResult
from scripted.core.violation import Violation

_RID: Final = "restored"
# The most pages to evict one by one, each of which costs an audit.
_PAGES_LIMIT: Final = 64


def check_checkpoint(scheduler: Scheduler, *, is_due: bool = True) -> None:
    """Check that an engine at rest makes a checkpoint exactly if one ``is_due``, and restore it.

    The caller decides, because only the engine knows whether an operator reserves memory. Raises Violation.
    """
    checkpoint = checkpoint_of(scheduler)
    if (checkpoint is not None) is not (is_due and not scheduler.pressure.is_on):
        raise Violation(f"a checkpoint is due: {is_due}, and the engine at rest makes {checkpoint}")
    if checkpoint is None:
        return
    try:
        twin = restored(scheduler.limits, checkpoint)
        if checkpoint_of(twin) != checkpoint:
            raise Violation(f"the checkpoint {checkpoint} is restored to what has the checkpoint {checkpoint_of(twin)}")
        if not checkpoint.tree.runs:
            return
        _check_hit(scheduler.limits, checkpoint)
        _check_eviction(twin)
    except (EngineError, AssertionError) as exc:
        raise Violation(f"an engine that is restored from {checkpoint} fails: {exc}") from exc


class Twin:
    """An engine restored from another one's latest checkpoint, which gets the same events and must do the same.

    It reveals an omission of a checkpoint when it matters: when a grammar is ready, a prefix evicted, a LoRA used.
    """

    def __init__(self) -> None:
        self._twin: Scheduler | None = None

    def follow(self, events: Sequence[Event], result: StepResult, scheduler: Scheduler) -> None:
        """Take the engine's last step, and restore the twin if the engine is at rest. Raises Violation.

        An engine that was replaced or reset begins without a twin.
        """
        twin = self._twin
        if twin is not None and twin.step_number + 1 != scheduler.step_number:
            twin = self._twin = None
        try:
            found = None if twin is None else twin.step(events, scheduler.now)
            if found is not None and found != result:
                raise Violation(f"what was restored from a checkpoint goes on with {found}, the engine with {result}")
            if scheduler.books.in_flight or not (events or result.replies):
                return
            # Counted independently: an engine that wrongly considers itself at rest must fail by its behaviour.
            checkpoint = None if scheduler.books.live() else checkpoint_of(scheduler)
            if checkpoint is not None:
                self._twin = restored(scheduler.limits, checkpoint)
                self._twin.digests = SilentDigests()
        except (EngineError, AssertionError) as exc:
            raise Violation(f"what was restored from a checkpoint fails: {exc}") from exc


def _check_hit(limits: Limits, checkpoint: Checkpoint) -> None:
    """Send a request for the run cached last: it must hit as much as the lookup promises.

    It uses the run's LoRA, if it has one. KV of a LoRA that is not resident is never hit.
    """
    checkpoint, salts = _with_known_salts(checkpoint)
    twin, runs = restored(limits, checkpoint), {run.id: run for run in checkpoint.tree.runs}
    names = {0: None} | {one.version: one.name for one in checkpoint.loras if one.version}
    of_use = [run for run in checkpoint.tree.runs if run.kv_key[0] in names]
    if not of_use:
        return
    run, ids = of_use[-1], tuple[int, ...]()
    version, salt = run.kv_key
    while True:
        ids = run.tokens + ids
        if run.parent not in runs:
            break
        run = runs[run.parent]
    prompt = (*ids, 1)
    hit = twin.memory.cached_tokens(prompt, kv_key=run.kv_key)
    if twin.books.paused is not None or limits.why_never_fits(len(prompt), 1) is not None:
        return
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    message = Generate(rid=_RID, prompt_ids=prompt, sampling=sampling, lora=names[version], cache_salt=salts[salt])
    result = twin.step([message], twin.now)
    start = None if result.microbatch is None else result.microbatch.segments[0].start
    if start != hit or (not limits.window_tokens and hit != len(ids)):
        raise Violation(f"of {len(ids)} cached tokens, {hit} are found in what was restored, and {start} are hit")
    audit(twin)


def _with_known_salts(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[int, str | None]]:
    """Return the checkpoint with other salts, and these by key, because a salt cannot be recovered from its key."""
    salts: dict[int, str | None] = {0: None}
    runs = []
    for run in checkpoint.tree.runs:
        version, key = run.kv_key
        salt = str(key) if key else None
        salts[salt_key(salt)] = salt
        runs.append(msgspec.structs.replace(run, kv_key=(version, salt_key(salt))))
    tree = msgspec.structs.replace(checkpoint.tree, runs=tuple(runs))
    return msgspec.structs.replace(checkpoint, tree=tree), salts


def _check_eviction(twin: Scheduler) -> None:
    """Evict page by page, least recently used leaf first, until nothing is cached."""
    memory = twin.memory
    for _ in range(min(memory.pages.cached, _PAGES_LIMIT)):
        leaves = (node for node in memory.tree.nodes() if not node.children)
        first = min(leaves, key=lambda node: (node.last_used, node.id))
        before = len(first.pages)
        if memory.tree.evict(1) != 1 or len(first.pages) != before - 1:
            raise Violation(f"of what was restored, {first} was used longest ago, but is not evicted")
        audit(twin)
    memory.tree.evict(memory.pages.cached)
    audit(twin)
    if memory.pages.cached:
        raise Violation(f"what was restored cannot be evicted: {list(memory.tree.nodes())}")
