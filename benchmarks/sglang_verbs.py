"""SGLang's script verbs on top of this engine's, so that its test texts run here unchanged, as far as they go.

Everything that both contracts have is translated; reading anything else of SGLang's own objects raises ``Untranslated``
with the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from scripted import api

# Stands before what this module has to say, in a traceback.
MARK: Final = "untranslated:"
# Arguments of SGLang's server under their names here; the others are those that change nothing of a schedule.
_SAME: Final = (
    "chunked_prefill_size",
    "max_prefill_tokens",
    "max_running_requests",
    "max_total_tokens",
    "page_size",
    "pp_max_micro_batch_size",
    "pp_size",
    "schedule_policy",
)
_RENAMED: Final = {
    "enable_dynamic_chunking": "dynamic_chunking",
    "enable_mixed_chunk": "mixed_chunk",
    "pp_async_batch_depth": "pp_async_depth",
}
_OF_NO_SCHEDULE: Final = frozenset(
    {"mem_fraction_static", "disable_piecewise_cuda_graph", "disable_cuda_graph", "model_impl"}
)
_MODES: Final = {"prefill": "EXTEND", "decode": "DECODE", "mixed": "MIXED"}
# SGLang's defaults.
_DEFAULTS: Final = {"page_size": 1, "max_total_tokens": 100_000, "max_running_requests": 64}
# The embedded model's; more tokens than it has room for are asked of SGLang by requests that are not to end.
_CONTEXT: Final = 8192


class Untranslated(Exception):
    """This contract has no equivalent."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{MARK} {what}")

    def __str__(self) -> str:
        return str(self.args[0])


def config_of(engine: Mapping[str, Any]) -> EngineConfig:
    """Translate SGLang's arguments into this engine's configuration. Raises Untranslated if one has no equivalent."""
    fields: dict[str, Any] = dict(_DEFAULTS)
    for name, value in engine.items():
        if name in _SAME or name in _RENAMED:
            fields[_RENAMED.get(name, name)] = value
        elif name == "disable_radix_cache":
            fields["radix_cache"] = not value
        elif name == "enable_priority_scheduling" and value:
            fields |= {"schedule_policy": "priority", "priority_preemption": True}
        elif (name in ("tp_size", "dp_size") and value == 1) or (name == "model_path" and "gpt-oss" not in value):
            continue
        elif name not in _OF_NO_SCHEDULE and not name.startswith("kv_canary"):
            raise Untranslated(f"no setting {name}" if name != "model_path" else f"needs the model {value}")
    try:
        return EngineConfig(context_length=_CONTEXT, **fields)
    except ConfigError as error:
        raise Untranslated(f"settings are refused: {str(error).partition(chr(10))[0]}") from error


class Server:
    """Takes the place of SGLang's server."""

    def __init__(self, engine: Mapping[str, Any]) -> None:
        self._config = config_of(engine)

    def execute_script(self, script: Callable[..., Any], *, args: tuple[Any, ...] = (), **_: Any) -> None:
        """Run a script. Raises AssertionError with the report of its failure."""

        def translated(t: Any) -> Iterator[None]:
            yield from script(_Context(t), *args)

        error = api.run_script(translated, config=self._config, tier="sim", title=script.__name__).error
        if error is not None:
            raise AssertionError(str(error)) from error


class _Partial:
    """Has the attributes it defines; any other belongs to a part of SGLang that is not translated."""

    _called = ""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Untranslated(f"{self._called}.{name}")


