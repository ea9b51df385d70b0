"""What a script can look at: the queries of ``t``. They change nothing and return copies, but for the live objects."""

from __future__ import annotations

from engine.clock import VirtualClock
from engine.messages import EngineStats
from engine.pipeline.wire import StageView
from engine.plan import ForwardMode
from engine.scheduler import Request, Scheduler, StepRecord
from scripted.errors import BadCall
from scripted.rig.rig import Rig
from scripted.script.state import State, take_state

__all__ = ["Queries"]


class Queries:
    """The queries of ``t``."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    @property
    def scheduler(self) -> Scheduler:
        """The live scheduler: there is no wall between a script and the engine."""
        return self._rig.scheduler

    @property
    def clock(self) -> VirtualClock:
        """Virtual time; ``clock.advance(seconds)`` is the only thing that moves it."""
        return self._rig.clock

    @property
    def state(self) -> State:
        """A frozen snapshot of the engine as it is now."""
        return take_state(self.scheduler, self._rig.results.due_steps())

    @property
    def history(self) -> tuple[StepRecord, ...]:
        """Every step of this script so far."""
        return tuple(self._rig.history.records)

    @property
    def last_batch_forward_mode(self) -> str | None:
        """``prefill``, ``decode`` or ``mixed``: what the last launched microbatch computes; None before the first."""
        microbatch = self.scheduler.last_microbatch
        return None if microbatch is None else microbatch.mode.value

    @property
    def forward_ct(self) -> int:
        """Microbatches launched since the script began."""
        return self.scheduler.counters.forward_ct

    @property
    def is_fully_idle(self) -> bool:
        """Nothing in flight, no request owns memory, nothing waits."""
        return self.scheduler.is_fully_idle

    def find_req_by_rid(self, rid: str) -> Request | None:
        """The scheduler's live object of this rid, or None."""
        return self.scheduler.find_request(rid)

    def is_finished(self, rid: str) -> bool:
        """True when the last life of this rid has ended; False for a rid that never was."""
        handle = self._rig.handles.latest(rid)
        return handle is not None and handle.finished

    def is_chunking(self, rid: str) -> bool:
        """True while this is the one partly prefilled request."""
        chunked = self.scheduler.books.chunked
        return chunked is not None and chunked.rid == rid

    def status(self, rid: str) -> str:
        """``waiting``, ``running``, ``finished``, ``aborted``, or ``unknown`` for a rid that never was."""
        handle = self._rig.handles.latest(rid)
        return "unknown" if handle is None else handle.status

    def remaining_prompt_tokens(self, rid: str) -> int:
        """Tokens of this request that must still be launched before it can decode."""
        handle = self._rig.handles.latest(rid)
        return 0 if handle is None else handle.remaining_prompt_tokens

    def list_active_reqs(self) -> list[Request]:
        """The scheduler's live objects of all requests that have not ended."""
        return list(self.scheduler.books.requests.values())

    def batch_composition(self) -> dict[str, list[str]]:
        """Rids by what they are part of: ``prefill`` and ``decode`` of the last microbatch, ``chunked``, ``running``.

        ``prefill`` leaves out the partly prefilled request, which is under ``chunked``, so the first three are
        disjoint.
        """
        books, microbatch = self.scheduler.books, self.scheduler.last_microbatch
        chunked = [books.chunked.rid] if books.chunked is not None else []
        last = [] if microbatch is None else [rid for rid in microbatch.rids if rid not in chunked]
        mode = None if microbatch is None else microbatch.mode
        decoding = (
            set(last) if mode is ForwardMode.DECODE else set(books.running) if mode is ForwardMode.MIXED else set()
        )
        return {
            "prefill": [rid for rid in last if rid not in decoding],
            "decode": [rid for rid in last if rid in decoding],
            "chunked": chunked,
            "running": list(books.running),
        }

    def engine_stats(self) -> EngineStats:
        """The scheduler's counters."""
        return self.scheduler.stats()

    def get_all_node_hit_counts(self) -> dict[int, int]:
        """The hit count of every node of the prefix tree, by node id."""
        return {node.id: node.hit_count for node in self.scheduler.memory.tree.nodes()}

    def get_all_node_lock_refs(self) -> dict[int, int]:
        """The lock refs of every node of the prefix tree, by node id."""
        return {node.id: node.lock_ref for node in self.scheduler.memory.tree.nodes()}

    def stage(self, i: int) -> StageView:
        """A stage's own view of what it has computed: last microbatch, counts, a digest of what its KV slots hold."""
        self._check_stage(i)
        return self._rig.world.describe_stage(i)

    def _check_stage(self, i: int) -> None:
        stages = self.scheduler.limits.pp_size
        if not 0 <= i < stages:
            raise BadCall(f"stage must be 0 to {stages - 1}, got {i}")
