"""What a script can do to the engine: the verbs of ``t``.

A verb takes the path of a client's call. It returns when its message has arrived at the gate; the scheduler sees it in
the next step. Effects are checked, and a refused call raises with status and body.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Final

from engine.messages import Abort, Generate, PauseMode
from scripted.adapters.lockstep.actions import (
    PAUSE_MODES,
    AbortEverything,
    AbortRequest,
    AdministrativeCall,
    BeginProfile,
    EndProfile,
    Evict,
    Flush,
    LoraLoad,
    LoraUnload,
    Pause,
    Press,
    Relieve,
    Resume,
    Update,
)
from scripted.core.prompts import prompt_of
from scripted.core.violation import Violation
from scripted.errors import BadCall, RequestRefused
from scripted.rig.clients import Call
from scripted.rig.handle import RequestHandle
from scripted.rig.rig import Rig
from scripted.script.asked import check_count
from scripted.script.json_values import as_json
from scripted.script.waits import Steps, Wait, Waits

__all__ = ["Verbs"]

# A longer delay would be taken for a process that hangs.
MAX_DELAY_S = 2.0
_MOST_SHOWN_CHARS: Final = 64
# What a body calls otherwise than start_req does.
_ARGUMENTS: Final = {"input_ids": "prompt_ids", "lora_path": "lora"}


class Verbs(Waits):
    """The verbs of ``t``. Requests without a rid of their own are named ``<rid_prefix>-<number>``."""

    def __init__(self, rig: Rig, *, rid_prefix: str = "scripted") -> None:
        super().__init__(rig)
        self._rid_prefix = rid_prefix
        self._rids = 0
        self._aborted_in_vain = 0
        # After which steps a stage was told to fail.
        self._failures_ordered: list[int] = []
        self._grammar_failures = 0

    def start_req(
        self,
        *,
        prompt_len: int | None = None,
        prompt_ids: Sequence[int] | None = None,
        text: str | None = None,
        prompt_seed: int = 0,
        max_new_tokens: int = 8,
        rid: str | None = None,
        priority: int = 0,
        ignore_eos: bool = False,
        temperature: float = 0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0,
        frequency_penalty: float = 0,
        presence_penalty: float = 0,
        repetition_penalty: float = 1,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        min_new_tokens: int = 0,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        stream: bool = True,
        logprob_start_len: int = -1,
        timeout_s: float | None = None,
        waiting_timeout_s: float | None = None,
        json_schema: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
        ebnf: str | None = None,
        lora: str | None = None,
    ) -> RequestHandle:
        """POST ``/generate`` with exactly one of ``prompt_len``, ``prompt_ids`` and ``text``.

        ``prompt_len`` tokens are made from ``prompt_seed``; equal seeds give equal prefixes. ``logprob_start_len`` asks
        for the prompt's logprobs from that position on, with ``return_logprob``. The time limits are in virtual
        seconds. ``lora`` names the LoRA that computes it. Raises RequestRefused, with status and body, for a request
        that the server does not admit.
        """
        prompt: dict[str, Any] = _one_prompt(prompt_len, prompt_ids, text, prompt_seed)
        sampling: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": min_new_tokens,
            "temperature": _number(temperature),
            "top_p": _number(top_p),
            "top_k": top_k,
            "min_p": _number(min_p),
            "frequency_penalty": _number(frequency_penalty),
            "presence_penalty": _number(presence_penalty),
            "repetition_penalty": _number(repetition_penalty),
            "logit_bias": _biases(logit_bias),
            "stop": _items(stop),
            "stop_token_ids": _items(stop_token_ids),
            "ignore_eos": ignore_eos,
        }
        if seed is not None:
            sampling["seed"] = seed
        grammars = {"json_schema": json_schema, "regex": regex, "ebnf": ebnf}
        sampling |= {name: grammar for name, grammar in grammars.items() if grammar is not None}
        body = prompt | {
            "rid": rid if rid is not None else self._next_rid(),
            "sampling_params": sampling,
            "stream": stream,
            "priority": priority,
            "return_logprob": return_logprob,
            "top_logprobs_num": top_logprobs_num,
            "logprob_start_len": logprob_start_len,
            "timeout_s": timeout_s,
            "waiting_timeout_s": waiting_timeout_s,
        }
        if lora is not None:
            body["lora_path"] = lora
        return self._start(body)

    def abort(self, r: RequestHandle | str) -> Call:
        """POST ``/abort_request`` for one request, by its exact rid."""
        if not isinstance(r, str):
            self._check_handle("abort()", r)
        rid = r if isinstance(r, str) else r.rid
        self._aborted_in_vain += rid not in self._rig.handles.known_rids()
        return self._call(AbortRequest(rid=rid))

    def abort_all(self) -> Call:
        """POST ``/abort_request`` for everything that is alive."""
        return self._call(AbortEverything())

    def disconnect(self, r: RequestHandle) -> None:
        """Drop the connection of a request's client; returns when the front end's abort has arrived at the gate."""
        self._check_handle("disconnect()", r)
        if r.finished:
            raise BadCall(f"disconnect() takes a request that is alive, {r.rid} has ended ({r.finish_reason})")
        if r.client.dropped:
            raise BadCall(f"disconnect() takes a request whose client is connected, that of {r.rid} hung up before")
        self._rig.world.clients.disconnect(r.client)
        self._rig.await_arrival(lambda m: isinstance(m, Abort) and m.rid == r.rid)

    def flush_cache(self, timeout_s: float | None = None) -> Call:
        """POST ``/flush_cache``; ``timeout_s``, in virtual seconds, is how long it may wait for a quiescent engine."""
        _check_timeout("flush_cache()", timeout_s)
        return self._call(Flush(timeout_s=timeout_s))

    def update_weights(self, model_path: str, timeout_s: float | None = None) -> Call:
        """POST ``/update_weights_from_disk``: 'embedded:SEED', or in the server tier any folder of the same model.

        ``timeout_s``, in virtual seconds, is how long it may wait for a quiescent engine. The configured weights are
        back before the next script.
        """
        if not isinstance(model_path, str):
            raise BadCall(f"update_weights() takes model_path as a text, such as 'embedded:7', got {model_path!r}")
        _check_timeout("update_weights()", timeout_s)
        return self._call(Update(path_of_weights=model_path, timeout_s=timeout_s))

    def load_lora(self, name: str, path: str) -> Call:
        """POST ``/v1/load_lora_adapter``: 'embedded-lora:SEED', or in the server tier any folder of peft's.

        Every LoRA that a script loads is gone before the next script.
        """
        if not isinstance(path, str):
            raise BadCall(f"load_lora() takes path as a text, such as 'embedded-lora:1', got {path!r}")
        return self._call(LoraLoad(name=name, path_of_lora=path))

    def unload_lora(self, name: str, timeout_s: float | None = None) -> Call:
        """POST ``/v1/unload_lora_adapter``; ``timeout_s``, in virtual seconds, is how long it may wait."""
        _check_timeout("unload_lora()", timeout_s)
        return self._call(LoraUnload(name=name, timeout_s=timeout_s))

    def pause_generation(self, mode: str = "retract") -> Call:
        """POST ``/pause_generation`` with mode ``retract``, ``in_place`` or ``abort``."""
        if mode not in PAUSE_MODES:
            raise BadCall(f"pause_generation() takes one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        return self._call(Pause(mode=PauseMode(mode)))

    def continue_generation(self) -> Call:
        """POST ``/continue_generation``."""
        return self._call(Resume())

    def start_profile(self) -> Call:
        """POST ``/start_profile``: the stages begin to profile themselves, with a microbatch without tokens."""
        return self._call(BeginProfile())

    def stop_profile(self) -> Call:
        """POST ``/stop_profile``."""
        return self._call(EndProfile())

    def warmup_radix(self, prompt_ids: Sequence[int]) -> Wait:
        """Put a prefix into the tree by a real request; use as ``yield from``."""
        return self._wait("warmup_radix(...)", self._warmup_radix(prompt_ids))

    # -- pressure: effective at once, given back before the next script --

    def exhaust_kv(self, leave_pages: int) -> None:
        """Keep pages from requests until exactly ``leave_pages`` are free; evicts unlocked cache only if it must."""
        most = self.scheduler.pressure.most_free_pages
        _check_pressure("exhaust_kv(leave_pages)", leave_pages, most, "pages can be free")
        self._rig.intervene(Press(pages=leave_pages).operator_event())

    def exhaust_window(self, leave_pages: int) -> None:
        """Keep pages of the window pool from requests until exactly ``leave_pages`` are free.

        Only for a model with window layers. Cached prefixes lose window pages only if they must.
        """
        if not self.scheduler.limits.window_tokens:
            raise BadCall(
                "exhaust_window(leave_pages) needs a model with window layers, and this one has none; "
                "use EngineConfig(model='embedded-window'), or exhaust_kv for the pages of all other layers"
            )
        most = self.scheduler.pressure.most_free_window_pages
        _check_pressure("exhaust_window(leave_pages)", leave_pages, most, "window pages can be free")
        self._rig.intervene(Press(window=leave_pages).operator_event())

    def exhaust_rows(self, leave_rows: int) -> None:
        """Keep rows from requests until exactly ``leave_rows`` are free."""
        most = self.scheduler.pressure.most_free_rows
        _check_pressure("exhaust_rows(leave_rows)", leave_rows, most, "rows can be free")
        self._rig.intervene(Press(rows=leave_rows).operator_event())

    def exhaust_locks(self, leave_unlocked: int) -> None:
        """Lock nodes of the prefix tree until exactly ``leave_unlocked`` are unlocked, so that no other is evicted."""
        most = self.scheduler.pressure.most_unlocked_nodes
        _check_pressure("exhaust_locks(leave_unlocked)", leave_unlocked, most, "nodes can be unlocked")
        self._rig.intervene(Press(unlocked=leave_unlocked).operator_event())

    def release_exhausted(self) -> None:
        """Give back all that the ``exhaust`` verbs keep; nothing to do when they keep nothing."""
        self._rig.intervene(Relieve().operator_event())

    def evict(self, pages: int | None = None) -> int:
        """Evict unlocked cache, all of it or ``pages`` pages, least recently used first. Returns how many."""
        before = self.scheduler.memory.tree.evictable_pages
        if pages is not None and (not isinstance(pages, int) or not 0 <= pages <= before):
            raise BadCall(f"evict() takes 0 to {before} pages, which is all the unlocked cache there is, got {pages!r}")
        self._rig.intervene(Evict(pages=pages).operator_event())
        return before - self.scheduler.memory.tree.evictable_pages

    # -- results and faults --

    def hold_results(self) -> None:
        """From the next step on, keep every completion back until it is released."""
        self._rig.results.hold()

    def release_results(self, n: int | None = None) -> None:
        """Let ``n`` held completions through, oldest first, or all of them and stop holding."""
        _check_released("release_results()", n)
        self._rig.results.release(n)

    def hold_grammars(self) -> None:
        """From the next step on, no grammar becomes ready until it is released."""
        self._rig.grammars.hold()

    def release_grammars(self, n: int | None = None) -> None:
        """Let ``n`` grammars become ready, in the order in which they were ordered, or all and stop holding."""
        _check_released("release_grammars()", n)
        self._rig.grammars.release(n)

    def fail_next_grammar(self) -> None:
        """Make the next grammar that would become ready one that cannot be compiled; the engine goes on."""
        self._rig.grammars.fail_next()
        self._grammar_failures += 1

    def kill_stage(self, i: int) -> None:
        """Kill a stage process: nothing in flight comes back. The server is not used again after this script."""
        self._check_live_stage("kill_stage", i)
        if self.scheduler.limits.pp_size == 1:
            raise BadCall("kill_stage() needs stages in processes of their own, got pp_size=1; use fail_next_step(0)")
        self._rig.kill_stage(i)

    def kill_scheduler(self) -> None:
        """Kill the scheduler's process; returns when its clients were told. Only in the server tier, and only once.

        After it no step runs, so nothing can be waited for; what clients were told can be asked. Raises Violation when
        an open stream does not end with an error that names the scheduler within two seconds.
        """
        if self._rig.is_dead:
            raise BadCall("kill_scheduler() was called before; nothing of the scheduler is left to kill")
        self._rig.kill_scheduler()

    def stall_stage(self, i: int) -> None:
        """Stop a stage; nothing completes until it is resumed."""
        self._check_live_stage("stall_stage", i)
        self._rig.world.stall_stage(i)
        self._rig.results.stalled.add(i)

    def resume_stage(self, i: int) -> None:
        """End a stall."""
        self._check_stage(i)
        if self._rig.failure is None and not self._rig.is_dead:
            self._rig.world.resume_stage(i)
        self._rig.results.stalled.discard(i)

    def slow_link(self, i: int, delay_s: float = 0.05) -> None:
        """Make every byte from and to a stage take ``delay_s`` longer, in real seconds. Only for placed stages.

        The steps are those of a fast link: a result that is due is waited for.
        """
        self._check_live_stage("slow_link", i)
        if not isinstance(delay_s, (int, float)) or isinstance(delay_s, bool) or not 0 < delay_s <= MAX_DELAY_S:
            raise BadCall(f"slow_link() takes delay_s in real seconds, 0 < delay_s <= {MAX_DELAY_S}, got {delay_s!r}")
        self._rig.slow_link(i, float(delay_s))

    def cut_link(self, i: int) -> None:
        """Cut a stage off: no byte gets through, its connections stay open. Only for placed stages.

        Nothing completes until ``heal_link``, or until ``await_loss`` has seen that the heartbeats found it.
        """
        self._check_live_stage("cut_link", i)
        self._rig.cut_link(i)

    def heal_link(self, i: int) -> None:
        """Let everything through again, what was held back first; ends a delay too."""
        self._check_stage(i)
        self._rig.heal_link(i)

    def await_loss(self, i: int) -> None:
        """Wait, in real time, until the heartbeats have found a cut. The server is not used again after this script."""
        self._check_live_stage("await_loss", i)
        if i not in self._rig.results.cut:
            raise BadCall(f"await_loss() takes a stage whose link is cut, that of stage {i} is not; use cut_link({i})")
        self._rig.await_loss(i)

    def lose_node(self, i: int) -> None:
        """Lose a stage's node: stage and agent are killed and their connections reset. Only for placed stages.

        Returns when the loss is known. Nothing in flight comes back, and the server is not used again.
        """
        self._check_live_stage("lose_node", i)
        self._rig.lose_node(i)

    def fail_next_step(self, i: int) -> None:
        """Make the next microbatch that a stage computes fail; the engine goes on."""
        self._check_live_stage("fail_next_step", i)
        self._rig.world.fail_next_step(i)
        self._failures_ordered.append(self.scheduler.step_number)

    # -- inside --

    def _start(self, body: dict[str, Any]) -> RequestHandle:
        body = _as_sent(body)
        rid = body["rid"]
        view = self._rig.world.clients.generate(rid, body)
        message = self._rig.await_arrival(
            lambda m: isinstance(m, Generate) and m.rid == rid, refused=lambda: view.closed
        )
        if message is None:
            if view.terminal_answers != 1:
                raise Violation(f"the client of {rid}, refused, got {view.terminal_answers} terminal answers: {view}")
            raise RequestRefused(f"request {_shown(rid)}", view.status or 0, view.error or view.text)
        assert isinstance(message, Generate)
        handle = RequestHandle(message, view)
        self._rig.handles.start(handle)
        return handle

    def _call(self, action: AdministrativeCall) -> Call:
        for name, value in (action.body or {}).items():
            as_json(f"POST {action.route}", name, value)
        call = self._rig.world.clients.call(action)
        message = self._rig.await_arrival(action.is_sent_as, refused=lambda: call.done)
        if message is None:
            raise RequestRefused(f"POST {action.path}", call.status, call.text)
        assert not isinstance(message, Generate), f"POST {action.path} arrived as {message}"
        call.arrived, call.call_id = True, message.call_id
        self._rig.handles.calls.append(call)
        return call

    def _warmup_radix(self, prompt_ids: Sequence[int]) -> Steps:
        r = self.start_req(prompt_ids=prompt_ids, max_new_tokens=1)
        yield from self.run_until_finished(r)
        yield from self.run_until_idle()

    def _next_rid(self) -> str:
        self._rids += 1
        return f"{self._rid_prefix}-{self._rids}"


def _check_pressure(call: str, value: int, most: int, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadCall(f"{call} takes a whole number >= 0, got {value!r}")
    if value > most:
        raise BadCall(f"{call} is at most {most} now, because no more {what} while requests own the rest; got {value}")


def _one_prompt(
    prompt_len: int | None, prompt_ids: Sequence[int] | None, text: str | None, prompt_seed: int
) -> dict[str, Any]:
    given = [
        name
        for name, value in (("prompt_len", prompt_len), ("prompt_ids", prompt_ids), ("text", text))
        if value is not None
    ]
    if len(given) != 1:
        raise BadCall(
            f"start_req() takes exactly one of prompt_len, prompt_ids and text, got {given or 'none of them'}"
        )
    if prompt_len is not None:
        check_count("start_req()", "prompt_len", prompt_len)
        if not isinstance(prompt_seed, int):
            raise BadCall(f"start_req() takes prompt_seed, a whole number, got {prompt_seed!r}")
        return {"input_ids": prompt_of(prompt_len, prompt_seed)}
    return {"input_ids": _items(prompt_ids)} if prompt_ids is not None else {"text": text}


def _shown(rid: Any) -> str:
    """A rid in a message: as it is, unless that is empty, long or no plain text."""
    plain = isinstance(rid, str) and rid.isprintable() and 0 < len(rid) <= _MOST_SHOWN_CHARS
    return rid if plain else reprlib.repr(rid)


# -- bodies: what is of another type goes to the server as it is, and the server says what it takes --


def _as_sent(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a request. Raises BadCall for an argument that JSON cannot say."""
    call = "start_req()"
    sampling = {name: as_json(call, name, value) for name, value in body["sampling_params"].items()}
    others = body | {"sampling_params": sampling}
    return {name: as_json(call, _ARGUMENTS.get(name) or name, value) for name, value in others.items()}


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _items(value: Any) -> Any:
    """Any sequence as a list; what has no order, or is no sequence, as it is."""
    is_sequence = isinstance(value, Iterable) and not isinstance(value, (str, Set, Mapping))
    return list(value) if is_sequence else value


def _biases(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return {} if value is None else value
    return {str(token): _number(bias) for token, bias in value.items()}


def _check_released(call: str, n: object) -> None:
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
        raise BadCall(f"{call} takes n >= 1, or None for all, got {n!r}")


def _check_timeout(call: str, timeout_s: Any) -> None:
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if timeout_s is not None and (not number or not math.isfinite(timeout_s)):
        raise BadCall(f"{call} takes timeout_s in virtual seconds, or None, got {timeout_s!r}")
