"""One stage's slice of a transformers model: built on the meta device, cut, filled only with its own weights.

The first stage owns the embedding, the last one the final norm and the head. Computes nothing by itself: a backend runs
or converts the slice. Built once when a stage starts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError
from engine.core.limits import Limits
from engine.model.checkpoint import (
    SERVED,
    dtype_name,
    is_text_part,
    read_model_config,
    read_quantization,
    require_trust,
    resolve_folder,
    window_layers,
)
from engine.model.pooling import read_pooling
from engine.model.weights import WeightFiles
from engine.process.control import Loading

OnLoad = Callable[[Loading], None]

# Architectures share no type that declares their parts (layers, norm, embed_tokens).
_Transformer = Any

# A stage computes this many tokens when it starts, in pages that no request owns yet.
PROBED_TOKENS = 5
_PROBE_TOKENS = 3
_ATTACHED = "paged_attention"


def stage_layers(num_layers: int, pp_size: int, stage: int) -> range:
    """Return the layers of one stage: contiguous and evenly divided; earlier stages take the remainder."""
    share, odd = divmod(num_layers, pp_size)
    first = stage * share + min(stage, odd)
    return range(first, first + share + (stage < odd))


def attach(layer: nn.Module, attention: object) -> None:
    """Give ``attention`` to every module of a layer that may call attention: each module with a ``layer_idx``."""
    for module in chain([layer], layer.modules()):
        if hasattr(module, "layer_idx"):
            # Not by setattr, which torch types only for tensors and submodules.
            vars(module)[_ATTACHED] = attention


def attached(module: nn.Module) -> Any:
    """Return the attention that a module was given."""
    return vars(module)[_ATTACHED]


def probe_states(tokens: int, hidden_size: int, start: int = 0) -> torch.Tensor:
    """Return fp32 hidden states that every norm changes."""
    places = torch.arange(tokens * hidden_size, dtype=torch.float32) + start
    return torch.sin(places).view(tokens, hidden_size)


def phase_report(facts: StageFacts, device: str, doing: str) -> Loading:
    """Return the report of a phase that counts no tensors."""
    return Loading(done=0, total=0, device=device, dtype=str(facts.dtype).removeprefix("torch."), doing=doing)


class StageFacts:
    """The facts about one stage that need no weights.

    ``description`` is the whole model's configuration; ``windowed`` has, for each layer of the stage, whether its KV is
    in the window pool.
    """

    def __init__(self, config: EngineConfig, limits: Limits, stage: int) -> None:
        self.folder = resolve_folder(config)
        self.model_config = read_model_config(self.folder, trust_remote_code=config.trust_remote_code)
        self.quantization = read_quantization(self.folder)
        self.is_text_part = is_text_part(self.folder)
        self.pooling = read_pooling(self.folder)
        # Read first: cutting the model down changes its configuration.
        self.description: Mapping[str, object] = self.model_config.to_dict()
        self.is_first = stage == 0
        self.is_last = stage == limits.pp_size - 1
        self.dtype: torch.dtype = getattr(torch, dtype_name(config, self.model_config))
        self.hidden_size = int(self.model_config.hidden_size)
        # The whole model's number of layers, read early for the same reason.
        self.total_layers = int(self.model_config.num_hidden_layers)
        self.layers = stage_layers(self.total_layers, limits.pp_size, stage)
        kinds = _windowed_layers(self.model_config, limits)
        self.windowed = [kinds[index] for index in self.layers]


class _Passed(nn.Module):
    """Replaces a norm, and counts its calls."""

    calls = 0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return states


class StageSlice:
    """The layers of one stage with their weights, as a transformers model.

    ``implementation`` names the attention that its layers call; ``on_load`` is called for each weight. With
    ``matrix_dtype`` the matrices of plain layers keep that type, and the caller widens them before their use. With
    ``is_mapped`` weights on a CPU stay views of the files until ``copy_views``. Raises CheckpointError when the
    checkpoint is incomplete, or its architecture cannot be cut into stages.
    """

    def __init__(
        self,
        facts: StageFacts,
        *,
        dtype: torch.dtype,
        device: torch.device,
        implementation: str,
        trust_remote_code: bool,
        on_load: OnLoad | None = None,
        matrix_dtype: torch.dtype | None = None,
        is_mapped: bool = False,
    ) -> None:
        self._facts = facts
        self._is_mapped = is_mapped
        self._dtype = dtype
        self._matrix_dtype = matrix_dtype
        self._device = device
        self._on_load = on_load
        self.model = _build(facts, dtype, implementation, trust_remote_code=trust_remote_code)
        self.decoder = self.model.base_model
        self._load()
        self._refuse_work_between_layers()

    def _load(self) -> None:
        """Reduce the model to this stage, then load the remaining weights."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        kept_buffers = dict(self.model.named_buffers(remove_duplicate=False))
        for name, buffer in kept_buffers.items():
            names[id(buffer)].append(name)
        known = {name for found in names.values() for name in found}
        self._cut()
        buffers = _rebuild_buffers(self.model, self._device)
        loaded: dict[int, nn.Parameter] = {}
        total = len({id(parameter) for parameter in self.model.parameters()})
        facts = self._facts
        with WeightFiles(
            facts.folder,
            self.model,
            facts.quantization,
            is_part=facts.is_text_part,
            is_headless=facts.pooling is not None,
        ) as files:
            files.require_all_used(known)
            for module, key, meta in buffers:
                kept = tuple(name for name in names[id(meta)] if name in files)
                if kept and key not in module._non_persistent_buffers_set:  # noqa: SLF001
                    weight = files.load(kept, meta.shape)
                    module.register_buffer(key, weight.to(self._device, meta.dtype, copy=True))
            for module in self.model.modules():
                for key, meta in list(module.named_parameters(recurse=False)):
                    if id(meta) not in loaded:
                        weight = files.load(tuple(names[id(meta)]), meta.shape)
                        # A copy, because the weight is a view of the file, which may be overwritten for an update.
                        copies, dtype = not self._is_mapped, self._dtype_of(module, meta)
                        weight = weight.to(device=self._device, dtype=dtype, copy=copies)
                        self._require_finite(names[id(meta)][0], weight)
                        loaded[id(meta)] = nn.Parameter(weight, requires_grad=False)
                        self._report_load(len(loaded), total)
                    setattr(module, key, loaded[id(meta)])
        self.model.eval()

    def copy_views(self) -> None:
        """Copy the weights that are views of the files, which may be overwritten for an update."""
        for parameter in self.model.parameters() if self._is_mapped else ():
            parameter.data = parameter.data.clone()

    def _require_finite(self, name: str, weight: torch.Tensor) -> None:
        """Raise CheckpointError for NaN or infinities, which would make every token wrong. Adds a tenth to the time of
        the copy.
        """
        if not weight.is_floating_point() or not weight.numel():
            return
        # Minimum and maximum are NaN if any number is. Reading both at once costs one wait for the device.
        if not all(map(math.isfinite, torch.stack(torch.aminmax(weight)).tolist())):
            raise CheckpointError(
                f"the weight {name} must be finite in {weight.dtype}, but in {self._facts.folder} it has infinite "
                "numbers or NaN; export the weights again, or compute in a wider type (--dtype)"
            )

    def _dtype_of(self, module: nn.Module, meta: torch.Tensor) -> torch.dtype:
        plain = type(module) in (nn.Linear, nn.Embedding) and meta.dim() == 2
        return self._matrix_dtype if plain and self._matrix_dtype is not None else meta.dtype

    def _report_load(self, done: int, total: int) -> None:
        if self._on_load is not None:
            dtype = str(self._facts.dtype).removeprefix("torch.")
            self._on_load(Loading(done=done, total=total, device=str(self._device), dtype=dtype))

    def _cut(self) -> None:
        decoder = self.decoder
        types = getattr(decoder.config, "layer_types", None)
        if types is not None:
            decoder.config.layer_types = [types[index] for index in self._facts.layers]
        decoder.config.num_hidden_layers = len(self._facts.layers)
        decoder.layers = nn.ModuleList([decoder.layers[index] for index in self._facts.layers])
        if not self._facts.is_first:
            decoder.embed_tokens = None
        if not self._facts.is_last:
            decoder.norm = nn.Identity()
        if not self._facts.is_last or self._facts.pooling is not None:
            self.model.set_output_embeddings(None)

    @torch.inference_mode()
    def _refuse_work_between_layers(self) -> None:
        """Raise CheckpointError for a decoder that changes hidden states outside its layers and its final norm.

        Some architectures scale the embeddings or add positions there, which every stage would repeat. Some also use
        their norm there, which only the last stage has.
        """
        if self._facts.is_first and self._facts.is_last:
            return
        layers, norm, count = self.decoder.layers, self.decoder.norm, self.decoder.config.num_hidden_layers
        passed = _Passed()
        self.decoder.layers, self.decoder.norm = nn.ModuleList(), passed
        self.decoder.config.num_hidden_layers = 0
        probe = probe_states(_PROBE_TOKENS, self._facts.hidden_size).to(self._device, self._dtype)[None]
        positions = torch.arange(_PROBE_TOKENS, device=self._device)[None]
        output = self.decoder(inputs_embeds=probe, position_ids=positions, use_cache=False).last_hidden_state
        self.decoder.layers, self.decoder.norm = layers, norm
        self.decoder.config.num_hidden_layers = count
        if passed.calls != 1 or not (self._facts.is_first or torch.equal(output, probe)):
            raise CheckpointError(
                f"{type(self.decoder).__name__} changes hidden states outside its layers, so it cannot be cut into "
                "stages; use pp_size=1"
            )


