"""The configuration of a LoRA in peft's format: the supported fields, and refusals of all others.

Reads only ``adapter_config.json``. An unknown field must be unset, because it may change the computation.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Final

from engine.core.config import EMBEDDED_LORA, embedded_lora_seed
from engine.core.errors import CheckpointError
from engine.model.checkpoint_files import folder_at, read_json
from engine.model.embedded_lora import embedded_lora_folder

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"

# Fields that are used, fields that only matter in training, and fields about the LoRA's origin.
_KNOWN: Final = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type", "use_dora",
    "use_rslora",
})  # fmt: skip
# A LoRA may come from an untrusted source, and its stage computes nothing while it reads. Groups and repetitions
# multiply the time of a match: exponentially if a group is repeated or their number is unbounded.
MAX_CONFIG_BYTES: Final = 2**20
MAX_EXPRESSION_CHARS: Final = 256
MAX_REPETITIONS: Final = 3
MAX_ALL_REPETITIONS: Final = 48
# One character of a pattern: escaped, or a set.
_CHARACTER: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]])*\]", re.DOTALL)
_REPETITION: Final = re.compile(r"\(|(?<!\()[*+?{]")
_REPEATED_GROUP: Final = re.compile(r"\)[*+{]")
_MERGE: Final = "merge the LoRA into the model and serve that"
_TRAIN: Final = "train the LoRA without it, or merge it into the model and serve that"
# These initializations change the base model, unless peft has converted the LoRA.
_CHANGED_BASES: Final = ("corda", "loftq", "olora", "pissa")


class LoraConfig:
    """The content of ``adapter_config.json``. Raises CheckpointError, naming the field, if it is not supported."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / CONFIG_FILE
        self._said: dict[str, Any] = read_json(self.path, remedy="save the LoRA again", most_bytes=MAX_CONFIG_BYTES)
        self._refuse_unsupported()
        self._alpha = _number(self.path, "lora_alpha", self._said.get("lora_alpha", 8))
        self._alphas = {
            _compiled(self.path, pattern): _number(self.path, f"alpha_pattern[{pattern!r:.200}]", alpha)
            for pattern, alpha in self._mapping("alpha_pattern").items()
        }
        if sum(map(_repetitions, self._mapping("alpha_pattern"))) > MAX_ALL_REPETITIONS:
            raise CheckpointError(
                f"{self.path} must have at most {MAX_ALL_REPETITIONS} groups and repetitions in all patterns of "
                "alpha_pattern, but has more; name the modules instead"
            )
        self._is_rank_stabilized = bool(self._said.get("use_rslora"))

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of the product of a module's two matrices."""
        alpha = next((alpha for pattern, alpha in self._alphas.items() if pattern.fullmatch(module)), self._alpha)
        return alpha / (math.sqrt(rank) if self._is_rank_stabilized else rank)

    def _mapping(self, field: str) -> dict[str, Any]:
        value = self._said.get(field) or {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path} must give {field} as an object, got {value!r:.200}; correct it")
        return value

    def _refuse_unsupported(self) -> None:
        said = self._said
        if str(said.get("peft_type", "")).upper() != "LORA":
            self._refuse("peft_type", "must be LORA, the only supported kind", _MERGE)
        if said.get("use_dora"):
            self._refuse("use_dora", "must be false: magnitudes are not supported", _MERGE)
        if said.get("modules_to_save"):
            self._refuse("modules_to_save", "must be empty: whole modules are not replaced", _TRAIN)
        for field, unset in (("bias", "none"), ("lora_bias", False)):
            if said.get(field, unset) != unset:
                self._refuse(field, f"must be {unset!r}: biases are not supported", _TRAIN)
        if str(said.get("init_lora_weights", "")).lower().startswith(_CHANGED_BASES):
            remedy = "save it with peft's conversion to LoRA"
            self._refuse("init_lora_weights", "must not change the base model", remedy)
        for field in sorted(said.keys() - _KNOWN):
            if said[field]:
                self._refuse(field, "must be unset: it is not supported", _MERGE)

    def _refuse(self, field: str, rule: str, remedy: str) -> None:
        raise CheckpointError(f"{self.path}: {field} {rule}, got {self._said.get(field)!r:.200}; {remedy}")


def lora_folder(path: str) -> Path:
    """Return a path's folder; a LoRA of the embedded model is written at first use. Raises CheckpointError."""
    seed = embedded_lora_seed(path)
    if seed is not None:
        return embedded_lora_folder(seed)
    folder = folder_at(path)
    if folder is None:
        raise CheckpointError(
            f"a LoRA must be a folder on this machine or '{EMBEDDED_LORA}:SEED', got {path!r}, which is not a "
            "folder here; check the path"
        )
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"a LoRA's folder must hold {name}, as peft saves it, but {folder} does not; save the LoRA with "
                "save_pretrained(..., safe_serialization=True)"
            )
    return folder


def require_lora(path: str) -> None:
    """Raise CheckpointError unless there is a LoRA with a supported configuration."""
    LoraConfig(lora_folder(path))


def _number(path: Path, field: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise CheckpointError(f"{path} must give {field} as a number, got {value!r:.200}; correct it")
    return float(value)


def _repetitions(pattern: str) -> int:
    """Count the groups and repetitions of a regular expression; above the limit if a group is repeated."""
    bare = _CHARACTER.sub("x", pattern)
    return MAX_REPETITIONS + 1 if _REPEATED_GROUP.search(bare) else len(_REPETITION.findall(bare))


def _compiled(path: Path, pattern: str) -> re.Pattern[str]:
    """Compile a pattern of module names, which may have a prefix. Names have no group and no repetition."""
    count = _repetitions(pattern)
    if count > MAX_REPETITIONS or (count and len(pattern) > MAX_EXPRESSION_CHARS):
        raise CheckpointError(
            f"{path} must have names in alpha_pattern, or patterns of at most {MAX_EXPRESSION_CHARS} characters with "
            f"{MAX_REPETITIONS} groups and repetitions, and no group repeated, got {pattern!r:.200}; name the modules "
            "instead"
        )
    try:
        re.compile(pattern)
        return re.compile(rf"(.*\.)?({pattern})")
    except (re.error, OverflowError, RecursionError) as exc:
        raise CheckpointError(
            f"{path} must have regular expressions in alpha_pattern, but {pattern!r:.200}: {exc}"
        ) from exc
