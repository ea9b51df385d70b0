"""``t`` on the engine: queries that only this scheduler has, and verbs that are not actions of schedules.

It lives in the scheduler's process, inside the gate, and sees the live scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from engine.core.routing.cache_index import CacheMirror
from engine.core.scheduler import Request
from engine.core.stats import EngineStats
from engine.pipeline.wire import StageView
from scripted.core.errors import BadCall
from scripted.script.context import BaseContext, with_verbs
from scripted.script.values import ListedList
from scripted.script.wait import Steps, Wait
from scripted_lockstep.actions import all_actions
from scripted_lockstep.script.fleet import Fleet
from scripted_lockstep.script.ineffective_actions import count_ineffective_actions

# A longer delay would look like a hung process.
MAX_DELAY_S: Final = 2.0


@with_verbs(all_actions())
class ScriptContext(BaseContext):
    """``t``: the verbs, waits and queries of a script on the engine."""

    # -- looking --

    def find_req_by_rid(self, rid: str) -> Request | None:
        """Return the scheduler's live object of this rid; None before its first step, after its end, or without one."""
        self._last_life("find_req_by_rid", rid)
        found: Request | None = self.scheduler.find_request(rid)
        return found

    def remaining_prompt_tokens(self, rid: str) -> int:
        """Count the tokens of this request that must still be launched before it can decode.

        Raises BadCall for a rid that was never used.
        """
        left: int = self._known("remaining_prompt_tokens", rid).remaining_prompt_tokens
        return left

    def list_active_reqs(self) -> list[Request]:
        """Return the live objects of all requests that have not ended; a request that has only arrived has none yet."""
        return ListedList(self.scheduler.books.requests.values())

    @property
    def forward_ct(self) -> int:
        """The number of microbatches launched since the script began."""
        count: int = self.scheduler.counters.forward_ct
        return count

    def predicted_chunk(self, prefix_tokens: int) -> int:
        """Return the tokens of a long prompt's next chunk after this prefix, in its own microbatch."""
        if not isinstance(prefix_tokens, int) or isinstance(prefix_tokens, bool) or prefix_tokens < 0:
            raise BadCall(f"t.predicted_chunk(prefix_tokens) takes a number of tokens >= 0, got {prefix_tokens!r}")
        limits, sizes = self.scheduler.limits, self.scheduler.planner.chunk_sizes
        budget: int = limits.prefill_budget_tokens
        return budget if sizes is None else sizes.part(prefix_tokens, limits.context_length, room=budget)

    def engine_stats(self) -> EngineStats:
        """Return the scheduler's counters; arrived requests count as waiting."""
        stats: EngineStats = self.scheduler.stats()
        return msgspec.structs.replace(stats, waiting=stats.waiting + len(self.run.arrived_requests))

    def get_all_node_hit_counts(self) -> dict[int, int]:
        """Return the hit count of every node of the prefix tree, by node id."""
        return {node.id: node.hit_count for node in self.scheduler.memory.tree.nodes()}

    def get_all_node_lock_refs(self) -> dict[int, int]:
        """Return the lock refs of every node of the prefix tree, by node id."""
        return {node.id: node.lock_ref for node in self.scheduler.memory.tree.nodes()}

    def host_tokens(self, prompt_ids: Sequence[int]) -> int:
        """Count the tokens of a prompt that a request would load from the host now, after its hit in the tree."""
        limits, memory = self.scheduler.limits, self.scheduler.memory
        if memory.host is None:
            raise BadCall("t.host_tokens(prompt_ids) needs a second tier; write EngineConfig(host_kv_tokens=...)")
        ids = _token_ids("host_tokens", prompt_ids)
        whole = (len(ids) - 1) // limits.page_size * limits.page_size
        tokens: int = memory.cached_tokens(ids) - min(memory.tree.match_length(ids), whole)
        return tokens

    def told_tokens(self, prompt_ids: Sequence[int]) -> int:
        """Count the cached tokens of a prompt according to the engine's KV events, in full pages."""
        limits = self.scheduler.limits
        if not limits.kv_events:
            raise BadCall("t.told_tokens(prompt_ids) needs KV events; write EngineConfig(kv_events=True)")
        mirror: CacheMirror = self.run.mirror
        page_size: int = limits.page_size
        return mirror.cached_pages(_token_ids("told_tokens", prompt_ids)) * page_size

    def stage(self, i: int) -> StageView:
        """Return a stage's own view: last microbatch, counts, a digest of its KV slots."""
        self.check_live_stage("stage", i)
        view: StageView = self.run.world.pipeline.describe()[i]
        return view

    # -- verbs --

    def engines(self, *names: str) -> Fleet:
        """Start a fleet beside this engine, with its configuration: ``p...`` prefill, ``d...`` decode, ``e...`` do
        both.

        ``fleet["d0"]`` is the ``t`` of one engine. Each step of this script is one step of each engine. Only once in a
        script.
        """
        if self.run.fleet is not None:
            raise BadCall("t.engines(...) was called before; a script has one fleet, so name all engines at once")
        if not names or len(set(names)) != len(names):
            raise BadCall(f"t.engines(...) takes different names such as 'p0', 'd0', got {names!r}")
        if self.run.new_fleet is None:
            tier = self.run.world.tier
            raise BadCall(f"t.engines(...) needs simulated engines, not those of tier {tier}; write tiers=('sim',)")
        fleet: Fleet = self.run.new_fleet(names, self.run.clock)
        self.run.fleet = fleet
        return fleet

    def warmup_radix(self, prompt_ids: Sequence[int]) -> Wait:
        """Put a prefix into the tree by a real request; use as ``yield from``."""
        return self.wait_for("warmup_radix(...)", self._warmup_radix(prompt_ids))

    def kill_scheduler(self) -> None:
        """Kill the scheduler's process; returns when its clients got their errors. Only in the server tier, and only
        once.

        No step runs after it, so a script cannot wait, but it can still read its clients' replies. Raises Violation
        unless every open stream ends within two seconds with an error that names the scheduler.
        """
        if self.run.is_dead:
            raise BadCall("kill_scheduler() was called before; nothing of the scheduler is left to kill")
        self.run.kill_scheduler()

    def slow_link(self, i: int, delay_s: float = 0.05) -> None:
        """Make every byte from and to a stage take ``delay_s`` longer, in real seconds. Only for placed stages.

        The steps do not change, because they wait for due results.
        """
        self.check_live_stage("slow_link", i)
        if not isinstance(delay_s, (int, float)) or isinstance(delay_s, bool) or not 0 < delay_s <= MAX_DELAY_S:
            raise BadCall(f"slow_link() takes delay_s in real seconds, 0 < delay_s <= {MAX_DELAY_S}, got {delay_s!r}")
        self.run.slow_link(i, float(delay_s))

    def cut_link(self, i: int) -> None:
        """Cut a stage off: no byte gets through, but its connections stay open. Only for placed stages.

        Nothing completes until ``heal_link``, or until ``await_loss`` has seen the heartbeats notice it.
        """
        self.check_live_stage("cut_link", i)
        self.run.cut_link(i)

    def heal_link(self, i: int) -> None:
        """Let everything through again, held bytes first; also ends a delay."""
        self.check_stage(i)
        self.run.heal_link(i)

    def await_loss(self, i: int) -> None:
        """Wait, in real time, until the heartbeats have noticed a cut. The server is not reused after this script."""
        self.check_live_stage("await_loss", i)
        if i not in self.run.results.cut:
            raise BadCall(f"await_loss() takes a stage whose link is cut, that of stage {i} is not; use cut_link({i})")
        self.run.await_loss(i)

    def lose_node(self, i: int) -> None:
        """Lose a stage's node: stage and agent are killed and their connections reset. Only for placed stages.

        Returns when the loss is known. Nothing in flight comes back, and the server is not reused.
        """
        self.check_live_stage("lose_node", i)
        self.run.lose_node(i)

    def check_stage(self, i: int) -> None:
        """Raise BadCall for a number that is not a stage; for verbs."""
        stages = self.scheduler.limits.pp_size
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < stages:
            raise BadCall(f"stage must be 0 to {stages - 1} with pp_size={stages}, got {i!r}")

    def check_live_stage(self, verb: str, i: int) -> None:
        """Raise BadCall for a stage that does not run; for verbs."""
        self.check_stage(i)
        failure = self.run.failure
        if failure is not None or self.run.is_dead:
            dead = "the scheduler" if failure is None else failure.process
            raise BadCall(
                f"t.{verb}({i}) needs stages that run, and {dead} has died, which ends all of them; "
                "ask what the clients were told"
            )

    # -- inside --

    def loose_ends(self) -> dict[str, int]:
        """Also count the ``fail_next_grammar`` calls that had no effect."""
        left = self._ineffective.pop("failures of a grammar that none met", 0) - self.run.grammars.failed
        if left > 0:
            self._ineffective["failures of a grammar that none met"] = left
        ends = super().loose_ends() | count_ineffective_actions(self.run)
        return ends if self.run.fleet is None else self.run.fleet.loose_ends(ends)

    def _warmup_radix(self, prompt_ids: Sequence[int]) -> Steps:
        r = self.start_req(prompt_ids=prompt_ids, max_new_tokens=1)
        yield from self.run_until_finished(r)
        yield from self.run_until_idle()


def _token_ids(call: str, prompt_ids: Sequence[int]) -> list[int]:
    if isinstance(prompt_ids, str) or not all(isinstance(token, int) for token in prompt_ids):
        raise BadCall(f"t.{call}(prompt_ids) takes token ids, got {prompt_ids!r}")
    return list(prompt_ids)