def _build(facts: StageFacts, dtype: torch.dtype, implementation: str, *, trust_remote_code: bool) -> _Transformer:
    """Build the whole model without memory: every tensor is on the meta device."""
    from transformers import AutoModelForCausalLM  # takes a second to import, and a cached graph does not need it

    auto_model: _Transformer = AutoModelForCausalLM
    folder = facts.folder
    try:
        with torch.device("meta"):
            model: _Transformer = auto_model.from_config(
                facts.model_config, dtype=dtype, attn_implementation=implementation, trust_remote_code=trust_remote_code
            )
    except Exception as exc:  # an architecture may raise anything for a configuration that it does not understand
        require_trust(folder, exc, trust_remote_code=trust_remote_code)
        why = (
            f"it accepts only its own attention: {exc}"
            if isinstance(exc, KeyError) and implementation in exc.args
            else str(exc)
        )
        raise CheckpointError(f"transformers cannot build the model that {folder} describes: {why}; {SERVED}") from exc
    parts = [part for part in ("embed_tokens", "layers", "norm") if not hasattr(model.base_model, part)]
    if parts or model.get_output_embeddings() is None:
        raise CheckpointError(
            f"a decoder must have embed_tokens, layers, norm and a head, {type(model).__name__} of {folder} has no "
            f"{', '.join(parts) or 'head'}; {SERVED}"
        )
    return model


