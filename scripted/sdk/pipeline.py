"""The simulated runner: executes plans over the scheduler's own block tables and reports every wrong read.

Each slot of a block holds a fingerprint of all tokens up to it. In the slots that it reads, a share must find the
fingerprints that its request or an equal prefix stored; a launch that reads anything else is reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from scripted.core.account import OWN_ENDS
from scripted.core.promises import CachedPrefix
from scripted.core.tokens import links_of, next_token, root_of
from scripted.core.violation import Bounds, Violation
from scripted.sdk.capabilities import Capabilities, Limits
from scripted.sdk.encoder import SimulatedEncoder, output_of
from scripted.sdk.messages import (
    Add,
    Answer,
    Batch,
    BatchFailed,
    BatchResult,
    Completion,
    Event,
    FlushCache,
    Load,
    Pause,
    Ring,
    Share,
    Sleep,
    Stepped,
    Tokens,
)
from scripted.sdk.request_tokens import RequestTokens

# The content of a slot whose KV did not arrive or was computed from such a slot; and the token sampled from such KV,
# which no model samples.
_CORRUPT: Final = -1
_NONSENSE: Final = 999_999_999


class SimulatedRunner:
    """One device, which computes a batch when it is launched; the result waits to be taken.

    A plan states whole block tables, so the runner keeps no row tables, unlike the simulated pipeline of Lockstep's
    engine.
    """

    def __init__(self, limits: Limits, can: Capabilities) -> None:
        self._size = limits.block_size
        self._context = limits.context_tokens
        self._speculative_tokens = can.speculative_tokens
        self._keeps_logits = can.kept_logits
        self._flushing = {mode.name for mode in can.pause_modes if mode.flushes}
        self._encoder = SimulatedEncoder(can.images)
        # The fingerprint in each slot of every block ever written, 0 for an unwritten slot; and the number of flushes
        # before the block's last write.
        self._blocks: dict[int, list[int]] = {}
        self._written: dict[int, int] = {}
        # The fingerprint of the tokens whose state a block holds.
        self._states: dict[int, int] = {}
        # Shares with guesses and states; until the next launch the scheduler may say that fewer of their guesses hold.
        self._guessing: list[tuple[Share, RequestTokens]] = []
        self._flushes = 0
        # The fingerprint of each prompt that was computed to its end, with the number of flushes before that.
        self._logits: dict[int, int] = {}
        # Requests whose first token came from kept logits in this step.
        self.from_logits: set[str] = set()
        self._flush_calls: set[str] = set()
        self._requests: dict[str, RequestTokens] = {}
        # The next requests of a session, which begin once its current one has ended.
        self._queued: dict[str, deque[Add]] = {}
        self._done: deque[Completion] = deque()
        self._failing = False
        # The last batch, completed with positions and guesses that its scheduler could not know.
        self.understood: Batch | None = None
        self.violation: Violation | None = None
        # Requests whose KV is missing because a batch failed, with the first missing position.
        self._missing: dict[str, int] = {}
        # Requests of the last batch that were computed from KV that did not arrive.
        self.corrupted: set[str] = set()
        self._may_be_corrupt = False
        # Requests whose scheduler accepted fewer guesses than the device had verified, with their next position.
        self.shortened: dict[str, int] = {}

    def begin(self, request: Add, *, is_queued: bool = False) -> None:
        """Begin a request, perhaps under an old rid. If it ``is_queued``, it begins once the one before it ends."""
        if is_queued:
            self._queued.setdefault(request.rid, deque()).append(request)
            return
        self._requests[request.rid] = RequestTokens(request)
        self._missing.pop(request.rid, None)

    def follow(self, events: Sequence[Event], stepped: Stepped) -> None:
        """Follow a step's input and replies, before its launch."""
        for event in events:
            match event:
                case FlushCache():
                    self._flush_calls.add(event.call_id)
                case Sleep() if event.drops_kv:
                    self._flush_calls.add(event.call_id)
                case Pause() if event.mode in self._flushing:
                    self._flush_calls.add(event.call_id)
        for reply in stepped.replies:
            if isinstance(reply, Answer) and reply.ok and reply.call_id in self._flush_calls:
                self._flushes += 1
            if isinstance(reply, Tokens) and reply.finish_reason is not None and reply.rid in self._queued:
                self._go_on(reply.rid, reply.finish_reason)
        self._begin_from_logits(stepped)
        self.shortened = {}
        for rid, most in stepped.verified:
            tokens = self._requests[rid]
            if tokens.held > most:
                tokens.hold(most, self._speculative_tokens)
                self.shortened[rid] = tokens.computed
                self._shorten_result(rid, most)
        if stepped.loads or stepped.copies:
            self._settle_all()
        for source, target in stepped.copies:
            self._copy(source, target)
        for load in stepped.loads:
            self._load(load)

    def _shorten_result(self, rid: str, most: int) -> None:
        """Cut the last batch's result, unless it was taken in this step, to ``most`` guesses; guess what follows."""
        if not self._done or self.understood is None:
            return
        result = self._done[-1]
        if isinstance(result, BatchFailed):
            return
        said, drafts = list(result.token_ids), list(result.draft_ids)
        place = [share.rid for share in self.understood.shares].index(rid)
        said[place], drafts[place] = said[place][: most + 1], self._requests[rid].guessed
        self._done[-1] = msgspec.structs.replace(result, token_ids=tuple(said), draft_ids=tuple(drafts))

    def _go_on(self, rid: str, reason: str) -> None:
        """Begin the next request of a session, or drop all of them if the previous one did not end by itself."""
        queued = self._queued[rid]
        if reason in OWN_ENDS:
            self.begin(queued.popleft())
        else:
            queued.clear()
        if not queued:
            del self._queued[rid]

    def _begin_from_logits(self, stepped: Stepped) -> None:
        """Begin the requests that get a token before their first launch, if their logits may be kept."""
        self.from_logits = set()
        for reply in stepped.replies if self._keeps_logits else ():
            if isinstance(reply, Tokens) and reply.token_ids and self.has_logits(reply.rid):
                self.from_logits.add(reply.rid)
                tokens = self._requests[reply.rid]
                tokens.computed = len(tokens.ids)
                tokens.extend(reply.token_ids[:1])

    def has_logits(self, rid: str) -> bool:
        """Whether a request was not launched, and an equal prompt was computed since the last successful flush."""
        tokens = self._requests.get(rid)
        if tokens is None or tokens.computed or len(tokens.ids) > len(tokens.message.prompt_ids):
            return False
        return self._logits.get(tokens.fingerprints[-1]) == self._flushes

    def fail_next_batch(self) -> None:
        self._failing = True

    def known_tokens(self, rid: str) -> int:
        """Count a request's tokens, those in flight included."""
        return len(self._requests[rid].ids) if rid in self._requests else 0

    def lora_of(self, rid: str) -> int:
        """Return the number of the LoRA that computes a request; 0 for none."""
        return self._requests[rid].message.lora if rid in self._requests else 0

    def holds(self, rid: str, block_ids: Sequence[int], first: int, end: int) -> bool:
        """Whether these blocks of a request hold its KV from one position to another."""
        fingerprints = self._requests[rid].fingerprints
        for position in range(first, end):
            index, slot = divmod(position, self._size)
            if self._blocks.get(block_ids[index], [0] * self._size)[slot] != fingerprints[position + 1]:
                return False
        return True

    def wrong_block(self, prefix: CachedPrefix) -> int | None:
        """Return the first block of a cached prefix that does not hold the KV of its tokens; None if all do."""
        links = links_of(root_of(prefix.lora), prefix.token_ids)
        for index, block in enumerate(prefix.block_ids, prefix.first):
            there = links[index * self._size + 1 : (index + 1) * self._size + 1]
            if self._blocks.get(block, [])[: len(there)] != there or self._written[block] < self._flushes:
                return block
        return None

    # -- the pipeline protocol --

    def launch(self, microbatch: Batch) -> None:
        """Compute a batch at once: first all writes, then all reads.

        A violation is kept for the oracle, which sees the whole step.
        """
        self.understood = None
        self._settle_all()
        try:
            self._launch(microbatch)
        except Violation as exc:
            self.violation = exc

    def _launch(self, microbatch: Batch) -> None:
        shares = tuple([self._understand(share) for share in microbatch.shares])
        self.understood = batch = msgspec.structs.replace(microbatch, shares=shares)
        if self._fails(batch):
            self._done.append(BatchFailed(batch_id=batch.id, error="this batch was told to fail"))
            return
        for source, target in batch.copies:
            self._copy(source, target)
        if self._encoder.room:
            self._encoder.encode(batch, lambda rid: self._requests[rid].message.images)
        # Initial states are read before any state is written.
        for share in batch.shares:
            self._check_states(share)
            self._check_rings(share)
        self.corrupted = set()
        # A share that computes missing KV restores it for later shares.
        for share in sorted(batch.shares, key=lambda share: share.start):
            if self._is_corrupt(share):
                self._corrupt(share)
            else:
                self._write(share)
        said = [self._nonsense(share) if share.rid in self.corrupted else self._read(share) for share in batch.shares]
        self._mirror(batch)
        drafts = tuple(self._guess(share.rid, bool(ids)) for share, ids in zip(batch.shares, said, strict=True))
        self._done.append(
            BatchResult(
                batch_id=microbatch.id, token_ids=tuple(said), draft_ids=drafts if self._speculative_tokens else ()
            )
        )

    def next_completion(self, timeout_s: float | None) -> Completion | None:
        """Return the oldest result; None if there is none."""
        del timeout_s
        return self._done.popleft() if self._done else None

    def _fails(self, batch: Batch) -> bool:
        """Whether the batch was made to fail, or continues a request whose KV a failed batch didn't write."""
        for share in batch.shares:
            if share.start <= self._missing.get(share.rid, -1):
                del self._missing[share.rid]
        if not self._failing and not any(share.rid in self._missing for share in batch.shares):
            return False
        self._failing = False
        for share in batch.shares:
            self._missing.setdefault(share.rid, share.start)
        return True

    # -- one share --

    def _understand(self, share: Share) -> Share:
        """Fill in the start and the guesses of a share. Raises Violation for a request that never arrived."""
        tokens = self._tokens_of(share)
        if share.start < 0:
            if share.start != -1 or not self._speculative_tokens:
                raise Violation(f"{share.rid} computes from position {share.start} on")
            share = msgspec.structs.replace(share, start=tokens.computed)
        if -1 in share.draft_ids:
            known = dict(enumerate(tokens.guessed))
            filled = [known.get(place, -1) if guess == -1 else guess for place, guess in enumerate(share.draft_ids)]
            share = msgspec.structs.replace(share, draft_ids=tuple(filled))
        return share

    def _copy(self, source: int, target: int) -> None:
        """Copy a block; a block that was never written is copied as unreadable."""
        self._blocks[target] = list(self._blocks.get(source, [0] * self._size))
        self._states[target] = self._states.get(source, 0)
        is_outside = source < 0
        self._written[target] = self._flushes if is_outside else self._written.get(source, self._flushes)

    def _mirror(self, batch: Batch) -> None:
        """Copy the rows that the batch wrote to their mirrors."""
        if not batch.mirrored:
            return
        written = {
            (share.block_ids[position // self._size], position % self._size)
            for share in batch.shares
            for position in range(share.start, share.start + share.count)
        }
        for rows in batch.mirrored:
            for slot in range(rows.first, rows.first + rows.count):
                if (rows.source, slot) in written:
                    self._blocks.setdefault(rows.target, [0] * self._size)[slot] = self._blocks[rows.source][slot]
                    self._written[rows.target] = self._flushes

    def _load(self, load: Load) -> None:
        """Write loaded KV, and mark the slots whose KV did not arrive."""
        self._may_be_corrupt |= bool(load.missing)
        if load.said:
            request = self._requests[load.rid]
            request.cut(len(load.token_ids))
            request.extend(load.said)
        fingerprints = links_of(self._requests[load.rid].fingerprints[0], load.token_ids)
        tables = [(load.start, load.block_ids)]
        end = len(load.token_ids)
        if not load.missing:
            tables += [(one.begins(end) // self._size * self._size, one.block_ids) for one in load.windows]
        for start, block_ids in tables:
            there = fingerprints[start + 1 :]
            if load.missing:
                lost = {index for index, block in enumerate(block_ids) if block in load.missing}
                there = [_CORRUPT if at // self._size in lost else one for at, one in enumerate(there, start)]
            self._store(block_ids, start, there)
        for ring in () if load.missing else load.rings:
            self._fill(ring, fingerprints, ring.begins(end - 1), end)
        for state in () if load.missing else load.states:
            block = state.block_ids[(len(load.token_ids) - 1) // state.tokens]
            self._states[block], self._written[block] = fingerprints[-1], self._flushes
            self._blocks.pop(block, None)

    def _is_corrupt(self, share: Share) -> bool:
        """Whether a share reads KV that did not arrive."""
        if not self._may_be_corrupt:
            return False
        slots: list[int] = []
        for block in share.block_ids[: -(-share.start // self._size)]:
            slots += self._blocks.get(block, [0] * self._size)
        # Blocks in the gap may be another request's by now.
        first, end = share.gap
        read = slots[: share.start] if end <= first else slots[:first] + slots[end : share.start]
        return _CORRUPT in read

    def _corrupt(self, share: Share) -> None:
        self.corrupted.add(share.rid)
        end = min(share.start + share.count, len(share.block_ids) * self._size)
        self._store(share.block_ids, share.start, [_CORRUPT] * (end - share.start))

    def _store(self, block_ids: Sequence[int], first: int, there: Sequence[int]) -> None:
        """Store these fingerprints in the slots from position ``first`` on."""
        size, done = self._size, 0
        while done < len(there):
            index, slot = divmod(first + done, size)
            block, more = block_ids[index], there[done : done + size - slot]
            self._blocks.setdefault(block, [0] * size)[slot : slot + len(more)] = more
            self._written[block] = self._flushes
            done += len(more)

    def _nonsense(self, share: Share) -> tuple[int, ...]:
        """Return the token of a share that read missing KV, if it samples; the client never gets it."""
        tokens = self._requests[share.rid]
        tokens.computed = end = share.start + share.count - len(share.draft_ids)
        return (_NONSENSE,) if end >= len(tokens.ids) else ()

    def _write(self, share: Share) -> None:
        tokens = self._requests[share.rid]
        end, drafts = share.start + share.count, len(share.draft_ids)
        self._check_positions(share, tokens)
        fingerprints = tokens.fingerprints[share.start + 1 : end + 1]
        if drafts:
            fingerprints += links_of(fingerprints[-1], share.draft_ids)[1:]
        for block_ids, first in share.written:
            self._store(block_ids, first, fingerprints[first - share.start :])
            for block in block_ids[first // self._size : -(-end // self._size)]:
                self._states.pop(block, None)
        if share.crossed is not None and share.start == 0:
            there = output_of(self._requests[share.rid].message.images[:1])
            if len(there) > len(share.crossed) * self._size:
                raise Violation(
                    f"{share.rid} reads what its encoder made of its image, {len(there)} tokens, but has room for "
                    f"{len(share.crossed) * self._size} in its blocks {list(share.crossed)}"
                )
            self._store(share.crossed, 0, there)
        for ring in share.rings:
            self._fill(ring, [*tokens.fingerprints[: share.start + 1], *fingerprints], share.start, end)
        tokens.ends, tokens.ahead = end, 0
        for state in share.states:
            place, (count, kept) = (end - 1) // state.tokens, state.kept
            left = list(zip(state.block_ids[place:], fingerprints[len(fingerprints) - drafts - 1 :], strict=False))
            for block, after in [(state.block_ids[kept], fingerprints[count - 1])] * bool(count) + left:
                self._states[block] = after
                self._blocks.pop(block, None)
                self._written[block] = self._flushes
        if share.states and drafts:
            self._guessing.append((share, tokens))

    def _check_positions(self, share: Share, tokens: RequestTokens) -> None:
        """Raise Violation for positions that the request or its blocks do not have, and for wrong input tokens."""
        end, drafts = share.start + share.count, len(share.draft_ids)
        if end - drafts > len(tokens.ids) or (drafts and end - drafts != len(tokens.ids)):
            raise Violation(
                f"{share.rid} computes positions {share.start} to {end - 1} with {drafts} guesses, but has "
                f"{len(tokens.ids)} tokens, those in flight included",
                bounds=Bounds(share.rid, last=len(tokens.ids) + drafts - 1)
                if drafts
                else Bounds(share.rid, end=len(tokens.ids)),
            )
        if drafts and drafts >= share.count:
            raise Violation(
                f"{share.rid} computes positions {share.start} to {end - 1}, all of them guesses: the token before a "
                "guess must be computed with it"
            )
        if end - drafts > self._context:
            raise Violation(
                f"{share.rid} computes positions {share.start} to {end - 1}, beyond its context of {self._context} "
                "tokens",
                bounds=Bounds(share.rid, end=self._context),
            )
        if share.token_ids is not None:
            self._compare(share, tokens)
        for block_ids in share.tables:
            room = len(block_ids) * self._size
            if end > room:
                raise Violation(
                    f"{share.rid} computes positions {share.start} to {end - 1}, but has room for {room} in its blocks "
                    f"{list(block_ids)}"
                )

    def _settle_all(self) -> None:
        for share, tokens in self._guessing:
            self._settle(share, tokens)
        self._guessing = []

    def _settle(self, share: Share, tokens: RequestTokens) -> None:
        """Fix the number of accepted guesses of a share, and store the state at a block's end in that block."""
        first = share.start + share.count - len(share.draft_ids)
        tokens.ahead = tokens.held
        for state in share.states:
            place = (share.start + share.count - 1) // state.tokens
            ends = (first + tokens.held) // state.tokens * state.tokens
            if ends < first:
                continue
            source, target = state.block_ids[place + ends - first], state.block_ids[ends // state.tokens - 1]
            self._states[target] = self._states.get(source, 0)
            self._written[target] = self._written.get(source, self._flushes)
            self._blocks.pop(target, None)
            if ends // state.tokens - 1 == place:
                tokens.ahead = 0

    def _fill(self, ring: Ring, fingerprints: Sequence[int], start: int, end: int) -> None:
        """Write these positions of a request into a ring; later positions overwrite earlier ones."""
        for position in range(max(start, end - self._size), end):
            self._blocks.setdefault(ring.block_id, [0] * self._size)[position % self._size] = fingerprints[position + 1]
        self._states.pop(ring.block_id, None)

    def _check_rings(self, share: Share) -> None:
        """Check that each ring holds the earlier positions of the first position's group. Raises Violation."""
        fingerprints = self._requests[share.rid].fingerprints
        for ring in share.rings:
            slots = self._blocks.get(ring.block_id, [0] * self._size)
            for position in range(ring.begins(share.start), share.start):
                if slots[position % self._size] != fingerprints[position + 1]:
                    raise Violation(
                        f"{share.rid} goes on at position {share.start}, but its ring, block {ring.block_id}, does not "
                        f"hold its position {position}",
                        bounds=Bounds(share.rid, first=position),
                    )

    def _check_states(self, share: Share) -> None:
        """Check that each state is the state of all tokens before the share. Raises Violation."""
        tokens = self._requests[share.rid]
        for state in share.states:
            last = (share.start + share.count - 1) // state.tokens + len(share.draft_ids)
            if last >= len(state.block_ids):
                raise Violation(
                    f"{share.rid} computes positions {share.start} to {share.start + share.count - 1}, but has no "
                    f"block for the state after them: {list(state.block_ids)}"
                )
            if not share.start:
                continue
            place = (share.start - 1) // state.tokens
            if self._speculative_tokens and share.known_tokens is None:
                place = (tokens.ends - 1) // state.tokens + tokens.ahead
            block = state.block_ids[place]
            if self._states.get(block) != tokens.fingerprints[share.start]:
                raise Violation(
                    f"{share.rid} continues from the wrong state: block {block} of {list(state.block_ids)} "
                    f"does not hold the state after its first {share.start} tokens",
                    bounds=Bounds(share.rid, first=share.start - 1),
                )
            if self._written[block] < self._flushes:
                raise Violation(
                    f"{share.rid} goes on from a state of before the cache was flushed, in block {block}",
                    bounds=Bounds(share.rid, first=share.start - 1),
                )

    def _read(self, share: Share) -> tuple[int, ...]:
        """Check all KV that the share attends to; return the tokens that it samples."""
        tokens = self._requests[share.rid]
        end = share.start + share.count - len(share.draft_ids)
        begin, gap = 0, share.gap
        if gap[0] < gap[1]:
            self._check_reads(share, share.block_ids, 0, gap[0])
            begin = gap[1]
        self._check_reads(share, share.block_ids, begin, end)
        for window in share.windows:
            self._check_reads(share, window.block_ids, window.begins(share.start), end)
        if share.crossed is not None:
            self._check_crossed(share)
        tokens.computed = end
        if end < len(tokens.ids):
            return ()
        said = self._sample(tokens, share.draft_ids)
        tokens.computed = len(tokens.ids) - 1
        return said

    def _check_crossed(self, share: Share) -> None:
        """Check that the blocks hold the encoder's output. Raises Violation."""
        made, crossed = output_of(self._requests[share.rid].message.images[:1]), share.crossed or ()
        there = [slot for block in crossed for slot in self._blocks.get(block, [0] * self._size)]
        if there[: len(made)] != made:
            raise Violation(
                f"{share.rid} reads what its encoder made of its image, but its blocks {list(crossed)} do not hold it"
            )

    def _check_reads(self, share: Share, block_ids: Sequence[int], begin: int, end: int) -> None:
        """Check that these blocks hold the request's own KV between two positions. Raises Violation."""
        fingerprints, size = self._requests[share.rid].fingerprints, self._size
        for index in range(begin // size, -(-end // size)):
            start = index * size
            first, last = max(begin, start), min(end, start + size)
            slots = self._blocks.get(block_ids[index], ())
            if list(slots[first - start : last - start]) != fingerprints[first + 1 : last + 1]:
                raise self._wrong_read(share, block_ids, first, last)
            if self._written[block_ids[index]] < self._flushes:
                raise Violation(
                    f"{share.rid} reads block {block_ids[index]}, which was written before the cache was flushed",
                    bounds=Bounds(share.rid, first=start),
                )

    def _sample(self, tokens: RequestTokens, drafts: Sequence[int]) -> tuple[int, ...]:
        """Sample the next token, and after each right guess the token after it."""
        if len(tokens.ids) == len(tokens.message.prompt_ids):
            self._logits[tokens.fingerprints[-1]] = self._flushes
        given = self.tokens_given(tokens.message.rid)
        if given:
            tokens.extend(given)
            tokens.held = len(given) - 1
            return given
        said = []
        for guess in (*drafts, None):
            said.append(next_token(tokens.fingerprints[-1], state=tokens.mask))
            tokens.extend(said[-1:])
            if guess != said[-1]:
                break
        tokens.held = len(said) - 1
        return tuple(said)

    def tokens_given(self, rid: str) -> tuple[int, ...]:
        """Return the tokens that a share samples if a recording has them; empty if the model samples them."""
        del rid
        return ()

    def _guess(self, rid: str, emits: bool) -> tuple[int, ...]:
        tokens = self._requests[rid]
        tokens.guess(self._speculative_tokens if emits else 0)
        return tokens.guessed

    def _tokens_of(self, share: Share) -> RequestTokens:
        tokens = self._requests.get(share.rid)
        if tokens is None:
            raise Violation(f"{share.rid} is launched, but no request of this name ever arrived")
        if share.known_tokens is not None and share.known_tokens < len(tokens.ids):
            tokens.cut(share.known_tokens)
        return tokens

    def _compare(self, share: Share, tokens: RequestTokens) -> None:
        """Compare the plan's tokens with the request's."""
        assert share.token_ids is not None
        there = [*tokens.ids[share.start : share.start + share.count - len(share.draft_ids)], *share.draft_ids]
        if len(there) != len(share.token_ids) or any(
            stated not in (-1, token) for stated, token in zip(share.token_ids, there, strict=True)
        ):
            stated = list(share.token_ids)
            raise Violation(f"{share.rid} computes the tokens {stated} from position {share.start} on, but has {there}")

    def _wrong_read(self, share: Share, block_ids: Sequence[int], first: int, last: int) -> Violation:
        block = block_ids[first // self._size]
        slots, place = self._blocks.get(block, ()), first % self._size
        there = self._requests[share.rid].fingerprints[first + 1 : last + 1]
        wrong = next(at for at, expected in enumerate(there, place) if at >= len(slots) or slots[at] != expected)
        known = [rid for rid, other in self._requests.items() if slots and slots[wrong] in other.fingerprints[1:]]
        what = f"was written for {' or '.join(known)}" if known else "was never written for what it has now"
        position = first - place + wrong
        return Violation(
            f"{share.rid} reads the wrong KV: slot {wrong} of block {block}, its position "
            f"{position}, {what}; its blocks are {list(block_ids)}, and it computes positions "
            f"{share.start} to {share.start + share.count - 1}",
            bounds=Bounds(share.rid, first=position),
        )
