"""The choice of a stage's backend: torch, or OpenVINO if it is installed and supports the model.

Owns the choice and its reasons; imports OpenVINO only once it is chosen. The choice is made when a server starts, when
a stage starts, and for each weight update.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar

import torch
from transformers import PreTrainedConfig

from engine.core.config import OPENVINO_BLOCK_TOKENS, EngineConfig, embedded_seed, why_not_openvino_settings
from engine.core.errors import ConfigError, OpenVINOError
from engine.core.limits import Limits
from engine.core.plan import Segment
from engine.model.arithmetic import compute_dtype
from engine.model.batch import Batch
from engine.model.checkpoint import dtype_name, read_model_config, resolve_folder
from engine.model.kv_pool import KVPool
from engine.model.lora import StageLoras
from engine.model.pooling import read_pooling
from engine.model.prompt_logprobs import ScoreTaker
from engine.model.stage_slice import OnLoad, StageFacts

_log = logging.getLogger(__name__)

# The models whose conversion the tests compare with transformers.
_MODEL_TYPES: Final = frozenset({"gemma3_text", "llama", "mistral", "qwen2", "qwen3"})
# Rotary angles that depend only on the position, so that a converted graph works for every length.
_ROPE_TYPES: Final = frozenset({"default", "linear", "llama3", "yarn"})

_Config = TypeVar("_Config", bound=EngineConfig)


class ComputingStage(Protocol):
    """The interface of a backend to the runner: the layers of one stage with their weights and their KV pool."""

    backend: str
    facts: StageFacts
    device: torch.device
    pool: KVPool
    lora: StageLoras | None

    @property
    def is_lean(self) -> bool:
        """True if torch's lean forward pass computes."""

    def batch(self, segments: Sequence[Segment]) -> Batch:
        """Build the argument of ``forward`` from segments whose pages are in the pool's tables."""

    def forward(self, batch: Batch, hidden: torch.Tensor | None, take_scored: ScoreTaker | None = None) -> torch.Tensor:
        """Compute hidden states [tokens, hidden size] for the next stage, or on the last logits [emitting, vocabulary].

        The result may be overwritten by the next call. On the last stage ``take_scored`` gets the logits of the rows
        with prompt logprobs, a few at a time.
        """

    def take_pool(self, pool: KVPool) -> None:
        """Use another pool of the same layout from now on."""


def make_stage(
    config: EngineConfig, limits: Limits, stage: int, *, lean: bool = True, on_load: OnLoad | None = None
) -> ComputingStage:
    """Load one stage on the configured backend, or for 'auto' on the best one.

    Raises CheckpointError if the model cannot be loaded, OpenVINOError if OpenVINO is configured but cannot compute it.
    """
    if takes_openvino(config):
        try:
            return _openvino_stage(config, limits, stage, on_load)
        except OpenVINOError as exc:
            if config.backend == "openvino":
                raise
            _log.warning("stage %d is computed by torch, not by OpenVINO: %s", stage, exc)
    from engine.model.stage_model import StageModel  # a second of import, which OpenVINO does not need

    return StageModel(config, limits, stage, lean=lean, on_load=on_load)


def _openvino_stage(config: EngineConfig, limits: Limits, stage: int, on_load: OnLoad | None) -> ComputingStage:
    """Import OpenVINO only when it computes."""
    try:
        from engine.model.openvino.stage import OpenVINOStage
    except ImportError as exc:
        raise OpenVINOError(
            f"OpenVINO must have the version that 'lockstep-engine[openvino]' installs, but: {exc}; install that"
        ) from exc
    return OpenVINOStage(config, limits, stage, on_load=on_load)


def takes_openvino(config: EngineConfig) -> bool:
    """True if OpenVINO will compute. Raises ConfigError, with the remedy, if it is configured and cannot."""
    if config.backend == "torch":
        return False
    reason = why_not_openvino(config)
    if reason is None:
        return True
    if config.backend == "openvino":
        raise ConfigError(f"backend='openvino' must be possible here, but {reason}; or use backend='torch'")
    _log.info("the model is computed by torch, not by OpenVINO: %s", reason)
    return False


def with_its_pages(config: _Config) -> _Config:
    """Return a configuration with OpenVINO's page size if 'auto' chooses OpenVINO and no page size is configured."""
    if config.backend != "auto" or "page_size" in config.model_fields_set:
        return config
    if config.max_total_tokens is not None and config.max_total_tokens < OPENVINO_BLOCK_TOKENS:
        return config
    paged = config.model_copy(update={"page_size": OPENVINO_BLOCK_TOKENS})
    return paged if why_not_openvino(paged) is None else config


def why_not_openvino(config: EngineConfig) -> str | None:
    """Return why torch must compute, judged without reading weights; None if OpenVINO can."""
    if config.backend == "auto" and embedded_seed(config.model, config.seed) is not None:
        return "torch computes the embedded model, which is the reference"
    found = importlib.util.find_spec("openvino")
    if found is None or found.origin is None:  # A folder that happens to have the name is not a package.
        return "OpenVINO is not installed; install 'lockstep-engine[openvino]'"
    reason = why_not_openvino_settings(config)
    if reason is not None:
        return reason
    if config.device == "auto" and torch.cuda.device_count():
        return "there is a CUDA device; use device='cpu'"
    folder = resolve_folder(config)
    if read_pooling(folder) is not None:
        return "it is an embedding model, which only torch computes"
    return _why_not_model(config, read_model_config(folder, trust_remote_code=config.trust_remote_code))


def _why_not_model(config: EngineConfig, model: PreTrainedConfig) -> str | None:
    if model.model_type not in _MODEL_TYPES or getattr(model, "auto_map", None):
        known = ", ".join(sorted(_MODEL_TYPES))
        return f"models of type {known} can be converted, this one is {model.model_type!r}"
    unknown = _rope_types(getattr(model, "rope_parameters", None)) - _ROPE_TYPES
    if unknown:
        return f"its rope_type is {', '.join(sorted(unknown))}, not one of {', '.join(sorted(_ROPE_TYPES))}"
    if getattr(model, "attn_logit_softcapping", None) is not None:
        return "the model caps its attention scores, which OpenVINO's paged attention does not"
    dtype = dtype_name(config, model)
    if dtype == "float16":
        return "its weights are float16, and OpenVINO computes here in float32 or bfloat16; set dtype"
    if dtype == "bfloat16" and compute_dtype(torch.bfloat16) is not torch.bfloat16:
        return "this processor has no bfloat16 arithmetic; use dtype='float32'"
    return None


def _rope_types(parameters: Any) -> set[str]:
    """Return the rope types of a configuration; some models have one for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(part.get("rope_type", "default")) for part in (nested or [parameters])}