def _rebuild_buffers(model: _Transformer, device: torch.device) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Compute the buffers that checkpoints lack (rotary frequencies, embedding scales) with the model's own
    initializer.

    Returns the previous buffers with their modules and names, because some checkpoints do have some of them.
    """
    found: list[tuple[nn.Module, str, torch.Tensor]] = []
    for module in model.modules():
        own = dict(module.named_buffers(recurse=False))
        if not own:
            continue
        for name, buffer in own.items():
            found.append((module, name, buffer))
            setattr(module, name, torch.empty_like(buffer, device=device))
        # The initializer is private, but only it knows every architecture's buffers. Weights are still on the meta
        # device, where initializing costs and changes nothing.
        try:
            model._init_weights(module)  # noqa: SLF001
        except Exception as exc:  # an architecture may raise anything here
            raise CheckpointError(
                f"{type(model).__name__} cannot be built in part: {type(module).__name__} fails with {exc}; {SERVED}"
            ) from exc
    return found


def _windowed_layers(model: PreTrainedConfig, limits: Limits) -> list[bool]:
    """Return, for each layer of the whole model, whether its KV is in the window pool; empty without a window."""
    window, windowed = window_layers(model)
    if not limits.window_tokens:
        return [False] * len(windowed)
    if window != limits.window_tokens:
        raise CheckpointError(f"window layers must see {limits.window_tokens} tokens, but this model's see {window}")
    return windowed
