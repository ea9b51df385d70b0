"""``EngineConfig``: the one definition of every field that changes what the engine computes.

Keyword-only, validated, frozen, hashable: equal configurations may share a server. Addresses and access belong to the
server's settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.core.errors import ConfigError
from lockstep.broken_rules import broken_rule, did_you_mean

EMBEDDED_MODEL = "embedded"
# The name of the embedded model with window layers.
EMBEDDED_WINDOW_MODEL = "embedded-window"
# LoRAs of the embedded model, each as 'embedded-lora:SEED'.
EMBEDDED_LORA = "embedded-lora"
SEED_LIMIT = 2**63
CHUNKING_OFF = -1
DEFAULT_MAX_LORAS = 8
MAX_STAGES = 64
MAX_LORA_NAME_CHARS = 256
# The block size of OpenVINO's paged attention on a CPU, in tokens; one of our pages is a whole number of blocks.
OPENVINO_BLOCK_TOKENS = 32


class EngineConfig(BaseModel):
    """The engine's configuration. Raises ConfigError, which names field, rule, value and remedy, for a bad value."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())

    model: str = Field(
        EMBEDDED_MODEL,
        min_length=1,
        description="'embedded' (or 'embedded:SEED' for other weights), 'embedded-window' (with sliding-window "
        "layers), a folder with a transformers checkpoint, or a hub name",
    )
    trust_remote_code: bool = Field(
        False, description="run the checkpoint's own Python code (auto_map); only if you have read it"
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="'auto', 'cpu', 'cuda' or 'cuda:N'",
        examples=["auto", "cpu", "cuda", "cuda:1"],
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="data type of weights and KV; 'auto': the checkpoint's"
    )
    backend: Literal["auto", "torch", "openvino"] = Field(
        "auto",
        description="library that computes the model; 'openvino' runs on CPUs and needs a page_size that is a "
        "multiple of 32; 'auto' uses it where it is installed and supports the model, but never for "
        "the embedded model",
    )
    weights: Literal["auto", "int8"] = Field(
        "auto", description="'int8' quantizes matrices to 8 bits, with a scale per row; needs backend='openvino'"
    )
    kv_cache_dtype: Literal["auto", "u8"] = Field(
        "auto",
        description="'u8' quantizes keys and values to 8 bits, with scales and offsets; needs backend='openvino'",
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads per stage; unset: one stage takes as many cores as a model of its size can use, "
        "several stages share the cores",
    )
    attention_backend: Literal["auto", "sdpa", "varlen"] = Field(
        "auto",
        description="'varlen': one kernel call per layer over the page tables (CUDA, 16-bit); 'sdpa': gathers keys "
        "and values first; 'auto': varlen where device and model support it, else sdpa",
    )
    cuda_graphs: Literal["off", "auto", "on"] = Field(
        "off",
        description="capture decode batches as CUDA graphs at startup; 'auto': where device and model support it, "
        "'on': refuse to start where they do not; off by default until measured on a GPU",
    )
    seed: int = Field(
        0, ge=0, lt=SEED_LIMIT, description="seed of everything random: embedded weights, unseeded requests"
    )
    context_length: int | None = Field(
        None, ge=2, description="maximum tokens of prompt and output together; unset: the model's limit"
    )

    pp_size: int = Field(
        1, ge=1, le=MAX_STAGES, description="pipeline stages; with more than one, each has its own process"
    )
    pp_async_depth: int = Field(0, ge=0, le=64, description="microbatches in flight beyond one per stage")
    async_scheduling: bool = Field(
        False,
        description="plan a request's next token before its last one arrives, which keeps a GPU busy; one stage only",
    )
    pp_max_micro_batch_size: int | None = Field(
        None, ge=1, description="maximum requests per microbatch; unset: limited by its tokens alone"
    )
    hidden_transport: Literal["auto", "socket", "gloo", "nccl"] = Field(
        "auto",
        description="how hidden states travel between stages; 'auto': NCCL with a GPU per stage, else a Unix socket",
    )

    chunked_prefill_size: int = Field(
        512, ge=CHUNKING_OFF, description="maximum prompt tokens per prefill microbatch; -1: prompts are never split"
    )
    max_prefill_tokens: int = Field(16_384, ge=1, description="maximum tokens per prefill microbatch, chunked or not")
    dynamic_chunking: bool = Field(
        False, description="shrink the chunks of a prompt as its prefix grows, to keep stages balanced"
    )
    chunk_parity_tokens: int = Field(
        16_384,
        ge=1,
        description="prefix length in tokens at which attention costs as much as everything else, for dynamic_chunking",
    )
    mixed_chunk: bool = Field(
        False,
        description="put decodes and prompts into one microbatch: decodes first, prompts get the rest of the budget",
    )
    max_gap_ms: int | None = Field(
        None,
        ge=1,
        le=3_600_000,
        description="target in milliseconds for the gap between tokens of a running request while other prompts "
        "are computed: measured step times limit the prompt tokens beside decodes; needs mixed_chunk; "
        "unset: max_gap_steps limits them",
    )
    max_gap_steps: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="the same target as a multiple of the duration of a decode-only step; prompts always get at "
        "least 10 ms and a quarter of a chunk, up to 128 tokens; max_gap_ms replaces it; no effect without "
        "mixed_chunk; unset: chunked_prefill_size alone limits them",
    )
    max_running_requests: int = Field(
        64, ge=1, le=65_536, description="maximum requests that own memory at once (rows)"
    )
    max_queued_requests: int = Field(
        1024, ge=1, description="maximum waiting requests; further ones are refused with 429"
    )
    waiting_timeout_s: float | None = Field(
        None, gt=0, description="seconds within which a request must start, else it ends with 504; unset: no limit"
    )
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "priority"] = Field(
        "fcfs",
        description="order of the queue: first come, longest prefix match, depth first through the prefix tree (the "
        "branch that most requests share first), or highest priority",
    )
    priority_preemption: bool = Field(
        False, description="let a waiting request of higher priority retract a running one; needs the priority policy"
    )
    max_cached_grammars: int = Field(
        64, ge=0, le=65_536, description="maximum compiled grammars to keep while no request uses them"
    )

    page_size: int = Field(16, ge=1, le=1024, description="tokens per KV page; unset: 32 with OpenVINO")
    max_total_tokens: int | None = Field(
        None, ge=1, description="KV capacity in tokens, rounded down to pages; unset: sized from the device's memory"
    )
    max_window_tokens: int | None = Field(
        None,
        ge=1,
        description="KV capacity of sliding-window layers in tokens, rounded down to pages; unset: as much as all "
        "running requests can use at once",
    )
    host_kv_tokens: int = Field(
        0,
        ge=0,
        description="capacity in tokens, rounded down to pages, of host memory for KV that is evicted from the KV "
        "cache; a hit copies it back; 0: none",
    )
    radix_cache: bool = Field(True, description="share the KV of equal prompt prefixes between requests")
    kv_events: bool = Field(False, description="publish the changes of the prefix cache, for routers")
    kv_sanitizer: bool = Field(False, description="keep a shadow of the KV cache on every stage and check every read")

    role: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="'prefill' computes prompts for other engines and sends them the KV, 'decode' receives that KV "
        "and generates from it, 'both' does everything itself",
    )
    prefill_timeout_s: float = Field(
        30.0,
        gt=0,
        description="seconds that a decode engine waits for the KV of a prompt before it computes the missing part "
        "itself",
    )

    speculative_algorithm: Literal["off", "ngram", "draft_model"] = Field(
        "off",
        description="guess tokens and verify several in one forward pass; 'ngram' looks them up in the request's "
        "own prompt and output, 'draft_model' has a smaller model guess them; the output stays the same",
    )
    speculative_draft_model: str = Field(
        "", description="the draft model, given like model; needs the same vocabulary and no window layers"
    )
    speculative_num_draft_tokens: int = Field(
        4, ge=1, le=64, description="maximum guessed tokens that one forward pass verifies"
    )
    speculative_ngram_max: int = Field(
        4, ge=1, le=64, description="longest suffix, in tokens, that is looked up for a guess"
    )
    speculative_ngram_min: int = Field(
        2,
        ge=1,
        le=64,
        description="shortest suffix, in tokens, that is looked up for a guess; doubled until guesses hold",
    )

    lora: str = Field(
        "",
        description="LoRA adapters that requests may select, each as NAME=PATH of a folder in peft's format, "
        "separated by commas; the flag can be repeated",
    )
    max_loras: int | None = Field(
        None, ge=1, description="maximum LoRAs that the stages hold at once; unset: 8 if lora is given, else none"
    )
    max_lora_rank: int = Field(64, ge=1, le=4096, description="maximum rank of a LoRA; higher ranks are refused")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as exc:
            raise ConfigError(_explain(exc, type(self))) from exc

    @model_validator(mode="before")
    @classmethod
    def _page_of_the_backend(cls, values: Any) -> Any:
        """Default a page to one OpenVINO block if the backend is OpenVINO and no page size is given."""
        if isinstance(values, dict) and values.get("backend") == "openvino" and "page_size" not in values:
            return {**values, "page_size": OPENVINO_BLOCK_TOKENS}
        return values

    @model_validator(mode="after")
    def _rules_between_fields(self) -> EngineConfig:
        """Check the rules between fields, in order; report the first broken one."""
        self._check_prompts()
        self._check_memory()
        self._check_scheduling()
        self._check_backend_and_role()
        return self

    def _check_prompts(self) -> None:
        if self.chunked_prefill_size == 0:
            raise ValueError("chunked_prefill_size must be >= 1, or -1 for off, got 0; use -1 to never split a prompt")
        if self.dynamic_chunking and (self.pp_size == 1 or self.chunked_prefill_size == CHUNKING_OFF):
            raise ValueError(
                f"dynamic_chunking needs several stages and chunked prefill, got pp_size={self.pp_size} and "
                f"chunked_prefill_size={self.chunked_prefill_size}; set both or switch it off"
            )

        if self.max_gap_ms is not None and "max_gap_ms" in self.model_fields_set and not self._may_bound_gaps:
            raise ValueError(
                f"max_gap_ms needs mixed_chunk and chunked prefill, got mixed_chunk={self.mixed_chunk} and "
                f"chunked_prefill_size={self.chunked_prefill_size}; set both or leave max_gap_ms out"
            )

    @property
    def _may_bound_gaps(self) -> bool:
        return self.mixed_chunk and self.chunked_prefill_size != CHUNKING_OFF

    @property
    def max_gap_s(self) -> float | None:
        """``max_gap_ms`` in seconds; None without a bound, or if prompts never join decodes or are never split."""
        return None if self.max_gap_ms is None or not self._may_bound_gaps else self.max_gap_ms / 1000

    @property
    def gap_steps(self) -> int | None:
        """``max_gap_steps``; None if ``max_gap_ms`` replaces it or no gap can be bounded."""
        return self.max_gap_steps if self.max_gap_ms is None and self._may_bound_gaps else None

    def _check_memory(self) -> None:
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ValueError(
                f"max_total_tokens must hold at least one page of page_size={self.page_size} tokens, "
                f"got {self.max_total_tokens}; raise it or use smaller pages"
            )
        if 0 < self.host_kv_tokens < self.page_size:
            raise ValueError(
                f"host_kv_tokens must be 0 or hold at least one page of page_size={self.page_size} tokens, "
                f"got {self.host_kv_tokens}; raise it or leave it out"
            )
        if self.kv_events and not self.radix_cache:
            raise ValueError(
                "kv_events needs radix_cache, whose changes they report; switch it on or leave kv_events out"
            )
        if self.host_kv_tokens and not self.radix_cache:
            raise ValueError(
                f"host_kv_tokens needs radix_cache, which finds the pages on the host, got {self.host_kv_tokens} "
                "without it; switch it on or leave host_kv_tokens out"
            )

    def _check_scheduling(self) -> None:
        if self.priority_preemption and self.schedule_policy != "priority":
            raise ValueError(
                f"priority_preemption needs schedule_policy='priority', got {self.schedule_policy!r}; "
                "set the policy or switch preemption off"
            )
        if (self.speculative_algorithm == "draft_model") is not bool(self.speculative_draft_model):
            raise ValueError(
                "speculative_draft_model must be set with speculative_algorithm='draft_model' and with no other, got "
                f"{self.speculative_draft_model!r} with {self.speculative_algorithm!r}; set both or none"
            )
        if self.async_scheduling and self.pp_size > 1:
            raise ValueError(
                f"async_scheduling needs one stage, got pp_size={self.pp_size}; leave it out: several stages compute "
                "other requests while a token travels back"
            )
        if self.async_scheduling and self.speculative_algorithm != "off":
            raise ValueError(
                "async_scheduling must be off with speculation, whose guesses need the newest token, got "
                f"speculative_algorithm={self.speculative_algorithm!r}; leave one of them out"
            )
        if self.speculative_ngram_min > self.speculative_ngram_max:
            raise ValueError(
                f"speculative_ngram_min must be <= speculative_ngram_max={self.speculative_ngram_max}, "
                f"got {self.speculative_ngram_min}; lower it or raise the other"
            )

    def _check_backend_and_role(self) -> None:
        if self.weights == "int8" and self.backend != "openvino":
            raise ValueError(
                f"weights='int8' needs backend='openvino', got backend={self.backend!r}; set it or leave weights out"
            )
        if self.role != "both" and self.speculative_algorithm == "draft_model":
            raise ValueError(
                f"role={self.role!r} needs speculative_algorithm 'off' or 'ngram', got 'draft_model', whose KV is "
                "not sent; leave the draft model out"
            )
        if self.role == "decode" and self.host_kv_tokens:
            raise ValueError(
                f"role='decode' needs host_kv_tokens=0, got {self.host_kv_tokens}: received KV must not overwrite a "
                "page whose copy to the host is due; leave it out"
            )
        loras_of(self.lora)
        if self.kv_cache_dtype == "u8" and self.backend != "openvino":
            raise ValueError(
                f"kv_cache_dtype='u8' needs backend='openvino', got backend={self.backend!r}; set it or leave "
                "kv_cache_dtype out"
            )
        if self.backend == "openvino" and (reason := why_not_openvino_settings(self)) is not None:
            raise ValueError(f"{reason}; or use backend='torch'")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a validated copy with these fields changed; ``copy.replace`` calls it. Raises ConfigError."""
        del deep  # every value is immutable
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | dict(update or {}))

    def draft_config(self) -> EngineConfig:
        """Return the draft model's configuration: one stage, the same device and backend."""
        values = {
            "model": self.speculative_draft_model,
            "pp_size": 1,
            "speculative_algorithm": "off",
            "speculative_draft_model": "",
            "async_scheduling": False,
            "dynamic_chunking": False,
            "weights": "auto",
            "lora": "",
            "max_loras": None,
        }
        return self.model_copy(update=values)

    @property
    def most_loras(self) -> int:
        """Return the capacity for LoRAs; 0 for an engine without LoRAs."""
        return self.max_loras or (DEFAULT_MAX_LORAS if self.lora else 0)

    @property
    def depth(self) -> int:
        """Return the maximum number of microbatches in flight. Planning ahead needs a second one."""
        return self.pp_size + max(self.pp_async_depth, self.async_scheduling)


