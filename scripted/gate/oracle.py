"""The token oracle: a request's output must be what the same request says when it runs alone.

Only greedy requests that came to their end by themselves are compared: for those batching, chunking, prefix hits,
retraction and pipeline depth must not matter. And only those that the present weights computed, after an update.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Final

from engine.messages import Generate, SamplingParams, TokenOutput
from scripted.rig.handle import RequestHandle
from scripted.rig.rig import Rig

__all__ = ["Oracle"]

_NATURAL_ENDS: Final = frozenset({"length", "stop"})
_BUDGET_STEPS: Final = 100_000

_Key = tuple[tuple[int, ...], SamplingParams]


class Oracle:
    """Runs requests alone on the rig's own idle engine, and remembers what they said."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._known: dict[_Key, tuple[int, ...]] = {}

    def compare(self, handles: Iterable[RequestHandle]) -> Generator[None, None, int]:
        """Compare every finished greedy request; returns how many. Raises AssertionError with both outputs."""
        compared = 0
        version = self._rig.scheduler.counters.weights_version
        for handle in handles:
            if handle.finish_reason not in _NATURAL_ENDS or handle.sampling.temperature != 0 or handle.sampling.stop:
                continue
            if not handle.was_computed_with(version):
                continue
            alone = yield from self._alone(handle)
            if handle.output_ids != alone:
                raise AssertionError(
                    f"{handle.rid} said {list(handle.output_ids)}, but the same request run alone says {list(alone)}"
                )
            compared += 1
        return compared

    def _alone(self, handle: RequestHandle) -> Generator[None, None, tuple[int, ...]]:
        key = (handle.prompt_ids, handle.sampling)
        if key not in self._known:
            self._known[key] = yield from self._run_alone(*key)
        return self._known[key]

    def _run_alone(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams
    ) -> Generator[None, None, tuple[int, ...]]:
        """Give the request to a flushed, idle engine and listen to the scheduler itself; no client is involved."""
        rig = self._rig
        rid = f"alone-{len(self._known)}"
        tokens: list[int] = []
        rig.flush()
        rig.inject(Generate(rid=rid, prompt_ids=prompt_ids, sampling=sampling))
        for _ in range(_BUDGET_STEPS):
            yield
            for reply in rig.last_replies:
                if isinstance(reply, TokenOutput) and reply.rid == rid:
                    tokens += reply.token_ids
                    if reply.finish_reason is not None:
                        return tuple(tokens)
        raise AssertionError(f"the request did not end alone within {_BUDGET_STEPS} steps: prompt {list(prompt_ids)}")
