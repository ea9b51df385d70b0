"""A pipeline without a model. Its tokens come from fingerprints of the KV that each request actually reads.

Each KV slot holds a hash chain over the tokens that lead to it. A page that is used after free, owned twice or written
twice breaks a chain, which changes the output and is reported. It runs in the caller's thread, in launch order, and
finishes at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, pairwise
from typing import Final

from engine.core.config import (
    EMBEDDED_LORA,
    EMBEDDED_MODEL,
    EMBEDDED_WINDOW_MODEL,
    embedded_lora_seed,
    embedded_seed,
    has_embedded_window,
)
from engine.core.limits import Limits
from engine.core.messages import (
    Completion,
    Generate,
    GrammarReady,
    LoraRead,
    OrderAnswer,
    PipelineEvent,
    PipelineFailed,
    PromptLogprob,
    RequestError,
    TokenLogprob,
    TransferEvent,
)
from engine.core.plan import (
    Copies,
    GrammarOrder,
    LoraChange,
    LoraOrder,
    LoraUpdate,
    Microbatch,
    SamplingSpec,
    Segment,
    SleepSwitch,
    TransferOrder,
    WeightUpdate,
)
from engine.pipeline.wire import StageView
from scripted.core.promises import CachedPrefix
from scripted.core.tokens import CHAIN, MASK, START, links_of
from scripted_lockstep.simulated.failures import dead_end, injected
from scripted_lockstep.simulated.grammar import HeldGrammars, SimulatedGrammar
from scripted_lockstep.simulated.held_orders import HeldOrders
from scripted_lockstep.simulated.model import alphabet_of, choose, logprob_of, prompt_logprobs_of, salt_of
from scripted_lockstep.simulated.row import TableRow
from scripted_lockstep.simulated.transfers import PageContent, SimulatedTransfers

_CORRUPTED: Final = 0x1EADBEEF
# A draft model with other weights makes one wrong guess in this many.
_GUESSES_PER_MISTAKE: Final = 3
_MISTAKE: Final = 0x5EED


class SimulatedPipeline:
    """All stages in one object. ``corruptions`` lists reads of KV that the reader neither wrote nor hit in the cache.

    It is not the SDK's ``SimulatedRunner``, because the stages' page tables are under test here: segments bring only
    changes of a row's table, where the SDK's plans state the whole table. ``alphabet`` is the number of different
    tokens that it emits: 94, or 3 with prompt lookup, so that guesses hold.
    """

    def __init__(self, limits: Limits, *, alphabet: int | None = None) -> None:
        self._alphabet = alphabet or alphabet_of(limits)
        self._guessed = limits.draft_tokens if limits.has_draft_model else 0
        self._drafts_itself = limits.drafts_itself
        self._page_size = limits.page_size
        self._stages = limits.pp_size
        self._seed = limits.seed
        self._total_pages = limits.total_pages
        self._window_tokens = limits.window_tokens
        self._window_pages = limits.window_pages
        self._host_pages = limits.host_pages
        self._ends = limits.eos_token_ids
        self._plans_ahead = limits.async_scheduling
        self._rows: dict[int, TableRow] = {}
        self._make_kv()
        self.forget()

    def forget(self) -> None:
        """Return to the initial state: empty KV, no faults, nothing in flight."""
        # The start of every chain. It represents the weights: with other weights the same tokens have other KV.
        self._root = START
        # A salt for each LoRA that the stages hold, by version: each LoRA has KV of its own.
        self._loras: dict[int, int] = {0: 0}
        self._is_asleep = False
        if self._rows:
            self._rows.clear()
            self._make_kv()
        self._done: deque[PipelineEvent] = deque()
        self._failing_stage: int | None = None
        self._dead: PipelineFailed | None = None
        # The compiled grammars by id, and the unanswered orders.
        self._grammars: dict[int, SimulatedGrammar] = {}
        self.grammars = HeldGrammars()
        # The paths of the LoRAs that the stages have read and not taken, by version, and the unanswered orders.
        self._read_paths: dict[int, str] = {}
        self.loras = HeldOrders()
        self.transfers = SimulatedTransfers(self._page_size)
        self.corruptions: list[str] = []
        self.last_microbatch: Microbatch | None = None
        self._microbatches = self._tokens = self._describes = 0
        # The number of failures by stage.
        self._failed: tuple[int, ...] = (0,) * self._stages

    def _make_kv(self) -> None:
        # A page is [fingerprint before it, fingerprint of slot 0, of slot 1, ...], up to its last written slot. Pages
        # that nothing was written to share one list: a large pool costs nothing until it is used.
        self._kv: list[list[int]] = [[]] * self._total_pages
        # The same for the window layers: a window page has the content of the page beside it.
        self._window_kv: list[list[int]] = [[]] * self._window_pages
        # The content of each host page.
        self._host_kv: list[list[int]] = [[]] * self._host_pages
        self._writes = [0] * self._total_pages
        # The slots of each page and host page that were ever written: stages do not forget useless KV.
        self._filled, self._host_filled = [0] * self._total_pages, [0] * self._host_pages

    # -- the pipeline protocol --

    def launch(self, microbatch: Microbatch) -> None:
        """Compute a microbatch at once; its completion waits to be taken."""
        self.last_microbatch = microbatch
        if self._dead is not None:
            return
        self._microbatches += 1
        fails = self._failing_stage is not None
        if fails:
            self._count_failure(microbatch)
        self._tokens += microbatch.tokens
        self._done.append(self._fail(microbatch) if fails else self._compute(microbatch))

    def next_completion(self, timeout_s: float | None) -> PipelineEvent | None:  # noqa: ARG002 - nothing to wait for
        """Return the next completion; None while nothing is in flight."""
        return self._done.popleft() if self._done else None

    @property
    def ready(self) -> bool:
        return bool(self._done)

    @property
    def takes_more(self) -> bool:
        return False

    def wake_sources(self) -> Sequence[object]:
        return ()

    # -- orders beside the computation --

    def order_grammar(self, order: GrammarOrder) -> None:
        """Compile a grammar at once, or forget it; the answer waits to be taken."""
        if order.grammar is None:
            self._grammars.pop(order.id, None)
        else:
            self._grammars[order.id] = SimulatedGrammar(order.grammar, self._ends)
            self.grammars.ordered((order.id,))

    def order_lora(self, order: LoraOrder) -> None:
        """Read a LoRA at once, or forget that it was read; the answer waits to be taken."""
        if order.path is None:
            self._read_paths.pop(order.version, None)
        else:
            self._read_paths[order.version] = order.path
            self.loras.ordered((order.version,))

    def answers(self, *, stalled: Collection[int] = ()) -> Sequence[OrderAnswer]:
        """Take the answers to orders, grammars first, unless they are held.

        A ``stalled`` stage reads no LoRA, and the last one compiles no grammar.
        """
        if not (self.grammars or self.loras):
            return ()
        compiled = () if self._stages - 1 in stalled else self.grammars.take_due()
        read = () if stalled else self.loras.take_due()
        ready = [self.grammars.answer(GrammarReady(grammar_id=number)) for number in compiled]
        return [*ready, *[self._answer_to(version) for version in read]]

    def _answer_to(self, version: int) -> LoraRead:
        path = self._read_paths[version]
        if embedded_lora_seed(path) is not None:
            return LoraRead(version=version)
        why = f"the simulated model has the LoRAs '{EMBEDDED_LORA}:SEED', got {path!r}"
        return LoraRead(version=version, error=why)

    def answer_source(self) -> int | None:
        """Return None: answers come at once, so there is nothing to wait on."""
        return None

    def close(self) -> None:
        pass

    # -- transfers --

    def order_transfer(self, order: TransferOrder) -> None:
        """Begin or stop a transfer, unless the stages are gone."""
        if self._dead is None:
            self.transfers.order(order)

    def ended_transfers(self, deliveries: Iterable[Generate]) -> Sequence[TransferEvent]:
        """Take the ends of transfers that are due; ``deliveries`` are the prompts that this engine sends."""
        if self._dead is not None or not self.transfers.open:
            return ()
        return self.transfers.take_ended(self, self._root, deliveries, self.corruptions)

    def content(self, page: int) -> PageContent:
        """Return the content of a page of the KV cache."""
        return self._kv[page]

    def receive(self, page: int, content: PageContent) -> None:
        """Overwrite a page of the KV cache with one of another engine."""
        self._kv[page] = list(content)
        self._filled[page] = self._page_size
        self._writes[page] += 1

    def wrong_block(self, prefix: CachedPrefix) -> int | None:
        """Return the first page of a cached prefix that does not hold the KV of its tokens; None if all do."""
        if prefix.lora not in self._loras:
            return None  # It can no longer be hit.
        links, size = links_of(self._root ^ self._loras[prefix.lora], prefix.token_ids), self._page_size
        for index, page in enumerate(prefix.block_ids):
            if self._kv[page] != links[index * size : (index + 1) * size + 1]:
                return page
        return None

    # -- faults --

    def fail_next_step(self, stage: int) -> None:
        """Make the next microbatch fail in this stage; the pipeline goes on."""
        self._failing_stage = self._checked(stage)

    def spare_next_step(self) -> None:
        self._failing_stage = None

    def kill_stage(self, stage: int) -> None:
        self._done.clear()
        self.transfers.lose()
        self._dead = PipelineFailed(
            process=f"stage-{self._checked(stage)}", cause="it was killed by signal 9 (SIGKILL)"
        )
        self._done.append(self._dead)

    def _checked(self, stage: int) -> int:
        if not 0 <= stage < self._stages:
            raise ValueError(f"stage must be 0 to {self._stages - 1}, got {stage}")
        return stage

    def _count_failure(self, microbatch: Microbatch) -> None:
        """Count a failure in its stage and, where tokens would pass them, in the stages after it."""
        first = self._failing_stage or 0
        last = first if microbatch.is_control else self._stages - 1
        self._failed = tuple(count + (first <= stage <= last) for stage, count in enumerate(self._failed))

    def _fail(self, microbatch: Microbatch) -> Completion:
        """Apply the changes of a microbatch to its rows without computing it, as a stage does after a failure."""
        for segment in microbatch.segments:
            self._update_row(segment).poisoned = True
        if isinstance(microbatch, LoraUpdate):
            self._read_paths.pop(microbatch.change.version, None)
        stage, self._failing_stage = self._failing_stage, None
        return Completion(microbatch_id=microbatch.id, error=injected(stage, microbatch))

    # -- computing --

    def _compute(self, microbatch: Microbatch) -> Completion:
        if microbatch.is_control:
            # There is nothing to profile here.
            return Completion(microbatch_id=microbatch.id, error=self._run_control(microbatch))
        if self._is_asleep:
            self.corruptions.append(f"microbatch {microbatch.id} is computed while the stages sleep")
        if microbatch.copies is not None:
            self._copy_pages(microbatch.copies)
        tokens: list[int] = []
        logprobs: list[TokenLogprob | None] = []
        accepted: list[int] = []
        guesses: list[tuple[int, ...]] = []
        wanted = False
        parts: list[tuple[PromptLogprob, ...]] = []
        errors: list[RequestError] = []
        for segment in microbatch.segments:
            links, row = self._forward(segment)
            if segment.logprobs_from >= 0:
                parts.append(prompt_logprobs_of(segment, links, row.spec))
            if not segment.emits:
                continue
            before = len(tokens)
            wanted = wanted or row.spec.return_logprob
            end, fingerprint = self._emit(segment, row, links, tokens, logprobs, errors)
            if segment.drafts:
                accepted.append(len(tokens) - before - 1)
            row.newest = tokens[-1]
            if self._guessed:
                guesses.append(self._guess(fingerprint, end, tokens[-1], row.spec, is_adapted=segment.lora > 0))
        return Completion(
            microbatch_id=microbatch.id,
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs) if wanted else (),
            accepted=tuple(accepted),
            guesses=tuple(guesses),
            prompt_logprobs=tuple(parts),
            errors=tuple(errors),
        )

    def _emit(
        self,
        segment: Segment,
        row: TableRow,
        links: Sequence[int],
        tokens: list[int],
        logprobs: list[TokenLogprob | None],
        errors: list[RequestError],
    ) -> tuple[int, int]:
        """Append the new tokens of a segment. Returns the end and the fingerprint of the KV before the last one."""
        spec, before = row.spec, len(tokens)
        # The tokens after the drafts that hold, each from the KV before it.
        for draft in range(segment.drafts, -1, -1):
            end = segment.start + len(segment.token_ids) - draft
            fingerprint = links[-1 - draft]
            value, allowed, is_stuck = fingerprint ^ row.salt, None, False
            if row.needs_history and not row.poisoned:
                value ^= self._penalty(end, row) if spec.has_penalty else 0
                allowed = self._allowed(segment, end, row) if spec.grammar_id else None
                is_stuck = spec.grammar_id > 0 and allowed is None
            if is_stuck and len(tokens) > before:
                # The previous draft is not accepted: the next decode meets this dead end by itself.
                return end - 1, links[-2 - draft]
            if is_stuck:
                errors.append(dead_end(segment, end - spec.prompt_tokens))
            token = choose(value, end, spec, self._alphabet, allowed)
            tokens.append(token)
            logprobs.append(logprob_of(fingerprint, token, spec, self._alphabet) if spec.return_logprob else None)
            # A grammar allows nothing after an end, which a draft may be.
            is_over = is_stuck or (spec.grammar_id > 0 and token in self._ends)
            if is_over or (draft and token != segment.token_ids[-draft]):
                break
        return end, fingerprint

    def _run_control(self, microbatch: Microbatch) -> str | None:
        """Execute a control microbatch, as every stage does. Returns the reason for a failure."""
        if isinstance(microbatch, WeightUpdate):
            return self._update_weights(microbatch.path)
        if isinstance(microbatch, SleepSwitch):
            self._is_asleep = microbatch.level > 0
            for kept in (self._kv, self._window_kv, self._host_kv):
                kept[:] = [[]] * len(kept)
            return None
        if isinstance(microbatch, LoraUpdate):
            self._change_lora(microbatch.change)
        return None

    def _change_lora(self, change: LoraChange) -> None:
        if change.path is not None:
            path = self._read_paths.pop(change.version, None)
            if path != change.path or self.loras.is_open(change.version):
                self.corruptions.append(f"version {change.version} of a LoRA is taken, and not every stage has read it")
            self._loras[change.version] = salt_of(EMBEDDED_LORA, embedded_lora_seed(change.path) or 0)
        if change.drop:
            del self._loras[change.drop]

    def _guess(
        self, fingerprint: int, position: int, token: int, spec: SamplingSpec, *, is_adapted: bool
    ) -> tuple[int, ...]:
        """Guess like a draft model: this model's greedy tokens after ``token``, without penalties or a grammar.

        A draft model with other weights makes wrong guesses, and so does any draft model for a LoRA; none where a bias
        decides.
        """
        guesses, greedy = list[int](), spec.for_guesses
        is_itself = self._drafts_itself and self._root == START and not is_adapted
        for number in range(1, self._guessed + 1):
            (_, fingerprint) = links_of(fingerprint, (token,))
            is_mistaken = not is_itself and fingerprint % _GUESSES_PER_MISTAKE == 0
            value = fingerprint ^ _MISTAKE if is_mistaken else fingerprint
            token = choose(value, position + number, greedy, self._alphabet)
            guesses.append(token)
        return tuple(guesses)

    def _update_weights(self, weights: str | None) -> str | None:
        """Switch to the weights of another seed. Returns the reason for a failure."""
        seed = self._seed if weights is None else embedded_seed(weights, self._seed)
        if seed is None or (weights is not None and has_embedded_window(weights) is not bool(self._window_tokens)):
            name = EMBEDDED_WINDOW_MODEL if self._window_tokens else EMBEDDED_MODEL
            return f"the simulated model has the weights {name!r} and '{name}:SEED', got {weights!r}"
        self._root = START if seed == self._seed else (START ^ (seed + 1) * CHAIN) & MASK
        return None

    # -- the KV cache --

    def _copy_pages(self, copies: Copies) -> None:
        """Copy pages to the host, then load pages from it over others."""
        for page, host in copies.out:
            self._host_kv[host] = list(self._kv[page])
            self._host_filled[host] = self._filled[page]
        for host, page in copies.into:
            self._kv[page] = list(self._host_kv[host])
            self._filled[page] = self._host_filled[host]
            self._writes[page] += 1

    def describe(self) -> tuple[StageView, ...]:
        """Return each stage's view. All stages computed the same microbatches; only their failures differ."""
        self._describes += 1
        return tuple(
            StageView(
                seq=self._describes,
                stage=stage,
                last_microbatch_id=-1 if self.last_microbatch is None else self.last_microbatch.id,
                microbatches=self._microbatches,
                failed=self._failed[stage],
                tokens=self._tokens,
                slots_written=sum(self._filled),
                slots_digest=f"{self.kv_digest():016x}",
            )
            for stage in range(self._stages)
        )

    def kv_digest(self) -> int:
        """Return a digest of the content of the whole KV cache."""
        digest = START
        for page in chain(self._kv, self._window_kv, self._host_kv):
            digest = (digest * CHAIN + (page[-1] if page else 0) + len(page)) & MASK
        return digest

    def _forward(self, segment: Segment) -> tuple[list[int], TableRow]:
        """Write one segment's KV. Returns the fingerprint before it and the one after each of its tokens."""
        row = self._update_row(segment)
        if row.poisoned:
            return [_CORRUPTED] * (len(segment.token_ids) + 1), row
        fingerprint = self._read(segment, row)
        tokens = segment.token_ids
        if self._plans_ahead and segment.is_ahead:
            tokens = self._newest_of(segment, row)
        links = links_of(fingerprint, tokens)
        self._write(segment, row, links)
        return links, row

    def _newest_of(self, segment: Segment, row: TableRow) -> tuple[int, ...]:
        """Return the token that a segment planned ahead follows, which the host did not know when it planned."""
        if row.needs_history:
            what = "its next token depends on the one before, which is unknown when it is planned ahead"
            return (self._corrupted(segment, what),)
        if row.newest is None:
            return (self._corrupted(segment, "it was planned ahead, but no token was chosen before it"),)
        return (row.newest,)

    def _update_row(self, segment: Segment) -> TableRow:
        """Apply a segment's changes to its row: a new request, new pages."""
        if segment.sampling is not None:
            self._rows[segment.row] = TableRow(segment.sampling)
        row = self._rows[segment.row]
        if segment.pages:
            row.pages[segment.page_start :] = segment.pages
            row.seen[segment.page_start :] = [self._writes[page] for page in segment.pages]
            row.window[segment.page_start :] = segment.window_pages
        return row

    def _read(self, segment: Segment, row: TableRow) -> int:
        """Return the fingerprint of the KV before this segment. Checks that the row may read all of it."""
        if segment.lora not in self._loras:
            return self._corrupted(segment, f"version {segment.lora} of a LoRA is not what the stages hold")
        if segment.start == 0:
            return self._root ^ self._loras[segment.lora]
        size, kv, writes = self._page_size, self._kv, self._writes
        last, offset = divmod(segment.start - 1, size)
        pages = row.pages[: last + 1]
        if [writes[page] for page in pages] != row.seen[: last + 1]:
            return self._corrupted(segment, f"a page of {pages} was written by another request")
        if len(kv[pages[last]]) < offset + 2:
            return self._corrupted(segment, f"position {segment.start - 1} in page {pages[last]} was never written")
        if segment.page_start == 0 and segment.pages and not self._is_chain(pages, segment.lora):
            return self._corrupted(segment, f"the pages {pages} are not one prefix")
        if self._window_tokens and (place := self._mismatched_window_page(segment, row, last)) is not None:
            what = f"window page {row.window[place]} does not hold what page {pages[place]} does"
            return self._corrupted(segment, what)
        return kv[pages[last]][offset + 1]

    def _penalty(self, end: int, row: TableRow) -> int:
        """Return the effect of penalties on a token: they count the request's output, which is read from its KV."""
        spec, tokens = row.spec, self._tokens_of(end, row)
        if tokens is None:
            return _CORRUPTED  # A token was never written, which is reported elsewhere.
        said = Counter(tokens[spec.prompt_tokens :])
        counts = sorted(said.items()) if spec.frequency_penalty else sorted(said)
        seen = sorted(set(tokens)) if spec.repetition_penalty != 1 else []
        return salt_of(spec.frequency_penalty, spec.presence_penalty, spec.repetition_penalty, counts, seen)

    def _allowed(self, segment: Segment, end: int, row: TableRow) -> tuple[int, ...] | None:
        """Return the tokens that a row's grammar allows at ``end``, by the output that is read from its KV.

        Returns None at a dead end.
        """
        number, tokens = row.spec.grammar_id, self._tokens_of(end, row)
        grammar = self._grammars.get(number)
        if grammar is None or self.grammars.is_open(number):
            state = "is not compiled, or not any more" if grammar is None else "is not ready"
            self.corruptions.append(f"{segment.rid} (row {segment.row}) is masked by grammar {number}, which {state}")
            return self._ends
        said = () if tokens is None else tuple(tokens[row.spec.prompt_tokens :])
        allowed = grammar.allowed(said)
        if allowed is None:
            return None
        if not allowed:
            self.corruptions.append(f"{segment.rid} (row {segment.row}) has said {said}, which its grammar forbids")
        return allowed or self._ends

    def _tokens_of(self, end: int, row: TableRow) -> list[int] | None:
        """Recover all tokens of a row before ``end`` from its KV; None if one was never written."""
        size = self._page_size
        tokens: list[int] = []
        for start in range(0, end, size):
            slots, count = self._kv[row.pages[start // size]], min(size, end - start)
            if len(slots) <= count:
                return None
            # The inverse of a link of the chain.
            links = pairwise(slots[: count + 1])
            tokens += [(after - before * CHAIN - 1) & MASK for before, after in links]
        return tokens

    def _mismatched_window_page(self, segment: Segment, row: TableRow, last: int) -> int | None:
        """Return the first page in the segment's window whose window page has other content."""
        first = max(0, (segment.start - self._window_tokens + 1) // self._page_size)
        for place in range(first, last + 1):
            twin = row.window[place]
            if twin < 0 or self._window_kv[twin] != self._kv[row.pages[place]]:
                return place
        return None

    def _is_chain(self, pages: list[int], lora: int) -> bool:
        """Return whether every page is full and follows the previous one, with the present weights and this LoRA."""
        before, full = self._root ^ self._loras[lora], self._page_size + 1
        for page in pages:
            slots = self._kv[page]
            if not slots or slots[0] != before or (page != pages[-1] and len(slots) != full):
                return False
            before = slots[-1]
        return True

    def _write(self, segment: Segment, row: TableRow, links: list[int]) -> None:
        """Write ``links[1:]`` to the slots from the segment's start on; other slots keep their content."""
        size, done, count = self._page_size, 0, len(links) - 1
        while done < count:
            index, offset = divmod(segment.start + done, size)
            page = row.pages[index]
            take = min(size - offset, count - done)
            slots = self._kv[page]
            if offset == 0:
                self._kv[page] = links[done : done + take + 1]
            elif slots:
                slots[offset + 1 :] = links[done + 1 : done + take + 1]
            else:
                self._kv[page] = links[done + 1 : done + take + 1]
            self._filled[page] = max(self._filled[page], offset + take)
            self._writes[page] += 1
            row.seen[index] = self._writes[page]
            if self._window_tokens:
                self._window_kv[row.window[index]] = list(self._kv[page])
            done += take

    def _corrupted(self, segment: Segment, what: str) -> int:
        self.corruptions.append(f"{segment.rid} (row {segment.row}) reads positions 0 to {segment.start - 1}: {what}")
        return _CORRUPTED ^ segment.start
