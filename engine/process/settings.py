"""The settings of a server beyond the engine's configuration: addresses, keys, the gate, time limits.

Defines every field once, whatever its source: a flag, the environment, a file, the default. No field changes what the
engine computes.
"""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    SecretStr,
    SerializationInfo,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from engine.core.config import CHUNKING_OFF, EngineConfig
from engine.process.links.endpoint import MAX_PORT, Endpoint, parse_endpoint, parse_engine_url

LIVE_GATE = "engine.server.scheduler_process.live_gate:LiveGate"
DEFAULT_MAX_BODY_BYTES = 16 * 1024 * 1024
_VISIBLE = re.compile(r"[!-~]+")
# A name, an IPv4 address or an IPv6 address.
_HOST = re.compile(r"[^\s:/]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*(%[\w.-]+)?")
_EVENTS = re.compile(r"tcp://(127\.\d+\.\d+\.\d+|localhost|\[::1\]):\d{1,5}|ipc://.+")
_ORIGIN = re.compile(r"[\w.+-]+://[^\s/?#]+/?")
# The serialization context of a dump that includes the keys, for a process that serves with them.
REVEAL_KEYS = {"reveal_keys": True}


class ServerSettings(EngineConfig):
    """An engine's configuration and its server's. Raises ConfigError for a bad value, as EngineConfig does."""

    # Validation errors must not show a key either.
    model_config = ConfigDict(hide_input_in_errors=True)

    # On, so that no stream waits for a long prompt. Off in scripts, which control the content of a microbatch.
    mixed_chunk: bool = Field(
        True,
        description="put decodes and prompts into one microbatch: decodes first, prompts get the rest of the budget",
    )
    # Set, so that streams do not stall while other prompts are computed. Beside four streams of a small model a long
    # prompt loses no throughput at 5, and a twelfth at 4. Unset in scripts, as above.
    max_gap_steps: int | None = Field(
        5,
        ge=1,
        le=1000,
        description="the same target as a multiple of the duration of a decode-only step; prompts always get at "
        "least 10 ms and a quarter of a chunk, up to 128 tokens; max_gap_ms replaces it; no effect without "
        "mixed_chunk; 1000: chunked_prefill_size alone limits them",
    )
    # Larger than in scripts: a burst of short prompts is computed in a few steps, and max_gap_steps limits what running
    # requests wait.
    chunked_prefill_size: int = Field(
        2048, ge=CHUNKING_OFF, description="maximum prompt tokens per prefill microbatch; -1: prompts are never split"
    )
    served_model_name: str = Field("", description="name by which clients select the model; unset: the value of model")
    tool_call_parser: Literal[
        "auto",
        "none",
        "hermes",
        "llama3",
        "mistral",
        "llama4",
        "qwen3_coder",
        "glm45",
        "deepseek",
        "kimi_k2",
        "gpt_oss",
    ] = Field("auto", description="parser of the model's tool calls; 'auto' chooses by its chat template")
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek-r1", "gpt-oss"] = Field(
        "auto", description="parser of the model's reasoning; 'auto' chooses by its chat template"
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="defaults of sampling fields that a request omits: 'model': from the checkpoint's "
        "generation_config.json; 'openai': temperature 1 without filters",
    )

    placement: Literal["local", "join", "ray"] = Field(
        "local",
        description="where stages run: 'local': in processes of this machine; 'join': wherever `engine stage "
        "--join` is started; 'ray': spread over the nodes of a Ray cluster",
    )
    stage_listen: str = Field(
        "127.0.0.1:30001",
        description="HOST:PORT on which stages join; other machines must reach it; port 0 picks a free one",
    )
    secret_file: str = Field(
        "", description="file with the secret by which stages authenticate; unset: a new one for each run"
    )
    heartbeat_timeout_s: float = Field(
        5.0, ge=0.2, le=3600, description="seconds of silence of a stage on another machine after which the server ends"
    )
    ray_address: str = Field(
        "",
        description="HOST:PORT of the Ray cluster, or 'local'; unset: RAY_ADDRESS, a running cluster, else a local one",
    )
    ray_cpus_per_stage: float = Field(
        1.0, gt=0, le=1024, description="CPUs that Ray reserves for each stage, in addition to a GPU if there are any"
    )

    prefill_engines: str = Field(
        "",
        description="URLs, separated by commas, of the engines with role='prefill' that serve a decode engine",
        examples=["http://127.0.0.1:30010"],
    )
    prefill_retry_s: float = Field(
        1.0,
        ge=0,
        le=30,
        description="seconds for which a prefill engine is avoided after a failure, doubled by each further one, "
        "up to 30; 0: failures are ignored",
    )
    kv_listen: str = Field(
        "",
        description="HOST:PORT on which the first stage of a decode engine receives KV, further stages on the "
        "ports after it; prefill engines must be able to reach it; unset: Unix sockets, for prefill "
        "engines on this machine",
    )
    kv_secret_file: str = Field(
        "", description="file with the secret by which prefill and decode engines authenticate on kv_listen"
    )

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(30_000, ge=0, le=65_535, description="TCP port to listen on; 0 picks a free one")
    max_body_bytes: int = Field(
        DEFAULT_MAX_BODY_BYTES, ge=1, description="largest request body in bytes; a larger one is refused with 413"
    )
    max_connections: int | None = Field(
        None, ge=1, description="maximum connections at once; unset: as many as the file descriptors allow"
    )
    header_timeout_s: float = Field(
        15.0, gt=0, le=86_400, description="maximum seconds for the rest of a request's header once it has begun"
    )
    body_timeout_s: float = Field(60.0, gt=0, le=86_400, description="maximum seconds for the whole body of a request")
    send_timeout_s: float = Field(
        60.0, gt=0, le=86_400, description="maximum seconds for a client to read what was sent to it"
    )
    start_timeout_s: float = Field(
        600.0, gt=0, le=86_400, description="maximum seconds for all processes to become ready"
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, le=86_400, description="maximum seconds for live requests to finish after SIGTERM; 0: none"
    )
    step_timeout_s: float = Field(
        600.0,
        ge=0,
        le=86_400,
        description="maximum seconds for a microbatch to complete, and for a stopped process to continue; after "
        "that the server ends and names what is stuck; 0: no limit",
    )
    shutdown_grace_s: float = Field(
        1.0, ge=0, le=1.2, description="maximum seconds for processes to end by themselves at shutdown"
    )

    api_key: SecretStr | None = Field(
        None, description="key that clients send as a bearer token; better in a file or the environment than as a flag"
    )
    admin_key: SecretStr | None = Field(
        None,
        description="key of the operators' routes; without one they are closed unless the server listens on loopback",
    )
    cors_origins: str = Field(
        "", description="origins, separated by commas, whose web pages may read replies; '*': any"
    )
    operator_origins: str = Field(
        "", description="origins, separated by commas, whose web pages may call the operators' routes"
    )
    allowed_hosts: str = Field(
        "", description="additional host names, separated by commas, that a server on loopback accepts"
    )

    kv_events_endpoint: str = Field(
        "",
        description="where kv_events are published: tcp://127.0.0.1:PORT or ipc://PATH; unset: nowhere",
        examples=["tcp://127.0.0.1:5557"],
    )
    kv_events_replay_endpoint: str = Field(
        "",
        description="where a subscriber can request missed events, in the form of kv_events_endpoint; unset: nowhere",
        examples=["tcp://127.0.0.1:5558"],
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="least severe log line shown"
    )
    log_format: Literal["text", "json"] = Field("text", description="log lines as text, or as one JSON object each")
    log_requests: bool = Field(
        False, description="log a line for each request: id, route, status, tokens, times; never its text"
    )
    record: str = Field("", description="file to which every step is recorded, for `scripted replay`; unset: none")
    record_redacted: bool = Field(
        False, description="record prompts and outputs as fingerprints, which replay like the originals"
    )
    flight_dir: str = Field(
        "",
        description="folder to which the last steps are dumped at a crash, or at SIGUSR2 to the scheduler; unset: none",
    )
    otlp_traces_endpoint: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="URL to which spans of requests are sent, by OTLP over HTTP; unset: no tracing",
        examples=["http://localhost:4318/v1/traces"],
    )
    profile_dir: str = Field(
        "", description="folder for the traces of /start_profile; unset: a private one among the temporary files"
    )

    gate: str = Field(
        LIVE_GATE,
        pattern=r"^[\w.]+:\w+$",
        description="the step gate, as 'package.module:factory'; for harnesses",
        examples=[LIVE_GATE],
    )
    gate_options: str = Field("", description="text that is passed to the gate unchanged; for harnesses")
    stage_probe: str = Field(
        "",
        pattern=r"^([\w.]+:\w+)?$",
        description="function that measures the objects of a stage, as 'package.module:function'; for harnesses",
        examples=["package.module:function"],
    )
    placement_options: str = Field(
        "", description="commands of the stages that Ray places, as a JSON list; for harnesses with a relay"
    )

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the names under which a server on loopback may be addressed."""
        return (self.host, *_listed(self.allowed_hosts))

    @property
    def origins(self) -> tuple[str, ...]:
        return _listed(self.operator_origins)

    @property
    def prefill_urls(self) -> tuple[str, ...]:
        return tuple(url.rstrip("/") for url in _listed(self.prefill_engines))

    @field_validator("api_key", "admin_key", mode="before")
    @classmethod
    def _key_can_be_sent(cls, key: object) -> object:
        # All checks are here, because the framework's own errors would show the value.
        text = key.get_secret_value() if isinstance(key, SecretStr) else key
        if text is not None and not (isinstance(text, str) and _VISIBLE.fullmatch(text)):
            raise ValueError(
                "a key must be visible ASCII characters without spaces, got other characters; choose another"
            )
        return key

    @field_validator("host")
    @classmethod
    def _host_is_alone(cls, host: str) -> str:
        if not _HOST.fullmatch(host):
            raise ValueError(f"host must be a name or an address without a port, got {host!r}; set the port separately")
        return host

    @field_validator("kv_events_endpoint", "kv_events_replay_endpoint")
    @classmethod
    def _events_stay_here(cls, endpoint: str, info: ValidationInfo) -> str:
        if endpoint and not _EVENTS.fullmatch(endpoint):
            raise ValueError(
                f"{info.field_name} must be tcp://127.0.0.1:PORT or ipc://PATH, got {endpoint!r}: the events have the "
                "tokens of prompts, and no key protects them; take them to another machine by a tunnel"
            )
        return endpoint

    @field_validator("cors_origins", "operator_origins")
    @classmethod
    def _origins_are_whole(cls, text: str, info: ValidationInfo) -> str:
        for origin in _listed(text):
            is_word = origin == "null" or (origin == "*" and info.field_name == "cors_origins")
            if not is_word and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{info.field_name} must hold origins as browsers send them, got {origin!r}; write "
                    "https://example.com, with the port if it is not the scheme's own"
                )
        return text

    @model_validator(mode="after")
    def _rules_of_roles(self) -> Self:
        if self.role != "both" and self.placement != "local":
            raise ValueError(
                f"role={self.role!r} needs placement='local', got {self.placement!r}: KV is sent by stages of this "
                "machine; leave one of them out"
            )
        if self.role == "decode" and not self.prefill_urls:
            raise ValueError(
                "role='decode' needs prefill_engines, which compute its prompts; set them, or leave role out"
            )
        if self.role != "decode":
            for name in ("prefill_engines", "kv_listen"):
                if value := getattr(self, name):
                    raise ValueError(f"{name} needs role='decode', got {value!r} with {self.role!r}; leave it out")
        if self.kv_secret_file and self.role == "both":
            raise ValueError("kv_secret_file needs role='prefill' or 'decode', got 'both'; leave it out")
        if self.role == "decode" and bool(self.kv_listen) != bool(self.kv_secret_file):
            given, other = ("kv_listen", "kv_secret_file")[:: 1 if self.kv_listen else -1]
            raise ValueError(
                f"{given} needs {other}: KV over TCP is accepted only from peers that prove the secret; set it too, "
                f"or leave {given} out for Unix sockets"
            )
        self._check_prefill_urls()
        if self.kv_listen:
            self._check_kv_listen(parse_endpoint(self.kv_listen, "kv_listen"))
        return self

    def _check_prefill_urls(self) -> None:
        own = {_place(Endpoint(host, self.port)) for host in self.hosts}
        places = set()
        for url in self.prefill_urls:
            place = _place(parse_engine_url(url, "prefill_engines"))
            if place in places or place in own:
                who = "this engine itself" if place in own else "the same one twice"
                raise ValueError(f"prefill_engines must be other engines, each once, got {who}: {url!r}; drop it")
            places.add(place)

    def _check_kv_listen(self, first: Endpoint) -> None:
        if first.is_wildcard:
            raise ValueError(
                f"kv_listen must be an address that prefill engines can connect to, got {self.kv_listen!r}; give an "
                "address of this machine that they can reach"
            )
        if not 1 <= first.port <= MAX_PORT - self.pp_size + 1:
            raise ValueError(
                f"kv_listen must leave a port for each of {self.pp_size} stages, from its own to {MAX_PORT}, got "
                f"{self.kv_listen!r}; choose another port"
            )

    @model_validator(mode="after")
    def _rules_between_server_fields(self) -> Self:
        if self.kv_events_endpoint and not self.kv_events:
            raise ValueError("kv_events_endpoint needs kv_events, which it publishes; set kv_events")
        if self.kv_events_replay_endpoint and not self.kv_events_endpoint:
            raise ValueError(
                "kv_events_replay_endpoint needs kv_events_endpoint, whose events it repeats; set that too"
            )
        if self.record_redacted and self.host_kv_tokens:
            raise ValueError(
                f"record_redacted needs host_kv_tokens=0, got {self.host_kv_tokens}: pages on the host are "
                "identified by digests of their text, which redaction changes; leave one of them out"
            )
        if self.record_redacted and self.speculative_algorithm != "off":
            raise ValueError(
                f"record_redacted needs speculative_algorithm='off', got {self.speculative_algorithm!r}: guesses "
                "come from repeated tokens, which redaction makes different; switch one of them off"
            )
        if self.placement == "local":
            return self
        parse_endpoint(self.stage_listen, "stage_listen")
        if self.pp_size == 1:
            raise ValueError(
                f"placement={self.placement!r} needs pp_size >= 2, got 1: a single stage has no process of its own; "
                "set pp_size or leave placement out"
            )
        return self

    @field_serializer("api_key", "admin_key", when_used="json-unless-none")
    def _mask(self, key: SecretStr, info: SerializationInfo) -> str:
        return key.get_secret_value() if info.context == REVEAL_KEYS else str(key)


def _place(endpoint: Endpoint) -> tuple[str, int]:
    """Map all names of loopback to one."""
    return "localhost" if endpoint.is_loopback or endpoint.is_wildcard else endpoint.host, endpoint.port


def _listed(text: str) -> tuple[str, ...]:
    return tuple(entry for part in text.split(",") if (entry := part.strip()))
