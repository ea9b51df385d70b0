"""Checkpoint folders: resolves 'embedded', a path or a hub name to a folder, and a folder to ``ModelFacts``.

Reads only configuration files, never a weight, and imports transformers only to read a folder. Every model name passes
here first, before any process is forked.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from safetensors import SafetensorError

from engine.core.config import EMBEDDED_MODEL, OPENVINO_BLOCK_TOKENS, EngineConfig, embedded_seed, has_embedded_window
from engine.core.errors import CheckpointError
from engine.core.limits import ModelFacts, embedded_facts
from engine.model.checkpoint_files import folder_at, path_at, read_json, weights_digest
from engine.model.embedded import embedded_folder
from engine.model.page_layout import KVOrigin
from engine.model.pooling import PoolingKind, read_pooling
from engine.model.quantization import Quantization, quantization_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
# The end of every refusal of a model.
SERVED = "decoders like Llama, Mistral, Qwen, Gemma, Phi-3 or OLMo are served, with experts or without"
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
# Fields about a model's origin or storage, which do not affect the computation.
ORIGIN_FIELDS = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
# Architectures whose configuration has one window for all layers, and no types of layers.
_UNIFORM_WINDOWS = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")
_BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}
# The scale and the offset of a block of 8-bit numbers, both fp32.
_SCALE_AND_OFFSET_BYTES = 8
_DIGEST_BYTES = 16
# A longer value of a field is compared by its digest, because a greeting carries all of them.
_MAX_VALUE_CHARS = 128


def resolve_folder(config: EngineConfig) -> Path:
    """Return the local folder of the configured model; a hub name is downloaded unless it is cached.

    Raises CheckpointError when there is no such folder or hub model.
    """
    seed = embedded_seed(config.model, config.seed)
    if seed is not None:
        return embedded_folder(seed, windowed=has_embedded_window(config.model))
    place = path_at(config.model)
    if place is not None and place.is_dir():
        return place
    if place is not None:
        gguf = " GGUF is not served; use the safetensors from which it was made." if place.suffix == ".gguf" else ""
        raise CheckpointError(
            f"model must be a folder, got the file {place}.{gguf} Name the folder that holds config.json"
        )
    if _HUB_NAME.fullmatch(config.model) is None:
        raise CheckpointError(
            f"model must be {EMBEDDED_MODEL!r}, '{EMBEDDED_MODEL}:SEED', a folder or a hub name 'owner/name', "
            f"got {config.model!r}, which is not a folder here; check the path"
        )
    return _download(config.model, trust_remote_code=config.trust_remote_code)


def local_folder(config: EngineConfig) -> Path:
    """Resolve a folder that must exist locally: nothing is downloaded.

    Raises CheckpointError when it is not.
    """
    if embedded_seed(config.model, config.seed) is None and folder_at(config.model) is None:
        raise CheckpointError(
            f"model_path must be a folder on this machine or '{EMBEDDED_MODEL}:SEED', got {config.model!r}, which is "
            "not a folder here; check the path"
        )
    return resolve_folder(config)


def require_files(config: EngineConfig) -> None:
    """Raise CheckpointError unless the configured model has files of every kind. Imports nothing costly.

    ``read_facts`` checks their contents.
    """
    if embedded_seed(config.model, config.seed) is not None:
        return
    folder = resolve_folder(config)
    _require_config(folder)
    read_quantization(folder)
    _require_weights(folder)
    require_tokenizer(folder)


def read_facts(config: EngineConfig) -> ModelFacts:
    """Read the facts about the configured model that the scheduler and the front end need; loads no weight.

    Raises CheckpointError for a folder that cannot be served: empty, without config, weights or tokenizer, or not a
    decoder of the usual shape.
    """
    plain = config.dtype in ("auto", "float32") and config.kv_cache_dtype == "auto"
    if embedded_seed(config.model, config.seed) is not None and plain:
        return embedded_facts(config.model)
    folder = resolve_folder(config)
    _require_config(folder)
    _require_weights(folder)
    facts = _facts_of(config, folder)
    require_tokenizer(folder)
    return facts


def read_all_facts(config: EngineConfig) -> ModelFacts:
    """Read the facts, including those of a draft model."""
    facts = read_facts(config)
    return facts.with_draft(read_facts(config.draft_config())) if config.speculative_draft_model else facts


def read_configured_facts(config: EngineConfig) -> ModelFacts:
    """Read the facts from the folder's configuration alone: it needs no weights and no tokenizer."""
    return _facts_of(config, local_folder(config))


