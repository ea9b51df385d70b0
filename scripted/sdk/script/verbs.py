"""What a script can do to a adapter of the SDK: the verbs of ``t``, each an action of its schedules.

The next step sees it. A verb that the adapter does not declare is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from scripted.core.action import Action, RunLike
from scripted.core.common_actions import HoldResults, ReleaseResults
from scripted.core.prompts import prompt_ids as ids_of_prompt
from scripted.errors import BadCall
from scripted.script.asked import check_count
from scripted.sdk.actions import AbortRequest, FailBatch, Flush, PauseAll, ResumeAll, begin_request
from scripted.sdk.script.gate import ScriptGate
from scripted.sdk.script.handles import Call, RequestHandle
from scripted.sdk.script.waits import Waits

__all__ = ["Verbs"]


class _Begin(Action, frozen=True, kw_only=True, omit_defaults=True, tag="start"):
    """A request of any tokens; a schedule's own starts are those that have a short text."""

    rid: str
    prompt: tuple[int, ...]
    new: int
    stops: tuple[int, ...]
    priority: int

    is_start: ClassVar[bool] = True

    def apply(self, run: RunLike) -> None:
        begin_request(run, self.rid, self.prompt, self.new, self.stops, self.priority)


class Verbs(Waits):
    """The verbs of ``t``. Requests without a rid of their own are named ``r1``, ``r2`` and so on."""

    def __init__(self, gate: ScriptGate) -> None:
        super().__init__(gate)
        self._rids = 0
        self._aborted_in_vain = 0
        # After which steps a batch was told to fail.
        self._failures_ordered: list[int] = []

    def start_req(
        self,
        rid: str | None = None,
        *,
        prompt_len: int | None = None,
        prompt_ids: Sequence[int] | None = None,
        prompt_seed: int = 0,
        shared_len: int = 0,
        tail_seed: int = 0,
        max_new_tokens: int = 2,
        stop_token_ids: Sequence[int] = (),
        priority: int = 0,
    ) -> RequestHandle:
        """Begin a request with ``prompt_len`` tokens made from ``prompt_seed``, or with these ``prompt_ids``.

        Equal seeds give equal prefixes. With ``shared_len`` only that many tokens are those of ``prompt_seed``, and the
        others are those of ``tail_seed``. A rid is free again when its request has ended.
        """
        prompt = _prompt_of(prompt_len, prompt_ids, prompt_seed, shared_len, tail_seed)
        check_count("start_req()", "max_new_tokens", max_new_tokens)
        if priority and not self._can.priority:
            raise BadCall(f"start_req() takes no priority, because {self._gate.adapter.name} declares none")
        rid = self._rid(rid)
        handle = RequestHandle(rid, prompt, max_new_tokens, self._gate.oracle.account, len(self._handles))
        stops = _tokens("stop_token_ids", stop_token_ids)
        self._gate.act(_Begin(rid=rid, prompt=prompt, new=max_new_tokens, stops=stops, priority=priority))
        self._handles.append(handle)
        return handle

    def abort(self, r: RequestHandle | str) -> None:
        """Its client gives a request up, by handle or exact rid."""
        if not isinstance(r, str):
            self._check_handle("abort()", r)
        rid = r if isinstance(r, str) else r.rid
        self._aborted_in_vain += all(handle.rid != rid for handle in self._handles)
        self._gate.act(AbortRequest(rid=rid))

    def flush_cache(self, *, force: bool = False) -> Call:
        """Empty the prefix cache, if it can be; with ``force`` what runs is preempted for it."""
        self._check_declared("flush_cache")
        if force and not self._can.forced_flush:
            raise BadCall(f"flush_cache() takes no force=True, because {self._gate.adapter.name} declares none")
        return self._call("flush_cache()", Flush(force=force), must_be_read=True)

    def pause_generation(self, mode: str) -> Call:
        """Pause in one of the modes that the adapter declares."""
        self._check_declared("pause_generation")
        modes = [known.name for known in self._can.pause_modes]
        if mode not in modes:
            raise BadCall(f"pause_generation() takes one of {', '.join(modes)}, got {mode!r}")
        return self._call(f"pause_generation({mode!r})", PauseAll(mode=mode))

    def continue_generation(self) -> Call:
        """End a pause."""
        self._check_declared("continue_generation")
        return self._call("continue_generation()", ResumeAll())

    def hold_results(self) -> None:
        """Keep every result back from the next step on, until it is released."""
        self._gate.act(HoldResults())

    def release_results(self, n: int | None = None) -> None:
        """Let ``n`` held results through, oldest first, or all of them and stop holding."""
        if n is not None:
            check_count("release_results()", "n", n)
        self._gate.act(ReleaseResults(count=n))

    def fail_next_batch(self) -> None:
        """Make the next batch fail; the scheduler goes on."""
        self._check_declared("fail_next_batch")
        self._gate.act(FailBatch())
        self._failures_ordered.append(self._gate.step)

    # -- inside --

    def _check_declared(self, verb: str) -> None:
        if verb not in self._declared:
            raise BadCall(
                f"t.{verb}() is no verb of {self._gate.adapter.name} in this configuration, which declares "
                f"{', '.join(self._declared)}; its adapter says in Capabilities what it can do"
            )

    def _call(self, name: str, action: Action, *, must_be_read: bool = False) -> Call:
        call = Call(name, self._gate.oracle.account, self._gate.call(action), must_be_read=must_be_read)
        self._calls.append(call)
        return call

    def _rid(self, rid: str | None) -> str:
        if rid is None:
            self._rids += 1
            rid = f"r{self._rids}"
        if not isinstance(rid, str) or not rid:
            raise BadCall(f"start_req() takes a rid that is a text and not empty, got {rid!r}")
        before = next((handle for handle in reversed(self._handles) if handle.rid == rid), None)
        if before is not None and not before.is_finished:
            raise BadCall(
                f"start_req() takes the rid of no request that is alive, and {before!r} is; wait for its end: "
                f"yield from t.run_until_finished(...)"
            )
        return rid


def _prompt_of(length: int | None, ids: Sequence[int] | None, seed: int, shared: int, tail: int) -> tuple[int, ...]:
    if (length is None) == (ids is None):
        raise BadCall(
            f"start_req() takes exactly one of prompt_len and prompt_ids, got {'neither' if ids is None else 'both'}"
        )
    if ids is not None:
        if seed or shared or tail:
            raise BadCall("start_req() takes prompt_seed, shared_len and tail_seed with prompt_len only")
        if not (prompt := _tokens("prompt_ids", ids)):
            raise BadCall("start_req() takes prompt_ids that are not empty")
        return prompt
    assert length is not None
    check_count("start_req()", "prompt_len", length)
    if not isinstance(shared, int) or not 0 <= shared <= length:
        raise BadCall(f"start_req() takes shared_len from 0 to prompt_len={length}, got {shared!r}")
    if tail and not shared:
        raise BadCall(f"start_req() takes tail_seed={tail!r} with shared_len only; write prompt_seed={tail!r}")
    return ids_of_prompt(length, seed, shared, tail)


def _tokens(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise BadCall(f"start_req() takes {name} that are whole numbers >= 0, got {ids!r}")
    return tuple(ids)
