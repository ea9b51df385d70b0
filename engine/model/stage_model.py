"""One pipeline stage's slice of a transformers model: built on the meta device, filled with its own weights only.

The first stage owns the embedding, the last the final norm and the head. Owns no request and no page table. Built once
when a stage starts, then called once a microbatch.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from engine.config import EngineConfig
from engine.errors import CheckpointError, EngineError, StepFailedError
from engine.limits import Limits
from engine.model import attention
from engine.model.batch import ForwardBatch
from engine.model.checkpoint import (
    dtype_name,
    heads_of,
    read_model_config,
    require_trust,
    resolve_folder,
    window_layers,
)
from engine.model.kv_pool import KVPool
from engine.model.lean import LeanDecoder, compute_dtype, why_not_lean
from engine.model.native import NativeAttention, NativeKernels
from engine.model.native_build import NativeUnavailableError, default_folder
from engine.model.varlen import VarlenAttention, why_not_varlen
from engine.model.weights import WeightFiles
from engine.plan import Segment
from engine.process.control import Loading

__all__ = ["PROBED_TOKENS", "StageModel", "stage_layers"]

_log = logging.getLogger(__name__)

# Each architecture is a class of its own whose parts (layers, norm, embed_tokens) no common type declares.
_Transformer = Any
_AUTO_MODEL: _Transformer = AutoModelForCausalLM

_PROBE_TOKENS = 3
# A stage computes this many tokens when it starts, in pages that no request owns yet.
PROBED_TOKENS = 5
# The largest difference from transformers, relative to the norm of its output. In fp32 1e-6 was seen. In 16 bits the
# two round at other places: 0.01 was seen, and a mistake in the forward makes it larger than 0.3.
_TOLERANCE_FP32 = 1e-4
_TOLERANCE_16_BIT = 0.1


def stage_layers(num_layers: int, pp_size: int, stage: int) -> range:
    """The layers of one stage: contiguous, as even as can be, the earlier stages taking the odd ones."""
    share, odd = divmod(num_layers, pp_size)
    first = stage * share + min(stage, odd)
    return range(first, first + share + (stage < odd))


class StageModel:
    """The layers of one stage with their weights and their KV pool.

    Computes with a ``LeanDecoder`` where that gives what transformers gives, which is tried once at start;
    ``lean=False`` always computes with transformers; ``on_load`` is told of each weight. Raises CheckpointError when
    the checkpoint lacks something, or its architecture cannot be cut into stages.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        stage: int,
        *,
        lean: bool = True,
        on_load: Callable[[Loading], None] | None = None,
    ) -> None:
        self._on_load = on_load
        self.folder = resolve_folder(config)
        model_config = read_model_config(self.folder, trust_remote_code=config.trust_remote_code)
        # Taken before the model is cut down, which changes its configuration.
        self.description: Mapping[str, object] = model_config.to_dict()
        self.is_first = stage == 0
        self.is_last = stage == limits.pp_size - 1
        self.device = _device(config.device, limits, stage)
        self.dtype: torch.dtype = getattr(torch, dtype_name(config, model_config))
        self.hidden_size = int(model_config.hidden_size)
        self.layers = stage_layers(model_config.num_hidden_layers, limits.pp_size, stage)
        kv_heads, head_dim = heads_of(model_config, self.folder)
        kinds = _windowed_layers(model_config, limits)
        windowed = [kinds[index] for index in self.layers]
        self._model = _build(model_config, self.dtype, self.folder, trust_remote_code=config.trust_remote_code)
        self._decoder = self._model.base_model
        self._load()
        self._refuse_work_between_layers()
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
        try:
            self.pool = pool_of(layers=windowed.count(False))
            if limits.window_tokens:
                self.pool.window = pool_of(layers=windowed.count(True), window_tokens=limits.window_tokens)
        except (RuntimeError, MemoryError) as exc:
            raise CheckpointError(
                f"the KV of {limits.total_pages} pages of {limits.page_size} tokens must fit on {self.device}, but: "
                f"{exc}; lower max_total_tokens"
            ) from exc
        self._attention = attention.StageAttention(self.pool)
        kernels = None if varlen else self._native_kernels(config, head_dim)
        self._paged = [
            self._layer_attention(windowed[:index].count(kind), kernels, windowed=kind)
            for index, kind in enumerate(windowed)
        ]
        for layer, layer_attention in zip(self._decoder.layers, self._paged, strict=True):
            _attach(layer, layer_attention)
        self._lean: LeanDecoder | None = None
        self._warm_up()
        if lean:
            self._become_lean(self._paged)

    @property
    def is_lean(self) -> bool:
        """True if the lean forward computes, False if transformers' does."""
        return self._lean is not None

    def take_pool(self, pool: KVPool) -> None:
        """Go on in another pool of the same layout, which the model of other weights has used before."""
        self.pool = self._attention.pool = pool
        for layer in self._paged:
            layer.bind()

    def forward(self, batch: ForwardBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """Compute this stage's layers for one batch.

        ``hidden`` is [tokens, hidden size] from the stage before, None on the first. Returns the same shape, or on the
        last stage the logits [emitting tokens, vocabulary].
        """
        self._attention.batch = batch
        self._attention.calls = 0
        hidden = None if self.is_first else _require_hidden(hidden, batch, self.hidden_size)
        try:
            output = self._call(batch, hidden) if self._lean is None else self._lean.forward(batch, hidden)
        finally:
            self._attention.batch = None
        if self._attention.calls != len(self.layers):
            raise StepFailedError(
                f"each of {len(self.layers)} layers must attend through the pool, {self._attention.calls} did; "
                "this architecture keeps state that is not paged"
            )
        return output.to(self.dtype)

    def _call(self, batch: ForwardBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        inputs = {"input_ids": batch.token_ids} if hidden is None else {"inputs_embeds": hidden[None]}
        if not self.is_last:
            output: torch.Tensor = self._decoder(
                **inputs, position_ids=batch.positions, use_cache=False
            ).last_hidden_state
            return output[0]
        logits: torch.Tensor = self._model(
            **inputs, position_ids=batch.positions, use_cache=False, logits_to_keep=batch.emitting
        ).logits
        return logits[0]

    def _takes_varlen(self, config: EngineConfig, model: PreTrainedConfig, kv_heads: int, head_dim: int) -> bool:
        """Whether attention is one kernel call a layer. Raises CheckpointError when it must be, but cannot."""
        if config.attention_backend == "sdpa":
            return False
        reason = why_not_varlen(
            self.device,
            self.dtype,
            heads=model.num_attention_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=config.page_size,
            softcap=getattr(model, "attn_logit_softcapping", None),
        )
        if reason is not None and config.attention_backend == "varlen":
            raise CheckpointError(f"attention_backend must be 'sdpa' or 'auto' here, got 'varlen': {reason}")
        if reason is not None and self.device.type == "cuda":
            _log.info("attention gathers its keys: %s", reason)
        return reason is None

    def _native_kernels(self, config: EngineConfig, head_dim: int) -> NativeKernels | None:
        """The compiled kernels, if they are wanted and can be had; a model is served without them otherwise."""
        if not config.compile:
            return None
        if self.device.type != "cpu":
            _log.warning("nothing is compiled: the kernels are for CPUs, and the device is %s", self.device)
            return None
        try:
            return NativeKernels(Path(config.compile_dir or default_folder()), head_dim)
        except NativeUnavailableError as exc:
            _log.warning("nothing is compiled, and the eager forward computes: %s", exc)
            return None

    def _layer_attention(
        self, layer: int, kernels: NativeKernels | None, *, windowed: bool
    ) -> attention.PagedAttention:
        if self.pool.pages_first:
            return VarlenAttention(self._attention, layer, windowed=windowed)
        if kernels is not None:
            return NativeAttention(self._attention, layer, kernels, windowed=windowed)
        return attention.LayerAttention(self._attention, layer, windowed=windowed)

    def _load(self) -> None:
        """Cut the model down to this stage, then fill what is left."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        self._cut()
        _rebuild_buffers(self._model, self.device)
        loaded: dict[int, nn.Parameter] = {}
        total = len({id(parameter) for parameter in self._model.parameters()})
        with WeightFiles(self.folder, self._model) as files:
            for module in self._model.modules():
                for key, meta in list(module.named_parameters(recurse=False)):
                    if id(meta) not in loaded:
                        weight = files.load(tuple(names[id(meta)]), meta.shape)
                        # A copy: what was read is a view of the file, which may be written anew for the next update.
                        weight = weight.to(device=self.device, dtype=meta.dtype, copy=True)
                        loaded[id(meta)] = nn.Parameter(weight, requires_grad=False)
                        self._tell_load(len(loaded), total)
                    setattr(module, key, loaded[id(meta)])
        self._model.eval()

    def _tell_load(self, done: int, total: int) -> None:
        if self._on_load is not None:
            dtype = str(self.dtype).removeprefix("torch.")
            self._on_load(Loading(done=done, total=total, device=str(self.device), dtype=dtype))

    def _cut(self) -> None:
        decoder = self._decoder
        types = getattr(decoder.config, "layer_types", None)
        if types is not None:
            decoder.config.layer_types = [types[index] for index in self.layers]
        decoder.config.num_hidden_layers = len(self.layers)
        decoder.layers = nn.ModuleList([decoder.layers[index] for index in self.layers])
        if not self.is_first:
            decoder.embed_tokens = None
        if not self.is_last:
            decoder.norm = nn.Identity()
            self._model.set_output_embeddings(None)

    @torch.inference_mode()
    def _refuse_work_between_layers(self) -> None:
        """Without its layers and its norm a decoder must hand hidden states on as they are, or stages would alter them.

        Some architectures scale the embeddings or add positions there; those would do it once a stage.
        """
        if self.is_first:
            return
        layers, norm, count = self._decoder.layers, self._decoder.norm, self._decoder.config.num_hidden_layers
        self._decoder.layers, self._decoder.norm = nn.ModuleList(), nn.Identity()
        self._decoder.config.num_hidden_layers = 0
        probe = torch.ones((1, _PROBE_TOKENS, self.hidden_size), dtype=self.dtype, device=self.device)
        positions = torch.arange(_PROBE_TOKENS, device=self.device)[None]
        output = self._decoder(inputs_embeds=probe, position_ids=positions, use_cache=False).last_hidden_state
        self._decoder.layers, self._decoder.norm = layers, norm
        self._decoder.config.num_hidden_layers = count
        if not torch.equal(output, probe):
            raise CheckpointError(
                f"{type(self._decoder).__name__} changes hidden states outside of its layers, so it cannot be cut into "
                "stages; use pp_size=1"
            )

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """One token through all layers: what an architecture cannot do shows at start, not at the first request."""
        segment = Segment("warm-up", row=0, start=0, token_ids=(0,), page_start=0, pages=(), emits=True)
        batch = ForwardBatch([segment], self.pool, self.device)
        hidden = None if self.is_first else torch.zeros((1, self.hidden_size), dtype=self.dtype, device=self.device)
        try:
            self.forward(batch, hidden)
        except (EngineError, RuntimeError, TypeError, ValueError, AttributeError) as exc:
            raise CheckpointError(f"{type(self._model).__name__} cannot run through paged attention: {exc}") from exc

    @torch.inference_mode()
    def _become_lean(self, paged: Sequence[attention.PagedAttention]) -> None:
        """Take the lean forward, and let go of transformers' model, if both compute this model alike."""
        name = type(self._model).__name__
        reason = why_not_lean(self._model, self.device)
        if reason is not None:
            _log.info("%s is computed by transformers: %s", name, reason)
            return
        dtype = compute_dtype(self.dtype)
        # Parameters that became views in inference mode could not be used outside of it.
        with torch.inference_mode(mode=False):
            lean = LeanDecoder(self._model, paged, dtype)
        expected = self._compare_outputs()
        self._lean = lean
        try:
            difference = float((self._compare_outputs() - expected).norm() / expected.norm())
        except (EngineError, RuntimeError, TypeError, ValueError) as exc:
            self._lean = None
            _log.warning("%s is computed by transformers: the lean forward fails", name, exc_info=exc)
            return
        tolerance = _TOLERANCE_FP32 if self.dtype == torch.float32 else _TOLERANCE_16_BIT
        if not difference < tolerance:
            self._lean = None
            text = "%s is computed by transformers: the lean forward differs by %g, more than %g"
            _log.warning(text, name, difference, tolerance)
            return
        _log.info("%s is computed by the lean forward in %s, %g from transformers'", name, dtype, difference)
        self._model = self._decoder = None

    def _compare_outputs(self) -> torch.Tensor:
        """What the stage computes for a chunk of a few tokens and for one more token after it, in fp32."""
        window = self.pool.window
        count = min([PROBED_TOKENS, *[pool.total_slots for pool in (self.pool, window) if pool is not None]])
        pages = tuple(range(-(-count // self.pool.page_size)))
        ids = tuple(range(count - 1))
        outputs = []
        for start, token_ids in ((0, ids), (count - 1, (count - 1,))):
            if not token_ids:
                continue
            segment = Segment(
                "compare",
                row=0,
                start=start,
                token_ids=token_ids,
                page_start=0,
                pages=pages,
                emits=True,
                window_pages=pages if window is not None else (),
            )
            self.pool.adopt(segment)
            places = torch.arange(len(token_ids) * self.hidden_size, dtype=torch.float32) + start
            hidden = torch.sin(places).view(-1, self.hidden_size).to(self.dtype)
            outputs.append(self.forward(ForwardBatch([segment], self.pool, self.device), hidden).float())
        return torch.cat(outputs)


def _build(
    model_config: PreTrainedConfig, dtype: torch.dtype, folder: Path, *, trust_remote_code: bool
) -> _Transformer:
    """The whole model without memory: every tensor on the meta device."""
    attention.register()
    try:
        with torch.device("meta"):
            model: _Transformer = _AUTO_MODEL.from_config(
                model_config,
                dtype=dtype,
                attn_implementation=attention.IMPLEMENTATION,
                trust_remote_code=trust_remote_code,
            )
    except Exception as exc:  # an architecture raises whatever it does not understand
        require_trust(folder, exc, trust_remote_code=trust_remote_code)
        raise CheckpointError(f"transformers cannot build the model that {folder} describes: {exc}") from exc
    parts = [part for part in ("embed_tokens", "layers", "norm") if not hasattr(model.base_model, part)]
    if parts or model.get_output_embeddings() is None:
        raise CheckpointError(
            f"a decoder must have embed_tokens, layers, norm and a head, {type(model).__name__} of {folder} has no "
            f"{', '.join(parts) or 'head'}; serve another architecture"
        )
    return model


def _rebuild_buffers(model: _Transformer, device: torch.device) -> None:
    """Compute what no checkpoint holds (rotary frequencies, embedding scales) by the model's own initialiser."""
    for module in model.modules():
        own = dict(module.named_buffers(recurse=False))
        if not own:
            continue
        for name, buffer in own.items():
            setattr(module, name, torch.empty_like(buffer, device=device))
        # The initialiser is private, but the only code that knows every architecture's buffers. It skips nothing here:
        # weights are still on the meta device, where initialising costs and changes nothing.
        model._init_weights(module)  # noqa: SLF001


def _attach(layer: nn.Module, paged: attention.PagedAttention) -> None:
    """Give a layer's attention its pool. Which submodule calls attention is the architecture's business: those with an
    index of their layer can.
    """
    for module in chain([layer], layer.modules()):
        if hasattr(module, "layer_idx"):
            module.paged_attention = paged  # type: ignore[assignment]  # a plain attribute, no submodule


def _windowed_layers(model: PreTrainedConfig, limits: Limits) -> list[bool]:
    """Which layers of the whole model keep their KV in the window pool: none where the limits have no window."""
    window, windowed = window_layers(model)
    if not limits.window_tokens:
        return [False] * len(windowed)
    if window != limits.window_tokens:
        raise CheckpointError(f"window layers must see {limits.window_tokens} tokens, those of this model see {window}")
    return windowed


def _require_hidden(hidden: torch.Tensor | None, batch: ForwardBatch, hidden_size: int) -> torch.Tensor:
    expected = (batch.tokens, hidden_size)
    if hidden is None or tuple(hidden.shape) != expected:
        found = None if hidden is None else tuple(hidden.shape)
        raise StepFailedError(f"hidden states from the stage before must have shape {expected}, got {found}")
    return hidden


def _device(name: str, limits: Limits, stage: int) -> torch.device:
    """The device of one stage: its own GPU where there are enough of them, else the same for all."""
    gpus = torch.cuda.device_count()
    if name.startswith("cuda") and not gpus:
        raise CheckpointError(f"device must exist, but torch sees no CUDA device for {name!r}; use device='cpu'")
    if name not in ("auto", "cuda"):
        return torch.device(name)
    if not gpus:
        return torch.device("cpu")
    return torch.device("cuda", stage if gpus >= limits.pp_size else 0)
