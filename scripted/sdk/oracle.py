"""The oracle of an SDK machine: the promises of all schedulers, and the checks of its blocks and counts.

Every request reads its own KV (``pipeline.py``) and gets the tokens that it gets when run alone; at the end nothing is
left behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from scripted.core.account import Life
from scripted.core.oracle import Oracle, Pausing
from scripted.core.violation import Violation
from scripted.sdk.capabilities import Capabilities, Limits, PauseMode
from scripted.sdk.fresh import Fresh
from scripted.sdk.messages import (
    Abort,
    Add,
    Answer,
    Batch,
    BatchFailed,
    BatchResult,
    Event,
    FlushCache,
    Load,
    Pause,
    Refused,
    Reply,
    Resume,
    SdkMachine,
    Share,
    Signal,
    Sleep,
    Stepped,
    Tokens,
    Wake,
)
from scripted.sdk.pipeline import SimulatedRunner


class SdkOracle(Oracle[Event, Stepped, SdkMachine, SimulatedRunner]):
    """Checks a machine from its first step. With ``fresh`` it must end as it began."""

    def __init__(self, limits: Limits, can: Capabilities, fresh: Fresh | None) -> None:
        super().__init__(
            depth=limits.depth,
            batch_requests=limits.batch_requests,
            batch_tokens=limits.batch_tokens,
            prompt_tokens=limits.prompt_tokens,
            context_tokens=limits.context_tokens,
            late_launches=can.late_launches,
            block_size=limits.block_size,
            # Needless preemptions happen while the requests that could give way are in flight, or while a request that
            # cannot grow begins again in each step until another one needs a block.
            most_in_vain=limits.depth if can.whole_leases else limits.block_size + limits.depth + 1,
            ended_take_seats=can.ended_take_seats,
        )
        self._limits = limits
        self._can = can
        self._fresh = fresh
        self._arrivals = 0
        # The pool of each of a request's block tables, one per group of layers.
        self._pools = {0: 0}
        # The tokens between two blocks of each group that keeps states.
        self._state_tokens: tuple[int, ...] = ()
        self._arriving: set[str] = set()
        # Requests whose part of the next step fails, some of which arrive in it.
        self._failing: set[str] = set()
        self._batches: dict[int, Batch] = {}
        # If pauses wait for their turn: the unanswered pause, and the calls queued behind it.
        self._ending: str | None = None
        self._behind: dict[str, Pause | Resume] = {}
        # The call whose answer put the device to sleep; empty if it is awake.
        self.asleep = ""
        # The parts of its memory that the device has released.
        self._released: set[str] = set()
        # The unanswered sleeps that release memory, each with its part; and the unanswered wakes, each with its part
        # and whether it ends the pause: not one that came later.
        self._sleeps: dict[str, str] = {}
        self._wakes: dict[str, tuple[str, bool]] = {}
        # The requests that a pause holds back; no pause aborts them.
        self._held_back: set[Life] = set()
        # The counts that aborts of unknown requests must not change; None in steps without such aborts.
        self._resting: Mapping[str, int] | None = None

    def arrive(self, rid: str) -> int:
        """Note a request for the next step; return how many came before it."""
        self._arriving.add(rid)
        self._arrivals += 1
        return self._arrivals - 1

    def fail(self, rids: Iterable[str]) -> None:
        """Note that these requests may end with an error, those that arrive in the next step too."""
        self.account.fail(rids := tuple(rids))
        self._failing.update(rids)

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        """The batches whose results are not back."""
        return tuple(self._batches.values())

    @property
    def fit_together(self) -> bool:
        """Whether all open requests fit into the blocks, one batch and the image cache; unused cache makes room."""
        return self._fit(self._can.spare_blocks)

    @property
    def fit_hint(self) -> str:
        """The declaration that lets requests which fit exactly wait, as the end of a finding's text; empty if none."""
        more = self._can.spare_blocks + 1
        return (
            "" if self._fit(more) else f"; Capabilities(spare_blocks={more}) says that requests wait for that many more"
        )

    def _fit(self, spare_blocks: int) -> bool:
        size, context, blocks, more = self._limits.block_size, self._limits.context_tokens, 0, 0
        tables = Counter(self._pools.values())
        for life in self.account.live.values():
            tokens = min(len(life.message.prompt_ids) + life.message.max_new_tokens, context)
            own = -(-tokens // size)
            blocks += own + (spare_blocks if life.computed is None else 0)
            # A table of states may have shorter blocks, and one more behind its end for the state after each guess.
            places = [-(-tokens // one) + self._can.speculative_tokens for one in self._state_tokens]
            more += sum([max(0, count - own) for count in places])
        loras = {life.message.lora for life in self.account.live.values()} - {0}
        images = {image.number: image.count for life in self.account.live.values() for image in life.message.images}
        # A session that waits for its client keeps its blocks.
        if any(life.message.session for life in self.account.lives):
            return False
        return (
            self._can.continuous
            and all(tables[pool] * blocks + more <= size for pool, size in enumerate(self._limits.pool_sizes))
            and len(self.account.live) <= self._limits.batch_requests
            and len(loras) <= self._can.loras_together
            and sum(images.values()) <= self._can.images
        )

    def is_live(self, rid: str) -> bool:
        return rid in self.account.live or rid in self._arriving

    @property
    def could_go_on(self) -> Iterable[Life]:
        """The open requests that neither a pause nor a sleep blocks."""
        return () if self.asleep else super().could_go_on

    def waits_for_deadline(self, stepped: Stepped) -> bool:
        return stepped.is_timer

    # -- a step --

    def after_step(
        self, events: Sequence[Event], stepped: Stepped, machine: SdkMachine, pipeline: SimulatedRunner
    ) -> None:
        """Check one step. Raises Violation."""
        if self._resting is not None:
            self._check_nothing_changed(machine)
        self._arriving.clear()
        for event in events:
            self._follow(event)
        self.account.fail(self._failing)
        self._failing.clear()
        self.account.lose_blocks(stepped.preempted)
        for rid, position in pipeline.shortened.items():
            self.account.goes_on(rid, position)
        for load in stepped.loads:
            self._take_load(load)
        for reply in stepped.replies:
            self._hear(reply, pipeline)
        self._end_aborted()
        self.account.check_names()
        if stepped.microbatch is not None:
            self._check_batch(pipeline.understood or stepped.microbatch, pipeline)
            # They compute it again, or end with an error.
            self.account.fail(pipeline.corrupted)
        if pipeline.violation is not None:
            raise pipeline.violation

    def _follow(self, event: Event) -> None:
        if isinstance(event, FlushCache | Pause | Resume | Sleep | Wake):
            self.account.ask(event.call_id, type(event).__name__)
        match event:
            case Add():
                self.account.begin(event, follows=event.goes_on)
                if self._can.pauses_in_turn and self.paused is not None:
                    self._held_back.add(self.account.lives[-1])
                if event.goes_on:
                    # Its session has already begun.
                    self.account.lives[-1].launched = True
                if event.grammar < 0:
                    # Its grammar fails before the request is computed.
                    self.account.fail([event.rid])
            case Signal():
                # Another request may have lost its blocks because of this one.
                self.account.preemptions.gains += 1
            case Abort():
                self.account.abort(event.rid)
            case Pause() | Resume():
                if self._ending is None and not self._behind:
                    self._take_turn(event)
                else:
                    self._behind[event.call_id] = event
            case Sleep():
                if event.level:
                    self._sleeps[event.call_id] = event.part
                if event.mode:
                    self.pause(self._mode_named(event.mode))
            case Wake():
                self._wakes[event.call_id] = event.part, self._can.wakes_resume
            case BatchResult() | BatchFailed():
                del self._batches[event.batch_id]
                self.land(event.batch_id, failed=isinstance(event, BatchFailed))

    def _take_turn(self, event: Pause | Resume) -> None:
        """Put a pause or a resume into effect."""
        if isinstance(event, Resume):
            self.resume()
            self._held_back.clear()
            return
        aborted = [life.aborted for life in self._held_back]
        self.pause(self._mode_named(event.mode))
        for life, before in zip(self._held_back, aborted, strict=True):
            life.aborted = before
        if self._can.pauses_in_turn and self._mode_named(event.mode).aborts:
            self._ending = event.call_id

    def _mode_named(self, name: str) -> PauseMode:
        return next(mode for mode in self._can.pause_modes if mode.name == name)

    def pause(self, mode: Pausing) -> None:
        super().pause(mode)
        self._wakes = {call_id: (part, False) for call_id, (part, _) in self._wakes.items()}

    def _sleep_or_wake(self, answer: Answer) -> None:
        """Take the answer to a sleep or a wake. Raises Violation for a device that sleeps under its batches."""
        slept = self._sleeps.pop(answer.call_id, None)
        woken, resumes = self._wakes.pop(answer.call_id, (None, False))
        if woken is not None:
            self._released -= {woken} if woken else self._released
        if not answer.ok:
            return
        if slept is not None and self._batches:
            batch = next(iter(self._batches))
            raise Violation(f"{answer.call_id} releases the device's memory, but batch {batch} is in flight there")
        if slept is not None:
            self.asleep = answer.call_id
            self._released |= {slept} if slept else set(self._can.wake_parts)
        elif woken is not None:
            self.asleep = ""
        if resumes:
            self.resume()

    @property
    def to_wake(self) -> Sequence[str]:
        """The parts of its memory that a sleeping device takes back to be awake; "" for all of it at once."""
        if not self.asleep:
            return ()
        is_partly = self._released < set(self._can.wake_parts)
        return sorted(self._released) if is_partly else ("",)

    def _end_turn(self, call_id: str) -> None:
        """Take the answer to a call. The next queued call that aborts begins now, and is answered later."""
        if call_id in self._behind:
            self._take_turn(self._behind.pop(call_id))
            self._ending = None
        elif call_id == self._ending:
            self._ending = None
        head = next(iter(self._behind.values()), None)
        if self._ending is None and isinstance(head, Pause) and self._mode_named(head.mode).aborts:
            self._take_turn(self._behind.pop(head.call_id))

    def _take_load(self, load: Load) -> None:
        """Begin a request whose KV is loaded; if some of it is missing, the request computes it or fails."""
        if load.late:
            return
        life = self.account.live.get(load.rid)
        if life is not None:
            life.launched = True
        if load.missing:
            self.account.fail([load.rid])

    def _hear(self, reply: Reply, pipeline: SimulatedRunner) -> None:
        match reply:
            case Tokens():
                self._begin_from_logits(reply, pipeline)
                self.account.tell(reply.rid, reply.token_ids, reply.finish_reason)
            case Refused():
                self.account.refuse(reply.rid, reply.reason)
            case Answer():
                self.account.answer(reply.call_id, reply)
                self._sleep_or_wake(reply)
                self._end_turn(reply.call_id)

    def _begin_from_logits(self, reply: Tokens, pipeline: SimulatedRunner) -> None:
        """Begin a request that gets a token before its first launch. Raises Violation if no logits are kept."""
        life = self.account.live.get(reply.rid)
        if life is None or life.launched or not reply.token_ids:
            return
        if reply.rid in pipeline.from_logits:
            life.launched, life.computed = True, len(life.message.prompt_ids)
        elif self._can.kept_logits:
            raise Violation(
                f"{reply.rid} is told its first token without a launch, but no logits can be kept: no equal prompt was "
                "computed since the last flush"
            )
        elif pipeline.has_logits(reply.rid):
            raise Violation(
                f"{reply.rid} is told tokens, but nothing of it was ever computed; an equal prompt was: "
                "Capabilities(kept_logits=True) says that its first token comes from kept logits"
            )

    def _end_aborted(self) -> None:
        """End aborted requests of an engine that doesn't answer aborts: their clients get no more replies."""
        if not self._can.answers_aborts:
            for rid in [rid for rid, life in self.account.live.items() if life.aborted]:
                self.account.end(rid, "abort")

    def _check_batch(self, batch: Batch, pipeline: SimulatedRunner) -> None:
        if self.asleep:
            raise Violation(
                f"batch {batch.id} is launched while the device sleeps: {self.asleep} released its memory, and no wake "
                "has brought all of it back"
            )
        self.launch(batch.id, [share.rid for share in batch.shares], sum(share.count for share in batch.shares))
        self._batches[batch.id] = batch
        loras = {pipeline.lora_of(share.rid) for share in batch.shares} - {0}
        if len(loras) > self._can.loras_together:
            raise Violation(
                f"batch {batch.id} has requests of {len(loras)} LoRAs, of at most {self._can.loras_together}"
            )
        # Blocks behind a window are not counted: other requests may own them by now.
        size = self._limits.block_size
        blocks = {block for share in batch.shares for block in share.own_blocks(size)}
        if len(blocks) > self._limits.blocks:
            raise Violation(f"batch {batch.id} is computed in {len(blocks)} blocks, of {self._limits.blocks}")
        for share in batch.shares:
            self._check_share(share)
            self._note_tables(share)
            # Accepted guesses were computed; the token sampled after them comes next.
            known = pipeline.known_tokens(share.rid)
            comes_next = known - 1 if share.draft_ids else share.start + share.count
            self.account.compute(share.rid, share.start, share.count, comes_next)
        self._check_tails(batch, pipeline)

    def _check_share(self, share: Share) -> None:
        blocks = share.own_blocks(self._limits.block_size)
        if len(set(blocks)) != len(blocks):
            raise Violation(f"{share.rid} has a block twice: {list(blocks)}")
        life = self.account.live.get(share.rid)
        if not self._can.chunked and life is not None and share.start + share.count < len(life.message.prompt_ids):
            raise Violation(f"{share.rid} computes a part of its prompt, but prompts are not to be cut")

    def _note_tables(self, share: Share) -> None:
        """Note the pool of each table of a share. Raises Violation for a table in another pool than before."""
        if share.states:
            self._state_tokens = tuple([state.tokens for state in share.states])
        if not self._limits.pools:
            count = len(share.tables) + len(share.states) + len(share.rings)
            if count > len(self._pools):
                self._pools = dict.fromkeys(range(count), 0)
            return
        for number, blocks in enumerate(share.used(self._limits.block_size)):
            pool = self._pool_of(share, blocks)
            known = self._pools.setdefault(number, pool)
            if pool != known:
                raise Violation(f"{share.rid} has table {number} in pool {pool}, but this table is in pool {known}")

    def _pool_of(self, share: Share, blocks: Sequence[int]) -> int:
        """Return the pool of a table's blocks. Raises Violation if they are not in one pool."""
        pools = {self._limits.pool_of(block) for block in blocks}
        if len(pools) != 1 or -1 in pools:
            sizes = " and ".join(map(str, self._limits.pools))
            raise Violation(
                f"{share.rid} has a table in blocks {list(blocks)}, not in one of the pools of {sizes} blocks"
            )
        return pools.pop()

    def _check_tails(self, batch: Batch, pipeline: SimulatedRunner) -> None:
        """Check that no block is written for two requests at once. Raises Violation."""
        owners: dict[int, str] = {}
        shares = {share.rid: share for share in batch.shares}
        size = self._limits.block_size
        for share in batch.shares:
            last = (share.start + share.count - 1) // size
            written = [block for table, first in share.written for block in table[first // size : last + 1]]
            for state in share.states:
                at = (share.start + share.count - 1) // state.tokens
                written += state.block_ids[at : at + 1 + len(share.draft_ids)]
                written += [state.block_ids[state.kept[1]]] * bool(state.kept[0])
            written += [ring.block_id for ring in share.rings]
            for block in written:
                other = owners.setdefault(block, share.rid)
                if other != share.rid:
                    self._check_equal(batch.id, block, (shares[other], share), pipeline)

    def _check_equal(self, batch_id: int, block: int, both: tuple[Share, Share], pipeline: SimulatedRunner) -> None:
        """Judge a block that is written for two requests. Raises Violation unless equal writes are harmless."""
        is_equal = self._is_equal(block, both, pipeline)
        if is_equal and self._can.equal_writes:
            return
        hint = ""
        # A live device does not know what its blocks hold.
        if is_equal and isinstance(pipeline, SimulatedRunner):
            hint = "; both write the same: Capabilities(equal_writes=True) says that this is harmless"
        raise Violation(f"batch {batch_id} writes block {block} for {both[0].rid} and for {both[1].rid}{hint}")

    def _is_equal(self, block: int, both: tuple[Share, Share], pipeline: SimulatedRunner) -> bool:
        """Whether two shares write the same content to a block."""
        size = self._limits.block_size
        for share in both:
            if block not in share.block_ids:
                return False
            first = share.block_ids.index(block) * size
            end = min(first + size, share.start + share.count)
            if not pipeline.holds(share.rid, share.block_ids, first, end):
                return False
        return True

    # -- the end --

    def at_rest(self, machine: SdkMachine) -> None:
        """Check that every request has ended and every call is answered. Raises Violation."""
        is_flush = FlushCache.__name__ in self.account.open_kinds
        self.account.check_end("; Capabilities(flush=False) says that no flush is known" if is_flush else "")
        self._resting = dict(machine.counts())

    def _check_nothing_changed(self, machine: SdkMachine) -> None:
        """Check that a step with only aborts of ended requests changed no count. Raises Violation."""
        resting, self._resting = self._resting, None
        assert resting is not None
        changed = [
            f"{name} {resting[name]} to {count}" for name, count in machine.counts().items() if count != resting[name]
        ]
        if changed:
            raise Violation(f"an abort of a request that is not alive changed {', '.join(changed)}")

    def at_end(self, machine: SdkMachine) -> None:
        """Check the end of a run, after a flush if the adapter declares it. Raises Violation."""
        if not machine.is_idle:
            raise Violation(f"everything has ended, but the scheduler is not idle: {_words(machine.counts())}")
        grown = None if self._fresh is None else self._fresh.grown(machine)
        if grown is not None:
            raise Violation(f"everything has ended, but {grown}")


def _words(counts: Mapping[str, int]) -> str:
    return " ".join(f"{name}={count}" for name, count in counts.items())
