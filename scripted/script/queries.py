"""What a script can look at: the queries of ``t``. They change nothing and return copies, but for the live objects."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.messages import EngineStats
from engine.pipeline.wire import StageView
from engine.plan import ForwardMode, Microbatch
from engine.scheduler import Request, Scheduler, StepRecord
from scripted.core.phrases import nearest
from scripted.errors import BadCall
from scripted.rig.handle import RequestHandle, status_of
from scripted.rig.rig import Rig
from scripted.rig.values import Listed, ListedList, Named
from scripted.script.asked import Asked
from scripted.script.clock import ScriptClock
from scripted.script.state import State, mode_of, take_state

__all__ = ["Queries"]


class Queries(Asked):
    """The queries of ``t``."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._clock = ScriptClock(rig.clock)
        # What was asked about a rid that never was, and had an answer all the same.
        self._asked_in_vain = 0

    @property
    def scheduler(self) -> Scheduler:
        """The live scheduler: there is no wall between a script and the engine."""
        return self._rig.scheduler

    @property
    def clock(self) -> ScriptClock:
        """Virtual time; ``clock.advance(seconds)`` is the only thing that moves it."""
        return self._clock

    @property
    def state(self) -> State:
        """A frozen snapshot of the engine as it is now."""
        return take_state(self._rig)

    @property
    def history(self) -> tuple[StepRecord, ...]:
        """Every step of this script so far."""
        return Listed(self._rig.history.records)

    @property
    def last_batch_forward_mode(self) -> str | None:
        """``prefill``, ``decode`` or ``mixed``: what the last launched microbatch computes.

        None when there is none: before the first, and from the step on after the one that got its results.
        """
        microbatch = self._last_microbatch()
        return None if microbatch is None else mode_of(microbatch.mode)

    @property
    def forward_ct(self) -> int:
        """Microbatches launched since the script began."""
        return self.scheduler.counters.forward_ct

    @property
    def is_fully_idle(self) -> bool:
        """True when nothing is in flight, owns memory or waits, and nothing has arrived that no step has seen."""
        return self.scheduler.is_fully_idle and not self._rig.has_unseen

    def find_req_by_rid(self, rid: str) -> Request | None:
        """The scheduler's live object of this rid, or None: before its first step, after its end, or without one."""
        self._last_life("find_req_by_rid", rid)
        return self.scheduler.find_request(rid)

    def is_finished(self, rid: str) -> bool:
        """True when the last life of this rid has ended. Raises BadCall for a rid that never was."""
        return self._known("is_finished", rid).finished

    def is_chunking(self, rid: str) -> bool:
        """True while this is the one partly prefilled request. Raises BadCall for a rid that never was."""
        return self._known("is_chunking", rid).is_chunking

    def status(self, rid: str) -> str:
        """``waiting``, ``running``, ``finished``, ``aborted``, or ``unknown`` for a rid that never was."""
        handle = self._last_life("status", rid)
        return status_of("unknown") if handle is None else handle.status

    def remaining_prompt_tokens(self, rid: str) -> int:
        """Tokens of this request that must still be launched before it can decode.

        Raises BadCall for a rid that never was.
        """
        return self._known("remaining_prompt_tokens", rid).remaining_prompt_tokens

    def list_active_reqs(self) -> list[Request]:
        """The scheduler's live objects of all requests that have not ended; one that has only arrived has none yet."""
        return ListedList(self.scheduler.books.requests.values())

    def predicted_chunk(self, prefix_tokens: int) -> int:
        """How large the next part of a long prompt is after this prefix, in a microbatch of its own."""
        if not isinstance(prefix_tokens, int) or isinstance(prefix_tokens, bool) or prefix_tokens < 0:
            raise BadCall(f"t.predicted_chunk(prefix_tokens) takes a number of tokens >= 0, got {prefix_tokens!r}")
        limits, sizes = self.scheduler.limits, self.scheduler.planner.chunk_sizes
        budget = limits.prefill_budget_tokens
        return budget if sizes is None else sizes.part(prefix_tokens, limits.context_length, room=budget)

    def batch_composition(self) -> dict[str, list[str]]:
        """Rids by what they are part of: ``prefill`` and ``decode`` of the last microbatch, ``chunked``, ``running``.

        The last microbatch counts while it is in flight and in the step that gets its results. ``prefill`` leaves out
        the partly prefilled request, which is under ``chunked``, so the first three are disjoint.
        """
        books, microbatch = self.scheduler.books, self._last_microbatch()
        chunked: list[str] = [books.chunked.rid] if books.chunked is not None else []
        last = [] if microbatch is None else [rid for rid in microbatch.rids if rid not in chunked]
        mode = None if microbatch is None else microbatch.mode
        decoding = (
            set(last) if mode is ForwardMode.DECODE else set(books.running) if mode is ForwardMode.MIXED else set()
        )
        parts: dict[str, list[str]] = {
            "prefill": ListedList(rid for rid in last if rid not in decoding),
            "decode": ListedList(rid for rid in last if rid in decoding),
            "chunked": ListedList(chunked),
            "running": ListedList(books.running),
        }
        return Named("t.batch_composition()", parts)

    def engine_stats(self) -> EngineStats:
        """The scheduler's counters; what has arrived waits."""
        stats = self.scheduler.stats()
        return msgspec.structs.replace(stats, waiting=stats.waiting + len(self._rig.arrived_requests))

    def get_all_node_hit_counts(self) -> dict[int, int]:
        """The hit count of every node of the prefix tree, by node id."""
        return {node.id: node.hit_count for node in self.scheduler.memory.tree.nodes()}

    def get_all_node_lock_refs(self) -> dict[int, int]:
        """The lock refs of every node of the prefix tree, by node id."""
        return {node.id: node.lock_ref for node in self.scheduler.memory.tree.nodes()}

    def host_tokens(self, prompt_ids: Sequence[int]) -> int:
        """Tokens of a prompt that a request would load from the host now: those after what the tree has."""
        limits, memory = self.scheduler.limits, self.scheduler.memory
        if memory.host is None:
            raise BadCall("t.host_tokens(prompt_ids) needs a second tier; write EngineConfig(host_kv_tokens=...)")
        if isinstance(prompt_ids, str) or not all(isinstance(token, int) for token in prompt_ids):
            raise BadCall(f"t.host_tokens(prompt_ids) takes token ids, got {prompt_ids!r}")
        ids = list(prompt_ids)
        return memory.cached_tokens(ids) - min(
            memory.tree.match_length(ids), (len(ids) - 1) // limits.page_size * limits.page_size
        )

    def stage(self, i: int) -> StageView:
        """A stage's own view of what it has computed: last microbatch, counts, a digest of what its KV slots hold."""
        self._check_live_stage("stage", i)
        return self._rig.world.describe_stage(i)

    # -- inside --

    def _last_microbatch(self) -> Microbatch | None:
        """The microbatch that was launched last, while it is in flight and in the step that gets its results."""
        last = self.scheduler.last_microbatch
        if last is None or last.id in self._rig.landed:
            return last
        return last if last.id in self.scheduler.books.in_flight_ids() else None

    def _last_life(self, query: str, rid: str) -> RequestHandle | None:
        """The handle of a rid's last life; a rid that never was is counted."""
        if not isinstance(rid, str):
            raise BadCall(f"t.{query}() takes a rid, got {rid!r}; write .rid after it, or ask the handle itself")
        handle = self._rig.handles.latest(rid)
        self._asked_in_vain += handle is None
        return handle

    def _known(self, query: str, rid: str) -> RequestHandle:
        handle = self._last_life(query, rid)
        if handle is None:
            known = self._rig.handles.known_rids()
            raise BadCall(
                f"t.{query}({rid!r}) asks about a rid that never was{nearest(rid, known)}; "
                f"the script has started {', '.join(sorted(known)) or 'none'}, and t.status(rid) says 'unknown'"
            )
        return handle

    def _check_stage(self, i: int) -> None:
        stages = self.scheduler.limits.pp_size
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < stages:
            raise BadCall(f"stage must be 0 to {stages - 1} with pp_size={stages}, got {i!r}")

    def _check_live_stage(self, verb: str, i: int) -> None:
        self._check_stage(i)
        failure = self._rig.failure
        if failure is not None or self._rig.is_dead:
            dead = "the scheduler" if failure is None else failure.process
            raise BadCall(
                f"t.{verb}({i}) needs stages that run, and {dead} has died, which ends all of them; "
                "ask what the clients were told"
            )
