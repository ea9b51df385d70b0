"""One pipeline stage computed by torch: transformers' own forward pass over a paged KV pool, or an equivalent lean one.

Owns no request and no page table. Built once when a stage starts, then called for each microbatch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError, EngineError, StepFailedError
from engine.core.limits import Limits
from engine.core.plan import Segment
from engine.model import attention
from engine.model.arithmetic import LEAN_ARCHITECTURES, compute_dtype, relative_difference, stage_devices
from engine.model.batch import Batch, DecodeBatch, ForwardBatch, LayersBatch, require_hidden
from engine.model.checkpoint import SERVED, heads_of
from engine.model.cuda_graphs import DecodeGraphs, cuda_recorder, why_no_graphs
from engine.model.file_pages import give_back_garbage
from engine.model.fused_decoder import PRODUCTS, LeanDecoder, why_not_lean
from engine.model.kv_pool import KVPool
from engine.model.lora import BatchLoras, StageLoras
from engine.model.matrix_product import is_packing_worthwhile
from engine.model.pooling import PoolingKind
from engine.model.prompt_logprobs import ScoreTaker, scored_rows, slices_of
from engine.model.stage_slice import PROBED_TOKENS, OnLoad, StageFacts, StageSlice, attach, phase_report, probe_states
from engine.model.varlen import AttentionShape, VarlenAttention, why_not_varlen

_log = logging.getLogger(__name__)

# The largest difference from transformers, relative to the norm of its output. Observed were 1e-6 in fp32 and 0.01 in
# 16 bits, where the two round at different places; a mistake in the forward pass exceeds 0.3.
_TOLERANCE_FP32 = 1e-4
_TOLERANCE_16_BIT = 0.1


class StageModel:
    """The layers of one stage with their weights and their KV pool.

    Computes with a ``LeanDecoder`` if a trial at startup shows that it equals transformers; ``lean=False`` always
    computes with transformers. ``on_load`` is called for each weight. Raises CheckpointError if the checkpoint is
    incomplete or its architecture cannot be cut into stages.
    """

    backend = "torch"

    def __init__(
        self, config: EngineConfig, limits: Limits, stage: int, *, lean: bool = True, on_load: OnLoad | None = None
    ) -> None:
        self.facts = facts = StageFacts(config, limits, stage)
        self.device = _device(config.device, limits, stage)
        if self.device.type == "cuda":
            # Otherwise pinned memory, streams and graphs would be created on the first GPU.
            torch.cuda.set_device(self.device)
        self.dtype = facts.dtype
        self._shows_all = facts.pooling is not None and facts.pooling.kind is PoolingKind.MEAN
        self._vocab_size = int(facts.model_config.vocab_size)
        attention.register()
        # The lean forward pass copies its weights from the files into its own order.
        is_mapped = lean and self.device.type == "cpu" and facts.model_config.model_type in LEAN_ARCHITECTURES
        held = StageSlice(
            facts,
            dtype=self.dtype,
            device=self.device,
            implementation=attention.IMPLEMENTATION,
            trust_remote_code=config.trust_remote_code,
            on_load=on_load,
            is_mapped=is_mapped,
        )
        # Architectures share no type that declares their parts (layers, norm, embed_tokens).
        self._model: Any = held.model
        self._decoder: Any = held.decoder
        self._attach_attention(config, limits)
        self.lora: StageLoras | None = None
        if limits.max_loras:
            first, total, max_rank = facts.layers.start, facts.total_layers, config.max_lora_rank
            self.lora = StageLoras(self._model, first=first, total=total, max_rank=max_rank, dtype=self.dtype)
        self._lean: LeanDecoder | None = None
        self._graphs: DecodeGraphs | None = None
        if on_load is not None:
            on_load(phase_report(facts, str(self.device), "trying it out"))
        # A pooling model decodes only prompts of one token.
        self._graph_choice = config.cuda_graphs if facts.pooling is None else "off"
        self._try_out(held, lean=lean, is_mapped=is_mapped)

    def _try_out(self, held: StageSlice, *, lean: bool, is_mapped: bool) -> None:
        """Compute a few tokens, and choose the fastest forward pass that gives the same outputs."""
        outputs = self._warm_up()
        if lean:
            self._become_lean(self._paged, outputs, is_mapped=is_mapped)
        if self._lean is None:
            held.copy_views()
        if (reason := self._record_decodes()) is not None and self._graph_choice == "on":
            raise CheckpointError(f"cuda_graphs must be 'off' or 'auto' here, got 'on': {reason}")

    def _attach_attention(self, config: EngineConfig, limits: Limits) -> None:
        """Create the KV pool, and attach each layer's attention over it."""
        model_config, windowed = self.facts.model_config, self.facts.windowed
        kv_heads, head_dim = heads_of(model_config, self.facts.folder)
        varlen = self._takes_varlen(config, model_config, kv_heads, head_dim)
        pool_of = partial(
            KVPool,
            limits,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=self.dtype,
            device=self.device,
            pages_first=varlen,
        )
        self.pool = self._new_pool(limits, pool_of, windowed, scratch=config.cuda_graphs != "off")
        self._attention = attention.StageAttention(self.pool)
        layer_attention = VarlenAttention if varlen else attention.LayerAttention
        self._paged: list[attention.PagedAttention] = [
            layer_attention(self._attention, windowed[:index].count(kind), windowed=kind)
            for index, kind in enumerate(windowed)
        ]
        for layer, paged in zip(self._decoder.layers, self._paged, strict=True):
            attach(layer, paged)

    def _new_pool(
        self, limits: Limits, pool_of: Callable[..., KVPool], windowed: Sequence[bool], *, scratch: bool
    ) -> KVPool:
        """Allocate the pool, and a second one for window layers. Raises CheckpointError if they do not fit."""
        try:
            pool = pool_of(layers=windowed.count(False), scratch=scratch)
            if limits.window_tokens:
                pool.window = pool_of(layers=windowed.count(True), window_tokens=limits.window_tokens)
        except (RuntimeError, MemoryError) as exc:
            raise CheckpointError(
                f"the KV of {limits.total_pages} pages of {limits.page_size} tokens must fit on {self.device}, but: "
                f"{exc}; lower max_total_tokens"
            ) from exc
        return pool

    @property
    def is_lean(self) -> bool:
        return self._lean is not None

    def take_pool(self, pool: KVPool) -> None:
        """Use another pool of the same layout, from the model with the previous weights."""
        self.pool = self._attention.pool = pool
        for layer in self._paged:
            layer.bind()
        # The captured graphs write into the old pool.
        self._record_decodes()

    def batch(self, segments: Sequence[Segment]) -> Batch:
        recorded = None if self._graphs is None else self._graphs.batch(segments)
        return ForwardBatch(segments, self.pool, self.device) if recorded is None else recorded

    def forward(self, batch: Batch, hidden: torch.Tensor | None, take_scored: ScoreTaker | None = None) -> torch.Tensor:
        """Compute this stage's layers for one batch.

        ``hidden`` is [tokens, hidden size] from the stage before, None on the first. Returns the same shape, or on the
        last stage the logits [emitting tokens, vocabulary]; ``take_scored`` gets the logits for prompt logprobs. An
        embedding model returns states after its norm there, of the emitting tokens, or of all tokens for a mean.
        """
        if self.device.type == "cuda" and self.facts.is_first:
            self._require_known(batch)
        if isinstance(batch, DecodeBatch):
            assert self._graphs is not None, "only a stage with graphs makes padded batches"
            return self._graphs.forward(batch, hidden)
        assert isinstance(batch, ForwardBatch), "a torch stage computes only its own batches"
        hidden = None if self.facts.is_first else require_hidden(hidden, batch.tokens, self.facts.hidden_size)
        loras = None if self.lora is None else self.lora.of(batch.segments)
        if self.lora is not None and self._lean is None:
            self.lora.present = loras
        return self._compute(batch.layers, hidden, take_scored, loras)

    def _compute(
        self,
        batch: LayersBatch,
        hidden: torch.Tensor | None,
        take_scored: ScoreTaker | None = None,
        loras: BatchLoras | None = None,
    ) -> torch.Tensor:
        self._attention.batch = batch
        self._attention.calls = 0
        try:
            if self._lean is not None:
                output = self._lean.forward(batch, hidden, take_scored, loras)
            elif take_scored is not None:
                output = self._call_scored(batch, hidden, take_scored)
            else:
                output = self._call(batch, hidden)
        finally:
            self._attention.batch = None
        if self._attention.calls != len(self.facts.layers):
            raise StepFailedError(
                f"each of {len(self.facts.layers)} layers must attend through the pool, but {self._attention.calls} "
                "did; this architecture keeps state that is not paged"
            )
        return output.to(self.dtype)

    def _require_known(self, batch: Batch) -> None:
        """Refuse ids outside the vocabulary, which raise IndexError on a CPU but break the context of a GPU."""
        least, most = int(batch.token_ids_array.min()), int(batch.token_ids_array.max())
        if least < 0 or most >= self._vocab_size:
            raise StepFailedError(f"token ids must be in 0..{self._vocab_size - 1}, got {least}..{most}")

    def _call(self, batch: LayersBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        inputs = {"input_ids": batch.token_ids} if hidden is None else {"inputs_embeds": hidden[None]}
        if not self.facts.is_last or self.facts.pooling is not None:
            output: torch.Tensor = self._decoder(
                **inputs, position_ids=batch.positions, use_cache=False
            ).last_hidden_state
            return output[0, batch.emitting] if self.facts.is_last and not self._shows_all else output[0]
        logits: torch.Tensor = self._model(
            **inputs, position_ids=batch.positions, use_cache=False, logits_to_keep=batch.emitting
        ).logits
        return logits[0]

    def _call_scored(self, batch: LayersBatch, hidden: torch.Tensor | None, take_scored: ScoreTaker) -> torch.Tensor:
        """Compute the layers once, then the head for a few rows at a time: all rows of a long chunk would not fit."""
        inputs = {"input_ids": batch.token_ids} if hidden is None else {"inputs_embeds": hidden[None]}
        output = self._decoder(**inputs, position_ids=batch.positions, use_cache=False)
        for rows in slices_of(scored_rows(batch.segments)):
            take_scored(self._head_of(output, rows))
        return self._head_of(output, batch.emitting)

    def _head_of(self, output: Any, rows: list[int] | torch.Tensor) -> torch.Tensor:
        """Compute logits of rows of the decoder's output by the model's own code: some models scale or cap them.

        The decoder is replaced by its output: the model's forward pass would compute the layers again.
        """
        states = output.last_hidden_state[:, rows]
        part = dataclasses.replace(output, last_hidden_state=states)
        self._decoder.forward = lambda **_: part
        try:
            logits: torch.Tensor = self._model(inputs_embeds=states, use_cache=False).logits
        finally:
            del self._decoder.forward
        return logits[0]

    def _takes_varlen(self, config: EngineConfig, model: PreTrainedConfig, kv_heads: int, head_dim: int) -> bool:
        """Return whether attention is one kernel call a layer. Raises CheckpointError if it must be, but cannot."""
        if config.attention_backend == "sdpa":
            return False
        softcap = getattr(model, "attn_logit_softcapping", None)
        shape = AttentionShape(self.dtype, model.num_attention_heads, kv_heads, head_dim, config.page_size, softcap)
        reason = why_not_varlen(self.device, shape)
        if reason is not None and config.attention_backend == "varlen":
            raise CheckpointError(f"attention_backend must be 'sdpa' or 'auto' here, got 'varlen': {reason}")
        if reason is not None and self.device.type == "cuda":
            _log.info("attention gathers its keys: %s", reason)
        return reason is None

    @torch.inference_mode()
    def _warm_up(self) -> torch.Tensor:
        """Compute a few tokens, so that an unsupported architecture fails at startup; return the outputs."""
        name = type(self._model).__name__
        try:
            outputs = self._compare_outputs()
            difference = 0.0 if why_not_lean(self._model) is None else self._difference_from_own_attention()
        except (EngineError, RuntimeError, TypeError, ValueError, AttributeError) as exc:
            raise CheckpointError(f"{name} cannot run through paged attention: {exc}; {SERVED}") from exc
        if not difference < self._tolerance:
            raise CheckpointError(
                f"{name} cannot run through paged attention: its own attention gives different states, by "
                f"{difference:g}; {SERVED}"
            )
        return outputs

    def _difference_from_own_attention(self) -> float:
        """Return the difference between the outputs with our attention and the architecture's own, which may do more.

        Measured at the token with the smallest difference, except the first, which attends only to itself: in 16 bits a
        router may choose other experts if two scores nearly tie.
        """
        segment = self._probe_segment(0, self._probed_tokens)
        batch = ForwardBatch([segment], self.pool, self.device).layers
        inputs: dict[str, Any] = {"position_ids": batch.positions, "use_cache": False}
        if self.facts.is_first:
            inputs["input_ids"] = batch.token_ids
        else:
            inputs["inputs_embeds"] = self._probe_hidden(0, batch.tokens)[None]
        self._attention.batch = batch
        try:
            paged = self._decoder(**inputs).last_hidden_state[0]
        finally:
            self._attention.batch = None
        self._model.set_attn_implementation("eager")
        try:
            own = self._decoder(**inputs).last_hidden_state[0]
        finally:
            self._model.set_attn_implementation(attention.IMPLEMENTATION)
        return min(
            (relative_difference(*pair) for pair in zip(paged[1:].float(), own[1:].float(), strict=True)), default=0.0
        )

    @torch.inference_mode()
    def _become_lean(
        self, paged: Sequence[attention.PagedAttention], expected: torch.Tensor, *, is_mapped: bool
    ) -> None:
        """Use the lean forward pass, and drop transformers' model, if both give the same ``expected`` outputs."""
        name = type(self._model).__name__
        reason = why_not_lean(self._model)
        if reason is not None:
            _log.info("%s is computed by transformers: %s", name, reason)
            return
        dtype = compute_dtype(self.dtype, self.device.type)
        packs = is_packing_worthwhile(dtype, self.device, torch.get_num_threads())
        # Parameters that became views in inference mode could not be used outside it.
        with torch.inference_mode(mode=False):
            lean = LeanDecoder(self._model, paged, dtype, packs=packs, is_mapped=is_mapped, shows_all=self._shows_all)
        self._lean = lean
        try:
            difference = relative_difference(self._compare_outputs(), expected)
        except (EngineError, RuntimeError, TypeError, ValueError) as exc:
            self._lean = None
            _log.warning("%s is computed by transformers: the lean forward pass fails", name, exc_info=exc)
            return
        if not difference < self._tolerance:
            self._lean = None
            text = "%s is computed by transformers: the lean forward pass differs by %g, more than %g"
            _log.warning(text, name, difference, self._tolerance)
            return
        _log.info(
            "%s is computed by the lean forward pass in %s, which differs by %g from transformers",
            name,
            dtype,
            difference,
        )
        if self.lora is not None:
            self.lora.fuse(PRODUCTS, dtype)
        self._model = self._decoder = None
        if lean.is_packed:
            _log.info("the weights of %s are packed for this CPU", name)
            give_back_garbage()

    @torch.inference_mode()
    def _record_decodes(self) -> str | None:
        """Capture plain decodes if configured; return why not, None if done or not configured.

        A captured forward pass must equal the eager one, which is checked in pages that belong to no request.
        """
        self._graphs = None
        if self._graph_choice == "off":
            return None
        reason = why_no_graphs(self.device, self.pool, lean=self._lean is not None)
        if reason is None:
            try:
                expected = self._compare_outputs()
                self._graphs = DecodeGraphs(
                    self._compute,
                    self.pool,
                    device=self.device,
                    dtype=self.dtype,
                    hidden_size=0 if self.facts.is_first else self.facts.hidden_size,
                    loras=self.lora is not None,
                    record=cuda_recorder(self.device),
                )
                difference = relative_difference(self._compare_outputs(), expected)
                if not difference < self._tolerance:
                    reason = f"captured decodes differ by {difference:g}, more than {self._tolerance}"
            except (EngineError, RuntimeError) as exc:
                reason = f"the capture fails: {exc}"
        if reason is not None:
            self._graphs = None
            _log.log(logging.INFO if self._graph_choice == "auto" else logging.WARNING, "no CUDA graphs: %s", reason)
        return reason

    @property
    def _tolerance(self) -> float:
        return _TOLERANCE_FP32 if self.dtype == torch.float32 else _TOLERANCE_16_BIT

    def _compare_outputs(self) -> torch.Tensor:
        """Compute a chunk of a few tokens and one more token after it, in fp32."""
        count = self._probed_tokens
        outputs = []
        for start, tokens in ((0, count - 1), (count - 1, 1)):
            if tokens:
                hidden = self._probe_hidden(start, tokens)
                # A copy, because the next captured forward pass overwrites the result.
                outputs.append(self.forward(self.batch([self._probe_segment(start, tokens)]), hidden).float().clone())
        return torch.cat(outputs)

    @property
    def _probed_tokens(self) -> int:
        pools = [pool for pool in (self.pool, self.pool.window) if pool is not None]
        return min([PROBED_TOKENS, *[pool.total_slots for pool in pools]])

    def _probe_segment(self, start: int, tokens: int) -> Segment:
        """Return a segment of the probe's tokens, in pages that belong to no request."""
        pages = tuple(range(-(-self._probed_tokens // self.pool.page_size)))
        segment = Segment(
            "compare",
            row=0,
            start=start,
            token_ids=tuple(range(start, start + tokens)),
            page_start=0,
            pages=pages,
            emits=True,
            window_pages=pages if self.pool.window is not None else (),
        )
        self.pool.adopt(segment)
        return segment

    def _probe_hidden(self, start: int, tokens: int) -> torch.Tensor:
        return probe_states(tokens, self.facts.hidden_size, start).to(self.device, self.dtype)


def _device(name: str, limits: Limits, stage: int) -> torch.device:
    """Return the device of one stage: its own GPU if there are enough, else a shared one."""
    gpus = torch.cuda.device_count()
    if name.startswith("cuda") and not gpus:
        raise CheckpointError(f"device must exist, but torch sees no CUDA device for {name!r}; use device='cpu'")
    if name == "cpu" or not gpus:
        return torch.device("cpu")
    return torch.device("cuda", stage_devices(name, limits.pp_size, gpus)[stage])