# Remedies for settings of SGLang and vLLM that have no equal here, or a name that means something else.
ELSEWHERE: Final = {
    "tp_size": "the model is not split by tensors here; pp_size splits it by layers",
    "tensor_parallel_size": "the model is not split by tensors here; pp_size splits it by layers",
    "dp_size": "one engine serves one copy of the model; start several behind engine.cluster.serve_app",
    "data_parallel_size": "one engine serves one copy of the model; start several behind engine.cluster.serve_app",
    "pipeline_parallel_size": "pp_size is the number of pipeline stages",
    "max_model_len": "context_length bounds prompt and output together",
    "enable_prefix_caching": "radix_cache shares the KV of equal prefixes",
    "disable_overlap_schedule": "async_scheduling plans a step ahead, and is off unless it is set",
    "max_loras_per_batch": "max_loras bounds the LoRAs that the stages hold at once",
    "enable_priority_scheduling": "set schedule_policy='priority', and priority_preemption=True to preempt",
    "enable_lora": "name the LoRAs in lora",
    "disable_radix_cache": "set radix_cache=False",
    "mem_fraction_static": "max_total_tokens bounds the KV cache in tokens",
    "gpu_memory_utilization": "max_total_tokens bounds the KV cache in tokens",
    "enable_mixed_chunk": "set mixed_chunk=True",
    "enable_chunked_prefill": "chunked_prefill_size is the chunk in tokens, -1 for none",
    "max_num_seqs": "max_running_requests bounds the requests that run",
    "max_num_batched_tokens": "max_prefill_tokens bounds the prompt tokens of a microbatch",
    "block_size": "page_size is the tokens of a KV page",
    "quantization": "the quantization is read from the checkpoint's config.json",
    "load_format": "weights are read as safetensors",
    "kv_events_config": "set kv_events, and kv_events_endpoint for the address",
    "swap_space": "host_kv_tokens bounds the KV in host memory, in tokens",
    "max_log_len": "log_requests switches the log of requests",
    "enable_auto_tool_choice": "tools are on where tool_call_parser is not 'none'",
    "chat_template": "chats use the template in the checkpoint's folder; change it there",
    "compilation_config": "cuda_graphs says whether decodes are recorded as CUDA graphs",
    "dist_init_addr": "stages of other machines come with placement='join' and `engine stage --join`",
    "distributed_executor_backend": "placement says where stages run: 'local', 'join' or 'ray'",
    "download_dir": "the environment variable HF_HOME names the folder of checkpoints",
    "enable_torch_compile": "cuda_graphs says whether decodes are recorded as CUDA graphs",
    "ep_size": "the model is not split by experts here; pp_size splits it by layers",
    "grammar_backend": "grammars are llguidance's; leave it out",
    "guided_decoding_backend": "grammars are llguidance's; leave it out",
    "kv_cache_memory_bytes": "max_total_tokens bounds the KV cache in tokens",
    "nnodes": "stages of other machines come with placement='join' and `engine stage --join`",
    "node_rank": "stages of other machines come with placement='join' and `engine stage --join`",
    "revision": "fetch the revision yourself, and name its folder as the model",
    "schedule_conservativeness": "requests that no longer fit are retracted; max_running_requests bounds their number",
    "speculative_config": "set speculative_algorithm and speculative_num_draft_tokens",
    "ssl_certfile": "TLS is for a proxy in front of the server",
    "ssl_keyfile": "TLS is for a proxy in front of the server",
    "tokenizer": "the tokenizer is the one in the model's folder",
    "tokenizer_path": "the tokenizer is the one in the model's folder",
    "watchdog_timeout": "step_timeout_s bounds the wait for a microbatch",
    "cpu_offload_gb": "weights stay on the device; pp_size splits them over several",
    "allowed_origins": "cors_origins lists the origins, separated by commas",
    "chat_template_content_format": "the template gets every message unchanged; leave it out",
    "default_chat_template_kwargs": "send chat_template_kwargs with each request",
    "disaggregation_mode": "set role to 'prefill', 'decode' or 'both'",
    "enable_expert_parallel": "the model is not split by experts here; pp_size splits it by layers",
    "hf_overrides": "change config.json in the model's folder",
    "json_model_override_args": "change config.json in the model's folder",
    "kv_transfer_config": "set role, and prefill_engines for a decode engine",
    "limit_mm_per_prompt": "requests are text only; leave it out",
    "log_level_http": "log_level is the least severe log line shown",
    "max_cpu_loras": "max_loras bounds the LoRAs that the stages hold at once",
    "model_impl": "transformers, torch and OpenVINO compute the model; backend chooses",
    "override_generation_config": "send the values with each request",
    "response_role": "every reply has the role 'assistant'; leave it out",
    "root_path": "strip the path in a proxy in front of the server",
    "rope_scaling": "change config.json in the model's folder",
    "runner": "the task is read from the model's folder",
    "structured_outputs_config": "grammars are llguidance's; leave it out",
    "task": "the task is read from the model's folder",
    "tokenizer_mode": "the tokenizer is the one in the model's folder",
    "tool_parser_plugin": "tool_call_parser names a built-in parser",
    "uvicorn_log_level": "log_level is the least severe log line shown",
    "uds": "listen on a Unix socket in a proxy in front of the server",
}


