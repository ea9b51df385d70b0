"""Parts of a standalone test of vLLM: code of the adapter, and the text of calls and plans."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import HiSparseConnectorWorkerMetadata
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from scripted.core import masks
from scripted.sdk.standalone import Calls, Standalone
from scripted_vllm import connector, encoder_cache, grammar
from scripted_vllm import encoder_check as encoded
from scripted_vllm import engine_objects as parts
from scripted_vllm import kv_check as held
from scripted_vllm import kv_event_check as announced
from scripted_vllm import plan_check as told
from scripted_vllm.config import VllmSettings
from scripted_vllm.ids import rid_of
from scripted_vllm.readers import launches, moves, positions_of, said_of

if TYPE_CHECKING:
    from scripted_vllm.machine import VllmMachine


# Texts of faults: plans without what the runner needs, and what is left when all requests have ended.
_TOLD_TOO_LITTLE: Final = r"^the plan (?:computes|has guesses|continues|resumes)|tokens, those in flight included"
_OTHERS_KV: Final = r"reads the wrong KV|continues from the wrong state"
_OLD_CACHE: Final = "was written before the cache was flushed"
_PAUSED: Final = "is launched while generation is paused"
_LEFT: Final = r"everything has ended, but (blocks_free|requests|waiting|running) is \d+ instead of (\d+)"
_GROWN: Final = r"something has grown: machine\.scheduler\.([\w.\[\]]+) has \d+ entries, in a new one (\d+)"
_COUNTS: Final = {
    "blocks_free": "scheduler.kv_cache_manager.block_pool.get_num_free_blocks()",
    "requests": "len(scheduler.requests)",
    "waiting": "len(scheduler.waiting)",
    "running": "len(scheduler.running)",
}


class VllmStandalone(Standalone):
    """Writes tests of the scheduler, and of its connector if there is one."""

    helpers = (positions_of, said_of, launches, moves)

    def __init__(self, version: Callable[[], str]) -> None:
        self._version = version

    @property
    def engine(self) -> str:
        return f"vLLM {self._version()}"

    def modules(self, config: VllmSettings) -> Sequence[ModuleType]:
        connectors = [connector] if config.has_connector else []
        grammars = (masks, grammar) if config.structured_output else ()
        images = (encoded,) if config.encoder_cache_size else ()
        connectors += [encoder_cache] if config.ec_connector else []
        events = (announced,) if config.enable_kv_cache_events else ()
        return (*connectors, *grammars, parts, told, held, *images, *events)

    def opening(self, config: VllmSettings) -> Sequence[str]:
        sampler = ("sampler = Sampler(scheduler)",) if config.structured_output else ()
        return ("scheduler = new_scheduler(settings)", *sampler)

    def watched(self, machine: VllmMachine) -> Mapping[str, tuple[Any, Sequence[str]]]:
        scheduler = machine.scheduler
        if machine.settings.connector_cls:
            raise NotImplementedError("with connector_cls the adapter is the worker, which no standalone file contains")
        methods = (
            "add_request", "schedule", "update_from_output", "finish_requests", "reset_prefix_cache", "set_pause_state",
            "update_draft_token_ids", "update_draft_token_ids_in_output", "reset_encoder_cache",
        )  # fmt: skip
        found: dict[str, tuple[Any, Sequence[str]]] = {"scheduler": (scheduler, methods)}
        compiler = scheduler.structured_output_manager.backend
        if compiler is not None:
            found["scheduler.structured_output_manager.backend"] = (compiler, ("finish",))
        if machine.settings.structured_output:
            found["sampler"] = (machine.sampler, ("masks_of", "masked"))
        if scheduler.ec_connector is not None:
            found["scheduler.ec_connector"] = (scheduler.ec_connector, ("begin",))
        if isinstance(scheduler.connector, connector.ScheduledConnector):
            found["scheduler.connector"] = (scheduler.connector, ("offer",))
        return found

    def spelled(self, value: Any, calls: Calls, arguments: Sequence[Any]) -> str | None:
        match value:
            case Request():
                calls.names[rid_of(value.request_id)] = value.request_id
                params = value.sampling_params
                more = {"max_tokens": params.max_tokens, "arrival_time": value.arrival_time}
                more |= {"stop_token_ids": params.stop_token_ids} if params.stop_token_ids else {}
                more |= {"priority": value.priority} if value.priority else {}
                more |= {"lora": value.lora_request.lora_int_id} if value.lora_request else {}
                more |= {"grammar": 1} if value.use_structured_output else {}
                more |= {"session": True} if value.resumable else {}
                images = [(one.mm_position.offset, one.mm_position.length, one.identifier) for one in value.mm_features]
                more |= {"images": images} if images else {}
                given = [f"settings, {value.request_id!r}, {value.prompt_token_ids}"]
                return f"new_request({', '.join(given + [f'{name}={one!r}' for name, one in more.items()])})"
            case ModelRunnerOutput():
                tokens = {name: ids for name, ids in zip(value.req_ids, value.sampled_token_ids, strict=True) if ids}
                masked = calls.named("masked")[-1:]
                # The sampler's last call makes this result, unless the plan has no masks.
                is_masked = bool(masked) and calls.results[masked[0]][2] == len(calls.lines)
                given = [calls.spell(arguments[0]), masked[0] if is_masked else repr(tokens)]
                if value.kv_connector_output is not None and not value.kv_connector_output.is_empty():
                    given.append(calls.spell(value.kv_connector_output))
                return f"result_of({', '.join(given)})"
            case KVConnectorOutput():
                fields = (
                    "finished_sending", "finished_recving", "invalid_block_ids", "failed_recving",
                    "kv_connector_worker_meta",
                )  # fmt: skip
                texts = {name: calls.spell(getattr(value, name)) for name in fields if getattr(value, name, None)}
                if value.finished_recving:
                    plans = ", ".join(calls.named(self.launch))
                    texts["finished_recving"] = f"begun_in([{plans}], {texts['finished_recving']})"
                said = [f"{name}={text}" for name, text in texts.items()]
                return f"KVConnectorOutput({', '.join(said)})"
            case HiSparseConnectorWorkerMetadata():
                return f"{type(value).__name__}({value.enqueued_transfer_counts}, {value.completed_transfer_counts})"
            case DraftTokenIds():
                return f"DraftTokenIds({value.req_ids}, {value.draft_token_ids})"
        return None

    def must_hold(self, machine: VllmMachine, calls: Calls, said: str) -> str:
        is_flushed = not machine.settings.enable_sleep_mode and calls.named("reset_prefix_cache")
        if _OLD_CACHE in said and not is_flushed:
            raise NotImplementedError("a sleep's flush is EngineCore's, which no standalone file contains")
        plans = calls.named(self.launch)
        made = [calls.results[name][0] for name in plans]
        if encoded.missing_in(made):
            return f"not missing_in([{', '.join(plans)}])"
        if machine.settings.keeps_images_whole and encoded.cut_in(made):
            return f"not cut_in([{', '.join(plans)}])"
        if re.search(_TOLD_TOO_LITTLE, said) and told.gaps_in(made, machine.settings.model_runner):
            return f"not gaps_in([{', '.join(plans)}], {machine.settings.model_runner})"
        if re.search(_OTHERS_KV, said) and are_followed(machine.settings):
            outputs = {calls.names[rid]: list(ids) for rid, ids in calls.outputs.items() if rid in calls.names}
            if held.wrong_reads_in(made, outputs, machine.settings):
                return f"not wrong_reads_in([{', '.join(plans)}], {outputs}, settings)"
        if _PAUSED in said and (since := _planned_since_the_pause(calls, plans)):
            return f"not any(map(launches, [{', '.join(since)}]))"
        last: Any = made[-1] if made else None
        left_out = [one.request_id for one in machine.scheduler.running if f"{rid_of(one.request_id)} runs and" in said]
        if last is not None and left_out:
            return f"{left_out[0]!r} in {plans[-1]}.num_scheduled_tokens"
        coordinator = machine.scheduler.kv_cache_manager.coordinator
        if left := _left_behind(said):
            return left
        is_wrong = machine.settings.enable_kv_cache_events and announced.not_cached(coordinator)
        return "not not_cached(scheduler.kv_cache_manager.coordinator)" if is_wrong else ""

    def remark(self, plan: Any) -> str:
        shown = [
            f"{name} computes {positions_of(plan, name)[0]} to {positions_of(plan, name)[-1]}"
            for name in plan.num_scheduled_tokens
        ]
        return "; ".join(shown) or "nothing"


def are_followed(settings: VllmSettings) -> bool:
    """Whether the file can follow what the blocks hold."""
    more = (settings.has_connector, settings.encoder_cache_size, settings.num_speculative_tokens, settings.rings)
    kept = (settings.hisparse_host_blocks, settings.rswa_window, settings.mamba_checkpoint_alignment)
    return not any((*more, *kept, settings.swa_bounded_replay)) and settings.decode_context_parallel_size == 1


def _planned_since_the_pause(calls: Calls, plans: Sequence[str]) -> Sequence[str]:
    """Return the plans since the last call that pauses or resumes, if it pauses everything; none otherwise."""
    states = calls.named("set_pause_state")
    line = calls.results[states[-1]][2] if states else 0
    is_pause = line > 0 and PauseState.PAUSED_ALL.name in calls.lines[line - 1]
    return [name for name in plans if is_pause and calls.results[name][2] > line]


def _left_behind(said: str) -> str:
    """Return an assertion about what ended requests leave; empty if this fault is another one."""
    if found := re.search(_LEFT, said):
        return f"{_COUNTS[found[1]]} == {found[2]}"
    if found := re.search(_GROWN, said):
        *owners, path = f"scheduler.{found[1]}".split("[].")
        owner, _, name = (f"one.{path}" if owners else path).rpartition(".")
        # A fixed engine may lack it.
        rule = f"len(vars({owner}).get({name!r}, ())) <= {found[2]}"
        if len(owners) < 2:
            return f"all({rule} for one in {owners[0]})" if owners else rule
    return ""