def _facts_of(config: EngineConfig, folder: Path) -> ModelFacts:
    model = _read_text_config(folder, trust_remote_code=config.trust_remote_code)
    heads, head_dim = heads_of(model, folder)
    window, windowed = window_layers(model)
    pooling = read_pooling(folder)
    if config.kv_cache_dtype == "u8":
        # A scale and an offset for each channel of a block of keys, and for the values of each token.
        values_a_head = head_dim + _SCALE_AND_OFFSET_BYTES
        keys_a_head = head_dim + head_dim * _SCALE_AND_OFFSET_BYTES // OPENVINO_BLOCK_TOKENS
    else:
        keys_a_head = values_a_head = head_dim * _BYTES_PER_VALUE[dtype_name(config, model)]
    layer_bytes = heads * (keys_a_head + values_a_head)
    return ModelFacts(
        name=config.model,
        vocab_size=model.vocab_size,
        context_length=model.max_position_embeddings,
        num_layers=model.num_hidden_layers,
        kv_bytes_per_token=layer_bytes * windowed.count(False),
        window_tokens=window,
        window_kv_bytes_per_token=layer_bytes * windowed.count(True),
        eos_token_ids=_eos_token_ids(folder, model),
        embedding_size=0 if pooling is None else model.hidden_size,
        shares_prefixes=pooling is None or pooling.kind is not PoolingKind.MEAN,
    )


def read_quantization(folder: Path) -> Quantization | None:
    """Read the folder's quantization; None for plain weights. Raises CheckpointError for an unsupported one."""
    path = folder / "config.json"
    return quantization_of(_said(path), path)


def is_text_part(folder: Path) -> bool:
    """Return whether the folder's model takes more than text; only its text part is served."""
    return "text_config" in _said(_require_config(folder))


def read_model_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read the checkpoint's text configuration. Raises CheckpointError unless it is a decoder whose KV can be paged.

    Python that comes with the checkpoint runs only if it is trusted, and the user is never prompted.
    """
    _require_config(folder)
    _require_weights(folder)
    return _read_text_config(folder, trust_remote_code=trust_remote_code)


def _read_text_config(folder: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    path = _require_config(folder)
    from transformers import AutoConfig  # seconds of import, for a folder only

    try:
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        model: PreTrainedConfig = whole.get_text_config(decoder=True)
    except Exception as exc:  # transformers raises many unrelated types for a bad configuration
        require_trust(folder, exc, trust_remote_code=trust_remote_code)
        raise CheckpointError(f"{path} must be a configuration that transformers can read, but: {exc}") from exc
    _require_decoder(model, path)
    return model


def require_trust(folder: Path, exc: Exception, *, trust_remote_code: bool) -> None:
    """Raise CheckpointError, which names the flag, if a checkpoint cannot be loaded without its own code."""
    if "trust_remote_code" in str(exc) and not trust_remote_code:
        raise CheckpointError(
            f"a checkpoint must load without its own code, but {folder} has Python files (auto_map) and needs them; "
            "read them, and if you trust them start with --trust-remote-code"
        ) from exc


def read_never_sampled_ids(folder: Path) -> tuple[int, ...]:
    """Read the ids that the checkpoint's generation config forbids (``suppress_tokens``)."""
    path = folder / "generation_config.json"
    ids = _said(path).get("suppress_tokens")
    return () if ids is None else _token_ids(path, "suppress_tokens", ids)


def read_sampling_defaults(folder: Path) -> dict[str, object]:
    """Read sampling defaults from the checkpoint's generation config, by the names of a request's fields."""
    said = _said(folder / "generation_config.json")
    return {name: said[name] for name in _SAMPLING_FIELDS if said.get(name) is not None}