class _Context(_Partial):
    _called = "t"

    def __init__(self, t: Any) -> None:
        self._t = t
        self._handles: dict[str, _Handle] = {}
        # Prompts of one repeated token: a token of this vocabulary for each of theirs.
        self._tokens: dict[int, int] = {}
        self.scheduler = _Scheduler(self)

    def start_req(
        self,
        *,
        prompt_len: int,
        max_new_tokens: int = 8,
        rid: str | None = None,
        prompt_token: int = 1,
        priority: int | None = None,
        temperature: float | None = None,
        top_logprobs_num: int | None = None,
        **more: Any,
    ) -> _Handle:
        optional = {"rid": rid, "priority": priority, "temperature": temperature, "top_logprobs_num": top_logprobs_num}
        more |= {name: value for name, value in optional.items() if value is not None}
        for name in ("dp_rank", "lora_path", "logprob_start_len"):
            if more.pop(name, None) is not None:
                raise Untranslated(f"start_req({name}=...)")
        token = self._tokens.setdefault(prompt_token, 32 + len(self._tokens))
        handle = _Handle(
            self,
            self._t.start_req(
                prompt_ids=[token] * prompt_len,
                max_new_tokens=min(max_new_tokens, max(_CONTEXT - prompt_len, 1)),
                **more,
            ),
        )
        self._handles[handle.rid] = handle
        return handle

    def pause_generation(self, *, mode: str) -> None:
        self._t.pause_generation(mode=mode)

    def continue_generation(self, *, torch_empty_cache: bool = False) -> None:
        del torch_empty_cache
        self._t.continue_generation()

    def abort(self, handle: Any, *, await_arrival: bool = True) -> None:
        # A script may make its own handle, for a request that never existed.
        del await_arrival
        self._t.abort(handle.rid)

    def abort_all(self) -> None:
        self._t.abort_all()

    def flush_cache(self) -> None:
        self._t.flush_cache()

    def evict_radix(self, *, prefix_tokens: None) -> None:
        assert prefix_tokens is None, "only all of it"
        self._t.flush_cache()

    def exhaust_kv(self, *, leave_pages: int) -> None:
        self._t.exhaust_kv(leave_pages)

    def exhaust_lock_refs(self, *, leave_refs: int) -> None:
        self._t.exhaust_locks(leave_refs)

    def _release_exhausted_pools(self) -> None:
        self._t.release_exhausted()

    def get_all_node_hit_counts(self) -> dict[int, int]:
        return dict(self._t.get_all_node_hit_counts())

    def get_all_node_lock_refs(self) -> dict[int, int]:
        return dict(self._t.get_all_node_lock_refs())

    @property
    def is_idle(self) -> bool:
        return bool(self._t.state.queues_clear)

    @property
    def is_fully_idle(self) -> bool:
        return bool(self._t.is_fully_idle)

    @property
    def last_batch_forward_mode(self) -> str | None:
        mode = self._t.last_batch_forward_mode
        return None if mode is None else _MODES[str(mode)]

    def find_req_by_rid(self, rid: str) -> _Req | None:
        return self._handles[rid].req if rid in self._handles else None

    def is_finished(self, rid: str) -> bool:
        return rid in self._handles and self._handles[rid].finished

    def is_chunking(self, rid: str) -> bool:
        return rid in self._handles and self._handles[rid].is_chunking

    def status(self, rid: str) -> str:
        return self._handles[rid].status if rid in self._handles else "unknown"

    def list_active_reqs(self) -> list[_Req]:
        return [handle.req for handle in self._handles.values() if handle.req is not None and not handle.finished]

    def batch_composition(self) -> dict[str, list[str]]:
        parts = self._t.batch_composition()
        return {name: list(parts[name]) for name in ("prefill", "decode", "chunked", "running")}

    def engine_stats(self) -> dict[str, int]:
        # SGLang counts free tokens, this engine pages.
        state = self._t.state
        return {
            "kv_pool_free": state.kv.free * state.kv.page_size,
            "req_pool_free": state.rows.free,
            "req_pool_total": state.rows.total,
            "page_size": state.kv.page_size,
        }

    def req_of(self, rid: str | None) -> _Req | None:
        return None if rid is None else self._handles[rid].req


class _Handle(_Partial):
    _called = "r"

    def __init__(self, context: _Context, of: Any) -> None:
        self.context = context
        self.of = of
        self.rid = str(of.rid)
        self._req = _Req(of)

    @property
    def req(self) -> _Req | None:
        """Whether the request exists: from its first step on, and for a while after its end."""
        if self.of.req is not None:
            self._req.seen = True
        return self._req if self._req.seen else None

    @property
    def finished(self) -> bool:
        return bool(self.of.finished)

    @property
    def is_chunking(self) -> bool:
        return bool(self.of.is_chunking)

    @property
    def chunks_done(self) -> int:
        return int(self.of.chunks_done)

    @property
    def status(self) -> str:
        """Whether a step has seen the request: SGLang knows none before its first step."""
        if self.finished:
            return "finished"
        return "unknown" if self.req is None else str(self.of.status)

    @property
    def remaining_prompt_tokens(self) -> int:
        return int(self.of.remaining_prompt_tokens)

    @property
    def kv_pages(self) -> int:
        return int(self.of.kv_pages)

    @property
    def lock_refs(self) -> int:
        return int(self.of.lock_refs)


class _Req(_Partial):
    _called = "r.req"

    def __init__(self, of: Any) -> None:
        self._of = of
        self.rid = str(of.rid)
        self.seen = False

    @property
    def output_ids(self) -> list[int]:
        return list(self._of.output_ids)

    @property
    def cached_tokens(self) -> int:
        return int(self._of.cached_tokens)

    @property
    def req_pool_idx(self) -> int | None:
        lease = None if self._of.req is None else self._of.req.lease
        return None if lease is None else int(lease.row)

    def finished(self) -> bool:
        return bool(self._of.finished)


class _Scheduler(_Partial):
    _called = "t.scheduler"

    def __init__(self, context: _Context) -> None:
        self._context = context
        self.req_to_token_pool = _Rows(context)

    @property
    def chunked_req(self) -> _Req | None:
        return self._context.req_of(self._context._t.state.chunked)  # noqa: SLF001 - its other half

    @property
    def waiting_queue(self) -> list[_Req]:
        waiting = [self._context.req_of(rid) for rid in self._context._t.state.waiting]  # noqa: SLF001 - as above
        return [req for req in waiting if req is not None]

    @property
    def forward_ct(self) -> int:
        return int(self._context._t.forward_ct)  # noqa: SLF001 - as above


class _Rows(_Partial):
    _called = "t.scheduler.req_to_token_pool"

    def __init__(self, context: _Context) -> None:
        self._context = context

    def available_size(self) -> int:
        return self._context.engine_stats()["req_pool_free"]