def _explain(exc: ValidationError, model: type[BaseModel]) -> str:
    """Write one line for each error: 'field must ..., got value; remedy'."""
    lines = []
    for error in exc.errors():
        name = ".".join(str(part) for part in error["loc"])
        if error["type"] == "value_error":
            lines.append(error["msg"].removeprefix("Value error, "))
        elif error["type"] == "extra_forbidden":
            remedy = ELSEWHERE.get(name) or did_you_mean(name, model.model_fields)
            lines.append(f"{name} is not a field of {model.__name__}, got {error['input']!r}; {remedy}")
        else:
            rule = broken_rule(error["type"], error.get("ctx"))
            description = model.model_fields[name].description if name in model.model_fields else ""
            if error["type"] == "string_pattern_mismatch":
                rule = f"must be such as {', '.join(map(repr, model.model_fields[name].examples or ()))}"
            lines.append(f"{name} {rule}, got {error['input']!r}; {name}: {description}")
    return "\n".join(lines)


def why_not_openvino_settings(config: EngineConfig) -> str | None:
    """Return the error for a setting that OpenVINO supports with no model, or None."""
    if config.device not in ("auto", "cpu"):
        return f"device must be 'cpu' for OpenVINO, got {config.device!r}; set it"
    if config.page_size % OPENVINO_BLOCK_TOKENS:
        return (
            f"page_size must be a multiple of {OPENVINO_BLOCK_TOKENS} for OpenVINO, whose blocks are of that size, "
            f"got {config.page_size}; use {OPENVINO_BLOCK_TOKENS}"
        )
    if config.dtype == "float16":
        return "dtype must be float32 or bfloat16 for OpenVINO, got 'float16'; use bfloat16"
    if config.cuda_graphs == "on":
        return "cuda_graphs must be 'off' or 'auto' for OpenVINO, which computes on CPUs, got 'on'; leave it out"
    if config.attention_backend != "auto":
        return f"attention_backend must be 'auto' for OpenVINO, got {config.attention_backend!r}; leave it out"
    if config.most_loras:
        return (
            "lora and max_loras must be unset for OpenVINO, whose graph has no LoRAs, got "
            f"max_loras={config.most_loras}; leave them out"
        )
    return None