def read_tokenizer(folder: Path, *, trust_remote_code: bool) -> str:
    """Return the text of the folder's tokenizer.json, built from other files if it has none."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return str(tokenizer.backend_tokenizer.to_str())


def tokenizer_reader(folder: Path, *, trust_remote_code: bool, now: bool) -> Callable[[], str]:
    """Return a function that calls ``read_tokenizer``. With ``now`` it reads a tokenizer.json at once, so that the file
    may be removed later.

    A text that transformers must build from other files is built on demand, which takes seconds.
    """
    if now and (folder / _TOKENIZER_FILES[0]).is_file():
        text = read_tokenizer(folder, trust_remote_code=trust_remote_code)
        return lambda: text
    return functools.partial(read_tokenizer, folder, trust_remote_code=trust_remote_code)


def require_tokenizer(folder: Path) -> None:
    """Raise CheckpointError when the folder holds no tokenizer."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(
            f"a model folder must hold a tokenizer ({', '.join(_TOKENIZER_FILES)}), but {folder} holds none; "
            "copy the tokenizer's files there"
        )


def checkpoint_digest(config: EngineConfig) -> str:
    """Return a digest of a checkpoint: its computation and its weights, of whose values ``weights_digest`` reads parts.

    Raises CheckpointError for a folder without a checkpoint.
    """
    folder = resolve_folder(config)
    return _short_digest(json.dumps([_described(folder), _weights_of(folder)], sort_keys=True))


def read_kv_origin(folder: Path, config: EngineConfig) -> KVOrigin:
    """Return the origin of KV that the checkpoint in ``folder`` computes. Raises CheckpointError like the digest."""
    fields = ((name, json.dumps(value, sort_keys=True)) for name, value in sorted(_described(folder).items()))
    rounded = "" if config.weights == "auto" else f" in {config.weights}"
    return KVOrigin(
        fields=tuple((name, text if len(text) <= _MAX_VALUE_CHARS else _short_digest(text)) for name, text in fields),
        weights=f"{_weights_of(folder)}{rounded}",
    )


def kv_origin_digest(config: EngineConfig) -> str:
    """Return a digest of the origin of the KV that this engine computes. Raises CheckpointError like the origin."""
    return _short_digest(msgspec.json.encode(read_kv_origin(resolve_folder(config), config)).decode())


def _described(folder: Path) -> dict[str, object]:
    """Read the fields of a model's configuration that affect the computation."""
    return {name: value for name, value in read_json(folder / "config.json").items() if name not in ORIGIN_FIELDS}


def _weights_of(folder: Path) -> str:
    try:
        return weights_digest(folder)
    except (OSError, SafetensorError) as exc:
        raise CheckpointError(f"{folder} must hold *.safetensors that can be read, but: {exc}") from exc


def _short_digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def checkpoint_digests(config: EngineConfig) -> tuple[str, str]:
    """Return the digests of the model and of its draft model, empty without one."""
    draft = checkpoint_digest(config.draft_config()) if config.speculative_draft_model else ""
    return checkpoint_digest(config), draft


def require_same_model(running: Mapping[str, object], other: Mapping[str, object], folder: Path) -> None:
    """Raise CheckpointError, which names the field, unless two models differ only in their weights."""
    for field in sorted((running.keys() | other.keys()) - ORIGIN_FIELDS):
        if running.get(field) != other.get(field):
            raise CheckpointError(
                f"weights must be for the running model, but {folder / 'config.json'} has "
                f"{field}={other.get(field)!r}, and the running model {running.get(field)!r}; start another server"
            )


def dtype_name(config: EngineConfig, model: PreTrainedConfig) -> str:
    """Return the dtype of weights and KV: the configured one, or the checkpoint's own for 'auto'."""
    if config.dtype != "auto":
        return config.dtype
    own = str(model.dtype).removeprefix("torch.") if model.dtype is not None else "float32"
    if own not in _BYTES_PER_VALUE:
        raise CheckpointError(f"dtype must be one of {sorted(_BYTES_PER_VALUE)}, the checkpoint has {own!r}; set dtype")
    return own


def heads_of(model: PreTrainedConfig, folder: Path) -> tuple[int, int]:
    """Return KV heads and head size. Raises CheckpointError if the configuration lacks them in their usual form."""
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    if getattr(model, "kv_lora_rank", None):
        raise CheckpointError(
            f"attention must keep plain keys and values, but {folder} ({model.model_type}) has latent attention (MLA, "
            f"kv_lora_rank), which is not served; {SERVED}"
        )
    return heads, head_dim