def loras_of(text: str) -> tuple[tuple[str, str], ...]:
    """Parse 'NAME=PATH,NAME=PATH' of LoRAs. Raises ValueError for a malformed entry."""
    found: dict[str, str] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, _, path = map(str.strip, entry.partition("="))
        if not name or not path or len(name) > MAX_LORA_NAME_CHARS:
            rule = f"each entry of lora must be NAME=PATH, a name has at most {MAX_LORA_NAME_CHARS} characters"
            raise ValueError(f"{rule}, got {entry!r}; correct it")
        if name in found:
            raise ValueError(f"lora must give each name once, got {name!r} twice; rename one of the two")
        found[name] = path
    return tuple(found.items())


def require_lora_names(lora: str, model_name: str) -> None:
    """Raise ConfigError for a configured LoRA that has the served model's name: no request could select it."""
    for name, _ in loras_of(lora):
        if name == model_name:
            raise ConfigError(f"lora must give LoRAs other names than the served model's, got {name!r}; rename it")


def embedded_seed(model: str, seed: int) -> int | None:
    """Return the seed of the embedded weights that ``model`` names, by default ``seed``; None for any other model."""
    name, colon, own = model.partition(":")
    if name not in (EMBEDDED_MODEL, EMBEDDED_WINDOW_MODEL):
        return None
    if not colon:
        return seed
    return _seed_in(own)


def embedded_lora_seed(path: str) -> int | None:
    """Return the seed of the embedded model's LoRA that ``path`` names; None for any other path."""
    name, _, seed = path.partition(":")
    return _seed_in(seed) if name == EMBEDDED_LORA else None


def _seed_in(text: str) -> int | None:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(SEED_LIMIT))
    return int(text) if is_number and int(text) < SEED_LIMIT else None


def has_embedded_window(model: str) -> bool:
    """Return whether this is the embedded model with window layers, of any seed."""
    return model.partition(":")[0] == EMBEDDED_WINDOW_MODEL