def window_layers(model: PreTrainedConfig) -> tuple[int, list[bool]]:
    """Return the window size, 0 without window layers, and for each layer whether it is a window layer.

    A window that no sequence can exceed does not count.
    """
    window = getattr(model, "sliding_window", None) or 0
    types = getattr(model, "layer_types", None)
    if types is not None:
        windowed = [kind == "sliding_attention" for kind in types]
    else:
        windowed = [model.model_type in _UNIFORM_WINDOWS] * model.num_hidden_layers
    if not any(windowed) or not 0 < window < model.max_position_embeddings:
        return 0, [False] * model.num_hidden_layers
    return window, windowed


def _download(name: str, *, trust_remote_code: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[*_HUB_FILES, *(["*.py"] if trust_remote_code else [])]))
    except Exception as exc:  # the hub's client raises many unrelated types; all mean that the model is unavailable
        raise CheckpointError(
            f"model {name!r} is not a folder here and could not be fetched from the hub: {str(exc).rstrip('.')}; "
            "check the name, the network, or give a folder"
        ) from exc


def _require_config(folder: Path) -> Path:
    path = folder / "config.json"
    if not path.is_file():
        _refuse_gguf(folder)
        raise CheckpointError(f"a model folder must hold config.json, but {folder} does not; check the path")
    return path


def _refuse_gguf(folder: Path) -> None:
    if any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"a model folder must hold its weights as *.safetensors, but {folder} holds GGUF, which is not served; "
            "use the safetensors from which it was made"
        )


def _require_weights(folder: Path) -> None:
    _refuse_gguf(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"a model folder must hold its weights as *.safetensors, but {folder} holds none; "
            "convert the checkpoint with save_pretrained"
        )
    for path in files:
        if not path.is_file():
            raise CheckpointError(
                f"{path} must be a regular file, not a pipe, a device or a broken link, because reading one may never "
                "end; fetch it again"
            )


def _require_decoder(model: PreTrainedConfig, path: Path) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    own_code = "AutoModelForCausalLM" in (getattr(model, "auto_map", None) or {})
    known = own_code or model.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if getattr(model, "is_encoder_decoder", False) or not known:
        raise CheckpointError(
            f"the model must be decoder-only, but {path} has model_type={model.model_type!r}; {SERVED}"
        )
    fields = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    said = {field: _size(model, field, path) for field in (*fields, *_OPTIONAL_SIZES)}
    missing = [field for field in fields if said[field] is None]
    if missing:
        raise CheckpointError(
            f"{path} (model_type={model.model_type!r}) must give {', '.join(missing)}, but does not; {SERVED}"
        )
    for field, size in said.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise CheckpointError(f"{path} must give {field} as a number >= 1, got {size!r:.200}; correct it")
    unsupported = set(getattr(model, "layer_types", None) or ()) - _SUPPORTED_LAYERS
    if unsupported:
        raise CheckpointError(
            f"layers must be of types {sorted(_SUPPORTED_LAYERS)}, {path} (model_type={model.model_type!r}) has "
            f"{sorted(unsupported)}; hybrid models are not served; {SERVED}"
        )


def _size(model: PreTrainedConfig, field: str, path: Path) -> object:
    """Return a size common to all layers; None if it is not given. Raises CheckpointError if layers differ."""
    try:
        return getattr(model, field, None)
    except Exception as exc:  # transformers refuses to return one number if layers differ
        raise CheckpointError(
            f"{path} (model_type={model.model_type!r}) must give one {field} for all layers, but they differ; {SERVED}"
        ) from exc


def _eos_token_ids(folder: Path, model: PreTrainedConfig) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    said = _said(path)
    if "eos_token_id" not in said:
        path, said = folder / "config.json", {"eos_token_id": getattr(model, "eos_token_id", None)}
    ids = said["eos_token_id"]
    found = () if ids is None else _token_ids(path, "eos_token_id", ids)
    if any(token >= model.vocab_size for token in found):
        raise CheckpointError(
            f"{path} must give eos_token_id below vocab_size={model.vocab_size}, got {ids!r}, with which no output "
            "would end; correct it"
        )
    return found


def _token_ids(path: Path, field: str, value: object) -> tuple[int, ...]:
    """Return one token id or a list of ids as a tuple."""
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise CheckpointError(
            f"{path} must give {field} as a token id or a list of them, got {value!r:.200}; correct it"
        )
    return tuple(ids)


def _said(path: Path) -> dict[str, object]:
    """Return the content of an optional file."""
    said: dict[str, object] = read_json(path) if path.is_file() else {}
    return said
